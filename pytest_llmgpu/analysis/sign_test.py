"""The exact sign test on items that were lost or won."""

from __future__ import annotations

_TINY = 1e-6


def by_chance(lost: int, won: int) -> float:
    """Return the exact probability of the one-sided sign test; 1.0 where nothing differs.

    It is the probability that at least `lost` of `lost + won` items are lost if each is lost or won with even odds.
    """
    differing = lost + won
    ways = total = 1  # ways to choose the items that were won: first none, then one more in each step
    for chosen in range(won):
        ways = ways * (differing - chosen) // (chosen + 1)
        total += ways
    return total / (1 << differing)


def mcnemar(lost: int, won: int) -> float:
    """Return the exact two-sided probability of McNemar's test: of a difference of this size by chance."""
    return min(1.0, 2 * by_chance(max(lost, won), min(lost, won)))


def written(probability: float) -> str:
    """Return a probability as text: `p = 0.0039`; the smallest are `p < 1e-06`."""
    return f"p < {_TINY:g}" if probability < _TINY else f"p = {probability:.2g}"
