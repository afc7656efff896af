"""When readings begin: at absolute deadlines, or after the wait that the paper's profiler makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = ["Tick", "compensated", "ticks"]

Clock = Callable[[], float]
Wait = Callable[[float], bool]


class Tick(NamedTuple):
    """One deadline that is kept, late or not."""

    k: int
    start_s: float


def ticks(t0_s: float, period_s: float, clock: Clock, wait: Wait) -> Iterator[Tick]:
    """Yield at each deadline t0 + k * period; one that has passed entirely is skipped, so that ticks never bunch up.

    Args:
        t0_s: First deadline.
        period_s: Seconds between deadlines.
        clock: The time now.
        wait: Waits so many seconds, 0 included, or less; true when sampling is to end.
    """
    k = 0
    while True:
        if _wait_until(t0_s + k * period_s, clock, wait):
            return
        yield Tick(k, clock())
        k = max(k + 1, int((clock() - t0_s) // period_s))


def compensated(t0_s: float, period_s: float, clock: Clock, wait: Wait) -> Iterator[Tick]:
    """Yield as the paper's profiler does: after each round it waits the period less the time the round took.

    What a wait is late by is never made up, so that rounds drift: each is counted as the deadline it has come to, and
    deadlines it has drifted past are missing. Arguments are those of `ticks`.
    """
    k, due_s = -1, t0_s
    while True:
        if _wait_until(due_s, clock, wait):
            return
        start_s = clock()
        k = max(k + 1, int((start_s - t0_s) // period_s))
        yield Tick(k, start_s)
        due_s = start_s + period_s


def _wait_until(due_s: float, clock: Clock, wait: Wait) -> bool:
    while True:
        remaining = due_s - clock()
        if wait(max(0.0, remaining)):
            return True
        if remaining <= 0:
            return False
