from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import known, make_result, make_work
from support.verdict_factory import BATCHES, make_invalid, with_latencies, with_launches

from pytest_llmgpu.analysis import noise_regime
from pytest_llmgpu.analysis.noise_regime import PRIORS, REGIMES, Prior
from pytest_llmgpu.gate import times
from pytest_llmgpu.gate.fixed_clock import Samples
from pytest_llmgpu.gate.judge import decided
from pytest_llmgpu.gate.policy import AmountRule, TimeRule
from pytest_llmgpu.gate.stats import t_quantile
from pytest_llmgpu.gate.times import Timed
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.result import Batches, CaseResult, HostUse, Launch
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.report.work import CollectiveWork, RankWork

_QUIET = Prior(s0=0.001, df0=1000.0)
_FAST, _SLOW = (1735, 1700, 1771), (1590, 1560, 1620)
"""Clocks of three passes of a GPU in MHz: free, and at its power limit."""


def _wall(base: CaseResult, head: CaseResult, prior: Prior = _QUIET, **given: Any) -> Any:
    rule = TimeRule(**{name: given.pop(name) for name in ("gate", "threshold") if name in given})
    with patch.object(noise_regime, "PRIORS", dict.fromkeys(PRIORS, prior)):
        return times.wall_times(base, head, rule, **{"in_turn": True, "same_gpus": True, **given})


def _judged(found: Timed) -> Row:
    return decided([found], 0.99)[0]


def _worked(
    *launches: float,
    mhz: Sequence[float] = (),
    uuids: Sequence[str] = "01",
    skew: Sequence[float] = (1.0, 1.0),
    batches: Sequence[int] = (0, 2),
    busy: float = 0.9,
    **fields: Any,
) -> CaseResult:
    """Return a result whose ranks took half a second in the kernels, times the level of the launch and the skew.

    The clock limits four fifths of this time. Where it is not known, one pass took half as long again.
    """
    result = with_launches([1.0] * len(launches), **fields)
    for launch, level in zip(result.launches, launches, strict=True):
        factors = [(one / 1735) ** -0.8 for one in mhz] or [0.99, 1.0, 1.5]
        ranks = [
            RankWork(
                uuids=[uuid],
                device_time_s=[0.5 * level * of_rank * one for one in factors],
                clock_ghz=[[one / 1000 for one in mhz]] if mhz else None,
                busy=busy,
                host_syncs=2,
            )
            for uuid, of_rank in zip(uuids, skew, strict=True)
        ]
        launch.work = msgspec.structs.replace(make_work(), batches=list(batches), ranks=ranks)
    return result


def _device(base: CaseResult, head: CaseResult) -> Any:
    return times.device_times(base, head, AmountRule(threshold=0.005))


@pytest.mark.parametrize(
    ("slower", "given", "verdict", "threshold"),
    [
        (1.06, {}, "REGRESSED", 0.02),
        (1.021, {}, "REGRESSED", 0.02),
        (1.019, {}, "OK", 0.02),
        (0.94, {}, "IMPROVED", 0.02),
        (1.03, {"in_turn": False}, "OK", 0.04),
        (1.03, {"in_turn": False, "threshold": 0.025}, "REGRESSED", 0.025),
        (1.022, {"same_gpus": False}, "OK", 0.0233),
        (1.025, {"same_gpus": False}, "REGRESSED", 0.0233),
        (1.3, {"same_gpus": False, "prior": PRIORS["eager_host"]}, "UNDECIDED", 2.73),
    ],
)
def test_launches_are_decided_at_the_threshold(
    slower: float, given: dict[str, Any], verdict: str, threshold: float
) -> None:
    """It is 2 % in turn, 4 % against a stored baseline, that of the policy, or 2.33 √2 of the deviation of GPUs."""
    row = _judged(_wall(with_launches([1.0]), with_launches([slower]), **given))
    assert (row.result, row.n) == (verdict, 1)
    assert (row.ratio, row.threshold) == pytest.approx((slower, threshold), rel=0.01)
    other_gpus = given.get("same_gpus") is False
    assert ("these GPUs" in row.next_step) == (other_gpus and verdict != "REGRESSED")


