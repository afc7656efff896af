from __future__ import annotations

import itertools
import math
from fractions import Fraction

import msgspec
import pytest
from support.report_factory import make_answers, make_result

from pytest_llmgpu.analysis.answers import by_chance, compare, lost_and_won, mcnemar, written


def test_mcnemars_exact_probability() -> None:
    """It is the sum over all outcomes that are at least as uneven, in exact fractions; many items do not overflow."""
    for lost, won in itertools.product(range(11), repeat=2):
        n = lost + won
        uneven = [k for k in range(n + 1) if min(k, n - k) <= min(lost, won)]
        assert mcnemar(lost, won) == float(sum((Fraction(math.comb(n, k), 2**n) for k in uneven), Fraction(0)))
    assert mcnemar(59, 6) == pytest.approx(4.964650327128616e-12, rel=1e-14)  # scipy.stats.binomtest(6, 65).pvalue
    assert mcnemar(10_042, 0) == 0.0  # 2^-10041 is below what a float holds
    assert by_chance(5041, 5001) == pytest.approx(0.3485711916691077, rel=1e-14)  # scipy.stats.binomtest
    assert [written(p) for p in (1.0, 0.0214, 2e-6, 0.0)] == ["p = 1", "p = 0.021", "p = 2e-06", "p < 1e-06"]


def test_a_comparison_has_flips_losses_and_the_largest_difference() -> None:
    """Items are numbered as they were scored; a difference is relative to the number of the reference."""
    numbers = [-1.0, -2.0, -4.0, -8.0] * 5
    before = make_answers([True, True, True, False, False], numbers)
    mp = make_result(1.0, before)
    numbers[9] = -2.5
    accuracy = make_answers([True, False, False, True, False], numbers)
    assert lost_and_won(before, accuracy, "acc_norm") == (1, 2)
    accuracy = msgspec.structs.replace(accuracy, predictions_norm=[*accuracy.predictions_norm[:4], 3])
    tp = make_result(1.0, accuracy, strategy="tp")
    found = compare(tp, mp, "acc_norm")
    assert (found.reference, found.items, found.flipped) == ("mp-bs1", 5, [1, 2, 3, 4])
    assert (found.lost, found.won, found.mcnemar_p) == (2, 1, 1.0)
    assert found.largest_difference == pytest.approx(0.25)
    assert compare(tp, mp, "acc").flipped == [1, 2, 3]
    unlabelled = make_result(1.0, msgspec.structs.replace(accuracy, labels=None))
    found = compare(unlabelled, mp, "acc")
    assert (found.flipped, found.lost, found.won, found.mcnemar_p) == ([1, 2, 3], None, None, None)


def test_the_worst_launch_is_compared() -> None:
    """The launch with the fewest right answers counts, and the largest difference of any launch, in any order."""
    mp = make_result(1.0, make_answers([True] * 4, [-1.0] * 16))
    launches = make_answers([True] * 4, [-1.5] * 16), make_answers([False] * 2 + [True] * 2, [-1.25] * 16)
    for first, second in (launches, launches[::-1]):
        result = make_result(1.0, first, strategy="tp")
        result.launches += make_result(1.0, second).launches
        found = compare(result, mp, "acc_norm")
        assert (found.flipped, found.lost, found.largest_difference) == ([0, 1], 2, 0.5)
