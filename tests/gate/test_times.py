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
from support.report_factory import make_result, make_work
from support.verdict_factory import BATCHES, make_invalid, with_latencies, with_launches

from pytest_llmgpu.analysis import noise_regime
from pytest_llmgpu.analysis.noise_regime import PRIORS, REGIMES, Prior, deviation, prior_of_time
from pytest_llmgpu.gate import fixed_clock
from pytest_llmgpu.gate.fixed_clock import Pass
from pytest_llmgpu.gate.policy import AmountRule, TimeRule
from pytest_llmgpu.gate.times import (
    Refusal,
    Samples,
    Timed,
    comparable,
    critical_t,
    device_times,
    launches_needed,
    rows,
    smallest_seen,
    wall_times,
)
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.result import CaseResult, HostUse
from pytest_llmgpu.report.verdicts import Row

_QUIET = Prior(s0=0.001, df0=1000.0, source="test")
_CLOCK = PRIORS["fixed_clock"]


def _wall(base: CaseResult, head: CaseResult, prior: Prior = _QUIET, **given: Any) -> Timed | Row | str:
    rule = TimeRule(**{name: given.pop(name) for name in ("gate", "threshold", "absolute_s") if name in given})
    fields: dict[str, Any] = {"in_turn": True, "same_gpus": True, **given}
    with patch.object(noise_regime, "PRIORS", dict.fromkeys(REGIMES, prior)):
        return wall_times(base, head, comparable(base, head), rule, **fields)


def _judged(base: CaseResult, head: CaseResult, prior: Prior = _QUIET, note: str = "", **given: Any) -> Row:
    found = _wall(base, head, prior, **given)
    assert isinstance(found, Timed), found
    return rows([found], 0.99, note)[0]


def _worked(
    *launches: float,
    uuids: Sequence[str] = "01",
    skew: Sequence[float] = (1.0, 1.0),
    batches: Sequence[int] = (0, 2),
) -> CaseResult:
    """Return a result whose ranks took half a second in the kernels, times the level of the launch and the skew."""
    result = with_launches([1.0] * len(launches))
    for launch, level in zip(result.launches, launches, strict=True):
        passes_s = [[0.5 * level * factor * wobble for wobble in (0.99, 1.0, 1.5)] for factor in skew]
        ranks = [
            msgspec.structs.replace(rank, uuids=[uuid], device_time_s=times_s)
            for rank, uuid, times_s in zip(make_work(len(uuids)).ranks, uuids, passes_s, strict=True)
        ]
        launch.work = msgspec.structs.replace(make_work(), batches=list(batches), ranks=ranks)
    return result


def _device(base: CaseResult, head: CaseResult) -> Timed | Row | str | None:
    return device_times(base, head, comparable(base, head), AmountRule(threshold=0.01))


def _device_row(base: CaseResult, head: CaseResult) -> Row:
    found = _device(base, head)
    assert isinstance(found, Timed), found
    return rows([msgspec.structs.replace(found, prior=_QUIET)], 0.99, "")[0]


@pytest.mark.parametrize(
    ("slower", "given", "verdict", "threshold"),
    [
        (1.06, {}, "REGRESSED", 0.02),
        (1.021, {}, "REGRESSED", 0.02),
        (1.019, {}, "OK", 0.02),
        (0.99, {}, "OK", 0.02),
        (0.94, {}, "IMPROVED", 0.02),
        (1.03, {"in_turn": False}, "OK", 0.04),
        (1.03, {"in_turn": False, "threshold": 0.025}, "REGRESSED", 0.025),
        (1.03, {"threshold": 0.025}, "REGRESSED", 0.025),
        (1.03, {"absolute_s": 21}, "OK", 0.1),
    ],
)
def test_quiet_launches_are_decided_at_the_threshold(
    slower: float, given: dict[str, Any], verdict: str, threshold: float
) -> None:
    """One launch of 210 s suffices. 2 % in turn, 4 % against a stored baseline, unless the policy has one."""
    row = _judged(with_launches([1.0]), with_launches([slower]), **given)
    assert (row.result, row.n) == (verdict, 1)
    assert (row.ratio, row.threshold) == pytest.approx((slower, threshold))