def test_the_figures_of_a_row_are_those_of_the_moderated_test() -> None:
    """Ratio, interval, p and smallest slowdown are computed from log times by the formula, with scipy's t."""
    stats = pytest.importorskip("scipy.stats")
    base, head, prior = [1.0, 1.02, 0.99], [1.06, 1.05], Prior(s0=0.01, df0=5.0)
    row = _judged(_wall(with_launches(base), with_launches(head), prior))
    then, now = ([math.log(one) for one in side] for side in (base, head))
    change = statistics.fmean(now) - statistics.fmean(then)
    variance = (5 * 1e-4 + 2 * statistics.variance(then) + statistics.variance(now)) / 8
    error = math.sqrt(variance * (1 / 3 + 1 / 2))
    half = stats.t.ppf(0.95, 8) * error
    assert (row.ratio, row.low, row.high) == pytest.approx(tuple(map(math.exp, (change, change - half, change + half))))
    assert row.p == pytest.approx(stats.t.sf(change / error, 8))
    shown = max(math.log1p(0.02), stats.t.ppf(0.99, 8) * error)
    assert row.smallest_seen == pytest.approx(math.expm1(shown + stats.norm.ppf(0.95) * error))


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "UNDECIDED"), (1.05, "UNDECIDED"), (0.97, "OK")])
def test_noise_is_not_enough_data(slower: float, verdict: str) -> None:
    """Equal times and a change within the noise are undecided; the launches needed decide, also where OK is chance."""
    noisy = Prior(s0=0.02, df0=1000.0)
    row = _judged(_wall(with_launches([1.0]), with_launches([slower]), noisy))
    assert row.result == verdict
    assert row.smallest_seen == pytest.approx(0.13, abs=0.04)
    enough = with_launches([1.0] * (row.launches_needed or 0))
    decided = _judged(_wall(enough, enough, noisy))
    assert (decided.result, decided.n) == ("OK", row.launches_needed)
    assert 0.02 < (decided.smallest_seen or 1.0) < 0.041


def test_a_slowdown_above_the_threshold_that_is_not_significant_has_its_launches() -> None:
    """The interval of one row is not the test over all rows, which the reason states with the launches that decide."""
    noisy, slower = Prior(s0=0.02, df0=1000.0), with_launches([1.08])
    rows = decided([_wall(with_launches([1.0]), slower, noisy) for _ in range(40)], 0.99)
    row = rows[0]
    assert row.verdict == "UNDECIDED"
    assert (row.low or 0.0) - 1 > (row.threshold or 1.0)
    needed = row.launches_needed or 0
    assert f"but the test at 1 % decides. {needed} launches in each report show such" in row.reason
    enough = _wall(with_launches([1.0] * needed), with_launches([1.08] * needed), noisy)
    assert {one.verdict for one in decided([enough] * 40, 0.99)} == {"REGRESSED"}
    assert needed < (times.launches_needed(noisy, threshold=0.02, family=40) or 21)


def test_a_regression_reads_in_one_line(prose: Prose) -> None:
    """It has the change, interval, threshold and seconds."""
    assert prose == _judged(_wall(with_launches([1.0]), with_launches([1.05]))).reason


def test_launches_that_scatter_are_never_ok() -> None:
    """One of two launches is much slower: their own deviation makes the interval wide, whatever was expected."""
    for execution in ("eager", "cuda_graphs"):
        spread = with_launches([1.0, 2.5], execution=execution)
        prior = noise_regime.prior_of_time(noise_regime.of_time(spread), seconds=1.0, batches=BATCHES)
        assert _judged(_wall(spread, spread, prior)).verdict == "UNDECIDED"


def test_disturbed_launches_are_left_out() -> None:
    """The reason counts those that are used; without any on either side the row is UNDECIDED and has the cause."""
    good, head = with_launches([1.0]), with_launches([1.0, 5.0])
    make_invalid(head.launches[1], "GPU 0 was throttled for 3 s.")
    row = _judged(_wall(good, head))
    assert (row.result, row.ratio) == ("OK", 1.0)
    assert "1 of 2 launches of the candidate are used" in row.reason
    make_invalid(head.launches[0], "GPU 0 was throttled for 2 s.")
    for sides in ((good, head), (head, good)):
        found = _wall(*sides, gate=False)
        assert (found.verdict, found.metric, found.gated) == ("UNDECIDED", "time", False)
        assert found.reason.endswith("were disturbed: GPU 0 was throttled for 2 s.")


def _on_a_busy_host(result: CaseResult, *, ahead: bool) -> CaseResult:
    """Return a result of launches whose ranks waited for a core, with forwards that were launched ahead, or not."""
    for launch in result.launches:
        make_invalid(launch, "CPU cores too busy: rank 0 waited for a core for 42 % of the time")
        ranks = [msgspec.structs.replace(rank, launched_ahead=ahead) for rank in launch.ranks]
        launch.work = msgspec.structs.replace(known(launch.work), ranks=ranks)
    return result


def test_a_busy_cpu_leaves_the_device_time_of_forwards_that_were_launched_ahead() -> None:
    """Else the clock of a pass is not that of its kernels, in which the GPU idles. Wall times are never judged."""
    base = _worked(1.0, mhz=_FAST)
    ahead, waiting = (_on_a_busy_host(_worked(1.02, mhz=_FAST), ahead=one) for one in (True, False))
    assert _judged(_device(base, ahead)).result == "REGRESSED"
    assert "waited for a core" in _device(base, waiting).reason
    assert _wall(base, ahead).verdict == "UNDECIDED"


