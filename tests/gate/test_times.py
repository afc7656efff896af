from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.report_factory import make_result, make_work
from support.verdict_factory import BATCHES, make_invalid, with_latencies, with_launches

from pytest_llmgpu.analysis.noise_regime import REGIMES, noisiest
from pytest_llmgpu.gate.policy import AmountRule, TimeRule
from pytest_llmgpu.gate.times import (
    DAY_SD,
    PRIORS,
    Deviation,
    Prior,
    Refusal,
    Samples,
    Sides,
    Timed,
    comparable,
    critical_t,
    days_apart,
    deviation,
    device_times,
    launches_needed,
    prior_of,
    prior_of_case,
    rows,
    smallest_seen,
    wall_times,
)
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.result import CaseResult, HostUse
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.report.work import Work

_QUIET = Prior(s0=0.001, df0=1000.0, source="test")
_MEMORY = PRIORS["device_memory"]


def _wall(base: CaseResult, head: CaseResult, prior: Prior = _QUIET, **given: Any) -> Timed | Row | str:
    rule = TimeRule(**{name: given.pop(name) for name in ("gate", "threshold", "absolute_s") if name in given})
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
    return device_times(base, head, sides, AmountRule(threshold=0.01), prior=prior, regime=regime, other_day=other_day)


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
        assert _judged(base, head, in_turn=in_turn, threshold=0.025).threshold == pytest.approx(0.025)
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
    back = _judged(scattered, steady, Prior(s0=0.001, df0=1e6, source="test"), threshold=0.9)
    assert back.verdict == "UNDECIDED"
    assert "factor of 3.0" in back.reason
    spread = with_launches([1.0, 2.5]), with_launches([1.0, 2.5])
    assert _judged(*spread, Prior(s0=1e-4, df0=1e6, source="test"), regime="eager_host", threshold=0.9).verdict == "OK"


def test_disturbed_launches_are_left_out() -> None:
    """The reason counts those that are used; without any the row is UNDECIDED."""
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
    assert "Slowdowns cannot be judged: the baseline is from other boards" in row.reason
    assert "threshold" not in row.reason
    assert "these boards" in row.next_step


def test_a_time_of_another_machine_that_is_ok_has_a_next_step() -> None:
    """The row is undecided where its launches would not have shown a slowdown by a factor of 1.5."""
    row = _judged(with_launches([1.0]), with_launches([1.01]), machine_sd=0.05)
    assert row.result == "OK"
    assert "threshold" in row.reason
    assert "these boards" in row.next_step


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
        assert "measured spread between boards" in row.reason


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