def test_the_figures_of_a_row_are_those_of_the_moderated_test() -> None:
    """Ratio, interval, p and smallest slowdown are computed from log times by the formula, with scipy's t."""
    stats = pytest.importorskip("scipy.stats")
    base, head, prior = [1.0, 1.02, 0.99], [1.06, 1.05], Prior(s0=0.01, df0=5.0, source="test")
    row = _judged(with_launches(base), with_launches(head), prior)
    then, now = ([math.log(one) for one in side] for side in (base, head))
    change = statistics.fmean(now) - statistics.fmean(then)
    variance = (5 * 1e-4 + 2 * statistics.variance(then) + statistics.variance(now)) / 8
    error = math.sqrt(variance * (1 / 3 + 1 / 2))
    half = stats.t.ppf(0.95, 8) * error
    assert (row.ratio, row.low, row.high) == pytest.approx(tuple(map(math.exp, (change, change - half, change + half))))
    assert row.p == pytest.approx(stats.t.sf(change / error, 8))
    shown = max(math.log1p(0.02), stats.t.ppf(0.99, 8) * error)
    assert row.smallest_seen == pytest.approx(math.expm1(shown + stats.norm.ppf(0.95) * error))
    updated = msgspec.structs.replace(prior, s0=math.sqrt(variance))
    assert row.smallest_seen == pytest.approx(smallest_seen(updated, n_base=3, n_head=2, threshold=0.02))


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "UNDECIDED"), (1.05, "UNDECIDED"), (0.97, "OK")])
def test_noise_is_not_enough_data(slower: float, verdict: str) -> None:
    """Equal times and a change within the noise are undecided; the launches needed decide, also where OK is chance."""
    noisy = Prior(s0=0.02, df0=1000.0, source="test")
    row = _judged(with_launches([1.0]), with_launches([slower]), noisy)
    assert row.result == verdict
    assert row.smallest_seen == pytest.approx(0.13, abs=0.04)
    assert (f": {row.launches_needed}, now 1." in row.reason) == (verdict == "UNDECIDED")
    enough = with_launches([1.0] * (row.launches_needed or 0))
    decided = _judged(enough, enough, noisy)
    assert (decided.result, decided.n) == ("OK", row.launches_needed)
    assert 0.02 < (decided.smallest_seen or 1.0) < 0.041


def test_a_regression_reads_in_two_lines(prose: Prose) -> None:
    """The first has the change, interval, threshold and seconds, the second what else changed."""
    row = _judged(with_launches([1.0]), with_launches([1.05]), note="Also changed: torch 2.6 -> 2.7.")
    assert prose == row.reason
    assert _judged(with_launches([1.0]), with_launches([1.0]), note="Also changed: x.").reason.count("\n") == 0


def test_launches_that_scatter_are_never_ok() -> None:
    """Two of five launches three times as slow; eager forwards that wait for the host scatter by nature."""
    precise = Prior(s0=1e-4, df0=1e6, source="test")
    back = _judged(with_launches([1.0, 1.0, 1.0, 3.0, 3.0]), with_launches([1.0] * 5), precise, threshold=0.9)
    assert back.verdict == "UNDECIDED"
    assert "factor of 3.0" in back.reason
    for execution, verdict in (("cuda_graphs", "UNDECIDED"), ("eager", "OK")):
        spread = with_launches([1.0, 2.5], execution=execution)
        assert _judged(spread, spread, precise, threshold=0.9).verdict == verdict


def test_disturbed_launches_are_left_out() -> None:
    """The reason counts those that are used; without any on either side the row is UNDECIDED and has the cause."""
    good, head = with_launches([1.0]), with_launches([1.0, 5.0])
    make_invalid(head.launches[1], "GPU 0 was throttled for 3 s.")
    row = _judged(good, head)
    assert (row.result, row.ratio) == ("OK", 1.0)
    assert "1 of 2 launches of the candidate are used" in row.reason
    make_invalid(head.launches[0], "GPU 0 was throttled for 2 s.")
    for sides in ((good, head), (head, good)):
        found = _wall(*sides, gate=False)
        assert isinstance(found, Row)
        assert (found.verdict, found.metric, found.gated) == ("UNDECIDED", "time", False)
        assert found.reason.endswith("were disturbed: GPU 0 was throttled for 2 s.")