def test_a_launch_without_a_clock_takes_it_from_no_other_one() -> None:
    """Those with a clock are compared where both reports have one; else all are, as measured."""
    base, head, late = _worked(1.0, mhz=_FAST), _worked(1.02, mhz=_SLOW), _worked(1.0)
    head.launches += late.launches
    row = _judged(_device(base, head))
    assert (row.result, row.n) == ("REGRESSED", 1)
    assert row.clock_ratio == pytest.approx(1590 / 1735, rel=0.001)
    assert "1 of 2 launches of the candidate are used" in row.reason
    row = _judged(_device(late, head))
    assert (row.clock_ratio, "are used" in row.reason) == (None, False)
    head.launches += late.launches
    assert _judged(_device(base, head)).clock_ratio is None, "most have none"


def test_a_launch_whose_passes_have_no_clock_takes_none_from_wall_time() -> None:
    """The passes of the others have the slope, and the batches of all have clocks."""
    base, head, late = (_worked(1.0, mhz=mhz, execution="cuda_graphs") for mhz in (_FAST, _SLOW, ()))
    head.launches += late.launches
    for result, mhz in ((base, 1735), (head, 1590)):
        for launch in result.launches:
            launch.batches.latency_s = [(mhz / 1735) ** -0.8] * BATCHES
            launch.batches.clock_ghz = [[mhz / 1000] * BATCHES]
    row = _judged(_wall(base, head))
    assert (row.verdict, row.n) == ("OK", 1)
    assert row.clock_ratio == pytest.approx(1590 / 1735)


def test_extreme_times_give_finite_ratios() -> None:
    """Ratios beyond the range of a float are limited."""
    base, head = (with_latencies([[each] * BATCHES] * 2) for each in (1e-300, 1e300))
    row = _judged(_wall(base, head))
    assert row.result == "REGRESSED"
    assert 1e300 < (row.ratio or math.inf) < math.inf


@pytest.mark.parametrize(
    ("base", "head", "batches", "ratio", "left_out"),
    [
        ([0], [5], 480, 1 + 45 / 480, ""),
        ([0], [1], 480, 1.0, " 1 time of more than twice the usual one left out."),
        ([0, 0], [0, 2], 480, 1.0, " 2 times of more than twice the usual one left out."),
        ([0, 0], [1, 1], 240, 1 + 9 / 240, ""),
        ([0, 0], [0, 3], 240, math.sqrt(1 + 27 / 240), ""),
        ([5], [5], 480, 1.0, ""),
        ([480], [0], 480, 0.1, ""),
        ([0], [1], 2, 1.0, " 1 time of more than twice the usual one left out."),
        ([0], [2], 2, 10.0, ""),
        ([0], [1], 1, 10.0, ""),
    ],
)
def test_a_few_batches_ten_times_slower_are_left_out_and_said_so(
    base: Sequence[int], head: Sequence[int], batches: int, ratio: float, left_out: str
) -> None:
    """Not where each launch has one, or a launch three or mostly such ones: the program is slower in some batches."""
    then, now = (with_latencies([[10.0] * n + [1.0] * (batches - n) for n in counts]) for counts in (base, head))
    row = _judged(_wall(then, now))
    assert row.ratio == pytest.approx(ratio)
    assert row.result == ("OK" if ratio == 1 else "REGRESSED" if ratio > 1 else "IMPROVED")
    assert row.reason.partition("was ")[2].partition(" s.")[2] == left_out


@pytest.mark.parametrize(
    ("slower", "mhz", "uuids", "verdict", "threshold"),
    [
        (1.005, (), "01", "OK", 0.005),
        (1.02, (), "01", "UNDECIDED", 0.005),
        (1.05, (), "01", "REGRESSED", 0.005),
        (1.02, (), "10", "UNDECIDED", 0.0436),
        (1.02, (), "89", "UNDECIDED", 0.0436),
        (1.07, (), "89", "REGRESSED", 0.0436),
        (1.0, _SLOW, "01", "OK", 0.005),
        (1.01, _SLOW, "01", "REGRESSED", 0.005),
        (0.99, _SLOW, "01", "IMPROVED", 0.005),
        (1.01, _FAST, "01", "REGRESSED", 0.005),
        (1.005, _SLOW, "89", "OK", 0.0165),
        (1.02, _SLOW, "89", "REGRESSED", 0.0165),
    ],
)
def test_device_time_is_compared_at_a_fixed_clock(
    slower: float, mhz: Sequence[float], uuids: str, verdict: str, threshold: float
) -> None:
    """One launch shows 1 % where the clock is known. The threshold is larger where the baseline is of other GPUs."""
    row = _judged(_device(_worked(1.0, mhz=mhz and _FAST), _worked(slower, mhz=mhz, uuids=uuids)))
    assert (row.result, row.metric) == (verdict, "device_time")
    assert (row.ratio, row.threshold) == pytest.approx((slower, threshold), abs=4e-4)
    assert ("spread between GPUs" in row.reason) == (uuids != "01")
    words = "Compared at equal clock: the GPU ran at 1,590 MHz, was 1,735 MHz."
    assert (words in row.reason) == (mhz == _SLOW)
    assert row.clock_ratio == (pytest.approx(1590 / 1735 if mhz == _SLOW else 1.0, abs=1e-3) if mhz else None)
    factor = (1590 / 1735) ** -0.8 if mhz == _SLOW else 1.0
    assert (row.base, row.head) == pytest.approx((0.5 * factor, 0.5 * factor * slower), rel=1e-3)


