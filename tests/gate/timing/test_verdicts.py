from __future__ import annotations

import math
import random
from typing import Any

import pytest
from support.verdict_factory import BATCHES, make_busy, make_invalid, with_latencies, with_launches

from pytest_llmgpu.gate.policy import TimeRule
from pytest_llmgpu.gate.stats.intervals import Change
from pytest_llmgpu.gate.timing.pairing import Timed, timed
from pytest_llmgpu.gate.timing.verdicts import rows
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row


def _judged(
    base: CaseResult, head: CaseResult, sd: float | None = 0.001, note: str = "", session_sd: float = 0.0, **rule: Any
) -> Row:
    found = timed(base, head, TimeRule(**rule), sd, session_sd)
    assert isinstance(found, Timed), found
    return rows([found], 0.95, note)[0]


@pytest.mark.parametrize(
    ("slower", "verdict"),
    [(1.06, "REGRESSED"), (1.022, "NOT_ENOUGH_DATA"), (1.01, "OK"), (1.0, "OK"), (0.99, "OK"), (0.94, "IMPROVED")],
)
def test_the_interval_decides_three_ways(slower: float, verdict: str) -> None:
    """The interval of a launch with 0.1 % noise is above the threshold, below it, or contains it."""
    row = _judged(with_launches([1.0]), with_launches([slower]))
    assert row.verdict == verdict
    assert row.ratio == pytest.approx(slower)
    assert row.low is not None
    assert row.high is not None
    assert row.low < slower < row.high
    assert (row.threshold, row.n) == (0.02, 1)
    assert len(row.reason.splitlines()) <= 2


def test_the_threshold_does_not_grow_with_the_noise() -> None:
    """A change within the noise is NOT_ENOUGH_DATA, never OK or REGRESSED, and equal times are too."""
    for slower in (1.0, 1.05, 1.10):
        row = _judged(with_launches([1.0]), with_launches([slower]), sd=0.05)
        assert (row.verdict, row.threshold) == ("NOT_ENOUGH_DATA", 0.02)


def test_chance_is_not_ok() -> None:
    """With noise above the threshold a case that looks much faster by chance is NOT_ENOUGH_DATA."""
    lucky = _judged(with_launches([1.0]), with_launches([0.44]), sd=0.2)
    assert lucky.high is not None
    assert lucky.high < 1.02
    assert lucky.verdict == "NOT_ENOUGH_DATA"
    sure = _judged(with_launches([1.0]), with_launches([0.97]), sd=0.009)
    assert sure.verdict == "OK", "half of the interval is within the threshold plus 2 %"


def test_an_uncalibrated_runner_has_twenty_percent() -> None:
    """The reason states the assumed noise and the command that measures it."""
    row = _judged(with_launches([1.0]), with_launches([1.5]), sd=None)
    assert row.low == pytest.approx(1.5 / math.exp(1.5 * 2.77 * 0.2), rel=1e-3)
    assert row.reason == (
        "Time +50.0 % (95 % CI -34.7 to +244.5 %), threshold 2 %: 315.0 s, was 210.0 s.\n"
        "Minimum launches required in each report to detect +4 %: more than 1,000, now 1. "
        "Noise assumed 20 %: run llmgpu calibrate."
    )
    assert (row.verdict, row.launches_needed) == ("NOT_ENOUGH_DATA", None)
    assert _judged(with_launches([1.0]), with_launches([3.0]), sd=None).verdict == "REGRESSED"


def test_a_regression_reads_in_two_lines() -> None:
    """The first has the change, interval, threshold and seconds, the second what else changed."""
    row = _judged(with_launches([1.0]), with_launches([1.05]), note="Also changed: torch 2.6 -> 2.7.")
    assert row.reason == (
        "Time +5.0 % (95 % CI +4.6 to +5.4 %), threshold 2 %: 220.5 s, was 210.0 s.\nAlso changed: torch 2.6 -> 2.7."
    )
    assert _judged(with_launches([1.0]), with_launches([1.0]), note="Also changed: x.").reason.count("\n") == 0


