"""The command loop of a rank, and how its exceptions reach pytest's process: as plain data."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import sys
import traceback
from itertools import product
from multiprocessing.connection import Connection
from types import NoneType
from typing import Any, NamedTuple

import msgspec

from pytest_llmgpu.inference.cuda_graphs import RecordingError
from pytest_llmgpu.ranks import engine_worker, memory
from pytest_llmgpu.ranks.local import Answer, Event
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report.result import Failure, Outcome, Phase
from pytest_llmgpu.report.text import beginning

NOT_RECORDED = "a forward could not be recorded as a CUDA graph"
"""Evidence of a failure. The message is the operation with its error, and the case can be measured eagerly."""
_TRACEBACK_LETTERS = 2**15
_PLAIN = (NoneType, bool, int, float, str, bytes)
_MOST_LETTERS = 2**16


class Raised(NamedTuple):
    """What pytest's process needs to raise an exception of a rank again. It arrives also if the exception cannot."""

    classes: tuple[tuple[str, str], ...]
    """Module and name of the class, then of each class that it derives from, in the order of their resolution."""
    args: tuple[Any, ...]
    """The arguments of the exception if all are plain values; else its text alone."""
    text: str
    """The text of the exception."""


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


def describe(error: BaseException) -> Raised:
    """Return an exception as plain data."""
    text = str(error)
    args = error.args if len(text) <= _MOST_LETTERS and _is_plain(error.args) else ()
    text = beginning(text, _MOST_LETTERS)
    classes = tuple((cls.__module__, cls.__qualname__) for cls in type(error).__mro__)
    return Raised(classes=classes, args=args or (text,) * bool(text), text=text)


def rebuild(raised: Raised) -> Exception | None:
    """Return an exception of the first class that is imported here and can be made with the same text.

    Nothing is imported: a test that names a class, such as `pytest.raises(torch.OutOfMemoryError)`, has imported it.

    Returns:
        The exception; None for one that is no `Exception`, such as SystemExit.
    """
    for module, name in raised.classes:
        cls: Any = sys.modules.get(module)
        for part in name.split("."):
            cls = getattr(cls, part, None)
        if not (isinstance(cls, type) and issubclass(cls, Exception)):
            continue
        # Then without the constructor, which may take other arguments than it passes on.
        for args, make in product((raised.args, (raised.text,)), (cls, functools.partial(cls.__new__, cls))):
            with contextlib.suppress(Exception):  # the class of a user may raise anything
                made = make(*args)
                if isinstance(made, cls) and str(made) == raised.text:
                    return made
    return None


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) in (tuple, list) and all(map(_is_plain, value)))
