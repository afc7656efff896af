"""The times at which readings begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple


class Tick(NamedTuple):
    """The begin of one round of readings."""

    k: int
    """The number of its deadline t0 + k * period."""
    start_s: float
    """The time at which it begins, possibly late."""


def ticks(
    t0_s: float, period_s: float, clock: Callable[[], float], wait: Callable[[float], bool], *, drift: bool = False
) -> Iterator[Tick]:
    """Yield at each deadline t0 + k * period. A deadline that has passed entirely is skipped.

    Args:
        t0_s: First deadline.
        period_s: Seconds between deadlines.
        clock: Returns the time now.
        wait: Waits for the given seconds (0 included) or less; returns true when sampling is to end.
        drift: Begin each round one period after the begin of the round before, as Shin et al. 2024 do. A delay is then
            never made up. Each round counts as the deadline that it has reached.
    """
    k, due_s = 0, t0_s
    while True:
        remaining_s = due_s - clock()
        if wait(max(0.0, remaining_s)):
            return
        if remaining_s > 0:
            continue
        start_s = clock()
        if drift:
            k = max(k, int((start_s - t0_s) // period_s))
        yield Tick(k, start_s)
        if drift:
            k, due_s = k + 1, start_s + period_s
        else:
            k = max(k + 1, int((clock() - t0_s) // period_s))
            due_s = t0_s + k * period_s
