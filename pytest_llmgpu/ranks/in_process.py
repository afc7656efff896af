"""The rank of an engine that was given as an object: pytest's own process.

A crash or an endless call there ends or blocks pytest itself: neither is an outcome.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from pytest_llmgpu.engines.protocol import Engine
from pytest_llmgpu.ranks import engine_worker, serving
from pytest_llmgpu.ranks.local import FinishedBatch, RankFailedError
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report.result import Batches, Phase


class InProcess:
    """Answers like a `group.RankGroup` of one rank."""

    alive = True

    def __init__(self, engine: Engine) -> None:
        self.given: set[str] = set()
        """SHA-256 of each dataset that the rank has received."""
        self._state = RankState(self._on_batch)
        self._state.engine = engine
        self._columns, self._planned = Batches(), 0
        self._tick: Callable[[int, int], None] | None = None

    def ask(
        self,
        fn: Callable[..., Any],
        *args: Any,
        phase: Phase,
        timeout_s: float,  # noqa: ARG002 - nothing ends a call in this process
        tick: Callable[[int, int], None] | None = None,
    ) -> list[Any]:
        """Run `fn(state, *args)` and return a list of its result (see `group.RankGroup.ask`).

        Raises:
            RankFailedError: It raised an exception.
        """
        self._columns, self._planned, self._tick = Batches(), 0, tick
        try:
            return [fn(self._state, *args)]
        except Exception as error:
            traceback.print_exc()  # as a rank does; pytest shows it with the failed test
            outcome, failure = serving.failure_of(error, phase)
            raise RankFailedError(outcome, failure, self._state.memory(), serving.describe(error)) from error

    def batches(self) -> Batches:
        """Return the finished batches of the running command."""
        return self._columns

    def close(self) -> None:
        """End the engine; it is the user's, and may be started again."""
        try:
            engine_worker.stop(self._state)
        except Exception:  # noqa: BLE001 - the user's, and the measured cases are complete
            traceback.print_exc()

    kill = close

    def _on_batch(self, finished: FinishedBatch) -> None:
        if not finished.planned:
            return
        columns = self._columns
        columns.latency_s.append(finished.latency_s)
        columns.sequences.append(finished.sequences)
        columns.tokens.append(finished.tokens)
        columns.padded_tokens.append(finished.padded_tokens)
        if self._tick is not None:
            self._tick(len(columns.latency_s), finished.planned)