def _timed(base: Sequence[float], head: Sequence[float], **fields: Any) -> Timed:
    """Return the times of a case by its launches' log times."""
    defaults: dict[str, Any] = {
        "result": make_result(),
        "metric": "device_time",
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
    one = _timed([0.0], [0.025], prior=Prior(s0=0.006, df0=1000.0, source="test"))
    others = [_timed([0.0], [0.0]) for _ in range(99)]
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
    for change in changes:
        noise = _drawn(chance, prior) if sd is None else sd
        samples = ([chance.gauss(0, noise) for _ in range(n)], [chance.gauss(change, noise) for _ in range(n)])
        threshold = 0.01 if regime.startswith("device") else 0.02
        cases.append(_timed(*samples, prior=prior, threshold=threshold, spread=1e9))
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
    """With so much noise the row is undecided, and the next step needs their number."""
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


_HELD = "throttled by power or heat: GPU 0 for 60.0 % of the time"


def _compared(base: CaseResult, head: CaseResult) -> Sides:
    found = comparable(base, head)
    assert not isinstance(found, Refusal), found
    return found


def _counts(base: CaseResult, head: CaseResult) -> tuple[int, int]:
    then, now = _compared(base, head)
    return len(then), len(now)


def _refused(base: CaseResult, head: CaseResult) -> Refusal:
    found = comparable(base, head)
    assert isinstance(found, Refusal), found
    return found


def test_batches_of_another_plan_are_not_compared() -> None:
    """Other items or shapes, a plan that nobody wrote down, or batches that are missing."""
    for change, words in (
        ({"plan_sha256": "0" * 64}, "they differ"),
        ({"plan_sha256": None}, "does not record them"),
    ):
        head = with_launches([1.0, 1.0])
        head.launches[1].plan_sha256 = change["plan_sha256"]
        row = _refused(with_launches([1.0]), head)
        assert row.verdict == "NOT_COMPARABLE"
        assert words in row.reason
    head.case = msgspec.structs.replace(head.case, execution="cuda_graphs")
    row = _refused(with_launches([1.0]), head)
    assert "The forwards ran as CUDA graphs, the baseline's eagerly" in row.reason
    short = with_latencies([[1.0] * (BATCHES - 1)])
    row = _refused(with_launches([1.0]), short)
    assert "one launch has 19, another 20" in row.reason


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False)])
def test_times_of_other_threads_are_not_compared(device: str, refused: bool) -> None:
    """On a CPU the number of threads decides the time; a GPU's rank starts kernels with one."""
    base, head = (with_launches([1.0], device=device) for _ in range(2))
    for result, threads in ((base, 2), (head, 1)):
        result.launches[0].host = HostUse(wall_s=1.0, threads=[threads], cpu_s=[1.0], waited_s=[0.0])
    found = comparable(base, head)
    assert isinstance(found, Refusal) is refused
    if isinstance(found, Refusal):
        assert found.verdict == "NOT_COMPARABLE"
        assert "2 in the baseline, 1 in the candidate" in found.reason
    head.launches[0].host = None
    assert not isinstance(comparable(base, head), Refusal)


def test_a_launch_with_evidence_against_it_does_not_count() -> None:
    """The others do; where none is left the time is UNDECIDED, with the evidence, on either side."""
    head = with_launches([1.0, 5.0])
    make_invalid(head.launches[1], "GPU 0 was throttled for 3 s.")
    assert _counts(with_launches([1.0]), head) == (1, 1)
    make_invalid(head.launches[0], "GPU 0 was throttled for 2 s.")
    for sides in ((with_launches([1.0]), head), (head, with_launches([1.0]))):
        found = _refused(*sides)
        assert found.verdict == "UNDECIDED"
        assert found.reason.endswith("were disturbed: GPU 0 was throttled for 2 s.")
    found = _refused(with_launches([1.0]), with_launches([0.0]))
    assert found.verdict == "UNDECIDED"


def test_a_time_that_is_gone_is_missing() -> None:
    """A case that completed without a timed batch. Where the baseline has none, nothing can be compared: no pass."""
    found = _refused(with_launches([1.0]), with_launches([]))
    assert found.verdict == "MISSING"
    found = _refused(with_launches([]), with_launches([1.0]))
    assert (found.verdict, found.next_step) == ("UNDECIDED", "Measure the baseline again.")


@pytest.mark.parametrize("kind", disturbances.TITLES)
def test_the_next_step_follows_the_disturbance(kind: disturbances.Kind) -> None:
    """Another program is to be ended, a throttled GPU to be cooled: the step also names the report."""
    head = with_launches([1.0])
    make_invalid(head.launches[0], f"{disturbances.TITLES[kind]}: GPU 0")
    if kind in ("throttled", "clock"):
        found = _refused(with_launches([1.0]), head)
        assert found.next_step.startswith(disturbances.COOLER)
    else:
        found = _refused(with_launches([1.0]), head)
        assert found.next_step.startswith(
            "End the other" if kind in ("processes", "memory", "cpu") else "Read the driver's"
        )
        assert found.next_step.endswith("Then measure the candidate again.")


def _held(*launches: tuple[float, bool]) -> CaseResult:
    """Return a result with launches of these levels, of which some were held down."""
    found = with_launches([level for level, _ in launches])
    for launch, (_, held) in zip(found.launches, launches, strict=True):
        make_invalid(launch, *[_HELD] * held)
    return found


