from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.report_factory import make_work
from support.verdict_factory import BATCHES, make_invalid, with_latencies, with_launches

from pytest_llmgpu.gate.comparable_launches import comparable
from pytest_llmgpu.gate.noise_model import DAY_SD, PRIORS, Prior
from pytest_llmgpu.gate.policy import DeviceTimeRule, TimeRule
from pytest_llmgpu.gate.time import (
    Name,
    Samples,
    Timed,
    days_apart,
    device_times,
    rows,
    wall_times,
)
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.report.work import Work

_QUIET = Prior(s0=0.001, df0=1000.0, source="test")
_MEMORY = PRIORS["device_memory"]


def _wall(base: CaseResult, head: CaseResult, prior: Prior = _QUIET, **given: Any) -> Timed | Row | str:
    rule = TimeRule(**{name: given.pop(name) for name in ("gate", "margin", "absolute_s") if name in given})
    fields: dict[str, Any] = {"regime": "replayed", "in_turn": True, "machine_sd": 0.0, **given}
    return wall_times(base, head, comparable(base, head), rule, prior=prior, **fields)


def _judged(base: CaseResult, head: CaseResult, prior: Prior = _QUIET, note: str = "", **given: Any) -> Row:
    found = _wall(base, head, prior, **given)
    assert isinstance(found, Timed), found
    return rows([found], 0.99, note)[0]


def _worked(
    *launches: float, uuids: Sequence[str] = ("GPU-0", "GPU-1"), skew: Sequence[float] = (1.0, 1.0), **fields: Any
) -> CaseResult:
    """Return a result whose ranks took half a second in the kernels, times the level of the launch and the skew."""
    result = with_launches([1.0] * len(launches), **fields)
    for launch, level in zip(result.launches, launches, strict=True):
        launch.work = _work(level, uuids, skew)
    return result


def _work(level: float, uuids: Sequence[str], skew: Sequence[float]) -> Work:
    ranks = [
        msgspec.structs.replace(
            rank, uuids=[uuid], device_time_s=[0.5 * level * factor * wobble for wobble in (0.99, 1.0, 1.5)]
        )
        for rank, uuid, factor in zip(make_work(len(uuids)).ranks, uuids, skew, strict=True)
    ]
    return msgspec.structs.replace(make_work(), ranks=ranks)


def _device(
    base: CaseResult,
    head: CaseResult,
    *,
    prior: Prior = _MEMORY,
    other_day: bool = False,
    regime: Any = "device_memory",
) -> Timed | Row | str | None:
    sides = comparable(base, head)
    return device_times(base, head, sides, DeviceTimeRule(), prior=prior, regime=regime, other_day=other_day)


def _device_row(base: CaseResult, head: CaseResult, **given: Any) -> Row:
    found = _device(base, head, **given)
    assert isinstance(found, Timed), found
    return rows([found], 0.99, "")[0]


@pytest.mark.parametrize(
    ("slower", "verdict"),
    [(1.06, "REGRESSED"), (1.021, "REGRESSED"), (1.019, "OK"), (1.0, "OK"), (0.99, "OK"), (0.94, "IMPROVED")],
)
def test_quiet_launches_are_decided_at_the_threshold(slower: float, verdict: str) -> None:
    """One launch with 0.1 % noise suffices; the interval of 90 % has the change in its middle."""
    row = _judged(with_launches([1.0]), with_launches([slower]))
    assert row.result == verdict
    assert row.ratio == pytest.approx(slower)
    assert row.threshold == pytest.approx(0.02)
    assert row.n == 1
    half = 1.6464 * 0.001 * math.sqrt(2)  # the quantile of t with 1,000 degrees of freedom
    assert (row.low, row.high) == pytest.approx((slower * math.exp(-half), slower * math.exp(half)), rel=1e-6)
    assert row.smallest_seen == pytest.approx(0.02 + 1.0234 * 1.645 * 0.001 * math.sqrt(2), rel=1e-3)


def test_the_figures_of_a_row_are_those_of_the_moderated_test() -> None:
    """Ratio, p and smallest slowdown are computed from log times by the formula, with scipy's t."""
    stats = pytest.importorskip("scipy.stats")
    base, head, prior = [1.0, 1.02, 0.99], [1.06, 1.05], Prior(s0=0.01, df0=5.0, source="test")
    row = _judged(with_launches(base), with_launches(head), prior)
    then, now = ([math.log(one) for one in side] for side in (base, head))
    change = statistics.fmean(now) - statistics.fmean(then)
    variance = (5 * 1e-4 + 2 * statistics.variance(then) + statistics.variance(now)) / 8
    error = math.sqrt(variance * (1 / 3 + 1 / 2))
    assert row.ratio == pytest.approx(math.exp(change))
    assert row.p == pytest.approx(stats.t.sf(change / error, 8))
    shown = max(math.log1p(0.02), stats.t.ppf(0.99, 8) * error)
    assert row.smallest_seen == pytest.approx(math.expm1(shown + stats.norm.ppf(0.95) * error))
    assert row.high == pytest.approx(math.exp(change + stats.t.ppf(0.95, 8) * error))