@pytest.mark.parametrize(
    ("slower", "execution", "passes", "verdict", "clock_ratio"),
    [
        (1.0, "cuda_graphs", _SLOW, "OK", 1590 / 1735),
        (1.05, "cuda_graphs", _SLOW, "REGRESSED", 1590 / 1735),
        (1.0, "eager", _SLOW, "OK", 1590 / 1735),
        (1.05, "cuda_graphs", (), "REGRESSED", None),
    ],
)
def test_wall_time_that_the_gpu_limits_is_compared_at_a_fixed_clock(
    slower: float, execution: str, passes: Sequence[float], verdict: str, clock_ratio: float | None
) -> None:
    """The slope is that of the device time in work passes; a throttled launch is compared like any other."""
    base, head = _worked(1.0, mhz=passes and _FAST, execution=execution), _worked(1.0, mhz=passes, execution=execution)
    for result, level, mhz in ((base, 1.0, 1735), (head, slower, 1590)):
        batches = result.launches[0].batches
        batches.latency_s, batches.clock_ghz = [level * (mhz / 1735) ** -0.8] * BATCHES, [[mhz / 1000] * BATCHES]
    make_invalid(head.launches[0], "throttled by power or heat: GPU 0 for 60.0 % of the time")
    row = _judged(_wall(base, head))
    assert (row.verdict, row.clock_ratio) == (verdict, clock_ratio and pytest.approx(clock_ratio))
    assert row.ratio == pytest.approx(slower if clock_ratio else slower * (1590 / 1735) ** -0.8, abs=1e-3)


def _replayed(level: float, *, mhz: Sequence[float] = _FAST, row_s: float = 0.54, **fields: Any) -> CaseResult:
    """Return a result whose graphs took so long in a row at 1,735 MHz, times a level; the kernels, half a second."""
    usual: dict[str, Any] = {"execution": "cuda_graphs", "mhz": mhz, "uuids": "1", "skew": (1.0,), "devices": 1}
    result = _worked(1.0, **usual | fields)
    (launch,) = result.launches
    assert launch.work is not None
    rank = msgspec.structs.replace(
        launch.work.ranks[0],
        replays_s=[row_s * level * (one / 1735) ** -0.8 for one in mhz],
        replays_ghz=[[one / 1000 for one in mhz]],
    )
    launch.work = msgspec.structs.replace(launch.work, ranks=[rank])
    return result


@pytest.mark.parametrize(
    ("slower", "fields", "rule", "verdict", "threshold"),
    [
        (1.0, {}, {}, "OK", 0.01),
        (1.02, {}, {}, "REGRESSED", 0.01),
        (1.0, {"mhz": _SLOW}, {}, "OK", 0.01),
        (1.02, {"mhz": _SLOW}, {}, "REGRESSED", 0.01),
        (0.98, {"mhz": _SLOW}, {}, "IMPROVED", 0.01),
        (1.02, {}, {"threshold": 0.03}, "OK", 0.03),
        (1.01, {"uuids": "9"}, {}, "OK", 0.0137),
        (1.02, {"uuids": "9"}, {}, "REGRESSED", 0.0137),
    ],
)
def test_one_launch_shows_slower_replays_in_a_row(
    slower: float, fields: dict[str, Any], rule: dict[str, Any], verdict: str, threshold: float
) -> None:
    """They are compared at a fixed clock, whatever the host did in the timed batches."""
    base, head = _replayed(1.0), _replayed(slower, **fields)
    base.launches[0].batches.latency_s[0] *= 1.5
    found = times.device_times(base, head, TimeRule(**rule), in_a_row=True)
    assert isinstance(found, Timed)
    row = _judged(found)
    assert (row.metric, row.result) == ("time", verdict)
    assert (row.ratio, row.threshold) == pytest.approx((slower, threshold), abs=6e-4)
    assert (row.smallest_seen or 1.0) < max(0.02, threshold + 0.01)


