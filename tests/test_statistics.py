from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence

import pytest

from pytest_llmgpu.statistics import (
    Calibration,
    Change,
    change,
    hodges_lehmann,
    holm,
    launch_levels,
    launches_needed,
    net_loss,
    smallest_change,
)


def _walsh_median(values: Sequence[float]) -> float:
    return statistics.median((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 20, 63, 64, 65, 66, 200])
def test_the_estimate_is_the_median_of_the_means_of_pairs(count: int) -> None:
    """For few values by forming the pairs, for many without: the same number, ties included."""
    chance = random.Random(count)
    values = [chance.gauss(0, 0.01) for _ in range(count)]
    assert hodges_lehmann(values) == pytest.approx(_walsh_median(values), abs=1e-12)
    tied = [round(value, 2) for value in values]
    assert hodges_lehmann(tied) == pytest.approx(_walsh_median(tied), abs=1e-12)


def test_two_clusters_meet_half_way() -> None:
    """The two middle pairs lie far apart; the estimate is the mean of both, whatever the way it is found."""
    for count in (2, 71):  # 71 and 71: a gap between the middle ranks would show
        values = [0.0] * count + [1.0] * count
        assert hodges_lehmann(values) == pytest.approx(_walsh_median(values), abs=1e-9)


def test_a_stalled_batch_does_not_move_the_estimate() -> None:
    """One batch of twenty that took 50 times as long is no slowdown of the case."""
    base = [[0.1 + 0.01 * batch for batch in range(20)]]
    head = [[*base[0][:-1], 50 * base[0][-1]]]
    assert launch_levels(base, head) == ([0.0], [0.0])


def test_all_of_hellaswag_at_one_item_a_batch_is_quick() -> None:
    """Ten thousand batches have fifty million pairs, which are never formed."""
    chance = random.Random(0)
    values = [chance.gauss(0.05, 0.01) for _ in range(10_042)]
    began = time.process_time()
    assert hodges_lehmann(values) == pytest.approx(0.05, abs=5e-4)
    assert time.process_time() - began < 1


def test_no_values_are_refused() -> None:
    """Nothing has no middle."""
    with pytest.raises(ValueError, match="at least one value"):
        hodges_lehmann([])


def test_batches_are_compared_in_pairs() -> None:
    """Batches of very different lengths add no noise: each is exactly 5 % slower."""
    shapes = [0.01 * 3**batch for batch in range(8)]
    before, after = launch_levels([shapes, shapes], [[1.05 * latency for latency in shapes]])
    assert before == [0.0, 0.0]
    assert after == pytest.approx([math.log(1.05)])


def test_the_calibrated_half_width_is_2_77_sd_over_root_n() -> None:
    """With n launches a side at 95 %; the facts' number, whatever these launches happen to spread."""
    for n in (1, 5, 20):
        seen = change([0.0] * n, [0.0] * n, 0.03)
        assert seen.half_width(0.95) == pytest.approx(2.77 * 0.03 / math.sqrt(n), rel=1e-3)


def test_the_spread_of_the_launches_widens_the_interval() -> None:
    """Student's t over both sides, by hand: means 0 and 0.1, 4 degrees of freedom, pooled variance 0.01."""
    seen = change([-0.1, 0.0, 0.1], [0.0, 0.1, 0.2], 0.001)
    assert seen.log_ratio == pytest.approx(0.1)
    assert seen.degrees == 4
    assert seen.observed_error == pytest.approx(0.1 * math.sqrt(2 / 3))
    assert seen.half_width(0.95) == pytest.approx(2.131846786 * 0.1 * math.sqrt(2 / 3))


def test_sides_may_have_different_numbers_of_launches() -> None:
    """One launch against four: the spread of the four speaks for both, the noise has sqrt(1 + 1/4)."""
    seen = change([0.0], [0.01, 0.02, 0.03, 0.04], 0.01)
    assert seen.log_ratio == pytest.approx(0.025)
    assert seen.degrees == 3
    assert seen.noise_error == pytest.approx(0.01 * math.sqrt(1.25))


