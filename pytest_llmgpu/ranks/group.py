"""The processes of one strategy as one thing: ask all of them, and know the worst that happened to any.

A rank that failed leaves its siblings waiting in a collective for ever, so nobody is waited for longer than it takes
to hear the cause.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec

from pytest_llmgpu.ranks.protocol import FinishedBatch, Launcher, RankFailedError
from pytest_llmgpu.report.result import Batches, Failure, Phase

__all__ = ["RankGroup", "slowest"]

_TICK_S = 0.25
_SIBLINGS_S = 2.0
_LOST_PEER = re.compile(r"closed by peer|reset by peer|Broken pipe|ncclRemoteError|remote process exited")


class RankGroup:
    """The ranks of one loaded model."""

    def __init__(self, launcher: Launcher, environments: Sequence[Mapping[str, str]]) -> None:
        self._lock = threading.Lock()
        self._columns: list[Batches] = [Batches() for _ in environments]
        self._planned = 0
        self._moved_s = time.monotonic()
        self._ranks = launcher.start(environments, self._on_batch)
        self.given: set[str] = set()
        """Hashes of the datasets the ranks have."""

    def ask(
        self,
        fn: Callable[..., Any],
        *args: Any,
        phase: Phase,
        timeout_s: float,
        tick: Callable[[int, int], None] | None = None,
    ) -> list[Any]:
        """Run `fn(state, *args)` on every rank and return the answers in the order of the ranks.

        Args:
            fn: A function that the ranks can import.
            args: Its arguments after the rank's state.
            phase: What a time limit is reported as.
            timeout_s: Seconds without an answer or a finished batch.
            tick: Called about four times a second once a batch is finished, with finished and planned batches.

        Raises:
            RankFailedError: With the worst cause known after all siblings had 2 s to report.
        """
        with self._lock:
            self._columns = [Batches() for _ in self._ranks]
            self._planned = 0
            self._moved_s = time.monotonic()
        futures = [rank.submit(fn, *args) for rank in self._ranks]
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=_TICK_S, return_when=FIRST_EXCEPTION)
            if any(future.exception() for future in done):
                wait(waiting, timeout=_SIBLINGS_S)
                worst = _worst(futures)
                # A process that died could not say what it was doing.
                worst.failure = msgspec.structs.replace(worst.failure, phase=phase)
                raise worst
            if tick is not None and self._planned:
                tick(len(self.batches().latency_s), self._planned)
            if waiting and time.monotonic() - self._moved_s > timeout_s:
                raise self._timeout(phase, timeout_s)
        return [future.result() for future in futures]

    def batches(self) -> Batches:
        """Return the batches that every rank was heard to finish; all of them once the ranks are ended."""
        with self._lock:
            return slowest(self._columns)

    @property
    def alive(self) -> bool:
        """Whether every rank is there to be asked."""
        return all(rank.alive for rank in self._ranks)

    def close(self) -> None:
        """End every rank, letting each finish by itself; all at once, since they may wait for each other to leave."""
        with ThreadPoolExecutor(max_workers=len(self._ranks)) as pool:
            leaving = [pool.submit(rank.close) for rank in self._ranks]
            try:
                wait(leaving)
            except KeyboardInterrupt:
                self.kill()
                raise

    def kill(self) -> None:
        """End every rank at once."""
        for rank in self._ranks:
            rank.kill()

    def _on_batch(self, rank: int, finished: FinishedBatch) -> None:
        with self._lock:
            self._moved_s = time.monotonic()
            if not finished.planned:
                return  # of the warm-up: a sign of life, no measurement
            column = self._columns[rank]
            column.latency_s.append(finished.latency_s)
            column.sequences.append(finished.sequences)
            column.tokens.append(finished.tokens)
            column.padded_tokens.append(finished.padded_tokens)
            self._planned = finished.planned

    def _timeout(self, phase: Phase, timeout_s: float) -> RankFailedError:
        what = "no loaded model" if phase == "load" else "no finished batch"
        log = "\n".join(rank.stacks() for rank in self._ranks)
        failure = Failure(
            phase=phase, message=f"{what} for {timeout_s:g} s", evidence=f"time limit of {timeout_s:g} s", log_tail=log
        )
        return RankFailedError("timeout", failure)


def slowest(ranks: Sequence[Batches]) -> Batches:
    """Return the batches that every rank has finished; a batch lasts as long as on its slowest rank."""
    finished = min(len(rank.latency_s) for rank in ranks)
    return Batches(
        latency_s=[max(rank.latency_s[batch] for rank in ranks) for batch in range(finished)],
        sequences=ranks[0].sequences[:finished],
        tokens=ranks[0].tokens[:finished],
        padded_tokens=ranks[0].padded_tokens[:finished],
    )


def _worst(futures: Sequence[Future[Any]]) -> RankFailedError:
    errors = [future.exception() for future in futures if future.done()]
    failed = [error for error in errors if isinstance(error, RankFailedError)]
    return min(failed, key=_rank_of_cause)


def _rank_of_cause(error: RankFailedError) -> int:
    if error.outcome == "error" and _LOST_PEER.search(error.failure.message):
        return 3
    return {"oom": 0, "error": 1, "crashed": 2}[error.outcome]
