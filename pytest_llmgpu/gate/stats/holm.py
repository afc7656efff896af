"""How sure each test has to be where several are judged together, so that a false alarm of any of them stays rare."""

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
        probabilities: of each test.
        families: which family each test is one of, and adjusted among; None: all are one.
        weights: of each test, above 0: how much of the family's chance of a false alarm it is given; None: equal ones.
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
    """Return the confidence that Holm's method asks of the first of a family.

    Args:
        confidence: that is asked of a test alone.
        family: tests that are judged together, by weight, this one's being 1.
    """
    return 1 - (1 - confidence) / family
