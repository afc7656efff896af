"""Changes of one figure over the reports of a history: steps and drifts, with the report where each of them began.

After each report the figures since the last change are searched for a new one: the mean may have changed with any of
the reports (a step), or have begun to grow or shrink with any of them (a drift). Both are the likelihood-ratio test of
a change point with an unknown mean and deviation (Hawkins, Qiu and Kang 2003, "The changepoint model for statistical
process control", Journal of Quality Technology 35, 355-366; the drift has a line instead of a second mean). The
deviation is moderated as that of the gate: the prior of the noise regime counts as some reports more, because few
reports do not show their deviation. There is no change where another figure of one report explains more than any step
and drift: this may be an accident.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from pytest_llmgpu.gate.noise_model import Prior
from pytest_llmgpu.gate.stats.distributions import t_tail
from pytest_llmgpu.report.text import signed_percent

WINDOW = 100
"""Most reports that are searched: a change that began earlier would have been found."""

_SMALLEST = 0.002
"""Smallest change that is stated, as a fraction. A test of figures that hardly vary would find any."""

_CHANCE = 3e-4
"""Largest p of a change. By the simulation of `benchmarks/trend/changes.py` it finds one in at most 1 % of histories of
100 unchanged reports."""

_MOST_DEGREES = 20.0
"""Most degrees of freedom of a prior: reports of different days can differ by more than launches of one day."""

_FEWEST_BEFORE, _FEWEST_STEP, _FEWEST_DRIFT = 4, 2, 5
"""Fewest reports before a change, after a step, and in a drift."""

FEWEST = _FEWEST_BEFORE + _FEWEST_STEP
"""Fewest reports in which a change can be found."""


class Shift(NamedTuple):
    """A change that lasts."""

    kind: Literal["step", "drift"]
    """A step is another mean; a drift grows or shrinks with each report."""
    first: int
    """The number of the first figure that it changed."""
    found: int
    """The number of the figure with which it was found."""
    change: float
    """The change as a fraction of the mean before: of a step the mean since, of a drift its end when it was found."""
    p: float
    """The two-sided p-value of its t, times the numbers of possible beginnings and of cases."""


class _Best(NamedTuple):
    kind: Literal["step", "drift"]
    first: int
    explained: float
    """The sum of squares that the change explains."""
    growth: float
    """The change of the logarithm: of the mean, or over the whole drift."""


def shifts(values: Sequence[float], prior: Prior, *, cases: int = 1) -> list[Shift]:
    """Return the changes of a history in their order.

    Args:
        values: The figures of all reports, the oldest first; all are above 0.
        prior: The expected noise of a report.
        cases: The number of histories that are searched: any of them may show a change by chance.
    """
    logs = [math.log(value) for value in values]
    found: list[Shift] = []
    start = 0
    for end in range(1, len(logs) + 1):
        start = max(start, end - WINDOW)
        shift = _shift(logs[start:end], start, prior, cases)
        if shift is not None:
            found.append(shift)
            start = shift.first if shift.kind == "step" else shift.found
    return found


def describe(shift: Shift, names: Sequence[str]) -> str:
    """Return a change in one sentence.

    Args:
        shift: The change.
        names: The names of the reports of its history.
    """
    first, found = names[shift.first], names[shift.found]
    change = signed_percent(shift.change)
    if shift.kind == "step":
        return f"Step of {change} since report {first}, found with report {found}."
    return f"Drift of {change} from report {first} to report {found}."


def _shift(logs: Sequence[float], start: int, prior: Prior, cases: int) -> Shift | None:
    """Return the change that the last of these logarithms shows; None without one."""
    size = len(logs)
    best = max(_beginnings(logs), key=lambda one: one.explained, default=None)
    if best is None or abs(math.expm1(best.growth)) < _SMALLEST:
        return None
    mean = statistics.fmean(logs)
    squares = [(value - mean) ** 2 for value in logs]
    if max(squares) * size / (size - 1) >= best.explained:
        return None  # one report alone explains more
    expected = min(prior.df0, _MOST_DEGREES)
    degrees = size - 2 + expected
    left = max(0.0, math.fsum(squares) - best.explained) + expected * prior.s0**2
    p = min(1.0, 2 * t_tail(math.sqrt(degrees * best.explained / left), degrees) * (size - _FEWEST_BEFORE) * cases)
    if p > _CHANCE:
        return None
    return Shift(best.kind, start + best.first, start + size - 1, math.expm1(best.growth), p)


def _beginnings(logs: Sequence[float]) -> Iterator[_Best]:
    """Yield a step and a drift for each possible beginning, the latest first."""
    size = len(logs)
    if size < FEWEST:
        return
    level = logs[0]  # differences keep the sums small
    total = math.fsum(value - level for value in logs)
    after = ramp = 0.0
    for first in range(size - 1, _FEWEST_BEFORE - 1, -1):
        number = size - first
        after += logs[first] - level
        ramp += after  # the sum of each figure times its place in the drift, which begins at 1
        if number >= _FEWEST_STEP:
            growth = after / number - (total - after) / first
            yield _Best("step", first, growth * growth * first * number / size, growth)
        if number >= _FEWEST_DRIFT:
            places = number * (number + 1) / 2
            spread = places * (2 * number + 1) / 3 - places * places / size
            slope = (ramp - places * total / size) / spread
            yield _Best("drift", first, slope * slope * spread, slope * number)
