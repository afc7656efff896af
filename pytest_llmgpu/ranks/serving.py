"""A rank's door: commands come in by one pipe, answers and finished batches go out by two others, as plain records."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

from pytest_llmgpu.ranks import oom
from pytest_llmgpu.ranks.device_memory import DeviceUse
from pytest_llmgpu.ranks.protocol import FinishedBatch
from pytest_llmgpu.report.result import Failure, Outcome, Phase

__all__ = ["State", "failure_of", "serve"]


class State(Protocol):
    """What commands work on."""

    phase: Phase

    def use(self) -> Sequence[DeviceUse]:
        """Return what the devices held at most."""
        ...


def failure_of(error: BaseException, phase: Phase) -> tuple[Outcome, Failure]:
    """Return an exception as plain records: a pickled exception may not unpickle, and needs its library to."""
    evidence = oom.evidence_of(error)
    lines = str(error).strip().splitlines() or [""]
    failure = Failure(
        phase=phase,
        message=f"{type(error).__name__}: {lines[0]}".rstrip(": "),
        evidence=evidence.rule if evidence else f"{type(error).__name__} was raised",
        requested_bytes=evidence.requested_bytes if evidence else None,
        free_bytes=evidence.free_bytes if evidence else None,
        allocated_bytes=evidence.allocated_bytes if evidence else None,
        tokens_requested=evidence.tokens_requested if evidence else None,
        tokens_granted=evidence.tokens_granted if evidence else None,
    )
    return ("oom" if evidence else "error"), failure


def serve(
    make: Callable[[Callable[[FinishedBatch], None]], State],
    commands: Connection,
    answers: Connection,
    batches: Connection,
) -> None:
    """Answer commands in turn until the parent closes its end.

    An answer says how many batches were streamed before it, so that the parent can hear them out first.

    Args:
        make: Returns what commands work on; it is given what streams a finished batch.
        commands: Pickled functions with their arguments.
        answers: Pickled answers and failures.
        batches: Pickled batches.
    """
    streamed = 0

    def stream(batch: FinishedBatch) -> None:
        nonlocal streamed
        batches.send_bytes(pickle.dumps(tuple(batch)))
        streamed += 1

    state = make(stream)
    while True:
        try:
            command = commands.recv_bytes()
        except EOFError:
            return
        try:
            fn, args = pickle.loads(command)  # noqa: S301 - written by our own parent
            answer = fn(state, *args)
            payload = pickle.dumps((streamed, True, answer))
        except BaseException as error:  # noqa: BLE001 - the rank's door: everything becomes a plain record
            traceback.print_exc()
            payload = pickle.dumps((streamed, False, (*failure_of(error, state.phase), state.use())))
            # The traceback's frames keep the tensors of the failed forward alive.
            traceback.clear_frames(error.__traceback__)
            del error
        answers.send_bytes(payload)