def test_waiting_is_distinguished_from_work() -> None:
    """Twice the time at half the utilisation is waiting; at the same utilisation it is work."""
    base = make_busy(with_launches([1.0]), 54.0)
    row = _judged(base, make_busy(with_launches([2.0]), 26.0), note="Also changed: x.")
    assert row.verdict == "REGRESSED"
    assert row.reason.splitlines()[1] == (
        "GPU utilisation 26 %, was 54 %: mostly the waiting of the GPUs changed. Look for it in the CPU code. "
        "Also changed: x."
    )
    silent = (
        make_busy(with_launches([2.0]), 54.0),
        make_busy(with_launches([2.0]), 26.0, samples=19),
        make_busy(with_launches([2.0]), 41.0),  # a part of it
        make_busy(with_launches([1.15]), 47.0),  # no more than readings differ by
        make_busy(with_launches([2.0]), 0.0),
        with_launches([2.0]),
    )
    for head in silent:
        assert "\n" not in _judged(base, head).reason
    thrice, slower = (
        make_busy(with_launches([level] * 3), *busy) for level, busy in ((1, [54.0] * 3), (2, [27, 26, 99]))
    )
    assert "GPU utilisation 27 %, was 54 %" in _judged(thrice, slower).reason, "the median launch"


def test_the_larger_of_both_thresholds_is_used() -> None:
    """21 s of 210 s are 10 %, so 5 % is OK."""
    row = _judged(with_launches([1.0]), with_launches([1.05]), absolute_s=21)
    assert row.verdict == "OK"
    assert row.threshold == pytest.approx(0.1)


def test_several_launches_bring_their_own_spread() -> None:
    """A larger spread of the launches is used instead of the calibrated noise."""
    base, head = with_launches([0.9, 1.0, 1.1]), with_launches([0.95, 1.05, 1.15])
    assert _judged(base, head, sd=0.0001).verdict == "NOT_ENOUGH_DATA"
    steady = with_launches([1.0, 1.001, 0.999]), with_launches([1.05, 1.051])
    row = _judged(*steady, sd=0.0001)
    assert (row.verdict, row.n) == ("REGRESSED", 2)


def test_many_rows_are_one_family() -> None:
    """A slowdown just significant alone is not significant among a hundred cases; a large one is."""
    base = with_launches([1.0])
    close = [timed(base, with_launches([slower]), TimeRule(), 0.01) for slower in (1.065, *[1.0] * 99)]
    cases = [case for case in close if isinstance(case, Timed)]
    assert rows(cases[:1], 0.95, "")[0].verdict == "REGRESSED"
    first = rows(cases, 0.95, "")[0]
    assert first.verdict == "NOT_ENOUGH_DATA"
    assert "among 100 cases" in first.reason
    clear = timed(base, with_launches([1.2]), TimeRule(), 0.01)
    assert isinstance(clear, Timed)
    assert rows([*cases, clear], 0.95, "")[-1].verdict == "REGRESSED"


def test_extreme_times_give_finite_ratios() -> None:
    """Ratios beyond the range of a float are limited."""
    for launches in (1, 2):
        base, head = (with_latencies([[each] * BATCHES] * launches) for each in (1e-300, 1e300))
        row = _judged(base, head)
        assert row.verdict == "REGRESSED"
        assert row.ratio is not None
        assert math.isfinite(row.ratio)


def test_a_stall_that_is_longer_than_the_case_is_bounded() -> None:
    """A case of 3 ms that can lose 30 ms has a wide, but finite interval."""
    row = _judged(with_latencies([[0.003 / BATCHES] * BATCHES]), with_latencies([[0.0033 / BATCHES] * BATCHES]))
    assert row.verdict == "NOT_ENOUGH_DATA"
    assert row.high is not None
    assert 2 < row.high < 10_000


@pytest.mark.parametrize(
    ("launches", "noise", "slower", "low", "high"),
    [
        (5, 0.01, 1.05, 0.95, 1.0),
        (5, 0.03, 1.05, 0.25, 0.45),
        (20, 0.03, 1.05, 0.80, 0.95),
        (5, 0.03, 1.00, 0.0, 0.005),
        (20, 0.03, 1.02, 0.01, 0.06),
    ],
)
def test_power_and_false_alarms(launches: int, noise: float, slower: float, low: float, high: float) -> None:
    """In a simulation +5 % is detected as often as noise and launches allow; the threshold of 2 % itself seldom."""
    chance = random.Random(f"{launches} {noise} {slower}")
    runs, caught = 400, 0
    for _ in range(runs):
        base = [chance.gauss(1, noise) for _ in range(launches)]
        head = [slower * chance.gauss(1, noise) for _ in range(launches)]
        found = timed(with_launches(base), with_launches(head), TimeRule(), noise)
        assert isinstance(found, Timed)
        caught += rows([found], 0.95, "")[0].verdict == "REGRESSED"
    assert low <= caught / runs <= high


