"""Holm's method, which limits the probability of any false alarm among several tests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def holm(probabilities: Sequence[float], families: Sequence[Hashable] | None = None) -> list[float]:
    """Return the probabilities of tests adjusted by Holm's method, in the same order.

    Args:
        probabilities: The p of each test.
        families: The family of each test, in which it is adjusted; None: all tests are one family.
    """
    members: dict[Hashable, list[int]] = {}
    for number in range(len(probabilities)):
        members.setdefault(families[number] if families is not None else None, []).append(number)
    adjusted = [1.0] * len(probabilities)
    for family in members.values():
        largest = 0.0
        for rank, number in enumerate(sorted(family, key=probabilities.__getitem__)):
            largest = max(largest, min(1.0, (len(family) - rank) * probabilities[number]))
            if largest == 1:
                break  # and so are all larger ones
            adjusted[number] = largest
    return adjusted
