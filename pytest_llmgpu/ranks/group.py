"""All ranks of one strategy: send a command to each of them, and report the most specific cause of a failure.

A failed rank leaves the others in a collective that never ends. After a first failure they get 2 s to report a cause.
"""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec

from pytest_llmgpu.engines.protocol import Engine
from pytest_llmgpu.ranks import engine_worker, serving
from pytest_llmgpu.ranks.local import FinishedBatch, LocalLauncher, Rank, RankFailedError
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report.result import Batches, Failure, Phase

_TICK_S = 0.25
_OTHER_RANKS_S = 2.0
_CLOSE_S = 10.0
_LOST_PEER = re.compile(r"closed by peer|reset by peer|Broken pipe|ncclRemoteError|remote process exited")


class RankGroup:
    """The ranks of one loaded model."""

    def __init__(self, launcher: LocalLauncher | None, environments: Sequence[Mapping[str, str]]) -> None:
        """Start one rank per environment; without a launcher none is started (`InProcess`)."""
        self._lock = threading.Lock()
        self._columns: list[Batches] = [Batches() for _ in environments]
        self._planned = 0
        self._progress_s = time.monotonic()
        self.ranks: Sequence[Rank] = [] if launcher is None else launcher.start(environments, self._on_batch)
        self.given: set[str] = set()
        """SHA-256 of each dataset that the ranks have received."""

    def ask(
        self,
        fn: Callable[..., Any],
        *args: Any,
        phase: Phase,
        timeout_s: float,
        tick: Callable[[int, int], None] | None = None,
    ) -> list[Any]:
        """Run `fn(state, *args)` on every rank, which imports it, and return the results in the order of the ranks.

        The time limit is of seconds without a result or a finished batch. `tick` is called about four times a second,
        with finished and planned batches, both 0 before the first one. A failure names the phase.

        Raises:
            RankFailedError: A rank failed, or the time limit is over. The error has the most specific cause that the
                ranks reported within 2 s.
        """
        self._begin()
        futures = self.submit(fn, *args)
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=_TICK_S, return_when=FIRST_EXCEPTION)
            if any(future.exception() for future in done):
                wait(waiting, timeout=_OTHER_RANKS_S)
                error = most_specific(future.exception() for future in futures if future.done())
                # A process that died reported no phase.
                error.failure = msgspec.structs.replace(error.failure, phase=phase)
                raise error
            if tick is not None:
                tick(min(len(column.latency_s) for column in self._columns), self._planned)
            if waiting and time.monotonic() - self._progress_s > timeout_s:
                try:
                    stacks = "\n".join(rank.stacks() for rank in self.ranks)
                except RankFailedError as error:  # its node does not answer, which explains the rest
                    error.failure = msgspec.structs.replace(error.failure, phase=phase)
                    raise
                missing = "loaded model" if phase == "load" else "finished batch"
                failure = Failure(
                    phase=phase,
                    message=f"no {missing} for {timeout_s:g} s",
                    evidence=f"time limit of {timeout_s:g} s",
                    log_tail=stacks,
                )
                raise RankFailedError("timeout", failure)
        return [future.result() for future in futures]

    def submit(self, fn: Callable[..., Any], *args: Any) -> list[Future[Any]]:
        """Begin `fn(state, *args)` on every rank, which imports it; nothing waits for the results."""
        return [rank.submit(fn, *args) for rank in self.ranks]

    def batches(self) -> Batches:
        """Return the batches that every rank has reported; the list is complete once the ranks have ended."""
        with self._lock:
            return slowest(self._columns)

    @property
    def alive(self) -> bool:
        """True if every rank runs."""
        return all(rank.alive for rank in self.ranks)

    def close(self) -> None:
        """Let every rank end by itself, all at the same time: a rank may wait until the others leave the group."""
        with ThreadPoolExecutor(max_workers=len(self.ranks)) as pool:
            closing = [pool.submit(rank.close, _CLOSE_S) for rank in self.ranks]
            try:
                wait(closing)
            except KeyboardInterrupt:
                self.kill()
                raise

    def kill(self) -> None:
        """End every rank at once."""
        with ThreadPoolExecutor(max_workers=len(self.ranks)) as pool:
            list(pool.map(lambda rank: rank.close(0.0), self.ranks))

    def _begin(self) -> None:
        """Forget the batches of the command before."""
        with self._lock:
            self._columns = [Batches() for _ in self._columns]
            self._planned, self._progress_s = 0, time.monotonic()

    def _on_batch(self, rank: int, finished: FinishedBatch) -> None:
        with self._lock:
            self._progress_s = time.monotonic()
            if not finished.planned:
                return  # A batch of the warm-up is progress, but no measurement.
            column = self._columns[rank]
            column.latency_s.append(finished.latency_s)
            column.sequences.append(finished.sequences)
            column.tokens.append(finished.tokens)
            column.padded_tokens.append(finished.padded_tokens)
            self._planned = finished.planned


class InProcess(RankGroup):
    """The rank of an engine that was given as an object: pytest's own process.

    A crash or an endless call there ends or blocks pytest itself: neither is an outcome.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(None, [{}])
        self._state = RankState(self._finished)
        self._state.engine = engine
        self._tick: Callable[[int, int], None] | None = None

    def ask(
        self,
        fn: Callable[..., Any],
        *args: Any,
        phase: Phase,
        timeout_s: float,  # noqa: ARG002 - nothing ends a call in this process
        tick: Callable[[int, int], None] | None = None,
    ) -> list[Any]:
        """Run `fn(state, *args)` and return a list of its result; RankFailedError if it raised an exception."""
        self._begin()
        self._tick = tick
        try:
            return [fn(self._state, *args)]
        except Exception as error:
            traceback.print_exc()  # as a rank does; pytest shows it with the failed test
            outcome, failure = serving.failure_of(error, phase)
            raise RankFailedError(outcome, failure, self._state.memory(), serving.describe(error)) from error

    def close(self) -> None:
        """End the engine; it is the user's, and may be started again."""
        try:
            engine_worker.stop(self._state)
        except Exception:  # noqa: BLE001 - the user's, and the measured cases are complete
            traceback.print_exc()

    kill = close

    def _finished(self, finished: FinishedBatch) -> None:
        self._on_batch(0, finished)
        if self._tick is not None and finished.planned:
            self._tick(len(self.batches().latency_s), finished.planned)


def slowest(ranks: Sequence[Batches]) -> Batches:
    """Return the batches that every rank has finished, each with the latency of its slowest rank."""
    finished = min(len(rank.latency_s) for rank in ranks)
    return Batches(
        latency_s=[max(rank.latency_s[batch] for rank in ranks) for batch in range(finished)],
        sequences=ranks[0].sequences[:finished],
        tokens=ranks[0].tokens[:finished],
        padded_tokens=ranks[0].padded_tokens[:finished],
    )


def most_specific(errors: Iterable[BaseException | None]) -> RankFailedError:
    """Return the error that explains the others: out of memory, then an error, a crash, a lost connection."""

    def distance_from_cause(error: RankFailedError) -> int:
        if error.outcome == "error" and _LOST_PEER.search(error.failure.message):
            return 3
        return {"oom": 0, "error": 1, "crashed": 2}[error.outcome]

    return min((error for error in errors if isinstance(error, RankFailedError)), key=distance_from_cause)