@pytest.mark.slow
def test_equal_code_raises_an_alarm_in_fewer_than_one_run_in_a_hundred() -> None:
    """In a simulation of 400 runs of 21 cases, 2 launches in each report, 3 % noise of launches and 2 % of batches."""
    chance = random.Random(11)
    base_shape = [1.0 + number for number in range(8)]

    def measured() -> CaseResult:
        levels = [chance.gauss(1, 0.03) for _ in range(2)]
        return with_latencies([[level * shape * chance.gauss(1, 0.02) for shape in base_shape] for level in levels])

    alarms = 0
    for _ in range(400):
        found = [timed(measured(), measured(), TimeRule(), 0.03) for _ in range(21)]
        judged = rows([case for case in found if isinstance(case, Timed)], 0.95, "")
        assert len(judged) == 21
        alarms += any(row.verdict == "REGRESSED" for row in judged)
    assert alarms <= 4


def _stalling(level: float, every: int, factor: float) -> list[float]:
    return [level * (factor if batch % every == 0 else 1.0) for batch in range(BATCHES)]


def test_a_stall_in_some_batches_is_not_ok() -> None:
    """The typical batch is unchanged, and the sum of all batches takes three times as long."""
    base, head = with_latencies([[1.0] * BATCHES]), with_latencies([_stalling(1.0, 4, 10.0)])
    row = _judged(base, head)
    assert row.verdict == "NOT_ENOUGH_DATA"
    assert row.reason.startswith("Typical batch +0.0 %")
    assert "all batches +225.0 %" in row.reason
    faster = with_latencies([_stalling(0.8, 4, 10.0)])
    assert _judged(base, faster).verdict == "NOT_ENOUGH_DATA", "no improvement either"
    assert _judged(head, base).verdict == "OK"


def test_launches_that_all_stall_are_regressed() -> None:
    """Three launches in each report estimate the noise of their sums; a stall in one launch is noise."""
    quiet = with_latencies([[level] * BATCHES for level in (1.0, 1.001, 0.999)])
    stalling = with_latencies([_stalling(level, 4, 10.0) for level in (1.0, 1.001, 0.999)])
    row = _judged(quiet, stalling)
    assert row.verdict == "REGRESSED"
    assert "a part of the batches became much slower" in row.reason
    once = with_latencies([_stalling(1.0, 4, 10.0), [1.001] * BATCHES, [0.999] * BATCHES])
    assert _judged(quiet, once).verdict == "NOT_ENOUGH_DATA"


@pytest.mark.parametrize(
    ("level", "sd", "verdict"),
    [(1.0, 0.3, "NOT_ENOUGH_DATA"), (1.0, 0.001, "OK"), (1.05, 0.001, "REGRESSED"), (0.9, 0.001, "IMPROVED")],
)
def test_a_different_change_of_the_sum_is_stated_whatever_the_noise_is(level: float, sd: float, verdict: str) -> None:
    """The change of the figures in the table is stated after the change of the typical batch, in the first line."""
    base = with_latencies([_stalling(1.0, 4, 10.0)])
    row = _judged(base, with_latencies([_stalling(level, 4, 5.0)]), sd=sd, note="Also changed: x.")
    assert row.verdict == verdict
    assert row.base is not None
    assert row.head is not None
    by = f"{100 * (row.head / row.base - 1):+.1f} %"
    assert row.reason.splitlines()[0].endswith(f" All batches {by}: the batches did not change by the same factor.")
    assert "All batches" not in _judged(base, with_latencies([_stalling(level, 4, 10.0)]), sd=sd).reason


def test_another_direction_of_the_sums_is_stated_however_small() -> None:
    """The changes differ by less than a point, but in direction."""
    base, head = with_latencies([[1.0] * BATCHES]), with_latencies([_stalling(0.997, 4, 1.026)])
    row = _judged(base, head, sd=0.3)
    assert row.reason.startswith("Time -0.3 % ")
    assert "All batches +0.3 %: " in row.reason


def test_a_difference_between_launches_is_not_one_of_batches() -> None:
    """The figures are those of the median launch, and the change is the mean of all."""
    row = _judged(with_launches([1.0, 1.0, 1.3]), with_launches([1.0, 1.0, 1.0]), sd=0.01)
    assert "All batches of the median launch +0.0 %: launches of one report differ." in row.reason


def test_a_verdict_that_only_the_family_changed_is_marked() -> None:
    """It is not marked if the interval contains the threshold or the sum has a veto."""
    base = with_launches([1.0])
    levels = (1.065, 0.935, *[1.0] * 98)
    cases = [case for one in levels if isinstance(case := timed(base, with_launches([one]), TimeRule(), 0.01), Timed)]
    many, alone = rows(cases, 0.95, ""), [rows([case], 0.95, "")[0] for case in cases]
    assert [row.verdict for row in alone[:2]] == ["REGRESSED", "IMPROVED"]
    assert [row.alone for row in many] == ["REGRESSED", "IMPROVED", *[None] * 98]
    assert {row.alone for row in alone} == {None}
    assert all("among 100 cases" in row.reason for row in many[:2])
    slow = with_latencies([_stalling(0.8, 4, 10.0)])
    assert _judged(with_latencies([[1.0] * BATCHES]), slow).alone is None
    single = _judged(with_launches([1.0] * 3), with_launches([1.0366] * 3), sd=0.01)
    assert single.low is not None
    assert (single.verdict, single.low > 1.02, single.alone) == ("NOT_ENOUGH_DATA", True, None), "one case"


