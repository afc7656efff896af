from __future__ import annotations

import math
import random
import statistics

import pytest

from pytest_llmgpu.gate.stats.intervals import (
    UNCALIBRATED_SD,
    Change,
    assumed_sd,
    change,
    launch_levels,
    launches_needed,
    smallest_change,
)


def test_a_stalled_batch_does_not_move_the_estimate() -> None:
    """One batch of twenty with 50 times its latency does not change the level."""
    base = [[0.1 + 0.01 * batch for batch in range(20)]]
    head = [[*base[0][:-1], 50 * base[0][-1]]]
    assert launch_levels(base, head) == ([0.0], [0.0])


def test_batches_are_compared_in_pairs() -> None:
    """Batches of very different latencies add no noise if each is 5 % slower."""
    shapes = [0.01 * 3**batch for batch in range(8)]
    before, after = launch_levels([shapes, shapes], [[1.05 * latency for latency in shapes]])
    assert before == [0.0, 0.0]
    assert after == pytest.approx([math.log(1.05)])


@pytest.mark.parametrize(("base", "head"), [(3, 3), (2, 5), (1, 3)])
def test_skewed_noise_of_batches_gives_no_bias(base: int, head: int) -> None:
    """The medians are of the launches of both reports, so that equal code has no change in the mean."""
    chance = random.Random(2)

    def launches(count: int) -> list[list[float]]:
        return [[math.exp(0.3 * chance.expovariate(1)) for _ in range(40)] for _ in range(count)]

    changes = []
    for _ in range(150):
        before, after = launch_levels(launches(base), launches(head))
        changes.append(statistics.fmean(after) - statistics.fmean(before))
    error = statistics.stdev(changes) / math.sqrt(len(changes))
    assert abs(statistics.fmean(changes)) < 3 * error
    assert error < 0.004


def test_noise_between_sessions_does_not_average_out() -> None:
    """Each report is one session, independent of its number of launches."""
    for launches in (2, 100):
        seen = change([0.0] * launches, [0.0] * launches, 0.01, 0.015)
        assert seen.noise_error == pytest.approx(math.sqrt(2) * math.hypot(0.01 / math.sqrt(launches), 0.015))
    assert launches_needed(0.04, 0.02, 0.003, 0.95, session_sd=0.015) is None


def test_few_false_alarms_between_days() -> None:
    """In a simulation days differ by 1.5 % and launches by 0.3 %; without the days over 10 % are false alarms."""
    chance, alarms = random.Random(6), {0.0: 0, 0.015: 0}
    for _ in range(1000):
        before, after = chance.gauss(0, 0.015), chance.gauss(0, 0.015)
        base, head = ([day + chance.gauss(0, 0.003) for _ in range(5)] for day in (before, after))
        for session_sd in alarms:
            alarms[session_sd] += change(base, head, 0.003, session_sd).p_above(math.log(1.02)) <= 0.05
    assert alarms[0.0] > 100
    assert alarms[0.015] < 5


def test_the_calibrated_half_width_is_2_77_sd_over_root_n() -> None:
    """This holds for n launches in each report at 95 %, if these launches have less spread."""
    for n in (2, 5, 20):
        seen = change([0.0] * n, [0.0] * n, 0.03)
        assert seen.half_width(0.95) == pytest.approx(2.77 * 0.03 / math.sqrt(n), rel=1e-3)


def test_many_launches_estimate_their_noise_without_a_calibration() -> None:
    """From five launches in each report on it is the upper limit: chi-squared is below 1.65 with 1 % at 8 degrees."""
    chance = random.Random(4)
    base, head = ([chance.gauss(0, 0.005) for _ in range(5)] for _ in range(2))
    squares = sum((one - statistics.fmean(side)) ** 2 for side in (base, head) for one in side)
    assert assumed_sd(base, head) == pytest.approx(math.sqrt(squares / 1.646), rel=0.03)
    assert assumed_sd(base[:4], head) == assumed_sd([0.0], [0.0]) == UNCALIBRATED_SD
    assert assumed_sd([10 * one for one in base], [-200 * one for one in head]) == UNCALIBRATED_SD, "at most that"
    assert assumed_sd([0.0] * 5, [0.0] * 5) == UNCALIBRATED_SD, "none at all is no noise that exists"


def test_one_launch_has_more_noise() -> None:
    """It can be an outlier, so its report has a factor of 1.5."""
    assert change([0.0], [0.0], 0.03).half_width(0.95) == pytest.approx(1.5 * 2.77 * 0.03, rel=1e-3)
    assert change([0.0], [0.0] * 4, 0.03).noise_error == pytest.approx(0.03 * math.hypot(1.5, 0.5))


