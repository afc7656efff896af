from __future__ import annotations

import itertools
import random
import statistics
import tracemalloc
from collections.abc import Sequence

import pytest

from pytest_llmgpu.gate.stats.hodges_lehmann import hodges_lehmann


def _walsh_median(values: Sequence[float]) -> float:
    return statistics.median((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 20, 63, 64, 65, 66, 200])
def test_the_estimate_is_the_median_of_the_means_of_pairs(count: int) -> None:
    """Both ways, with and without forming all pairs, agree with the definition, also with ties."""
    chance = random.Random(count)
    values = [chance.gauss(0, 0.01) for _ in range(count)]
    assert hodges_lehmann(values) == pytest.approx(_walsh_median(values), abs=1e-12)
    tied = [round(value, 2) for value in values]
    assert hodges_lehmann(tied) == pytest.approx(_walsh_median(tied), abs=1e-12)


def test_two_clusters_meet_half_way() -> None:
    """The two middle pairs are far apart, and the estimate is their mean in both ways."""
    for zeros, ones in ((2, 2), (71, 71), (84, 35)):  # of 84 and 35, exactly half of the pairs are zeros alone
        values = [0.0] * zeros + [1.0] * ones
        assert hodges_lehmann(values) == pytest.approx(_walsh_median(values), abs=1e-9)
    assert hodges_lehmann(values) == 0.25


def test_ten_thousand_values_need_little_memory() -> None:
    """HellaSwag with one item per batch has fifty million pairs, which are not formed."""
    chance = random.Random(0)
    values = [chance.gauss(0.05, 0.01) for _ in range(10_042)]
    tracemalloc.start()
    try:
        assert hodges_lehmann(values) == pytest.approx(0.05, abs=5e-4)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_no_values_are_refused() -> None:
    """An empty list is refused with ValueError."""
    with pytest.raises(ValueError, match="at least one value"):
        hodges_lehmann([])


@pytest.mark.parametrize("odd", [1e9, -1e9])
def test_an_odd_value_among_many_leaves_the_estimate_precise(odd: float) -> None:
    """The range of all sums is then much larger than the range of the middle ones."""
    chance = random.Random(4)
    values = [odd, *(chance.gauss(0, 1e-6) for _ in range(150))]
    assert hodges_lehmann(values) == pytest.approx(_walsh_median(values), abs=1e-12)
