"""The contract of a launcher: it starts ranks, and each of them runs commands in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from pytest_llmgpu.ranks.device_memory import DeviceUse
from pytest_llmgpu.ranks.raised import Raised
from pytest_llmgpu.report.result import Failure, Outcome


class FinishedBatch(NamedTuple):
    """One batch, sent by a rank as soon as the batch is finished."""

    latency_s: float
    sequences: int
    tokens: int
    padded_tokens: int
    planned: int
    """The case has this many batches; 0 marks a batch of the warm-up."""


BatchListener = Callable[[int, FinishedBatch], None]
"""Called with the number of the rank and each finished batch, from any thread."""


class RankFailedError(Exception):
    """A command failed on a rank; the error holds plain records, never the exception of the rank."""

    def __init__(
        self, outcome: Outcome, failure: Failure, use: Sequence[DeviceUse] = (), raised: Raised | None = None
    ) -> None:
        super().__init__(failure.message)
        self.outcome: Outcome = outcome
        self.failure = failure
        self.use = use
        self.raised = raised
        """The exception of the rank; None if the rank itself ended."""


class Process(Protocol):
    """A process that runs commands."""

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        ...

    def stacks(self) -> str:
        """Return the stack of each thread of the process, as the end of its log shows them.

        Raises:
            RankFailedError: The node of the process does not answer.
        """
        ...

    def close(self) -> None:
        """End the process and wait for it; its devices are free when this returns."""
        ...

    def kill(self) -> None:
        """End the process at once, in whatever state it is, and wait for it."""
        ...


class Rank(Process, Protocol):
    """One process of a strategy."""

    rank: int

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run `fn(state, *args)` on the rank, after all commands that were submitted before.

        The rank imports `fn` by its name; arguments and result are pickled. The future raises RankFailedError.
        """
        ...


class Launcher(Protocol):
    """One way to start processes."""

    name: str

    def take_output(self) -> Mapping[int, str]:
        """Return what the processes of each rank wrote to stdout and stderr since the last call."""
        ...

    def start(self, environments: Sequence[Mapping[str, str]], on_batch: BatchListener) -> Sequence[Rank]:
        """Start one rank per environment: the variables of this process, with these added or replaced."""
        ...
