"""Intervals of the ratio of times over launches, and the number of launches that a change requires.

Times are compared as logarithms of ratios. The replicate is a launch of the processes, because clocks, allocator and
tuning are the same within a launch.
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
"""Noise between launches without a calibration, as a fraction: that of forwards that wait for the CPU. 40 launches on
two shared cores differed by 14 to 20 %, and 39 launches on H200s by 15 to 22 % at batch size 2, 9 to 20 % at 8 and 0.7
to 1.6 % at 32 (benchmarks/gate). With 5 % every third comparison of equal launches there had a false alarm."""

POWER = 0.95
"""Probability with which a detectable change is detected."""

_ALONE = 1.5
"""Factor for the noise of a report with one launch. Launches have outliers that no normal distribution has, and one
launch has no spread that shows them. Among 1,000 pairs of equal launches on H200s 3.8 % had a false alarm without the
factor, 1.0 % with it (benchmarks/gate), and 0.7 % with the allowance for a stall in a single launch."""

_ENOUGH_DEGREES = 8
"""Degrees of freedom from which the noise is estimated from the launches without a calibration: five launches in each
report."""

_CHANCE = 0.01
"""Probability with which this estimate is too small."""

_MOST_LAUNCHES = 1000
"""Largest number of launches that is recommended."""

_NORMAL = statistics.NormalDist()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The change from baseline to candidate with its standard errors. All values are logarithms of ratios."""

    log_ratio: float
    """The logarithm of the ratio of candidate to baseline."""
    noise_error: float
    """The standard error from the known or assumed noise: sd x sqrt(1/n + 1/m), with a factor of 1.5 for a report with
    one launch, the noise between sessions, and an allowance for a stall in a single launch."""
    observed_error: float | None = None
    """The standard error from the spread of these launches; None with one launch in each report."""
    degrees: int = 0
    """The degrees of freedom of that spread."""

    def half_width(self, confidence: float) -> float:
        """Return half of the width of the interval: the larger of two.

        One is the t-interval, each of whose ends has this confidence. The other is from the known noise, and both ends
        together have this confidence: at 0.95 and n launches in each report 2.77 sd / sqrt(n), for one launch 4.16 sd.
        """
        calibrated = _normal_quantile(confidence) * self.noise_error
        if self.observed_error is None:
            return calibrated
        return max(calibrated, t_quantile(self.degrees, confidence) * self.observed_error)

    def p_above(self, threshold: float) -> float:
        """Return the probability of this change or a larger one if the true change were equal to a threshold.

        It is at most 1 - confidence if the lower end of the interval is above the threshold. It is therefore the larger
        of the one-sided p of the t-test and the two-sided p of the known noise.
        """
        return self._p(self.log_ratio - threshold)

    def p_below(self, threshold: float) -> float:
        """Return the probability of this change or a smaller one if the true change were equal to a threshold."""
        return self._p(threshold - self.log_ratio)

    def _p(self, distance: float) -> float:
        if distance <= 0:
            return 1.0
        # erfc is precise for small probabilities, which 1 - cdf rounds to 0.
        calibrated = math.erfc(distance / self.noise_error / math.sqrt(2)) if self.noise_error else 0.0
        if not self.observed_error:
            return calibrated
        return max(calibrated, t_tail(distance / self.observed_error, self.degrees))