def test_replays_that_cannot_be_compared() -> None:
    """A forward takes less than 5 ms, the passes ran other batches, or the replays or a clock are missing."""
    good, no_clock = _replayed(1.0), _replayed(1.0)
    (launch,) = no_clock.launches
    assert launch.work is not None
    launch.work = msgspec.structs.replace(
        launch.work, ranks=[msgspec.structs.replace(launch.work.ranks[0], replays_ghz=None)]
    )
    others = (
        _replayed(1.0, row_s=0.0099),
        _replayed(1.0, batches=(0, 3)),
        no_clock,
        _worked(1.0, mhz=_FAST, uuids="1", skew=(1.0,), execution="cuda_graphs"),
        _worked(1.0, uuids="1", skew=(1.0,), execution="cuda_graphs"),
    )
    for other in others:
        for sides in ((good, other), (other, good)):
            assert not isinstance(times.device_times(*sides, TimeRule(), in_a_row=True), Timed)
    for row_s in (0.0101, 0.65):
        long = _replayed(1.0, row_s=row_s)
        assert isinstance(times.device_times(long, long, TimeRule(), in_a_row=True), Timed)


def test_the_slope_that_the_clocks_do_not_show_is_an_error_of_wall_time() -> None:
    """The clocks of each report are one value, another one in the candidate: the slope is that of the prior."""
    usual: dict[str, Any] = {"execution": "cuda_graphs", "busy": 0.96, "uuids": "1", "skew": (1.0,), "devices": 1}
    base, head = _worked(1.0, mhz=(1735,) * 3, **usual), _worked(1.0, mhz=(1683,) * 3, **usual)
    for result, mhz in ((base, 1735), (head, 1683)):
        batches = result.launches[0].batches
        batches.latency_s, batches.clock_ghz = [(mhz / 1735) ** -0.95] * BATCHES, [[mhz / 1000] * BATCHES]
    assert _judged(_wall(base, head, in_turn=False, threshold=0.01)).verdict == "OK"


def _launched(level: float, speed: float = 1.0, of_gpu: int = 0) -> CaseResult:
    """Return an eager result whose host takes a multiple of its time for everything; the GPU limits some batches."""
    busy = 0.9 if of_gpu else 0.3
    result = _worked(1.0, 1.0, 1.0, uuids="1", skew=(1.0,), busy=busy, execution="eager")
    for batches in (launch.batches for launch in result.launches):
        batches.launch_s = [0.02 * level * speed] * BATCHES
        batches.latency_s = [0.04] * of_gpu + [1.01 * one for one in batches.launch_s[of_gpu:]]
        batches.reference_s = [0.003 * speed] * BATCHES
    return result


@pytest.mark.parametrize(
    ("slower", "speed", "given", "verdict", "threshold"),
    [
        (1.0, 1.0, {}, "OK", 0.02),
        (1.2, 1.0, {}, "REGRESSED", 0.02),
        (1.2, 1.9, {}, "REGRESSED", 0.02),
        (1.2, 0.5, {}, "REGRESSED", 0.02),
        (0.8, 1.9, {}, "IMPROVED", 0.02),
        (1.0, 1.9, {}, "UNDECIDED", 0.02),
        (1.2, 1.0, {"threshold": 0.3}, "OK", 0.3),
        (1.2, 1.0, {"same_gpus": False}, "REGRESSED", 0.109),
        (1.1, 1.0, {"same_gpus": False}, "UNDECIDED", 0.109),
    ],
)
def test_a_slower_host_is_found_at_equal_speed(
    slower: float, speed: float, given: dict[str, Any], verdict: str, threshold: float
) -> None:
    """At a speed of 1.9 times the error of the slope is added: few launches do not decide equal programs."""
    rule = TimeRule(threshold=given.get("threshold"))
    machines = {"same_gpus": given.get("same_gpus", True), "same_host": True}
    (found,) = times.parts(_launched(1.0), _launched(slower, speed), rule, **machines)
    assert isinstance(found, Timed)
    row = _judged(found)
    assert (found.part, row.metric, row.result) == ("host at equal speed", "time", verdict)
    assert (row.ratio, row.threshold) == pytest.approx((slower, threshold), abs=2e-3)
    assert f"The host took {speed:.2f} times as long" in row.reason


def test_the_deviation_of_a_host_falls_with_the_batches_it_launched() -> None:
    """Of 1,000 batches it is that of the launch."""
    found = []
    for batches in (4, 16, 1000):
        launch = Launch(batches=Batches(launch_s=[1.0] * batches, reference_s=[1.0] * batches))
        *_, prior = noise_regime.at_equal_speed([[launch], [launch]])
        found.append(prior.s0)
    assert found == pytest.approx([0.045, 0.0225, 0.015])


