from __future__ import annotations

import math
import random
from typing import Any

import pytest
from verdict_factory import BATCHES, make_invalid, with_latencies, with_launches

from pytest_llmgpu.policy import TimeRule
from pytest_llmgpu.result import CaseResult
from pytest_llmgpu.time_verdicts import Timed, rows, timed
from pytest_llmgpu.verdicts import Row


def _judged(base: CaseResult, head: CaseResult, sd: float | None = 0.001, note: str = "", **rule: Any) -> Row:
    found = timed(base, head, TimeRule(**rule), sd)
    assert isinstance(found, Timed), found
    return rows([found], 0.95, note)[0]


@pytest.mark.parametrize(
    ("slower", "verdict"),
    [(1.06, "REGRESSED"), (1.022, "INCONCLUSIVE"), (1.01, "OK"), (1.0, "OK"), (0.99, "OK"), (0.94, "IMPROVED")],
)
def test_the_interval_decides_three_ways(slower: float, verdict: str) -> None:
    """Wholly above the margin, wholly below it, or across: with a noise of 0.1 % and one launch a side."""
    row = _judged(with_launches([1.0]), with_launches([slower]))
    assert row.verdict == verdict
    assert row.ratio == pytest.approx(slower)
    assert row.low is not None
    assert row.high is not None
    assert row.low < slower < row.high
    assert (row.margin, row.n) == (0.02, 1)
    assert len(row.reason.splitlines()) <= 2


def test_the_margin_does_not_grow_with_the_noise() -> None:
    """What the noise hides is INCONCLUSIVE, equal times too; it is never OK and never REGRESSED."""
    for slower in (1.0, 1.05, 1.10):
        row = _judged(with_launches([1.0]), with_launches([slower]), sd=0.05)
        assert (row.verdict, row.margin) == ("INCONCLUSIVE", 0.02)


def test_luck_is_not_ok() -> None:
    """Where noise is larger than what is looked for, a case that happens to look much faster is not told either."""
    lucky = _judged(with_launches([1.0]), with_launches([0.575]), sd=0.2)
    assert lucky.high is not None
    assert lucky.high < 1.02
    assert lucky.verdict == "INCONCLUSIVE"
    sure = _judged(with_launches([1.0]), with_launches([0.97]), sd=0.0135)
    assert sure.verdict == "OK", "faster by less than its noise, which is within margin and promise"


def test_an_uncalibrated_runner_has_five_percent() -> None:
    """The reason says that this was assumed, how many launches would do, and what to run instead."""
    row = _judged(with_launches([1.0]), with_launches([1.1]), sd=None)
    assert row.low == pytest.approx(1.1 / math.exp(2.77 * 0.05), rel=1e-3)
    assert row.reason == (
        "time changed by +10.0 % (-4.2 to +26.4 %): 1 launch against 1 cannot tell that from the margin of 2 %.\n"
        "191 launches a side would show +4 % (noise assumed 5 %: calibrate)."
    )
    assert row.launches_needed == 191


def test_a_regression_reads_in_two_lines() -> None:
    """What was found, in seconds and percent, and what else changed."""
    row = _judged(with_launches([1.0]), with_launches([1.05]), note="Also changed: torch 2.6 -> 2.7.")
    assert row.reason == (
        "time changed by +5.0 % (+4.7 to +5.3 %), more than the margin of 2 %: 220.5 s in all, was 210 s.\n"
        "Also changed: torch 2.6 -> 2.7."
    )
    assert _judged(with_launches([1.0]), with_launches([1.0]), note="Also changed: x.").reason.count("\n") == 0


def test_seconds_may_be_allowed_where_the_margin_is_less() -> None:
    """Of 210 s, 21 s are 10 %: 5 % is fine then."""
    row = _judged(with_launches([1.0]), with_launches([1.05]), absolute_s=21)
    assert row.verdict == "OK"
    assert row.margin == pytest.approx(0.1)


def test_several_launches_bring_their_own_spread() -> None:
    """A calibration that promises too little noise is not believed."""
    base, head = with_launches([0.9, 1.0, 1.1]), with_launches([0.95, 1.05, 1.15])
    assert _judged(base, head, sd=0.0001).verdict == "INCONCLUSIVE"
    steady = with_launches([1.0, 1.001, 0.999]), with_launches([1.05, 1.051])
    row = _judged(*steady, sd=0.0001)
    assert (row.verdict, row.n) == ("REGRESSED", 2)


def test_many_rows_are_one_family() -> None:
    """A slowdown that is just enough alone is not among a hundred rows; a clear one still is."""
    base = with_launches([1.0])
    close = [timed(base, with_launches([slower]), TimeRule(), 0.01) for slower in (1.052, *[1.0] * 99)]
    cases = [case for case in close if isinstance(case, Timed)]
    assert rows(cases[:1], 0.95, "")[0].verdict == "REGRESSED"
    first = rows(cases, 0.95, "")[0]
    assert first.verdict == "INCONCLUSIVE"
    assert "from the margin of 2 % among 100 rows" in first.reason
    clear = timed(base, with_launches([1.2]), TimeRule(), 0.01)
    assert isinstance(clear, Timed)
    assert rows([*cases, clear], 0.95, "")[-1].verdict == "REGRESSED"