@pytest.mark.parametrize(
    ("slower", "s0", "verdict", "threshold"),
    [
        (1.01, 0.006, "OK", 0.042),
        (1.03, 0.006, "UNDECIDED", 0.042),
        (1.06, 0.006, "REGRESSED", 0.042),
        (1.3, 0.3, "UNDECIDED", 6.2),
    ],
)
def test_wall_time_of_another_machine_has_a_larger_threshold(
    slower: float, s0: float, verdict: str, threshold: float
) -> None:
    """It has 2.33 √2 of their deviation; noise of launches makes no OK, and a row that is not worse has a next step."""
    prior = Prior(s0=s0, df0=1000.0, source="test")
    row = _judged(with_launches([1.0]), with_launches([slower]), prior, same_gpus=False)
    assert row.result == verdict
    assert row.threshold == pytest.approx(threshold, rel=0.1)
    can_be_judged = threshold < 1
    assert ("threshold" in row.reason) == can_be_judged
    assert ("Slowdowns cannot be judged: the baseline is from other GPUs" in row.reason) != can_be_judged
    assert ("these GPUs" in row.next_step) == (verdict != "REGRESSED")


def test_the_sum_of_the_batches_is_judged() -> None:
    """Three slow batches of one launch count, or one in every launch; a single one was a disturbance, and is stated."""
    once, often = [[1.0] * 10 for _ in range(3)], [[1.0] * 10 for _ in range(3)]
    once[1][4] = 30.0
    often[1][2:5] = [30.0] * 3
    always = [[1.0] * 9 + [30.0] for _ in range(3)]
    base = with_latencies([[1.0] * 10] * 3)
    row = _judged(base, with_latencies(once))
    assert (row.result, row.ratio) == ("OK", 1.0)
    assert "1 time of more than twice the usual one left out" in row.reason
    for latencies, total_s in ((often, math.prod([10, 97, 10]) ** (1 / 3)), (always, 39.0)):
        row = _judged(base, with_latencies(latencies), Prior(s0=0.01, df0=1e6, source="test"))
        assert row.head == pytest.approx(total_s)


def _passes(level: float, clock_ghz: float, slope: float = -0.8, range_: float = 0.04) -> list[Pass]:
    """Return four passes whose clock has a range, and whose time follows it."""
    clocks = [clock_ghz * (1 - range_ * (number % 2)) for number in range(4)]
    return [Pass(math.log(level) + slope * math.log(clock / 1.7), math.log(clock)) for clock in clocks]


@pytest.mark.parametrize(("slope", "range_"), [(-0.8, 0.04), (-0.2, 0.04), (-0.5, 0.0)])
def test_times_at_a_fixed_clock_have_the_change_of_the_program_alone(slope: float, range_: float) -> None:
    """Whatever the clocks of both reports; without a range of clocks the error is that of the expected slope."""
    base = [_passes(1.0, 1.75, slope, range_)]
    found = fixed_clock.fit(base, [_passes(1.01, 1.6, slope, range_)])
    assert found.change == pytest.approx(math.log(1.01), abs=5e-4)
    assert found.slope == pytest.approx(slope, abs=0.01)
    assert (found.sd > 0.01) == (range_ == 0.0)
    assert fixed_clock.fit(base, base).sd < 0.001


def test_extreme_times_give_finite_ratios() -> None:
    """Ratios beyond the range of a float are limited."""
    base, head = (with_latencies([[each] * BATCHES] * 2) for each in (1e-300, 1e300))
    row = _judged(base, head)
    assert row.result == "REGRESSED"
    assert 1e300 < (row.ratio or math.inf) < math.inf