def test_the_error_of_the_slope_stays_with_many_launches() -> None:
    """Hosts of very different speeds decide less, however many launches there are, and on other GPUs as well."""
    rows = []
    for launches in (3, 30):
        sides = _launched(1.0), _launched(1.0, 1.9)
        for result in sides:
            result.launches *= launches // 3
        (found,) = times.parts(*sides, TimeRule(), same_gpus=False, same_host=True)
        assert isinstance(found, Timed)
        assert found.error > 0.05 * math.log(1.9)
        rows.append(_judged(found))
    assert [row.launches_needed for row in rows] == [None, None]
    assert rows[0].threshold is not None
    assert 0.1 < (rows[1].threshold or 0.0) < rows[0].threshold


@pytest.mark.parametrize("side", [0, 1])
def test_a_pause_of_the_host_is_no_change(side: int) -> None:
    """One batch, or one reference, in which the host paused, counts as little as any other one."""
    for name in ("launch_s", "reference_s"):
        sides = _launched(1.0), _launched(1.0)
        for launch in sides[side].launches:
            getattr(launch.batches, name)[1] += 0.1
            launch.batches.latency_s = [one + 1e-4 for one in launch.batches.launch_s]
        (found,) = times.parts(*sides, TimeRule(), same_gpus=True, same_host=True)
        assert isinstance(found, Timed)
        assert _judged(found).ratio == pytest.approx(1.0, abs=1e-6)


def test_a_host_that_the_gpu_waits_for_is_judged_alone() -> None:
    """The GPU limits, forwards wait for it or nothing shows it, or hosts and executions are not of one kind."""
    base, busy = _launched(1.0), _launched(1.2)
    assert not list(times.parts(base, busy, TimeRule(), same_gpus=True, same_host=False))
    waiting, graphs, unknown = (_launched(1.0) for _ in range(3))
    graphs.case = msgspec.structs.replace(graphs.case, execution="cuda_graphs")
    for launch, without in zip(waiting.launches, unknown.launches, strict=True):
        assert launch.work is not None
        (rank,) = launch.work.ranks
        launch.work = msgspec.structs.replace(launch.work, ranks=[msgspec.structs.replace(rank, host_syncs=3)])
        without.work = None
    for other in (waiting, graphs, unknown):
        for sides in ((base, other), (other, base)):
            found = list(times.parts(*sides, TimeRule(), same_gpus=True, same_host=True))
            assert not found, "and there is nothing to promote"
    limited = _launched(1.0, of_gpu=BATCHES), _launched(1.0, of_gpu=BATCHES)
    assert not list(times.parts(*limited, TimeRule(), same_gpus=True, same_host=True))


@pytest.mark.parametrize(
    ("host", "gpu", "verdicts"),
    [(1.0, 1.0, ["OK"] * 2), (1.2, 1.0, ["REGRESSED", "OK"]), (1.0, 1.06, ["OK", "REGRESSED"])],
)
def test_each_batch_is_judged_by_what_limits_it(host: float, gpu: float, verdicts: list[str]) -> None:
    """The GPU limits some in every launch: their time counts, and of the others that of launching them."""
    few = BATCHES // 3
    base, head = _launched(1.0, of_gpu=few), _launched(host, of_gpu=few)
    for launch in head.launches:
        launch.batches.latency_s[:few] = [gpu * one for one in base.launches[0].batches.latency_s[:few]]
    found = list(times.parts(base, head, TimeRule(), same_gpus=True, same_host=True))
    assert [one.part for one in found if isinstance(one, Timed)] == [
        "host at equal speed",
        "batches that the GPU limits",
    ]
    rows = [_judged(one) for one in found if isinstance(one, Timed)]
    assert [row.verdict for row in rows] == verdicts
    assert f" They are {few} of {BATCHES} batches." in rows[1].reason


def test_a_batch_that_another_limit_slows_is_not_judged_by_launching() -> None:
    """The host limits batches of one report that the GPU limits in the other one: launching them shows nothing."""
    few = BATCHES // 3
    base, head = _launched(1.0, of_gpu=few), _launched(1.0, of_gpu=few)
    for launch in head.launches:
        launch.batches.latency_s[few:-1] = [0.03] * (BATCHES - few - 1)
    for sides in ((base, head), (head, base)):
        (found,) = times.parts(*sides, TimeRule(), same_gpus=True, same_host=True)
        assert isinstance(found, Timed)
        assert found.part == "batches that the GPU limits"
        assert list(found.seconds[0]) == pytest.approx([0.04 * few] * 2)
    head = _launched(1.0, of_gpu=BATCHES)
    assert not list(times.parts(_launched(1.0), head, TimeRule(), same_gpus=True, same_host=True))


