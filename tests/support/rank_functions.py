"""Commands of the tests: functions that a rank imports by name."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pytest_llmgpu.inference import quantization
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.ranks.local import Answer, FinishedBatch
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies.compile import Compiled
from pytest_llmgpu.strategies.protocol import Loaded
from pytest_llmgpu.strategies.tp import TensorParallel

if TYPE_CHECKING:
    import torch


class CannotPickleError(Exception):
    """An exception that pickles but does not unpickle: its constructor takes two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def graphs(state: RankState) -> int:
    """Return the number of graphs that were compiled for the latest case."""
    assert state.loaded.compiled is not None
    return state.loaded.compiled.graphs


def add(_state: RankState, first: int, second: int) -> int:
    """Return a sum."""
    return first + second


def variable(_state: RankState, name: str) -> str | None:
    """Return an environment variable of the rank."""
    return os.environ.get(name)


def identity(_state: RankState | Loaded) -> tuple[int, int, int]:
    """Return the ids of the process, of its parent and of its session."""
    return os.getpid(), os.getppid(), os.getsid(0)


def fail(_state: RankState) -> NoReturn:
    """Raise an exception that does not unpickle."""
    raise CannotPickleError("first line\nsecond", "line")


def run_out(_state: RankState) -> NoReturn:
    """Raise the error of torch for a host without free memory."""
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")


def leave(_state: RankState, status: int) -> NoReturn:
    """Exit without an answer."""
    os._exit(status)


def receive(_state: RankState, number: int) -> str:
    """Receive a signal."""
    os.kill(os.getpid(), number)
    return "still here"


def break_down(_state: RankState) -> NoReturn:
    """Raise an exception."""
    raise ValueError("the layer is broken")


def hang(_state: RankState) -> None:
    """Wait for ever."""
    threading.Event().wait()


def on_rank(state: RankState, rank: int, fn: Callable[..., None], *args: object) -> None:
    """Call a function on one rank; the others do nothing."""
    if os.environ["RANK"] == str(rank):
        fn(state, *args)


def abort_among_threads(_state: RankState, reason: str) -> None:
    """Abort as a library does, in a process with many threads."""
    for _ in range(20):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    print(reason, file=sys.stderr, flush=True)
    os.abort()


def unreadable(_state: RankState) -> CannotPickleError:
    """Return a value that does not unpickle."""
    return CannotPickleError("first", "second")


def unsendable(_state: RankState) -> object:
    """Return a value that does not pickle."""
    return threading.Lock()


def finish_batches(state: RankState, count: int, then: Callable[..., object] = repr, *args: object) -> None:
    """Finish some batches of ten, then call a function."""
    for number in range(count):
        state.on_batch(FinishedBatch(latency_s=number + 1.0, sequences=4, tokens=40, padded_tokens=44, planned=10))
    then(state, *args)


def read(_state: RankState, pipe: Path) -> None:
    """Wait until another process writes to a named pipe."""
    pipe.read_bytes()


def hang_in_a_collective(_state: RankState, begun: str) -> None:
    """Open a file or a named pipe for writing, then wait for a peer that never comes."""
    Path(begun).write_bytes(b"")
    threading.Event().wait()


def hang_on_rank_0_fail_on_rank_1(state: RankState) -> None:
    """Behave as a strategy in which one rank fails."""
    on_rank(state, 0, hang)
    break_down(state)


def fork_and_die(_state: RankState) -> None:
    """Leave a child that holds every pipe of the rank, as a worker of a data loader does."""
    if os.fork() == 0:
        threading.Event().wait()
    os.kill(os.getpid(), signal.SIGSEGV)


def start_daemon(_state: RankState) -> int:
    """Leave a process in a session of its own, which holds no pipe of the rank."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid


def write_to_the_pipe(_state: RankState, text: bytes) -> None:
    """Write text to the pipe of the answers, as a library does that closes a descriptor twice."""
    os.write(int(sys.argv[3]), text)
    threading.Event().wait()


def answer(_state: RankState, text: str) -> None:
    """Answer the first command before it returns."""
    frame = pickle.dumps(Answer(done=True, content=pickle.dumps(text), number=0))
    os.write(int(sys.argv[3]), struct.pack("!i", len(frame)) + frame)


def log_and_die(_state: RankState, size_bytes: int, last: str) -> None:
    """Make the log so large, write a last line, and end."""
    os.ftruncate(1, size_bytes)
    os.lseek(1, 0, os.SEEK_END)
    os.write(1, f"\n{last}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def fail_on_a_full_disk(state: RankState) -> NoReturn:
    """Raise where no file can grow; Python ignores the signal of that."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    break_down(state)


class UncompiledTensorParallel(TensorParallel):
    """Strategy tp without compiling DeepSpeed's extension for all-reduces through shared memory."""

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load as strategy tp does."""
        if case.backend == "deepspeed":
            # DeepSpeed reads it on import. Without it DeepSpeed warns that there is no GPU.
            os.environ["DS_ACCELERATOR"] = "cpu"
            from deepspeed import ops

            ops.__compatible_ops__["deepspeed_shm_comm"] = False
        return super().load(case, source)


class Traced(Compiled):
    """Strategy compile with layers that torch traces; the graphs run eagerly, since inductor takes seconds for each."""

    compiler = "eager"


# Functions of `llm.run`, which get the loaded model.


def parts(loaded: Loaded) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter on this rank."""
    from torch.distributed.tensor import DTensor

    named = loaded.model.named_parameters()
    return {name: tuple((part.to_local() if isinstance(part, DTensor) else part).shape) for name, part in named}


def quantised(loaded: Loaded) -> dict[str, tuple[str, int]] | None:
    """Return the kind and the bytes of each quantised weight of the model."""
    return quantization.stored(loaded.model, loaded.world_size)


def logits(loaded: Loaded, ids_BS: torch.Tensor) -> torch.Tensor:
    """Return the logits of a batch."""
    import torch

    with torch.inference_mode():
        answer: torch.Tensor = loaded.model(input_ids=ids_BS).logits
    return answer