def test_launches_that_are_not_used_are_stated() -> None:
    """The reason has the number of used launches."""
    base = with_launches([1.0, 1.0, 9.0])
    assert "are used" not in _judged(base, base, sd=0.01).reason
    make_invalid(base.launches[2], "programs of others at work: GPU 0")
    row = _judged(base, with_launches([1.0] * 3), sd=0.01)
    assert row.reason.splitlines()[0].endswith(" 2 of 3 launches of the baseline are used (`profile.invalid`).")


def test_cases_that_are_not_gated_are_a_separate_family() -> None:
    """Sixty reported cases do not change the significance of a gated one."""
    base, head = with_launches([1.0]), with_launches([1.065])
    slower, reported = (timed(base, head, TimeRule(gate=gate), 0.01) for gate in (True, False))
    same = timed(base, base, TimeRule(gate=False), 0.01)
    cases = [case for case in (*[same] * 60, slower, reported) if isinstance(case, Timed)]
    verdicts = [row.verdict for row in rows(cases, 0.95, "")]
    assert verdicts[60:] == ["REGRESSED", "NOT_ENOUGH_DATA"]


def test_the_smallest_change_is_that_of_the_family() -> None:
    """More cases in the family make it larger."""
    base = with_launches([1.0])
    case = timed(base, base, TimeRule(), 0.01)
    assert isinstance(case, Timed)
    alone, among = rows([case], 0.95, "")[0].smallest_seen, rows([case] * 21, 0.95, "")[0].smallest_seen
    assert alone is not None
    assert among is not None
    assert 1.1 * alone < among


def test_a_slowdown_of_all_batches_names_no_part() -> None:
    """If only the sum is significant, the row has the figures of the sum, and no part of the batches is named."""
    base = with_latencies([[level] * BATCHES for level in (1.0, 1.0001, 0.9999)])
    slower = [[level * (1.05 if batch < 5 else 1.018) for batch in range(BATCHES)] for level in (1.0, 1.0001, 0.9999)]
    row = _judged(base, with_latencies(slower), sd=0.0005)
    assert row.verdict == "REGRESSED"
    assert row.reason.startswith("Time of all batches +2.6 %")
    assert "\nTypical batch " in row.reason
    assert "a part of the batches" not in row.reason
    assert row.ratio == pytest.approx(1.026)
    assert row.low is not None
    assert row.p is not None
    assert row.low > 1.02
    assert row.p <= 0.05


@pytest.mark.parametrize(
    ("deviations", "sum_deviations", "verdict"),
    [(2.1, 0.0, "REGRESSED"), (1.97, 0.0, "NOT_ENOUGH_DATA"), (0.0, 2.5, "NOT_ENOUGH_DATA"), (0.0, 2.9, "REGRESSED")],
)
def test_both_figures_of_a_case_share_the_chance_of_a_false_alarm(
    deviations: float, sum_deviations: float, verdict: str
) -> None:
    """With p = 0.036, 0.049, 0.012 and 0.004 the typical batch has nine tenths of the allowed rate and the sum one."""
    case = timed(with_launches([1.0] * 3), with_launches([1.0] * 3), TimeRule(), 0.01)
    assert isinstance(case, Timed)
    typical, total = (
        Change(log_ratio=math.log(1.02) + 0.01 * many, noise_error=0.01) for many in (deviations, sum_deviations)
    )
    assert rows([case._replace(change=typical, total=total)], 0.95, "")[0].verdict == verdict


def test_sessions_that_differ_set_a_limit() -> None:
    """More launches do not help then, and the reason states what does."""
    base, head = with_launches([1.0] * 5), with_launches([1.05] * 5)
    assert _judged(base, head, sd=0.003).verdict == "REGRESSED"
    row = _judged(base, head, sd=0.003, session_sd=0.015)
    assert (row.verdict, row.launches_needed) == ("NOT_ENOUGH_DATA", None)
    assert row.reason.splitlines()[1] == (
        "Sessions differ by 1.5 %: more launches do not help. Measure both in one session with llmgpu ab. "
        "Minimum launches required in each report to detect +4 % there: 5."
    )