def test_the_rank_that_became_slowest_decides() -> None:
    """Ranks of equal number are compared; the p is multiplied by the number of ranks."""
    row = _judged(_device(_worked(1.0), _worked(1.0, skew=(1.05, 1.0))))
    assert row.result == "REGRESSED"
    assert row.ratio == pytest.approx(1.05)
    assert "of rank 0 " in row.reason
    alone = _judged(_device(_worked(1.0, uuids="1", skew=(1.0,)), _worked(1.0, uuids="1", skew=(1.05,))))
    assert row.p == pytest.approx(2 * (alone.p or 0.0))
    faster = _judged(_device(_worked(1.0), _worked(1.0, skew=(0.9, 1.0))))
    assert not faster.improved, "an improvement is one of every rank"


def test_on_other_gpus_the_least_slow_rank_decides() -> None:
    """One GPU may be slower than the others of its kind; a slower program is slower on every rank."""
    for mhz in (_FAST, ()):
        for skew, verdict in (((1.05, 1.0), "OK"), ((0.95, 1.0), "OK"), ((1.08, 1.07), "REGRESSED")):
            row = _judged(_device(_worked(1.0, mhz=mhz), _worked(1.0, mhz=mhz, uuids="23", skew=skew)))
            assert (row.result, row.improved) == (verdict, False)
            assert "of rank 1 " in row.reason


def test_device_time_that_cannot_be_compared() -> None:
    """None on a CPU, a phrase where the baseline has none, and a row where the candidate lost it."""
    bare, worked, lost, disturbed = with_launches([1.0]), _worked(1.0), with_launches([1.0]), _worked(1.0)
    assert _device(with_launches([1.0], device="cpu"), with_launches([1.0], device="cpu")) is None
    assert _device(bare, bare) == "neither report has it"
    assert _device(bare, worked) == "only the candidate has it"
    lost.launches[0].why = {"work": "work passes are switched off for this case (--llmgpu-work=off)"}
    make_invalid(disturbed.launches[0], "processes of other programs")
    sending, moved = _worked(1.0), CollectiveWork(collective="peer_copy", calls=8, transfer_s=[0.1], wait_s=[0.0])
    launch = sending.launches[0]
    launch.work = msgspec.structs.replace(known(launch.work), collectives=[moved])
    for head, verdict, words in (
        (lost, "MISSING", "--llmgpu-work=off"),
        (_worked(1.0, batches=(0, 5)), "NOT_COMPARABLE", "other batches, ranks or copies between GPUs"),
        (sending, "NOT_COMPARABLE", "make the newer report the baseline"),
        (disturbed, "UNDECIDED", "processes of other programs"),
    ):
        found = _device(worked, head)
        assert (found.result, found.metric) == (verdict, "device_time")
        assert words in found.reason


def _timed(base: Sequence[float], head: Sequence[float], **fields: Any) -> Timed:
    """Return the times of a case by its launches' log times."""
    defaults: dict[str, Any] = {
        "result": make_result(),
        "metric": "device_time",
        "gated": True,
        "ranks": [Samples(base, head)],
        "seconds": [(1.0, 1.0)],
        "prior": _QUIET,
        "threshold": 0.01,
    }
    return Timed(**{**defaults, **fields})


def test_gated_rows_of_times_are_one_family() -> None:
    """A slowdown that is significant alone is not among a hundred rows; rows that are not gated do not count."""
    one = _timed([0.0], [0.025], prior=Prior(s0=0.006, df0=1000.0))
    for others, gated, verdict in ((0, True, "REGRESSED"), (99, True, "UNDECIDED"), (99, False, "REGRESSED")):
        row = decided([one, *(_timed([0.0], [0.0], gated=gated) for _ in range(others))], 0.99)[0]
        assert row.verdict == verdict
        assert ("among 100 rows" in row.reason) == (verdict == "UNDECIDED")


def _simulated(
    chance: random.Random, regime: Any, n: int, changes: Sequence[float], sd: float | None = None
) -> list[Row]:
    """Return the rows of cases with given changes, measured with launches of a regime.

    Without `sd` the deviation of each machine is drawn from the prior: scaled inverse chi-squared.
    """
    prior = PRIORS[regime]
    cases = []
    for change in changes:
        noise = sd or prior.s0 * math.sqrt(prior.df0 / chance.gammavariate(prior.df0 / 2, 2.0))
        samples = ([chance.gauss(0, noise) for _ in range(n)], [chance.gauss(change, noise) for _ in range(n)])
        cases.append(_timed(*samples, prior=prior, threshold=0.02))
    return decided(cases, 0.99)


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("launches", [1, 3])
def test_unchanged_programs_have_no_regression(regime: str, launches: int) -> None:
    """At most 1 % of the reports of 21 cases have one, if machines differ as the prior states; 400 reports each."""
    chance = random.Random(f"{regime} {launches}")
    reports = [_simulated(chance, regime, launches, [0.0] * 21) for _ in range(400)]
    assert sum(any(row.result == "REGRESSED" for row in report) for report in reports) <= 9