@pytest.mark.parametrize(
    ("slower", "uuids", "verdict", "threshold"),
    [
        (1.005, "01", "OK", 0.01),
        (1.02, "01", "REGRESSED", 0.01),
        (1.02, "89", "OK", 0.0245),
        (1.05, "89", "REGRESSED", 0.0245),
    ],
)
def test_device_time_has_a_larger_threshold_on_other_gpus(
    slower: float, uuids: str, verdict: str, threshold: float
) -> None:
    """The middle of the passes is compared: one pass that took half as long again does not count."""
    row = _device_row(_worked(1.0, uuids="01"), _worked(slower, uuids=uuids))
    assert (row.result, row.metric) == (verdict, "device_time")
    assert row.threshold == pytest.approx(threshold, abs=0.002 * (uuids == "89"))
    assert (row.ratio, (row.head or 0) / (row.base or 1)) == pytest.approx((slower, slower), rel=2e-3)
    assert ("spread between GPUs" in row.reason) == (uuids == "89")


def test_the_rank_that_became_slowest_decides() -> None:
    """Ranks with equal GPUs are compared, whatever their numbers; the p is multiplied by the number of ranks."""
    row = _device_row(_worked(1.0), _worked(1.0, uuids="10", skew=(1.03, 1.0)))
    assert row.result == "REGRESSED"
    assert row.ratio == pytest.approx(1.03, rel=1e-3)
    assert "of rank 0 " in row.reason
    alone = _device_row(_worked(1.0, uuids="1", skew=(1.0,)), _worked(1.0, uuids="1", skew=(1.03,)))
    assert row.p == pytest.approx(2 * (alone.p or 0.0), rel=0.05)
    faster = _device_row(_worked(1.0), _worked(1.0, skew=(0.9, 1.0)))
    assert faster.verdict == "OK", "an improvement is one of every rank"


def test_device_time_that_cannot_be_compared() -> None:
    """None on a CPU, a phrase where the baseline has none, and a row where the candidate lost it."""
    bare, worked, lost, disturbed = with_launches([1.0]), _worked(1.0), with_launches([1.0]), _worked(1.0)
    assert _device(with_launches([1.0], device="cpu"), with_launches([1.0], device="cpu")) is None
    assert _device(bare, bare) == "neither report has it"
    assert _device(bare, worked) == "only the candidate has it"
    lost.launches[0].why = {"work": "work passes are switched off for this case (--llmgpu-work=off)"}
    make_invalid(disturbed.launches[0], "processes of other programs")
    for head, verdict, words in (
        (lost, "MISSING", "--llmgpu-work=off"),
        (_worked(1.0, batches=(0, 5)), "NOT_COMPARABLE", "other batches or ranks"),
        (disturbed, "UNDECIDED", "processes of other programs"),
    ):
        found = _device(worked, head)
        assert isinstance(found, Row)
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
        "prior": _CLOCK,
        "threshold": 0.01,
        "spread": 2.0,
    }
    return Timed(**{**defaults, **fields})


def test_gated_rows_of_times_are_one_family() -> None:
    """A slowdown that is significant alone is not among a hundred rows; rows that are not gated do not count."""
    one = _timed([0.0], [0.025], prior=Prior(s0=0.006, df0=1000.0, source="test"))
    for others, gated, verdict in ((0, True, "REGRESSED"), (99, True, "UNDECIDED"), (99, False, "REGRESSED")):
        row = rows([one, *(_timed([0.0], [0.0], gated=gated) for _ in range(others))], 0.99, "")[0]
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
        cases.append(_timed(*samples, prior=prior, threshold=0.02, spread=1e9))
    return rows(cases, 0.99, "")


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
    least = smallest_seen(prior, n_base=launches, n_head=launches, threshold=0.02, family=21)
    for slowdown, hits in ((least, range(273, 301)), (least / 2, range(150))):
        changes = [math.log1p(slowdown), *[0.0] * 20]
        found = [_simulated(chance, regime, launches, changes, prior.s0)[0] for _ in range(300)]
        assert sum(row.result == "REGRESSED" for row in found) in hits