@pytest.mark.parametrize("launches", [1, 2, 5])
def test_the_probability_inverts_the_interval(launches: int) -> None:
    """A bar at the interval's lower end has p = 0.05; a little above it more, a little below it less."""
    chance = random.Random(launches)
    head = [chance.gauss(0.1, 0.03) for _ in range(launches)]
    seen = change([chance.gauss(0, 0.03) for _ in range(launches)], head, 0.02)
    low = seen.log_ratio - seen.half_width(0.95)
    assert seen.p_above(low) == pytest.approx(0.05)
    assert seen.p_above(low - 1e-3) < 0.05 < seen.p_above(low + 1e-3)
    high = seen.log_ratio + seen.half_width(0.95)
    assert seen.p_below(high) == pytest.approx(0.05)
    assert seen.p_above(seen.log_ratio + 1) == seen.p_below(seen.log_ratio - 1) == 1.0


def test_noise_of_nothing_is_certain() -> None:
    """Equal launches on a runner without noise: any difference is one, and nothing divides by 0."""
    seen = Change(log_ratio=0.03, noise_error=0.0, observed_error=0.0, degrees=2)
    assert (seen.half_width(0.95), seen.p_above(0.02), seen.p_above(0.03)) == (0.0, 0.0, 1.0)
    assert launches_needed(0.04, 0.02, 0.0, 0.95) == 1


def test_holm_by_hand() -> None:
    """The smallest by the number of tests, the next by one less, never below one before it, at most 1, in order."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(("sd", "family"), [(0.01, 1), (0.01, 21), (0.005, 7), (0.03, 1)])
def test_the_launches_asked_for_show_the_slowdown(sd: float, family: int) -> None:
    """In simulation: a true +4 % against a margin of 2 % is seen at least 94 % of the time, and far fewer do not."""
    chance = random.Random(7)
    needed = launches_needed(0.04, 0.02, sd, 0.95, family)
    assert needed is not None

    def power(n: int) -> float:
        hits = 0
        for _ in range(400):
            head = [chance.gauss(math.log(1.04), sd) for _ in range(n)]
            seen = change([chance.gauss(0, sd) for _ in range(n)], head, sd)
            hits += seen.p_above(math.log(1.02)) <= 0.05 / family
        return hits / 400

    assert power(needed) >= 0.94
    assert power(max(2, needed // 2)) < 0.9


def test_launches_that_nobody_has() -> None:
    """A change equal to the margin is never shown, and a noise of 50 % would need thousands."""
    assert launches_needed(0.02, 0.02, 0.01, 0.95) is None
    assert launches_needed(0.04, 0.02, 0.5, 0.95) is None


def test_the_smallest_change_is_shown_with_its_probability() -> None:
    """In simulation, with the calibrated noise: a slowdown of that size is seen 95 % of the time."""
    chance = random.Random(3)
    least = smallest_change(change([0.0], [0.0], 0.01), 0.02, 0.95)
    seen = [change([0.0], [chance.gauss(math.log1p(least), 0.01 * math.sqrt(2))], 0.01) for _ in range(2000)]
    assert sum(one.p_above(math.log(1.02)) <= 0.05 for one in seen) / 2000 == pytest.approx(0.95, abs=0.015)


def test_the_interval_of_a_loss() -> None:
    """Nothing flipped is certain; one of 64 lost may be the net loss of one or of none; more items narrow it."""
    assert net_loss(0, 0, 64, 0.95) == (0.0, 0.0)
    low, high = net_loss(1, 0, 64, 0.95)
    assert low == pytest.approx(-0.9 / 64)
    assert high == 1 / 64
    low, high = net_loss(50, 50, 10_042, 0.95)
    assert -0.002 < low < 0 < high < 0.002
    assert (low, high) == pytest.approx((-high, -low))


def test_a_case_without_noise_of_its_own_gets_the_typical_one() -> None:
    """None where nothing was calibrated at all."""
    assert Calibration(sd={"a": 0.01}, typical=0.02).of("a") == 0.01
    assert Calibration(sd={"a": 0.01}, typical=0.02).of("b") == 0.02
    assert Calibration().of("a") is None
