"""The command loop of a rank: commands arrive on one pipe; answers and finished batches leave on two others."""

from __future__ import annotations

import contextlib
import faulthandler
import pickle
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

from pytest_llmgpu.inference.cuda_graphs import RecordingError
from pytest_llmgpu.processes import die_with_parent
from pytest_llmgpu.ranks import oom, raised
from pytest_llmgpu.ranks.protocol import FinishedBatch
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report.result import Failure, Outcome, Phase
from pytest_llmgpu.report.text import beginning

NOT_RECORDED = "a forward could not be recorded as a CUDA graph"
"""Evidence of a failure. The message is the operation with its error, and the case can be measured eagerly."""

_TRACEBACK_LETTERS = 2**15


def main(arguments: Sequence[str]) -> None:
    """Serve the process that started this one.

    Args:
        arguments: The parent's process id, then the file descriptors of the pipes for commands, answers and batches.
    """
    parent, commands, answers, batches = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    # The stacks of all threads would fill the part of the log that a failure keeps, after the reason of an abort.
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1)
    serve(
        Connection(commands, writable=False),
        Connection(answers, readable=False),
        Connection(batches, readable=False),
    )


def serve(commands: Connection, answers: Connection, batches: Connection) -> None:
    """Run commands in turn until the parent closes its end of the pipe.

    An answer holds the number of batches that were sent before it: the two pipes keep no common order, and the parent
    waits for these batches first.

    Args:
        commands: Delivers pickled functions with their arguments.
        answers: Receives pickled results and failures.
        batches: Receives pickled batches.
    """
    sent = 0

    def send_batch(batch: FinishedBatch) -> None:
        nonlocal sent
        batches.send_bytes(pickle.dumps(tuple(batch)))
        sent += 1

    state = RankState(send_batch)
    while True:
        try:
            command = commands.recv_bytes()
        except EOFError:
            return
        try:
            fn, args = pickle.loads(command)  # noqa: S301 - written by our own parent
            done, content = True, _pickled(fn(state, *args))
        except BaseException as error:  # noqa: BLE001 - the parent gets every error as plain records
            with contextlib.suppress(OSError):  # the disk of the log is full
                print(beginning(traceback.format_exc(), _TRACEBACK_LETTERS), file=sys.stderr)
            done, content = False, pickle.dumps((*failure_of(error, state.phase), state.use(), raised.describe(error)))
            # The traceback's frames keep the tensors of the failed forward alive.
            traceback.clear_frames(error.__traceback__)
            del error
        # The content is pickled apart: it may be an object of the user that does not unpickle.
        answers.send_bytes(pickle.dumps((sent, done, content)))


def _pickled(answer: object) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:
        raise TypeError(f"the answer does not pickle: {error}") from error


def failure_of(error: BaseException, phase: Phase) -> tuple[Outcome, Failure]:
    """Return an exception as plain records; a pickled exception needs its library, and some do not unpickle."""
    shortage = oom.decide_out_of_memory(error)
    name, first_line = type(error).__name__, str(error).strip().partition("\n")[0]
    message = beginning(f"{name}: {first_line}".rstrip(": "))
    recording = isinstance(error, RecordingError)
    if shortage is None:
        evidence = NOT_RECORDED if recording else f"{name} was raised"
        message = beginning(first_line) if recording else message
        return "error", Failure(phase=phase, message=message, evidence=evidence)
    advice = "; to run forwards eagerly, in less memory, pass --llmgpu-cuda-graphs=off"
    return "oom", Failure(
        phase=phase,
        message=message + advice if recording else message,
        evidence=f"{shortage.rule}, while a CUDA graph was recorded" if recording else shortage.rule,
        requested_bytes=shortage.requested_bytes,
        free_bytes=shortage.free_bytes,
        allocated_bytes=shortage.allocated_bytes,
        tokens_requested=shortage.tokens_requested,
        tokens_granted=shortage.tokens_granted,
    )