def test_the_threshold_of_wall_time_depends_on_the_comparison() -> None:
    """2 % in turn, 4 % against a stored baseline, unless the policy has one; the absolute one may be larger."""
    base, head = with_launches([1.0]), with_launches([1.03])
    assert _judged(base, head).verdict == "REGRESSED"
    stored = _judged(base, head, in_turn=False)
    assert stored.verdict == "OK"
    assert stored.threshold == pytest.approx(0.04)
    for in_turn in (True, False):
        assert _judged(base, head, in_turn=in_turn, margin=0.025).threshold == pytest.approx(0.025)
    assert _judged(base, head, absolute_s=21).threshold == pytest.approx(0.1), "21 s of 210 s"


def test_noise_is_not_enough_data() -> None:
    """Equal times and a change within the noise are neither OK nor REGRESSED, and the launches needed are stated."""
    noisy = Prior(s0=0.02, df0=20.0, source="test")
    for slower in (1.0, 1.05):
        row = _judged(with_launches([1.0]), with_launches([slower]), noisy)
        assert row.result == "UNDECIDED"
        assert row.threshold == pytest.approx(0.02)
        assert row.launches_needed is not None
        assert f": {row.launches_needed}, now 1." in row.reason
    enough = [1.0] * (row.launches_needed or 0)
    assert _judged(with_launches(enough), with_launches(enough), noisy).verdict == "OK"


def test_a_regression_reads_in_two_lines() -> None:
    """The first has the change, interval, threshold and seconds, the second what else changed."""
    row = _judged(with_launches([1.0]), with_launches([1.05]), note="Also changed: torch 2.6 -> 2.7.")
    assert row.reason == (
        "Time +5.0 % (90 % CI +4.8 to +5.2 %), threshold 2 %: 220.5 s, was 210.0 s.\nAlso changed: torch 2.6 -> 2.7."
    )
    assert _judged(with_launches([1.0]), with_launches([1.0]), note="Also changed: x.").reason.count("\n") == 0


def test_launches_that_scatter_are_never_ok() -> None:
    """Two of five launches three times as slow; eager forwards that wait for the host scatter by nature."""
    steady, scattered = with_launches([1.0] * 5), with_launches([1.0, 1.0, 1.0, 3.0, 3.0])
    assert _judged(steady, scattered).verdict != "OK"
    back = _judged(scattered, steady, Prior(s0=0.001, df0=1e6, source="test"), margin=0.9)
    assert back.verdict == "UNDECIDED"
    assert "factor of 3.0" in back.reason
    spread = with_launches([1.0, 2.5]), with_launches([1.0, 2.5])
    assert _judged(*spread, Prior(s0=1e-4, df0=1e6, source="test"), regime="eager_host", margin=0.9).verdict == "OK"


def test_disturbed_launches_are_left_out() -> None:
    """The reason counts those that are used; without any the row is INVALID."""
    head = with_launches([1.0, 5.0])
    make_invalid(head.launches[1], "processes of other programs: GPU 0 has 1 besides 1 of this run")
    row = _judged(with_launches([1.0]), head)
    assert row.result == "OK"
    assert row.ratio == pytest.approx(1.0)
    assert "1 of 2 launches of the candidate are used" in row.reason
    make_invalid(head.launches[0], "processes of other programs: GPU 0 has 1 besides 1 of this run")
    invalid = _wall(with_launches([1.0]), head, gate=False)
    assert isinstance(invalid, Row)
    assert (invalid.verdict, invalid.metric, invalid.gated) == ("UNDECIDED", "time", False)


def test_wall_time_of_another_machine_has_a_larger_threshold() -> None:
    """Machines of one kind differ as launches do: 2.33 √2 times that deviation is allowed."""
    row = _judged(with_launches([1.0]), with_launches([1.10]), machine_sd=0.05)
    assert row.result != "REGRESSED"
    assert row.threshold == pytest.approx(
        math.expm1(2.33 * 0.001 * math.sqrt(2) + 2.326 * math.sqrt(2) * 0.05), rel=0.01
    )
    assert _judged(with_launches([1.0]), with_launches([1.5]), machine_sd=0.05).verdict == "REGRESSED"


