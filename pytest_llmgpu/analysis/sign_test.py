"""The sign test on items that changed sides."""

from __future__ import annotations

__all__ = ["by_chance", "mcnemar", "written"]

_TINY = 1e-6


def by_chance(lost: int, won: int) -> float:
    """Return how likely it is that of `lost + won` items at least `lost` were lost, each lost or won by even odds.

    The one-sided sign test, exact: 1.0 where nothing differs.
    """
    differing = lost + won
    ways = total = 1  # to choose the items that were won: none, then one more at a time
    for chosen in range(won):
        ways = ways * (differing - chosen) // (chosen + 1)
        total += ways
    return total / (1 << differing)


def mcnemar(lost: int, won: int) -> float:
    """Return the exact two-sided probability of McNemar's test: of a difference this large either way, by chance."""
    return min(1.0, 2 * by_chance(max(lost, won), min(lost, won)))


def written(probability: float) -> str:
    """Return a probability as people read it; what is tiny is not told apart."""
    return f"p < {_TINY:g}" if probability < _TINY else f"p = {probability:.2g}"