def _counts(base: CaseResult, head: CaseResult) -> tuple[int, int]:
    found = comparable(base, head)
    assert not isinstance(found, Refusal), found
    return len(found[0]), len(found[1])


def _refused(base: CaseResult, head: CaseResult, verdict: str) -> Refusal:
    found = comparable(base, head)
    assert isinstance(found, Refusal), found
    assert found.verdict == verdict
    return found


def test_batches_of_another_plan_are_not_compared() -> None:
    """Other items or shapes, a plan that is not recorded, or batches that are missing."""
    base, head = with_launches([1.0]), with_launches([1.0, 1.0])
    for plan, words in (("0" * 64, "they differ"), (None, "does not record them")):
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
    assert isinstance(comparable(base, head), Refusal) is refused
    if refused:
        assert "2 in the baseline, 1 in the candidate" in _refused(base, head, "NOT_COMPARABLE").reason
    head.launches[0].host = None
    assert _counts(base, head) == (1, 1)


def test_a_time_that_is_gone_is_missing() -> None:
    """A case that completed without a timed batch. Where the baseline has none, nothing can be compared: no pass."""
    timed, bare = with_launches([1.0]), with_launches([])
    _refused(timed, bare, "MISSING")
    assert _refused(bare, timed, "UNDECIDED").next_step == "Measure the baseline again."
    _refused(timed, with_launches([0.0]), "UNDECIDED")


@pytest.mark.parametrize(
    ("kinds", "step", "report"),
    [
        (("processes", "memory", "cpu"), "End the other", "candidate"),
        (("lost", "ecc", "xid"), "Read the driver's", "candidate"),
    ],
)
def test_the_next_step_follows_the_disturbance(kinds: Sequence[str], step: str, report: str) -> None:
    """Another program is to be ended, a throttled GPU to be cooled: the step also names the report."""
    base, head = with_launches([1.0]), with_launches([1.0])
    for kind in kinds:
        make_invalid(head.launches[0], f"{disturbances.TITLES[kind]}: GPU 0")
        next_step = _refused(base, head, "UNDECIDED").next_step
        assert (next_step[: len(step)], next_step.rpartition(". ")[2]) == (step, f"Then measure the {report} again.")


def test_the_critical_value_is_a_quantile_of_the_family() -> None:
    """It is that of Student's t at 1 - 0.01 / 21, as scipy has it. One launch of each report shows no noise."""
    assert critical_t(10, 21, 0.99) == pytest.approx(4.618766)
    assert _QUIET.updated(deviation([[1.0], [2.0]])) is _QUIET.updated(None) is _QUIET


def test_the_launches_needed_are_the_fewest_that_show_a_slowdown() -> None:
    """One launch fewer does not show it, and a slowdown up to the threshold is never shown."""
    eager = PRIORS["eager_device"]
    needed = launches_needed(eager, slowdown=0.05, threshold=0.04, family=21) or 0
    fewer, enough = (smallest_seen(eager, n_base=n, n_head=n, threshold=0.04, family=21) for n in (needed - 1, needed))
    assert enough <= 0.05 < fewer
    assert launches_needed(_CLOCK, slowdown=0.02, threshold=0.01, family=21) == 1
    assert launches_needed(_CLOCK, slowdown=0.01, threshold=0.01) is None
    assert launches_needed(Prior(s0=1.0, df0=2.0, source="test"), slowdown=0.05, threshold=0.04) is None


def test_the_prior_of_a_case_is_that_of_its_noisier_report() -> None:
    """Between replayed graphs the noise of the host is added while the GPU is idle; an eager report counts for both."""
    graphs = make_result(1.0, execution="cuda_graphs")
    graphs.launches[0].work = make_work(batches=[0, 2], passes=3)
    assert prior_of_time(graphs).s0 == pytest.approx(math.hypot(0.003, (1 - 0.67) * 0.1))
    assert prior_of_time(graphs, make_result(1.0)) == PRIORS["eager_host"]
    assert set(PRIORS) == set(REGIMES)
