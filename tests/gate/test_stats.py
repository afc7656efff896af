from __future__ import annotations

import math
from fractions import Fraction

import pytest

from pytest_llmgpu.gate.stats import beta, holm, least_share, net_loss, t_quantile, t_tail


@pytest.mark.parametrize(
    ("x", "a", "b", "expected"),
    [
        # scipy.special.betainc
        (0.3, 2.0, 5.0, 0.579825),
        (0.5, 0.5, 0.5, 0.5),
        (0.999, 20.0, 1.5, 0.9978572512063048),
        (0.504921069820894, 8689.19755090187, 8465.185158380993, 0.33674541359389437),
    ],
)
def test_the_incomplete_beta_function_is_scipys(x: float, a: float, b: float, expected: float) -> None:
    """The parameters are skewed, flat, at an edge, and as large as for the items of HellaSwag."""
    assert beta(x, a, b) == pytest.approx(expected, rel=1e-8)


def test_beta_is_the_binomial_tail() -> None:
    """The tail is summed exactly as fractions, for both continued fractions."""
    for n, k in ((1, 1), (7, 2), (20, 20), (30, 4)):
        for share in (Fraction(1, 50), Fraction(1, 3), Fraction(9, 10)):
            tail = sum(math.comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(k, n + 1))
            assert beta(float(share), k, n - k + 1) == pytest.approx(float(tail), rel=1e-12)
    assert (beta(-1.0, 2, 3), beta(0.0, 2, 3), beta(1.0, 2, 3)) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("t", "degrees", "expected"),
    [(0.0, 3, 0.5), (1.0, 1, 0.25), (2.0, 2, 0.5 - 1 / math.sqrt(6)), (2.306004135, 8, 0.025)],
)
def test_students_tail(t: float, degrees: int, expected: float) -> None:
    """The values are closed forms for one and two degrees of freedom, and from a table for eight."""
    assert t_tail(t, degrees) == pytest.approx(expected, rel=1e-8)
    assert t_tail(1e6, 20) > 0.0  # not rounded away, however far out


@pytest.mark.parametrize(("degrees", "expected"), [(1, 6.313751515), (4, 2.131846786), (38, 1.685954458)])
def test_students_quantile(degrees: int, expected: float) -> None:
    """The values are from tables at 95 %, and the tail inverts the quantile at the confidence of ten thousand rows."""
    assert t_quantile(degrees, 0.95) == pytest.approx(expected, rel=1e-8)
    assert t_tail(t_quantile(degrees, 1 - 5e-6), degrees) == pytest.approx(5e-6, rel=1e-6)


def test_the_least_share_is_where_the_count_becomes_improbable() -> None:
    """With that share, as many lost items or more have a probability of 1 - confidence."""
    assert least_share(0, 9, 0.95) == 0.0
    assert least_share(5, 0, 0.95) == pytest.approx(0.05 ** (1 / 5))
    share = least_share(8, 3, 0.95)
    tail = sum(math.comb(11, k) * share**k * (1 - share) ** (11 - k) for k in range(8, 12))
    assert tail == pytest.approx(0.05)


def test_the_interval_of_a_loss() -> None:
    """Without changed items it is exact, and more items make it narrower."""
    assert net_loss(0, 0, 64, 0.95) == (0.0, 0.0)
    assert net_loss(1, 0, 64, 0.95) == pytest.approx((-0.9 / 64, 1 / 64))
    low, high = net_loss(50, 50, 10_042, 0.95)
    assert -0.002 < low < 0 < high < 0.002
    assert (low, high) == pytest.approx((-high, -low))


def test_holm_multiplies_by_the_number_of_remaining_tests() -> None:
    """An adjusted p is at least the one before it and at most 1; each test is adjusted within its own family."""
    assert holm([0.01, 0.04, 0.03, 0.005], ["a"] * 4) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8], ["a"] * 2) == [1.0, 1.0]
    assert holm([], []) == []
    assert holm([0.01, 0.04, 0.03, 0.005], [True, False, True, False]) == pytest.approx([0.02, 0.04, 0.03, 0.01])
