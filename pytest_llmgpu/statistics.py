"""How sure a change is: intervals of ratios over launches, the launches that it takes, and families of tests.

Times are compared as logarithms of ratios. A launch of the processes is the replicate: clocks, allocator and tuning are
shared inside one.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import statistics
from collections.abc import Sequence

import msgspec

from pytest_llmgpu.distributions import least_share, t_quantile, t_tail

__all__ = [
    "POWER",
    "UNCALIBRATED_SD",
    "Calibration",
    "Change",
    "change",
    "hodges_lehmann",
    "holm",
    "launch_levels",
    "launches_needed",
    "net_loss",
    "smallest_change",
]

UNCALIBRATED_SD = 0.05
"""Noise between launches, as a fraction, where nobody has measured it."""

POWER = 0.95
"""Probability with which a change that is called detectable is detected."""

_ALL_PAIRS = 64
"""Most values of which pairs are formed, 928 of their 2,080: more are counted instead."""

_MOST_LAUNCHES = 1000

_NORMAL = statistics.NormalDist()


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Noise between launches on one runner, from launches of the same thing."""

    sd: dict[str, float] = {}
    """Key of a case to the standard deviation of its log times between launches."""
    typical: float | None = None
    """For cases that were not calibrated; None: they count as uncalibrated."""
    sha256: str | None = None
    """Of the file that it was read from."""

    def of(self, key: str) -> float | None:
        """Return the standard deviation of a case's log times; None where it is not known."""
        return self.sd.get(key, self.typical)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """How much slower the candidate is, and how sure that is. Logarithms of ratios throughout."""

    log_ratio: float
    """Of candidate to baseline."""
    noise_error: float
    """Standard error by the calibrated noise: sd x sqrt(1/n + 1/m)."""
    observed_error: float | None = None
    """Standard error by the spread of these launches; None with one launch a side."""
    degrees: int = 0
    """Degrees of freedom of that spread."""

    def half_width(self, confidence: float) -> float:
        """Return half of the interval's width: the larger of two.

        The t-interval whose ends each hold with probability `confidence`, and the calibrated noise's with both ends
        together: at 0.95, and n launches a side, 2.77 sd / sqrt(n).
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


def hodges_lehmann(values: Sequence[float]) -> float:
    """Return the median of the means of all pairs of values, each with itself too.

    As robust as a median against a few odd values, almost as precise as a mean without them.

    Raises:
        ValueError: no values.
    """
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        raise ValueError("the Hodges-Lehmann estimate needs at least one value")
    pairs = count * (count + 1) // 2
    if count <= _ALL_PAIRS:
        below, middle_pairs = _middle_pairs(count)
        sums = sorted([ordered[a] + ordered[b] for a, b in middle_pairs])
        return (sums[(pairs - 1) // 2 - below] + sums[pairs // 2 - below]) / 4
    middle = _pair_sum(ordered, (pairs + 1) // 2)
    return (middle if pairs % 2 else (middle + _pair_sum(ordered, pairs // 2 + 1)) / 2) / 2


def launch_levels(base: Sequence[Sequence[float]], head: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Return how slow each launch is against the baseline's typical one, as a logarithm, from its batches in pairs.

    Batch k is compared with batch k: equal work, so that shapes add no noise.

    Args:
        base: [launches, batches] latencies, all above 0.
        head: [launches, batches] likewise, of the same batches.
    """
    logs_base = [list(map(math.log, launch)) for launch in base]
    reference = logs_base[0] if len(base) == 1 else [statistics.median(batch) for batch in zip(*logs_base, strict=True)]

    def level(logs: Sequence[float]) -> float:
        return hodges_lehmann(list(map(operator.sub, logs, reference)))

    before = [0.0] if len(base) == 1 else [level(logs) for logs in logs_base]
    return before, [level(list(map(math.log, launch))) for launch in head]


def change(base: Sequence[float], head: Sequence[float], sd: float) -> Change:
    """Return the change between launch levels; the numbers of launches may differ.

    Args:
        base: [launches] logarithms, as `launch_levels` gives them.
        head: [launches] likewise.
        sd: noise between launches that is known or assumed.
    """
    scale = math.sqrt(1 / len(base) + 1 / len(head))
    degrees = len(base) + len(head) - 2
    ratio = statistics.fmean(head) - statistics.fmean(base)
    if not degrees:
        return Change(log_ratio=ratio, noise_error=sd * scale)
    spread = math.sqrt((_squares(base) + _squares(head)) / degrees)
    return Change(log_ratio=ratio, noise_error=sd * scale, observed_error=spread * scale, degrees=degrees)


