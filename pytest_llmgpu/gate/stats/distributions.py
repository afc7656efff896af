"""Exact probabilities behind the gate's tests: Student's t, and the share, or loss, that a count of two kinds allows.

Here and not scipy's, whose import takes longer than all else that a gate does.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable

__all__ = ["beta", "largest_sd", "least_share", "net_loss", "t_quantile", "t_tail"]

_TERMS = 40
"""Terms of a continued fraction; distributions of many degrees take more."""

_BITS = 60
"""Halvings that leave nothing of an interval that a float could tell."""


def beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function, the distribution behind binomial and t probabilities.

    By the continued fraction of Abramowitz and Stegun, 26.5.8, from the innermost term that matters outwards.

    Args:
        x: 0 to 1.
        a: above 0.
        b: above 0.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the other side converges faster
        return 1 - beta(1 - x, b, a)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    fraction = 1.0
    for k in range(_TERMS + int(2 * math.sqrt(a + b)), 0, -1):
        even = k * (b - k) * x / ((a + 2 * k - 1) * (a + 2 * k))
        odd = (a + k - 1) * (a + b + k - 1) * x / ((a + 2 * k - 2) * (a + 2 * k - 1))
        fraction = 1 - odd / (1 + even / fraction)
    return math.exp(scale) / (a * fraction)


def t_tail(t: float, degrees: int) -> float:
    """Return the probability that Student's t exceeds `t`, 0 or more, precise however small it is."""
    return beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2


@functools.lru_cache(maxsize=4096)
def t_quantile(degrees: int, confidence: float) -> float:
    """Return the t below which lies `confidence`, at least a half, of the distribution."""
    most = 1.0
    while t_tail(most, degrees) > 1 - confidence:
        most *= 2
    return _solved(lambda t: 1 - confidence - t_tail(t, degrees), 0.0, most)


def largest_sd(sd: float, degrees: int, luck: float) -> float:
    """Return the largest standard deviation of which a sample that shows `sd`, or less, still has probability `luck`.

    By Wilson and Hilferty's quantile of the chi-squared distribution: up to 3 % too large from 8 degrees on, and more
    below; infinite where so few degrees say nothing, and for a sample that shows none at all.
    """
    if sd <= 0 or degrees <= 0:
        return math.inf
    root = 1 - 2 / (9 * degrees) + statistics.NormalDist().inv_cdf(luck) * math.sqrt(2 / (9 * degrees))
    return sd / root**1.5 if root > 0 else math.inf


@functools.lru_cache(maxsize=4096)
def least_share(lost: int, won: int, confidence: float) -> float:
    """Return the lower end of the share of lost items: the one at which so many, or more, have 1 - confidence."""
    if not lost:
        return 0.0
    return _solved(lambda share: beta(share, lost, won + 1) - (1 - confidence), 0.0, 1.0)


def net_loss(lost: int, won: int, items: int, confidence: float) -> tuple[float, float]:
    """Return the interval of the fraction of items that are lost, less that of items won.

    Exact (Clopper and Pearson) in the share of lost ones among those that flipped; each end holds with `confidence`.
    """
    flipped = lost + won
    if not flipped:
        return 0.0, 0.0
    low, high = least_share(lost, won, confidence), 1 - least_share(won, lost, confidence)
    return flipped * (2 * low - 1) / items, flipped * (2 * high - 1) / items


def _solved(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return where a rising function is 0, between two ends, by bisection."""
    for _ in range(_BITS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