def test_the_spread_of_the_launches_widens_the_interval() -> None:
    """Student's t has 4 degrees of freedom and a pooled variance of 0.01 for means of 0 and 0.1."""
    seen = change([-0.1, 0.0, 0.1], [0.0, 0.1, 0.2], 0.001)
    assert seen.log_ratio == pytest.approx(0.1)
    assert seen.degrees == 4
    assert seen.observed_error == pytest.approx(0.1 * math.sqrt(2 / 3))
    assert seen.half_width(0.95) == pytest.approx(2.131846786 * 0.1 * math.sqrt(2 / 3))


def test_reports_may_have_different_numbers_of_launches() -> None:
    """With one launch and four, the spread of the four is used for both, and the noise has sqrt(1.5^2 + 1/4)."""
    seen = change([0.0], [0.01, 0.02, 0.03, 0.04], 0.01)
    assert seen.log_ratio == pytest.approx(0.025)
    assert seen.degrees == 3
    assert seen.noise_error == pytest.approx(0.01 * math.sqrt(1.5**2 + 0.25))


@pytest.mark.parametrize("launches", [1, 2, 5])
def test_the_probability_inverts_the_interval(launches: int) -> None:
    """A threshold at the lower end of the interval has p = 0.05, a higher one more, a lower one less."""
    chance = random.Random(launches)
    head = [chance.gauss(0.1, 0.03) for _ in range(launches)]
    seen = change([chance.gauss(0, 0.03) for _ in range(launches)], head, 0.02)
    low = seen.log_ratio - seen.half_width(0.95)
    assert seen.p_above(low) == pytest.approx(0.05)
    assert seen.p_above(low - 1e-3) < 0.05 < seen.p_above(low + 1e-3)
    high = seen.log_ratio + seen.half_width(0.95)
    assert seen.p_below(high) == pytest.approx(0.05)
    assert seen.p_above(seen.log_ratio + 1) == seen.p_below(seen.log_ratio - 1) == 1.0


def test_a_change_without_noise_is_certain() -> None:
    """Each difference is significant then, and nothing divides by 0."""
    seen = Change(log_ratio=0.03, noise_error=0.0, observed_error=0.0, degrees=2)
    assert (seen.half_width(0.95), seen.p_above(0.02), seen.p_above(0.03)) == (0.0, 0.0, 1.0)
    assert launches_needed(0.04, 0.02, 0.0, 0.95) == 1


@pytest.mark.parametrize(
    ("sd", "family", "days"), [(0.01, 1, 0.0), (0.01, 21, 0.0), (0.005, 7, 0.0), (0.03, 1, 0.0), (0.01, 1, 0.002)]
)
def test_the_launches_needed_detect_the_slowdown(sd: float, family: int, days: float) -> None:
    """In a simulation +4 % with a threshold of 2 % is detected in at least 94 %, and with half of the launches not."""
    chance = random.Random(7)
    needed = launches_needed(0.04, 0.02, sd, 0.95, family, days)
    assert needed is not None

    def power(n: int) -> float:
        hits = 0
        for _ in range(400):
            day = chance.gauss(0, days * math.sqrt(2)) if days else 0.0
            head = [chance.gauss(math.log(1.04) + day, sd) for _ in range(n)]
            seen = change([chance.gauss(0, sd) for _ in range(n)], head, sd, days)
            hits += seen.p_above(math.log(1.02)) <= 0.05 / family
        return hits / 400

    assert power(needed) >= 0.94
    assert power(max(2, needed // 2)) < 0.9


def test_some_slowdowns_need_too_many_launches() -> None:
    """A change equal to the threshold is never detected, and a noise of 50 % needs thousands."""
    assert launches_needed(0.02, 0.02, 0.01, 0.95) is None
    assert launches_needed(0.04, 0.02, 0.5, 0.95) is None


@pytest.mark.parametrize("family", [1, 21])
def test_the_smallest_change_is_detected_with_its_probability(family: int) -> None:
    """In a simulation with the known noise it is detected in 95 %, also in a family."""
    chance = random.Random(3)
    error = 1.5 * 0.01 * math.sqrt(2)  # the noise of one launch in each report
    least = smallest_change(change([0.0], [0.0], 0.01), 0.02, 0.95, family)
    seen = [change([0.0], [chance.gauss(math.log1p(least), error)], 0.01) for _ in range(2000)]
    shown = sum(one.p_above(math.log(1.02)) <= 0.05 / family for one in seen)
    assert shown / 2000 == pytest.approx(0.95, abs=0.015)