def launch_levels(base: Sequence[Sequence[float]], head: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Return the level of each launch of two reports as a logarithm; only differences have a meaning.

    Args:
        base: [launches, batches] latencies of the baseline, all above 0.
        head: [launches, batches] latencies of the candidate, with the same batches.
    """
    if len(base) == len(head) == 1:  # The same difference as below, computed directly.
        return [0.0], [hodges_lehmann(list(map(operator.sub, _logs(head[0]), _logs(base[0]))))]
    found = levels([*base, *head])
    return found[: len(base)], found[len(base) :]


def levels(launches: Sequence[Sequence[float]]) -> list[float]:
    """Return the level of each launch relative to the typical launch as a logarithm.

    Batch k is compared with batch k, which is equal work, so that shapes add no noise. The typical launch has the
    medians of all launches. Medians of the baseline only would contain its own launches, but not those of the
    candidate.

    Args:
        launches: [launches, batches] latencies, all above 0.
    """
    logs = list(map(_logs, launches))
    typical = [statistics.median(batch) for batch in zip(*logs, strict=True)]
    return [hodges_lehmann(list(map(operator.sub, launch, typical))) for launch in logs]


def assumed_sd(base: Sequence[float], head: Sequence[float]) -> float:
    """Return the noise between launches without a calibration, as a fraction.

    It is `UNCALIBRATED_SD`, or with at least five launches in each report the upper limit of their spread if that is
    smaller.

    Args:
        base: [launches] logarithms of the baseline from `launch_levels`.
        head: [launches] logarithms of the candidate from `launch_levels`.
    """
    degrees = len(base) + len(head) - 2
    if degrees < _ENOUGH_DEGREES:
        return UNCALIBRATED_SD
    return min(UNCALIBRATED_SD, largest_sd(_spread(base, head), degrees, _CHANCE))


def change(
    base: Sequence[float],
    head: Sequence[float],
    sd: float,
    session_sd: float = 0.0,
    stalls: tuple[float, float] = (0.0, 0.0),
) -> Change:
    """Return the change between the launches of two reports, whose numbers can differ.

    Args:
        base: [launches] logarithms of the baseline from `launch_levels`.
        head: [launches] logarithms of the candidate from `launch_levels`.
        sd: The known or assumed noise between launches.
        session_sd: The noise between sessions. Each report is one session, so that more launches do not reduce it.
        stalls: The additional standard error of a single launch of each report, as a logarithm.
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
    """Return the smallest true slowdown that is detected with probability `POWER`, as a fraction.

    Args:
        change: The change between these launches.
        margin: The threshold as a fraction.
        confidence: The confidence of each end of the interval.
        family: The weight of all tests of the family, relative to the weight of this test.
    """
    error = max(change.noise_error, change.observed_error or 0.0)
    half_width = change.half_width(first_confidence(confidence, family))
    shown = math.log1p(margin) + half_width + _NORMAL.inv_cdf(POWER) * error
    return math.expm1(min(700.0, shown))


@functools.lru_cache(maxsize=4096)
def launches_needed(
    slowdown: float, margin: float, sd: float, confidence: float, family: float = 1, session_sd: float = 0.0
) -> int | None:
    """Return how many launches in each report detect a true slowdown with probability `POWER`; None above 1,000.

    Args:
        slowdown: The true slowdown as a fraction.
        margin: The threshold as a fraction. A slowdown up to the threshold is never detected.
        sd: The noise between launches.
        confidence: The confidence of each end of the interval.
        family: The weight of all tests of the family, relative to the weight of this test (`first_confidence`).
        session_sd: The noise between sessions, which limits the slowdown that any number of launches detects.
    """
    distance = math.log1p(slowdown) - math.log1p(margin)
    required = first_confidence(confidence, family)

    def missed(launches: int) -> bool:
        return _miss(launches, distance, sd, session_sd, required) > 1 - POWER

    if distance <= 0 or missed(_MOST_LAUNCHES):
        return None
    if not missed(1):  # A special case: two launches also have a spread, which widens their interval.
        return 1
    few, enough = 1, _MOST_LAUNCHES
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (middle, enough) if missed(middle) else (few, middle)
    return enough


def _spread(base: Sequence[float], head: Sequence[float]) -> float:
    """Return the standard deviation of launches around the mean of their report."""
    return math.sqrt((_squares(base) + _squares(head)) / (len(base) + len(head) - 2))


def _error(sd: float, launches: int) -> float:
    """Return the standard error of the mean of one report."""
    return sd * (_ALONE if launches == 1 else 1 / math.sqrt(launches))


def _squares(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _logs(latencies: Sequence[float]) -> list[float]:
    return list(map(math.log, latencies))


def _miss(launches: int, distance: float, sd: float, session_sd: float, confidence: float) -> float:
    """Return an upper limit of the probability that one of the two intervals does not detect a change."""
    error, between = math.sqrt(2) * _error(sd, launches), session_sd * math.sqrt(2)
    both = math.hypot(error, between)
    calibrated = _NORMAL.cdf(_normal_quantile(confidence) - (distance / both if both else math.inf))
    if launches == 1 or not error:
        return calibrated
    degrees = 2 * launches - 2
    quantile = t_quantile(degrees, confidence)
    # The normal approximation of the noncentral t distribution: Abramowitz and Stegun, 26.7.10. Noise between sessions
    # changes the measured ratio, but not the spread of the launches.
    spread = math.sqrt(1 + quantile * quantile / (2 * degrees) + (between / error) ** 2)
    return calibrated + _NORMAL.cdf((quantile * (1 - 1 / (4 * degrees)) - distance / error) / spread)


@functools.lru_cache(maxsize=64)
def _normal_quantile(confidence: float) -> float:
    return _NORMAL.inv_cdf(1 - (1 - confidence) / 2)
