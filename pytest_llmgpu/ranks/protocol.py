"""What passes between pytest's process and its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pytest_llmgpu.report.result import DeviceMemory, Failure, Outcome

if TYPE_CHECKING:
    from pytest_llmgpu.ranks.serving import Raised


class FinishedBatch(NamedTuple):
    """One batch, sent by a rank as soon as the batch is finished."""

    latency_s: float
    sequences: int
    tokens: int
    padded_tokens: int
    planned: int
    """The case has this many batches; 0 marks a batch of the warm-up."""


class Answer(NamedTuple):
    """The answer of a rank to its oldest command without one, after the batches that it finished before."""

    done: bool
    """True if the command returned, False if it raised an exception."""
    content: bytes
    """What it returned, or the records of the failure, pickled apart: an object of a user may not unpickle."""
    log_tail: str | None = None
    """The end of the log of the process if the command failed."""


class End(NamedTuple):
    """The end of a process, which nothing follows."""

    outcome: Outcome
    """`crashed`, or `oom` where the host killed the process."""
    failure: Failure
    """The signal or the exit status, with the end of the log."""


Event = FinishedBatch | Answer | End
Listener = Callable[[Event], None]
"""Receives what a process sends, from any thread."""
BatchListener = Callable[[int, FinishedBatch], None]
"""Called with the number of the rank and each finished batch, from any thread."""


class RankFailedError(Exception):
    """A command failed on a rank; the error holds plain records, never the exception of the rank."""

    def __init__(
        self, outcome: Outcome, failure: Failure, memory: Sequence[DeviceMemory] = (), raised: Raised | None = None
    ) -> None:
        super().__init__(failure.message)
        self.outcome: Outcome = outcome
        self.failure = failure
        self.memory = memory
        """The memory of the devices of the rank; empty if it did not report it."""
        self.raised = raised
        """The exception of the rank; None if the rank itself ended."""
