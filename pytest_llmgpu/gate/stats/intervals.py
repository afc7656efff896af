"""How sure a change is: intervals of ratios over launches, and the launches that it takes.

Times are compared as logarithms of ratios. A launch of the processes is the replicate: clocks, allocator and tuning are
shared inside one.
"""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections.abc import Sequence

import msgspec

from pytest_llmgpu.gate.stats.distributions import largest_sd, t_quantile, t_tail
from pytest_llmgpu.gate.stats.hodges_lehmann import hodges_lehmann
from pytest_llmgpu.gate.stats.holm import first_confidence

__all__ = [
    "POWER",
    "UNCALIBRATED_SD",
    "Change",
    "assumed_sd",
    "change",
    "launch_levels",
    "launches_needed",
    "levels",
    "smallest_change",
]

UNCALIBRATED_SD = 0.2
"""Noise between launches, as a fraction, where nobody has measured it: what was seen of forwards that wait for the CPU.
40 launches on two shared cores differed by 14 to 20 %; 39 on H200s by 15 to 22 % at batch size 2, 9 to 20 % at 8 and
0.7 to 1.6 % at 32 (benchmarks/gate). With 5 % every third comparison of equal launches there had a false alarm."""

POWER = 0.95
"""Probability with which a change that is called detectable is detected."""

_ALONE = 1.5
"""How much more the noise of a side with one launch counts. Launches have outliers that no normal distribution has, and
one launch shows no spread that would tell: of 1,000 pairs of equal launches on H200s 3.8 % had a false alarm without it
and 1.0 % with it (benchmarks/gate); 0.7 % since a single launch may have met a stall, too."""

_ENOUGH_DEGREES = 8
"""Degrees of freedom, five launches a side, from which launches tell their own noise where nobody calibrated."""

_LUCK = 0.01
"""Probability with which they look quieter than they are."""

_MOST_LAUNCHES = 1000

_NORMAL = statistics.NormalDist()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """How much slower the candidate is, and how sure that is. Logarithms of ratios throughout."""

    log_ratio: float
    """Of candidate to baseline."""
    noise_error: float
    """Standard error by the calibrated noise: sd x sqrt(1/n + 1/m), half as much again for a side with one launch, that
    of two sessions, and what a machine that stalls may have done to a single launch."""
    observed_error: float | None = None
    """Standard error by the spread of these launches; None with one launch a side."""
    degrees: int = 0
    """Degrees of freedom of that spread."""

    def half_width(self, confidence: float) -> float:
        """Return half of the interval's width: the larger of two.

        The t-interval whose ends each hold with probability `confidence`, and the calibrated noise's with both ends
        together: at 0.95, and n launches a side, 2.77 sd / sqrt(n); 4.16 sd for one launch.
        """
        calibrated = _normal_quantile(confidence) * self.noise_error
        if self.observed_error is None:
            return calibrated
        return max(calibrated, t_quantile(self.degrees, confidence) * self.observed_error)

    def p_above(self, bar: float) -> float:
        """Return the probability of so large a change, or a larger one, were the true one `bar`.

        It inverts the interval: at most 1 - confidence where the lower end is above `bar`. So it is the larger of the
        t-test's one-sided p and the two-sided p of the calibrated noise.
        """
        return self._p(self.log_ratio - bar)

    def p_below(self, bar: float) -> float:
        """Return the probability of so small a change, or a smaller one, were the true one `bar`."""
        return self._p(bar - self.log_ratio)

    def _p(self, distance: float) -> float:
        if distance <= 0:
            return 1.0
        # Far out the normal's tail is below what 1 - cdf resolves: erfc keeps it.
        calibrated = math.erfc(distance / self.noise_error / math.sqrt(2)) if self.noise_error else 0.0
        if not self.observed_error:
            return calibrated
        return max(calibrated, t_tail(distance / self.observed_error, self.degrees))