def test_noise_of_launches_makes_no_time_of_another_machine_ok() -> None:
    """The threshold has the noise of one eager launch, a factor of 3; a change up to the threshold is undecided."""
    row = _judged(with_launches([1.0]), with_launches([1.3]), PRIORS["eager_host"], machine_sd=PRIORS["eager_host"].s0)
    assert row.threshold is not None
    assert row.threshold > 1
    assert row.result == "UNDECIDED"
    assert "Slowdowns cannot be judged with a baseline of other GPUs" in row.reason
    assert "threshold" not in row.reason
    assert "same GPUs" in row.next_step


def test_a_time_of_another_machine_that_is_ok_has_a_next_step() -> None:
    """The row has not enough data where its launches would not have shown a slowdown of the policy's limit."""
    row = _judged(with_launches([1.0]), with_launches([1.01]), machine_sd=0.05)
    assert row.result == "OK"
    assert "threshold" in row.reason
    assert "same GPUs" in row.next_step


def test_extreme_times_give_finite_ratios() -> None:
    """Ratios beyond the range of a float are limited."""
    for launches in (1, 2):
        base, head = (with_latencies([[each] * BATCHES] * launches) for each in (1e-300, 1e300))
        row = _judged(base, head)
        assert row.result == "REGRESSED"
        assert row.ratio is not None
        assert math.isfinite(row.ratio)


def test_device_time_is_compared_by_the_median_of_the_passes() -> None:
    """One pass that took half as long again does not count; 2 % in one launch is a regression."""
    row = _device_row(_worked(1.0), _worked(1.02))
    assert (row.result, row.metric) == ("REGRESSED", "device_time")
    assert row.threshold == pytest.approx(0.01)
    assert (row.base, row.head) == pytest.approx((0.5, 0.51))
    assert _device_row(_worked(1.0), _worked(1.005)).verdict == "OK"


def test_the_rank_that_became_slowest_decides() -> None:
    """Ranks with equal GPUs are compared, whatever their numbers; the p is multiplied by the number of ranks."""
    slower = _worked(1.0, uuids=("GPU-1", "GPU-0"), skew=(1.03, 1.0))
    row = _device_row(_worked(1.0), slower)
    assert row.result == "REGRESSED"
    assert row.ratio == pytest.approx(1.03)
    assert "of rank 0 " in row.reason
    alone = _device_row(_worked(1.0, uuids=("GPU-1",), skew=(1.0,)), _worked(1.0, uuids=("GPU-1",), skew=(1.03,)))
    assert alone.p is not None
    assert row.p == pytest.approx(2 * alone.p)
    one_faster = _worked(1.0, skew=(0.9, 1.0))
    assert _device_row(_worked(1.0), one_faster).verdict == "OK", "an improvement is one of every rank"


def test_other_gpus_of_one_kind_have_a_larger_threshold() -> None:
    """It has the deviation between GPUs."""
    others = ("GPU-8", "GPU-9")
    for slower, verdict in ((1.01, "OK"), (1.02, "OK"), (1.05, "REGRESSED")):
        row = _device_row(_worked(1.0), _worked(slower, uuids=others))
        assert row.result == verdict
        assert row.threshold == pytest.approx(0.0245, abs=0.002)
        assert "measured on five GPUs" in row.reason


def test_another_day_has_half_a_point_more() -> None:
    """Sessions more than twelve hours apart; a time that cannot be read counts as another day."""
    assert _device_row(_worked(1.0), _worked(1.0), other_day=True).threshold == pytest.approx(0.01 + DAY_SD)
    assert not days_apart("2026-01-02T03:04:05Z", "2026-01-02T14:00:00+00:00")
    assert days_apart("2026-01-02T03:04:05Z", "2026-01-02T15:04:06Z")
    assert days_apart("", "2026-01-02T15:04:06Z")
    assert days_apart("2026-01-02T03:04:05", "2026-01-02T03:04:05Z")


def test_device_time_that_cannot_be_compared() -> None:
    """None on a CPU, a phrase where the baseline has none, MISSING with its reason where the candidate lost it."""
    bare, worked = with_launches([1.0]), _worked(1.0)
    assert _device(with_launches([1.0], device="cpu"), with_launches([1.0], device="cpu")) is None
    assert _device(bare, bare) == "neither report has it"
    assert _device(bare, worked) == "only the candidate has it"
    lost = with_launches([1.0])
    lost.launches[0].why = {"work": "work passes are switched off for this case (--llmgpu-work=off)"}
    gone = _device(worked, lost)
    assert isinstance(gone, Row)
    assert (gone.verdict, gone.metric) == ("MISSING", "device_time")
    assert "--llmgpu-work=off" in gone.reason
    other = _worked(1.0)
    other.launches[0].work = msgspec.structs.replace(_work(1.0, ("GPU-0", "GPU-1"), (1, 1)), batches=[0, 5])
    found = _device(worked, other)
    assert isinstance(found, Row)
    assert found.result == "NOT_COMPARABLE"
    disturbed = _worked(1.0)
    make_invalid(disturbed.launches[0], "processes of other programs")
    invalid = _device(worked, disturbed)
    assert isinstance(invalid, Row)
    assert (invalid.verdict, invalid.metric) == ("UNDECIDED", "device_time")