@pytest.mark.slow
@pytest.mark.parametrize(("regime", "launches"), [("fixed_clock", 1), ("replayed", 2), ("eager_device", 5)])
def test_the_smallest_slowdown_of_one_case_of_21_is_found(regime: Any, launches: int) -> None:
    """In about 95 % of the reports, if the machine has the deviation of the prior; half of it is found rarely."""
    chance, prior = random.Random(f"{regime} {launches}"), PRIORS[regime]
    least = times.smallest_seen(prior, launches, threshold=0.02, family=21)
    for slowdown, hits in ((least, range(273, 301)), (least / 2, range(150))):
        changes = [math.log1p(slowdown), *[0.0] * 20]
        found = [_simulated(chance, regime, launches, changes, prior.s0)[0] for _ in range(300)]
        assert sum(row.result == "REGRESSED" for row in found) in hits


def _refused(base: CaseResult, head: CaseResult, verdict: str) -> Any:
    found: Any = times.comparable(base, head)
    assert found.verdict == verdict
    return found


def test_batches_of_another_plan_are_not_compared() -> None:
    """Other items or shapes, a plan that is not recorded, or batches that are missing."""
    base, head = with_launches([1.0]), with_launches([1.0, 1.0])
    for plan, words in (("0" * 64, "they differ"), (None, "a launch lacks plan_sha256")):
        head.launches[1].plan_sha256 = plan
        assert words in _refused(base, head, "NOT_COMPARABLE").reason
    head.case = msgspec.structs.replace(head.case, execution="cuda_graphs")
    words = "The forwards ran as CUDA graphs, the baseline's eagerly"
    assert words in _refused(base, head, "NOT_COMPARABLE").reason
    short = with_latencies([[1.0] * (BATCHES - 1)])
    assert "one launch has 19, another 20" in _refused(base, short, "NOT_COMPARABLE").reason


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False)])
def test_times_of_other_threads_are_not_compared(device: str, refused: bool) -> None:
    """On a CPU the number of threads decides the time; a GPU's rank starts kernels with one."""
    base, head = (with_launches([1.0], device=device) for _ in range(2))
    for result, threads in ((base, 2), (head, 1)):
        result.launches[0].host = HostUse(wall_s=1.0, threads=[threads], cpu_s=[1.0], waited_s=[0.0])
    assert isinstance(times.comparable(base, head), Row) is refused
    if refused:
        assert "2 in the baseline, 1 in the candidate" in _refused(base, head, "NOT_COMPARABLE").reason
    head.launches[0].host = None
    assert not isinstance(times.comparable(base, head), Row)


def test_a_batch_that_took_no_time_is_undecided() -> None:
    """Its logarithm is not finite."""
    _refused(with_launches([1.0]), with_launches([0.0]), "UNDECIDED")


@pytest.mark.parametrize(
    ("kinds", "step"),
    [(("processes", "memory", "cpu"), "End the other"), (("lost", "ecc", "xid"), "Read the driver's")],
)
def test_the_next_step_follows_the_disturbance(kinds: Sequence[str], step: str) -> None:
    """Another program is to be ended, a fault to be read about: the step also names the report."""
    base, head = with_launches([1.0]), with_launches([1.0])
    for kind in kinds:
        make_invalid(head.launches[0], f"{disturbances.TITLES[kind]}: GPU 0")
        next_step = _refused(base, head, "UNDECIDED").next_step
        assert (next_step[: len(step)], next_step.rpartition(". ")[2]) == (step, "Then measure the candidate again.")


def test_the_launches_needed_are_the_fewest_that_show_a_slowdown() -> None:
    """One launch fewer does not show it, more than 20 are not needed but useless; t is that of scipy."""
    assert t_quantile(10, 1 - 0.01 / 21) == pytest.approx(4.618766)
    eager = PRIORS["eager_device"]
    needed = times.launches_needed(eager, threshold=0.04, family=2) or 0
    fewer, enough = (times.smallest_seen(eager, n, threshold=0.04, family=2) for n in (needed - 1, needed))
    assert enough <= 0.06 < fewer
    assert times.launches_needed(_QUIET, threshold=0.01, family=21) == 1
    assert times.launches_needed(Prior(s0=1.0, df0=2.0), threshold=0.04) is None
