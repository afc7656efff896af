"""The command loop of a rank, and how its exceptions reach pytest's process: as plain data.

A launcher runs this module. Its arguments are the id of the process that is served, then the file descriptors of the
pipes for commands and answers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import pickle
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec

from pytest_llmgpu.inference.cuda_graphs import RecordingError
from pytest_llmgpu.processes import die_with_parent
from pytest_llmgpu.ranks import engine_worker, memory
from pytest_llmgpu.ranks.local import Answer, Event
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report.result import Failure, Outcome, Phase
from pytest_llmgpu.report.text import beginning

NOT_RECORDED = "a forward could not be recorded as a CUDA graph"
"""Evidence of a failure. The message is the operation with its error, and the case can be measured eagerly."""
_TRACEBACK_LETTERS = 2**15
_MOST_LETTERS = 2**16


def serve(commands: Connection, events: Connection) -> None:
    """Run commands, pickled functions with their arguments, in turn until the parent closes its end of the pipe."""

    def send(event: Event) -> None:
        events.send_bytes(pickle.dumps(event))

    state = RankState(send)
    for number in itertools.count():
        try:
            command = commands.recv_bytes()
        except EOFError:
            engine_worker.stop(state)
            return
        try:
            fn, args = pickle.loads(command)  # noqa: S301 - written by our own parent
            result = fn(state, *args)
            try:
                answer = Answer(done=True, content=pickle.dumps(result), number=number)
            except Exception as error:
                raise TypeError(f"the answer does not pickle: {error}") from error
        except BaseException as error:  # noqa: BLE001 - the parent gets every error as plain records
            with contextlib.suppress(OSError):  # the disk of the log is full
                print(beginning(traceback.format_exc(), _TRACEBACK_LETTERS), file=sys.stderr)
            records = *failure_of(error, state.phase), state.memory(), describe(error)
            answer = Answer(done=False, content=pickle.dumps(records), number=number)
            # The traceback's frames keep the tensors of the failed forward alive.
            traceback.clear_frames(error.__traceback__)
            del error
        send(answer)


def failure_of(error: BaseException, phase: Phase) -> tuple[Outcome, Failure]:
    """Return an exception as plain records; a pickled exception needs its library, and some do not unpickle."""
    shortage = memory.decide_out_of_memory(error)
    name, first_line = type(error).__name__, str(error).strip().partition("\n")[0]
    message = beginning(f"{name}: {first_line}".rstrip(": "))
    recording = isinstance(error, RecordingError)
    if shortage is not None:
        evidence = shortage.evidence
        if recording:
            message += "; to run forwards eagerly, in less memory, pass --llmgpu-cuda-graphs=off"
            evidence = f"{evidence}, while a CUDA graph was recorded"
        return "oom", msgspec.structs.replace(shortage, phase=phase, message=message, evidence=evidence)
    if recording:
        return "error", Failure(phase=phase, message=beginning(first_line), evidence=NOT_RECORDED)
    return "error", Failure(phase=phase, message=message, evidence=f"{name} was raised")


def describe(error: BaseException) -> list[bytes]:
    """Return an exception pickled: class and arguments, then each class that it derives from with the text alone."""
    text = beginning(str(error), _MOST_LETTERS)
    found = []
    for cls, args in ((type(error), error.args), *((cls, (text,)) for cls in type(error).__mro__)):
        with contextlib.suppress(Exception):  # what a user made may not pickle
            content = pickle.dumps((cls, args, text))
            found += [content] * (b"torch._utils" not in content)  # a tensor would be made on its GPU
    return found


def rebuild(pickled: Sequence[bytes]) -> Exception | None:
    """Return the first exception that can be made with the same text; None for no `Exception`, such as SystemExit."""
    for content in pickled:
        # The second time without the constructor, which may take other arguments than it passes on.
        for plain in (False, True):
            with contextlib.suppress(Exception):  # the class of a user may raise anything
                cls, args, text = pickle.loads(content)  # noqa: S301 - written by our own rank
                made = cls.__new__(cls, *args) if plain else cls(*args)
                if isinstance(made, Exception) and str(made) == text:
                    return made
    return None


if __name__ == "__main__":
    parent, commands, events = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    # The stacks of all threads would fill the part of the log that a failure keeps, after the reason of an abort.
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1)
    serve(Connection(commands, writable=False), Connection(events, readable=False))
