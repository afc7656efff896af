"""What a launcher gives: ranks, each an executor of one worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from pytest_llmgpu.ranks.device_memory import DeviceUse
from pytest_llmgpu.report.result import Failure, Outcome

__all__ = ["BatchListener", "FinishedBatch", "Launcher", "Rank", "RankFailedError"]


class FinishedBatch(NamedTuple):
    """What a rank tells of a batch as soon as it is done."""

    latency_s: float
    sequences: int
    tokens: int
    padded_tokens: int
    planned: int
    """Batches of the whole case; 0 for one of the warm-up."""


BatchListener = Callable[[int, FinishedBatch], None]
"""Called with the rank for each finished batch, from any thread."""


class RankFailedError(Exception):
    """A rank could not do what was asked of it; it carries plain records, never the rank's own exception."""

    def __init__(self, outcome: Outcome, failure: Failure, use: Sequence[DeviceUse] = ()) -> None:
        super().__init__(failure.message)
        self.outcome: Outcome = outcome
        self.failure = failure
        self.use = use


class Rank(Protocol):
    """One process of a strategy."""

    rank: int

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        ...

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run `fn(state, *args)` on the rank, after what was submitted before.

        `fn` is imported there by its name; arguments and the answer are pickled. The future raises RankFailedError.
        """
        ...

    def stacks(self) -> str:
        """Return where the process is stuck, as the end of its log shows it."""
        ...

    def close(self) -> None:
        """End the process and wait for it; it has let go of its devices when this returns."""
        ...

    def kill(self) -> None:
        """End the process at once, whatever it waits for, and wait for it."""
        ...


class Launcher(Protocol):
    """A way to start processes."""

    name: str

    def start(self, environments: Sequence[Mapping[str, str]], on_batch: BatchListener) -> Sequence[Rank]:
        """Start one rank per environment; each holds what is added to or changed in the caller's own."""
        ...