def test_a_clock_that_hardly_fell_is_no_reason_to_leave_a_launch_out() -> None:
    """Only one of two met its limit: by 1 % it still compares, by more it does not, whatever the threshold."""
    free, held, slow = with_launches([1.0]), with_launches([1.01]), with_launches([1.08])
    make_invalid(free.launches[0], mhz=1980)
    make_invalid(held.launches[0], _HELD, mhz=1961)
    make_invalid(slow.launches[0], _HELD, mhz=1955)
    assert _counts(free, held) == _counts(held, free) == (1, 1)
    unknown = with_launches([1.0])
    for sides in ((free, slow), (slow, free), (held, unknown)):
        found = _refused(*sides)
        assert found.verdict == "UNDECIDED"
    assert _counts(slow, held) == (1, 1), "both met their limit, whatever their clocks"


@pytest.mark.parametrize(
    ("base", "head", "counts"),
    [
        ([0, 0, 0, 0, 0], [0, 1, 1, 1, 1], (5, 1)),
        ([0, 0, 1], [0, 1, 1, 1, 1], (2, 1)),
        ([1, 1], [1], (2, 1)),
        ([1, 1, 0], [0, 1, 1, 1], (3, 4)),
        ([0, 1], [0, 1, 0, 1], (1, 2)),
        ([1, 1], [0], "baseline"),
        ([0, 1], [1, 1], "candidate"),
    ],
)
def test_throttled_launches_are_left_out_unless_they_are_most_of_both(
    base: list[int], head: list[int], counts: tuple[int, int] | str
) -> None:
    """A hot GPU is no slowdown; where both are mostly throttled, that is how this machine runs."""
    sides = [_held(*((1.08 if held else 1.0, bool(held)) for held in side)) for side in (base, head)]
    if isinstance(counts, str):
        found = _refused(*sides)
        assert (found.verdict, found.reason) == (
            "UNDECIDED",
            f"Power or heat throttled only the {counts} (`profile.invalid`).",
        )
        assert found.next_step.startswith(disturbances.COOLER)
    else:
        assert _counts(*sides) == counts


_PRIOR = Prior(s0=0.003, df0=8.0, source="test")


def test_every_regime_has_a_prior_with_its_source() -> None:
    """The policy has the same values, and a part of them can be replaced."""
    assert set(PRIORS) == set(REGIMES)
    for regime, prior in PRIORS.items():
        assert prior.s0 > 0
        assert prior.df0 > 0
        assert prior.source
        assert prior_of(regime) is prior


def test_launches_and_prior_are_weighted_by_their_degrees_of_freedom() -> None:
    """s² = (df0 s0² + df s²) / (df0 + df); without degrees of freedom the prior is unchanged."""
    updated = _PRIOR.updated(Deviation(sd=0.01, degrees=4))
    assert updated.s0 == pytest.approx(math.sqrt((8 * 9e-6 + 4 * 1e-4) / 12))
    assert updated.df0 == 12
    for nothing in (None, Deviation(sd=0.0, degrees=0)):
        assert _PRIOR.updated(nothing) is _PRIOR


def test_the_deviation_is_within_the_reports() -> None:
    """A difference between two reports is their change, not their noise."""
    one, other = [1.0, 1.2, 1.1], [5.0, 5.4]
    found = deviation([one, other])
    squares = 2 * statistics.variance(one) + statistics.variance(other)
    assert found.sd == pytest.approx(math.sqrt(squares / 3))
    assert found.degrees == 3
    assert deviation([[1.0], [2.0]]) == Deviation(sd=0.0, degrees=0)


@pytest.mark.parametrize(
    ("degrees", "family", "t"), [(10, 1, 2.763769), (10, 21, 4.6188), (2.5, 1, 5.4), (1000, 1, 2.33)]
)
def test_the_first_critical_value(degrees: float, family: int, t: float) -> None:
    """It is the quantile of Student's t at 1 - 0.01 / family."""
    assert critical_t(degrees, family, 0.99) == pytest.approx(t, rel=0.02)
    stats = pytest.importorskip("scipy.stats")
    assert critical_t(degrees, family, 0.99) == pytest.approx(stats.t.ppf(1 - 0.01 / family, degrees), rel=1e-6)


