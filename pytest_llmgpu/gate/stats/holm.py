"""Holm's method, which limits the probability of any false alarm among several tests."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

__all__ = ["first_confidence", "holm"]


def holm(
    probabilities: Sequence[float],
    families: Sequence[Hashable] | None = None,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Return the probabilities of tests adjusted by Holm's method, in the same order.

    Args:
        probabilities: The p of each test.
        families: The family of each test, in which it is adjusted; None: all tests are one family.
        weights: The weight of each test, above 0: its part of the allowed rate of false alarms of the family; None:
            equal weights.
    """
    members: dict[Hashable, list[int]] = {}
    for number in range(len(probabilities)):
        members.setdefault(families[number] if families is not None else None, []).append(number)
    weight = weights or [1.0] * len(probabilities)
    adjusted = [1.0] * len(probabilities)
    for family in members.values():
        largest, left = 0.0, math.fsum(weight[number] for number in family)
        for number in sorted(family, key=lambda one: probabilities[one] / weight[one]):
            largest = max(largest, min(1.0, left * probabilities[number] / weight[number]))
            adjusted[number] = largest
            left -= weight[number]
    return adjusted


def first_confidence(confidence: float, family: float) -> float:
    """Return the confidence that Holm's method requires of the first test of a family.

    Args:
        confidence: The confidence that is required of a single test.
        family: The weight of all tests of the family, relative to the weight of this test.
    """
    return 1 - (1 - confidence) / family
