"""Statistics of the verdicts: exact probabilities of Student's t, intervals of shares and losses, Holm's method.

scipy is not used, because its import takes longer than a gate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence


def beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function, which gives binomial and t probabilities.

    It is computed from the continued fraction 26.5.8 of Abramowitz and Stegun by Lentz's method, which ends as soon as
    a term no longer changes the result: after ten terms for most verdicts.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # The complement converges faster.
        return 1 - beta(1 - x, b, a)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    above = 1.0
    below = 1 / (1 - (a + b) * x / (a + 1))
    fraction = below
    for k in range(1, 40 + int(2 * math.sqrt(a + b))):  # Many degrees of freedom need more terms.
        for term in (
            k * (b - k) * x / ((a + 2 * k - 1) * (a + 2 * k)),
            -(a + k) * (a + b + k) * x / ((a + 2 * k) * (a + 2 * k + 1)),
        ):
            above, below = 1 + term / above, 1 / (1 + term * below)
            fraction *= above * below
        if abs(above * below - 1) < 1e-15:  # noqa: PLR2004 - the precision of a float
            break
    return math.exp(scale) * fraction / a


def t_tail(t: float, degrees: float) -> float:
    """Return the probability that Student's t exceeds `t`, which is at least 0. Small probabilities are precise too."""
    return beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2


@functools.lru_cache(maxsize=4096)
def t_quantile(degrees: float, confidence: float) -> float:
    """Return the quantile of Student's t for a confidence of at least 0.5."""
    most = 1.0
    while t_tail(most, degrees) > 1 - confidence:
        most *= 2
    return _solved(lambda t: 1 - confidence - t_tail(t, degrees), 0.0, most)


@functools.lru_cache(maxsize=4096)
def least_share(lost: int, won: int, confidence: float) -> float:
    """Return the lower limit of the share of lost items among lost and won ones (Clopper and Pearson)."""
    if not lost:
        return 0.0
    return _solved(lambda share: beta(share, lost, won + 1) - (1 - confidence), 0.0, 1.0)


def net_loss(lost: int, won: int, items: int, confidence: float) -> tuple[float, float]:
    """Return the interval of the fraction of lost items minus the fraction of won items.

    It is exact (Clopper and Pearson) in the share of lost items among the changed ones. Each end has this confidence.
    """
    flipped = lost + won
    if not flipped:
        return 0.0, 0.0
    low, high = least_share(lost, won, confidence), 1 - least_share(won, lost, confidence)
    return flipped * (2 * low - 1) / items, flipped * (2 * high - 1) / items


def _solved(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a rising function between two ends by bisection."""
    for _ in range(60):  # Then the interval is smaller than the precision of a float.
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def holm(probabilities: Sequence[float], families: Sequence[Hashable]) -> list[float]:
    """Return the probabilities of tests adjusted by Holm's method, in the same order.

    It limits the probability of any false alarm among the tests of a family.
    """
    adjusted = [1.0] * len(probabilities)
    for family in set(families):
        members = [number for number, one in enumerate(families) if one == family]
        largest = 0.0
        for rank, number in enumerate(sorted(members, key=probabilities.__getitem__)):
            largest = max(largest, min(1.0, (len(members) - rank) * probabilities[number]))
            adjusted[number] = largest
    return adjusted
