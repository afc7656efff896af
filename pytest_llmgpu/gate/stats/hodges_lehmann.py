"""The Hodges-Lehmann estimate: as robust as a median against outliers, and almost as precise as a mean."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence

__all__ = ["hodges_lehmann"]

_ALL_PAIRS = 64
"""Largest number of values for which pairs are formed, 928 of their 2,080. For more values pairs are counted."""

_FORMED = 4
"""Number of pairs per value that are formed for many values. Their sums are close to the middle."""


def hodges_lehmann(values: Sequence[float]) -> float:
    """Return the median of the means of all pairs of values, with the pairs of a value and itself.

    Raises:
        ValueError: There are no values.
    """
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        raise ValueError("the Hodges-Lehmann estimate needs at least one value")
    if count > _ALL_PAIRS:
        return sum(_middle_sums(ordered)) / 4
    pairs = count * (count + 1) // 2
    below, middle_pairs = _middle_pairs(count)
    sums = sorted([ordered[a] + ordered[b] for a, b in middle_pairs])
    return (sums[(pairs - 1) // 2 - below] + sums[pairs // 2 - below]) / 4


@functools.lru_cache(maxsize=_ALL_PAIRS)
def _middle_pairs(count: int) -> tuple[int, list[tuple[int, int]]]:
    """Return how many pairs of ordered values always have a smaller sum, and the pairs that can have the middle sum.

    The sum of a pair is at least the sum of each pair with the same or lower places. Counting these pairs, and those
    above, excludes most pairs.
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


def _middle_sums(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the two middle sums of pairs; both are the same if the number of pairs is odd.

    The range of the sums is halved until it contains few sums. Only those are formed.
    """
    count = len(ordered)
    pairs = count * (count + 1) // 2
    first, second = (pairs - 1) // 2, pairs // 2
    low, high = math.nextafter(2 * ordered[0], -math.inf), 2 * ordered[-1]
    below, up_to = 0, pairs
    while up_to - below > _FORMED * count:
        middle = (low + high) / 2
        if not low < middle < high:  # All sums in the range are equal.
            tied = max(ordered[place] + ordered[end - 1] for place, end in enumerate(_ends(ordered, high)))
            return tied, tied
        ends = _ends(ordered, middle)
        counted = sum(ends) - sum(range(len(ends)))
        if counted <= first:
            low, below = middle, counted
        elif counted > second:
            high, up_to = middle, counted
        else:  # The middle lies between the two.
            lower = max(ordered[place] + ordered[end - 1] for place, end in enumerate(ends))
            above = [ordered[place] + ordered[end] for place, end in enumerate(ends) if end < count]
            return lower, min([*above, *(2 * value for value in ordered[len(ends) : len(ends) + 1])])
    lows, highs = _ends(ordered, low), _ends(ordered, high)
    lows += range(len(lows), len(highs))  # Values that are too large have no pair below.
    ranges = zip(ordered, lows, highs, strict=False)  # There are fewer ends than values.
    sums = sorted([value + other for value, start, end in ranges for other in ordered[start:end]])
    return sums[first - below], sums[second - below]


def _ends(ordered: Sequence[float], bound: float) -> list[int]:
    """Return for each value the place after the last value with which its sum is at most `bound`.

    Only places from the value itself on are used, so that each pair is counted once. The list ends at the first value
    without such a place.
    """
    ends = []
    for place, value in enumerate(ordered):
        end = bisect_right(ordered, bound - value, place)
        if end == place:
            break
        ends.append(end)
    return ends