def smallest_change(change: Change, margin: float, confidence: float) -> float:
    """Return the smallest true slowdown that launches of this spread show with probability `POWER`, as a fraction."""
    error = max(change.noise_error, change.observed_error or 0.0)
    shown = math.log1p(margin) + change.half_width(confidence) + _NORMAL.inv_cdf(POWER) * error
    return math.expm1(min(700.0, shown))


@functools.lru_cache(maxsize=4096)
def launches_needed(slowdown: float, margin: float, sd: float, confidence: float, family: int = 1) -> int | None:
    """Return how many launches a side show a true slowdown with probability `POWER`; None above 1,000.

    Args:
        slowdown: the true one, as a fraction.
        margin: the bar, as a fraction. A slowdown no larger is never shown.
        sd: noise between launches.
        confidence: of the interval's ends.
        family: rows that are judged together (Holm): the first has to be as sure as 1 / family of the rest of 1.
    """
    distance = math.log1p(slowdown) - math.log1p(margin)
    sure = 1 - (1 - confidence) / family
    if distance <= 0 or _miss(_MOST_LAUNCHES, distance, sd, sure) > 1 - POWER:
        return None
    if _miss(1, distance, sd, sure) <= 1 - POWER:  # asked apart: two launches pay for a spread of their own
        return 1
    few, enough = 1, _MOST_LAUNCHES
    while enough - few > 1:
        middle = (few + enough) // 2
        if _miss(middle, distance, sd, sure) > 1 - POWER:
            few = middle
        else:
            enough = middle
    return enough


def net_loss(lost: int, won: int, items: int, confidence: float) -> tuple[float, float]:
    """Return the interval of the fraction of items that are lost, less that of items won.

    Exact (Clopper and Pearson) in the share of lost ones among those that flipped; each end holds with `confidence`.
    """
    flipped = lost + won
    if not flipped:
        return 0.0, 0.0
    low, high = least_share(lost, won, confidence), 1 - least_share(won, lost, confidence)
    return flipped * (2 * low - 1) / items, flipped * (2 * high - 1) / items


def holm(probabilities: Sequence[float]) -> list[float]:
    """Return the probabilities of a family of tests adjusted by Holm's method, in the same order."""
    adjusted = [1.0] * len(probabilities)
    largest = 0.0
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    for rank, number in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * probabilities[number]))
        adjusted[number] = largest
    return adjusted


@functools.lru_cache(maxsize=_ALL_PAIRS)
def _middle_pairs(count: int) -> tuple[int, list[tuple[int, int]]]:
    """Return which pairs of so many ordered values can have the middle sum, and how many surely have less.

    A pair is at least each pair that has both its places, or lower ones; that counts those below it and above it.
    """

    def not_larger(first: int, second: int) -> int:
        return (first + 1) * (second + 1) - first * (first + 1) // 2

    total, below, candidates = count * (count + 1) // 2, 0, []
    for first, second in itertools.combinations_with_replacement(range(count), 2):
        if total - not_larger(count - 1 - second, count - 1 - first) < (total - 1) // 2:
            below += 1
        elif not_larger(first, second) - 1 <= total // 2:
            candidates.append((first, second))
    return below, candidates


def _pair_sum(ordered: Sequence[float], rank: int) -> float:
    """Return the `rank`-th smallest sum of two of the values by bisection, without forming the pairs."""
    low, high = 2 * ordered[0], 2 * ordered[-1]
    precision = 1e-13 * max(1.0, abs(low), abs(high))
    while high - low > precision:
        middle = (low + high) / 2
        if _pairs_up_to(ordered, middle) >= rank:
            high = middle
        else:
            low = middle
    return high


def _pairs_up_to(ordered: Sequence[float], bound: float) -> int:
    count, last = 0, len(ordered) - 1
    for first, value in enumerate(ordered):
        rest = bound - value
        while last >= first and ordered[last] > rest:
            last -= 1
        if last < first:
            break
        count += last - first + 1
    return count


def _squares(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _miss(launches: int, distance: float, sd: float, confidence: float) -> float:
    """Return at most how likely a change is missed: by the calibrated interval, or by the t-interval."""
    shift = distance / (sd * math.sqrt(2 / launches)) if sd else math.inf
    calibrated = _NORMAL.cdf(_normal_quantile(confidence) - shift)
    if launches == 1 or math.isinf(shift):
        return calibrated
    degrees = 2 * launches - 2
    bar = t_quantile(degrees, confidence)
    # The noncentral t distribution by a normal one: Abramowitz and Stegun, 26.7.10.
    spread = math.sqrt(1 + bar * bar / (2 * degrees))
    return calibrated + _NORMAL.cdf((bar * (1 - 1 / (4 * degrees)) - shift) / spread)


@functools.lru_cache(maxsize=64)
def _normal_quantile(confidence: float) -> float:
    return _NORMAL.inv_cdf(1 - (1 - confidence) / 2)