def launch_levels(base: Sequence[Sequence[float]], head: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Return how slow each launch of two sides is, as a logarithm; only differences mean anything.

    Args:
        base: [launches, batches] latencies, all above 0.
        head: [launches, batches] likewise, of the same batches.
    """
    if len(base) == len(head) == 1:  # the same difference as below, without the way round
        return [0.0], [hodges_lehmann(list(map(operator.sub, _logs(head[0]), _logs(base[0]))))]
    found = levels([*base, *head])
    return found[: len(base)], found[len(base) :]


def levels(launches: Sequence[Sequence[float]]) -> list[float]:
    """Return how slow each launch is against the typical one, as a logarithm, from its batches in pairs.

    Batch k is compared with batch k: equal work, so that shapes add no noise. The typical one is of all launches alike:
    one of the baseline's alone would be held against medians that it is part of, and the candidate's would not.

    Args:
        launches: [launches, batches] latencies, all above 0.
    """
    logs = list(map(_logs, launches))
    typical = [statistics.median(batch) for batch in zip(*logs, strict=True)]
    return [hodges_lehmann(list(map(operator.sub, launch, typical))) for launch in logs]


def assumed_sd(base: Sequence[float], head: Sequence[float]) -> float:
    """Return the noise between launches, as a fraction, that counts where nobody calibrated it.

    `UNCALIBRATED_SD`, or what five launches a side and more show, as much larger as luck may have made it look small.

    Args:
        base: [launches] logarithms, as `launch_levels` gives them.
        head: [launches] likewise.
    """
    degrees = len(base) + len(head) - 2
    if degrees < _ENOUGH_DEGREES:
        return UNCALIBRATED_SD
    return min(UNCALIBRATED_SD, largest_sd(_spread(base, head), degrees, _LUCK))


def change(
    base: Sequence[float],
    head: Sequence[float],
    sd: float,
    session_sd: float = 0.0,
    stalls: tuple[float, float] = (0.0, 0.0),
) -> Change:
    """Return the change between launch levels; the numbers of launches may differ.

    Args:
        base: [launches] logarithms, as `launch_levels` gives them.
        head: [launches] likewise.
        sd: noise between launches that is known or assumed.
        session_sd: noise between sessions, of which each side is one: the number of launches does not make it less.
        stalls: standard error, as a logarithm, that a single launch of either side has beside its noise.
    """
    scale = math.sqrt(1 / len(base) + 1 / len(head))
    degrees = len(base) + len(head) - 2
    ratio = statistics.fmean(head) - statistics.fmean(base)
    errors = [_error(sd, len(base)), _error(sd, len(head)), session_sd * math.sqrt(2)]
    errors += [stall for side, stall in zip((base, head), stalls, strict=True) if len(side) == 1]
    known = math.hypot(*errors)
    if not degrees:
        return Change(log_ratio=ratio, noise_error=known)
    return Change(log_ratio=ratio, noise_error=known, observed_error=_spread(base, head) * scale, degrees=degrees)


def smallest_change(change: Change, margin: float, confidence: float, family: float = 1) -> float:
    """Return the smallest true slowdown that launches of this spread show with probability `POWER`, as a fraction.

    Args:
        change: of these launches.
        margin: the bar, as a fraction.
        confidence: of the interval's ends.
        family: as for `launches_needed`.
    """
    error = max(change.noise_error, change.observed_error or 0.0)
    half_width = change.half_width(first_confidence(confidence, family))
    shown = math.log1p(margin) + half_width + _NORMAL.inv_cdf(POWER) * error
    return math.expm1(min(700.0, shown))


@functools.lru_cache(maxsize=4096)
def launches_needed(
    slowdown: float, margin: float, sd: float, confidence: float, family: float = 1, session_sd: float = 0.0
) -> int | None:
    """Return how many launches a side show a true slowdown with probability `POWER`; None above 1,000.

    Args:
        slowdown: the true one, as a fraction.
        margin: the bar, as a fraction. A slowdown no larger is never shown.
        sd: noise between launches.
        confidence: of the interval's ends.
        family: tests that are judged together (Holm), by weight, this one's being 1: the first has to be as sure as 1 /
            family of the rest of 1.
        session_sd: noise between the sessions of both sides, which sets a limit to what any number of launches shows.
    """
    distance = math.log1p(slowdown) - math.log1p(margin)
    sure = first_confidence(confidence, family)

    def missed(launches: int) -> bool:
        return _miss(launches, distance, sd, session_sd, sure) > 1 - POWER

    if distance <= 0 or missed(_MOST_LAUNCHES):
        return None
    if not missed(1):  # asked apart: two launches pay for a spread of their own
        return 1
    few, enough = 1, _MOST_LAUNCHES
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (middle, enough) if missed(middle) else (few, middle)
    return enough


def _spread(base: Sequence[float], head: Sequence[float]) -> float:
    """Return the standard deviation of launches around the mean of their side."""
    return math.sqrt((_squares(base) + _squares(head)) / (len(base) + len(head) - 2))


def _error(sd: float, launches: int) -> float:
    """Return the standard error of one side."""
    return sd * (_ALONE if launches == 1 else 1 / math.sqrt(launches))


def _squares(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _logs(latencies: Sequence[float]) -> list[float]:
    return list(map(math.log, latencies))


def _miss(launches: int, distance: float, sd: float, session_sd: float, confidence: float) -> float:
    """Return at most how likely a change is missed: by the calibrated interval, or by the t-interval."""
    error, between = math.sqrt(2) * _error(sd, launches), session_sd * math.sqrt(2)
    both = math.hypot(error, between)
    calibrated = _NORMAL.cdf(_normal_quantile(confidence) - (distance / both if both else math.inf))
    if launches == 1 or not error:
        return calibrated
    degrees = 2 * launches - 2
    bar = t_quantile(degrees, confidence)
    # The noncentral t distribution by a normal one: Abramowitz and Stegun, 26.7.10. Sessions add to what is measured,
    # and nothing to the spread that it is held against.
    spread = math.sqrt(1 + bar * bar / (2 * degrees) + (between / error) ** 2)
    return calibrated + _NORMAL.cdf((bar * (1 - 1 / (4 * degrees)) - distance / error) / spread)


@functools.lru_cache(maxsize=64)
def _normal_quantile(confidence: float) -> float:
    return _NORMAL.inv_cdf(1 - (1 - confidence) / 2)