def test_batches_of_another_plan_are_not_compared() -> None:
    """Other items or shapes, a plan that nobody wrote down, or batches that are missing."""
    for change, words in (
        ({"plan_sha256": "0" * 64}, "batches differ"),
        ({"plan_sha256": None}, "does not say which batches"),
    ):
        head = with_launches([1.0, 1.0])
        head.launches[1].plan_sha256 = change["plan_sha256"]
        row = timed(with_launches([1.0]), head, TimeRule(gate=False), None)
        assert isinstance(row, Row)
        assert (row.verdict, row.metric, row.gated) == ("NOT_COMPARABLE", "time", False)
        assert words in row.reason
    short = with_latencies([[1.0] * (BATCHES - 1)])
    row = timed(with_launches([1.0]), short, TimeRule(), None)
    assert isinstance(row, Row)
    assert "has 19 batches and another 20" in row.reason


def test_a_launch_with_evidence_against_it_does_not_count() -> None:
    """The others do; where none is left the time is INVALID, with the evidence, on either side."""
    head = with_launches([1.0, 5.0])
    make_invalid(head.launches[1], "GPU 0 was throttled for 3 s.")
    row = _judged(with_launches([1.0]), head)
    assert (row.verdict, row.n) == ("OK", 1)
    make_invalid(head.launches[0], "GPU 0 was throttled for 2 s.")
    for sides in ((with_launches([1.0]), head), (head, with_launches([1.0]))):
        found = timed(*sides, TimeRule(), None)
        assert isinstance(found, Row)
        assert found.verdict == "INVALID"
        assert found.reason.endswith("does not speak for the case: GPU 0 was throttled for 2 s.")
    found = timed(with_launches([1.0]), with_launches([0.0]), TimeRule(), None)
    assert isinstance(found, Row)
    assert found.verdict == "INVALID"


def test_a_time_that_is_gone_is_missing() -> None:
    """A case that completed without a timed batch; one that the baseline did not time is nothing to compare."""
    found = timed(with_launches([1.0]), with_launches([]), TimeRule(), None)
    assert isinstance(found, Row)
    assert found.verdict == "MISSING"
    assert timed(with_launches([]), with_launches([1.0]), TimeRule(), None) == "no batch of the baseline was timed"


def test_no_time_is_too_odd_to_be_written_down() -> None:
    """Ratios beyond what a float holds stay finite."""
    row = _judged(with_latencies([[1e-300] * BATCHES]), with_latencies([[1e300] * BATCHES]))
    assert row.verdict == "REGRESSED"
    assert row.ratio is not None
    assert math.isfinite(row.ratio)


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
    """In simulation with a margin of 2 %: +5 % is caught as often as noise and launches allow, the margin seldom."""
    chance = random.Random(f"{launches} {noise} {slower}")
    runs, caught = 400, 0
    for _ in range(runs):
        base = [chance.gauss(1, noise) for _ in range(launches)]
        head = [slower * chance.gauss(1, noise) for _ in range(launches)]
        found = timed(with_launches(base), with_launches(head), TimeRule(), noise)
        assert isinstance(found, Timed)
        caught += rows([found], 0.95, "")[0].verdict == "REGRESSED"
    assert low <= caught / runs <= high


def test_equal_code_raises_an_alarm_in_fewer_than_one_run_in_a_hundred() -> None:
    """In simulation: 400 runs of 21 rows, 2 launches a side, 3 % between launches and 2 % between batches."""
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
    """The typical batch is as fast as before, and the whole takes three times as long."""
    base, head = with_latencies([[1.0] * BATCHES]), with_latencies([_stalling(1.0, 4, 10.0)])
    row = _judged(base, head)
    assert row.verdict == "INCONCLUSIVE"
    assert "the typical batch changed by +0.0 %" in row.reason
    assert "time in all by +225.0 %" in row.reason
    faster = with_latencies([_stalling(0.8, 4, 10.0)])
    assert _judged(base, faster).verdict == "INCONCLUSIVE", "no improvement either"
    assert _judged(head, base).verdict == "OK"


def test_launches_that_all_stall_are_regressed() -> None:
    """Three a side know the noise of their own sums; a stall in one of them is noise."""
    quiet = with_latencies([[level] * BATCHES for level in (1.0, 1.001, 0.999)])
    stalling = with_latencies([_stalling(level, 4, 10.0) for level in (1.0, 1.001, 0.999)])
    row = _judged(quiet, stalling)
    assert row.verdict == "REGRESSED"
    assert "a part of the batches became much slower" in row.reason
    once = with_latencies([_stalling(1.0, 4, 10.0), [1.001] * BATCHES, [0.999] * BATCHES])
    assert _judged(quiet, once).verdict == "INCONCLUSIVE"