@pytest.mark.parametrize("launches", [(1, 1), (3, 3), (2, 5)])
@pytest.mark.parametrize("threshold", [0.01, 0.04])
def test_the_smallest_slowdown_is_seen_with_its_probability(launches: tuple[int, int], threshold: float) -> None:
    """In a simulation with the deviation of the prior it is found in 95 % of the comparisons, half of it rarely."""
    n_base, n_head = launches
    least = smallest_seen(_PRIOR, n_base=n_base, n_head=n_head, threshold=threshold, family=21)
    chance = random.Random(5)

    def found(slowdown: float) -> float:
        hits = 0
        for _ in range(600):
            base = [chance.gauss(0, _PRIOR.s0) for _ in range(n_base)]
            head = [chance.gauss(math.log1p(slowdown), _PRIOR.s0) for _ in range(n_head)]
            noise = _PRIOR.updated(deviation([base, head]))
            change = statistics.fmean(head) - statistics.fmean(base)
            error = noise.s0 * math.sqrt(1 / n_base + 1 / n_head)
            significant = change / error >= critical_t(noise.df0, 21, 0.99)
            hits += significant and change > math.log1p(threshold)
        return hits / 600

    assert found(least) >= 0.93
    assert found(least / 2) < 0.5


def test_the_launches_needed_are_the_fewest_that_show_a_slowdown() -> None:
    """One launch fewer does not show it, and a slowdown up to the threshold is never shown."""
    needed = launches_needed(PRIORS["eager_device"], slowdown=0.05, threshold=0.04, family=21)
    assert needed is not None
    rounded = msgspec.structs.replace(PRIORS["eager_device"])
    seen = [smallest_seen(rounded, n_base=n, n_head=n, threshold=0.04, family=21) for n in (needed - 1, needed)]
    assert seen[1] <= 0.05 < seen[0]
    assert launches_needed(PRIORS["device_memory"], slowdown=0.02, threshold=0.01, family=21) == 1
    assert launches_needed(PRIORS["device_memory"], slowdown=0.01, threshold=0.01) is None
    assert launches_needed(Prior(s0=1.0, df0=2.0, source="test"), slowdown=0.05, threshold=0.04) is None


def test_fewer_forwards_have_more_noise() -> None:
    """The deviation of a mean of forwards falls with the square root of their number, down to that of 200."""
    compute = PRIORS["device_compute"].s0
    assert prior_of("device_compute", forwards=24).s0 == pytest.approx(compute)
    assert prior_of("device_compute", forwards=6).s0 == pytest.approx(2 * compute)
    assert prior_of("device_compute", forwards=10**6) == prior_of("device_compute", forwards=200)


def test_the_prior_of_a_case_is_that_of_its_noisier_report() -> None:
    """Fewer forwards in one of two reports, or an eager execution, count for both."""
    few, many = make_result(1.0, execution="cuda_graphs"), make_result(1.0, execution="cuda_graphs")
    few.launches[0].work = make_work(batches=[0, 2], passes=3)
    many.launches[0].work = make_work(batches=[0, 2], passes=12)
    assert prior_of_case(noisiest("device_time", few, many), few, many) == prior_of("device_compute", forwards=6)
    timed = len(few.launches[0].batches.latency_s)
    assert prior_of_case(noisiest("time", few, many), few, many) == prior_of("replayed", idle=1 - 0.67, forwards=timed)
    eager = make_result(1.0)
    assert prior_of_case(noisiest("time", many, eager), many, eager).s0 == PRIORS["eager_host"].s0


def test_replayed_graphs_have_the_noise_of_the_host_in_their_idle_time() -> None:
    """The noise of the host counts with the fraction of the time in which the GPU waits for it."""
    replayed, host = PRIORS["replayed"].s0, PRIORS["eager_host"].s0
    assert prior_of("replayed", idle=0.15).s0 == pytest.approx(math.hypot(replayed, 0.15 * host))
    assert prior_of("device_memory", idle=0.15) == PRIORS["device_memory"]