def _timed(number: int, base: Sequence[float], head: Sequence[float], **fields: Any) -> Timed:
    """Return the times of a case by its launches' log times."""
    defaults: dict[str, Any] = {
        "name": Name(str(number), f"mp-bs{number}", None, "device_time"),
        "gated": True,
        "ranks": [Samples(base, head)],
        "seconds": [(1.0, 1.0)],
        "prior": _MEMORY,
        "threshold": 0.01,
        "spread": 2.0,
    }
    return Timed(**{**defaults, **fields})


def test_gated_rows_of_times_are_one_family() -> None:
    """A slowdown that is significant alone is not among a hundred rows; rows that are not gated do not count."""
    one = _timed(0, [0.0], [0.025], prior=Prior(s0=0.006, df0=1000.0, source="test"))
    others = [_timed(number, [0.0], [0.0]) for number in range(1, 100)]
    assert rows([one], 0.99, "")[0].verdict == "REGRESSED"
    among = rows([one, *others], 0.99, "")[0]
    assert among.verdict == "UNDECIDED"
    assert "among 100 rows" in among.reason
    not_gated = [msgspec.structs.replace(other, gated=False) for other in others]
    assert rows([one, *not_gated], 0.99, "")[0].verdict == "REGRESSED"


def _drawn(chance: random.Random, prior: Prior) -> float:
    """Return the deviation of one machine, drawn from a prior: scaled inverse chi-squared."""
    return prior.s0 * math.sqrt(prior.df0 / chance.gammavariate(prior.df0 / 2, 2.0))


def _simulated(
    chance: random.Random, regime: Any, n: int, changes: Sequence[float], sd: float | None = None
) -> list[Row]:
    """Return the rows of cases with given changes, measured with launches of a regime."""
    prior = PRIORS[regime]
    cases = []
    for number, change in enumerate(changes):
        noise = _drawn(chance, prior) if sd is None else sd
        samples = ([chance.gauss(0, noise) for _ in range(n)], [chance.gauss(change, noise) for _ in range(n)])
        threshold = 0.01 if regime.startswith("device") else 0.02
        cases.append(_timed(number, *samples, prior=prior, threshold=threshold, spread=1e9))
    return rows(cases, 0.99, "")


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["device_memory", "device_compute", "replayed", "eager_device", "eager_host", "cpu"])
@pytest.mark.parametrize("launches", [1, 3])
def test_unchanged_programs_have_no_regression(regime: str, launches: int) -> None:
    """At most 1 % of the reports of 21 cases have one, if machines differ as the prior states; 400 reports each."""
    chance = random.Random(f"{regime} {launches}")
    reports = [_simulated(chance, regime, launches, [0.0] * 21) for _ in range(400)]
    assert sum(any(row.result == "REGRESSED" for row in report) for report in reports) <= 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("regime", "launches", "slowdown"),
    [("device_memory", 1, 0.02), ("replayed", 2, 0.04), ("eager_device", 5, 0.05)],
)
def test_a_slowdown_of_one_case_of_21_is_found(regime: Any, launches: int, slowdown: float) -> None:
    """In 95 % of the reports, if the machine has the deviation of the prior."""
    chance = random.Random(f"{regime} {launches}")
    changes = [math.log1p(slowdown), *[0.0] * 20]
    found = [_simulated(chance, regime, launches, changes, PRIORS[regime].s0)[0] for _ in range(300)]
    assert sum(row.result == "REGRESSED" for row in found) >= 285


def test_a_time_that_is_ok_by_chance_has_the_launches_that_exclude_a_slowdown() -> None:
    """A policy whose `largest_unseen_slowdown` is small makes it undecided, and the next step needs their number."""
    prior = Prior(s0=0.02, df0=1000.0, source="test")
    row = _judged(with_launches([1.0]), with_launches([0.97]), prior)
    assert row.result == "OK"
    assert row.smallest_seen == pytest.approx(0.13, abs=0.04)
    assert row.launches_needed is not None
    enough = [1.0] * row.launches_needed
    seen = _judged(with_launches(enough), with_launches([0.97] * len(enough)), prior).smallest_seen
    assert len(enough) > 1
    assert seen is not None
    assert seen < 0.041
