from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.report_factory import make_answers, make_failed, make_memory, make_report, make_work
from support.verdict_factory import make_invalid, make_traffic, with_latencies, with_launches

from pytest_llmgpu.gate.policy import AmountRule, ExactRule, Known, Policy, TimeRule
from pytest_llmgpu.gate.selftest.injected_regressions import regressions
from pytest_llmgpu.gate.selftest.selftest import SelfTest, Trial, selftest
from pytest_llmgpu.gate.timing.calibration import Calibration
from pytest_llmgpu.gate.timing.pairing import FEWEST
from pytest_llmgpu.report.file import encode
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult

TODAY = datetime.date(2026, 6, 1)
QUIET = Calibration(typical=0.002)


def _full(levels: Sequence[float] = (1.0,), **fields: Any) -> CaseResult:
    """Return a completed result that has every metric."""
    result = with_launches(levels, accuracy=make_answers([True] * 100), memory=make_memory(2), **fields)
    result.traffic = make_traffic(link="nvlink")
    return result


def _tested(
    *cases: CaseResult, policy: Policy | None = None, calibration: Calibration = QUIET, slowdown: float = 0.05
) -> SelfTest:
    report = make_report(cases)
    return selftest(report, policy or Policy(), today=TODAY, calibration=calibration, injected=regressions(slowdown))


def _trial(found: SelfTest, name: str) -> Trial:
    return next(trial for trial in found.trials if trial.plant == name)


def test_all_regressions_are_detected_in_a_report_with_little_noise() -> None:
    """A lost batch size is injected into the largest of each series only; an unchanged copy is not worse."""
    found = _tested(_full(), _full(batch_size=2), _full(strategy="tp"), make_failed(strategy="tp", batch_size=2))
    assert found.ok
    assert found.control == []
    assert {trial.plant: trial.cases for trial in found.trials} == {
        "time": 3,
        "collective": 3,
        "memory": 3,
        "batch-size": 2,
        "answers": 3,
    }
    assert all(trial.caught and not trial.missed for trial in found.trials)


def test_regressions_of_work_are_detected_where_it_was_measured() -> None:
    """A kernel call more is injected where the policy gates it."""
    worked = _full()
    worked.launches[0].work = make_work()
    for policy, trials in ((Policy(), ["flops", "host-sync"]), (Policy(kernels=ExactRule()), ["kernel"])):
        found = _tested(worked, _full(batch_size=2), policy=policy)
        assert found.ok
        assert {name: _trial(found, name).cases for name in trials} == dict.fromkeys(trials, 1)
    only_shown = selftest(make_report([worked]), Policy(), today=TODAY, injected=[regressions()[3]])
    assert [(trial.plant, trial.cases, trial.caught) for trial in only_shown.trials] == [("kernel", 0, False)]


def test_the_report_is_not_changed() -> None:
    """Its bytes stay the same, and a second self-test has the same result."""
    report = make_report([with_launches([1.0, 1.01], sequences=20, accuracy=make_answers([True] * 100))])
    before = encode(report, compressed=False)
    first = selftest(report, Policy(), today=TODAY)
    assert encode(report, compressed=False) == before
    assert selftest(report, Policy(), today=TODAY) == first


def test_one_launch_with_noise_does_not_detect_five_percent() -> None:
    """The minimum number of launches is stated; with the large assumed noise there is none."""
    (assumed,) = _trial(_tested(_full(), calibration=Calibration()), "time").missed
    assert (assumed.verdict, assumed.launches_needed) == ("NOT_ENOUGH_DATA", None)
    found = _tested(_full(), calibration=Calibration(typical=0.05))
    assert not found.ok
    assert [trial.plant for trial in found.trials if not trial.caught] == ["time"]
    missed = _trial(found, "time").missed[0]
    assert (missed.id, missed.verdict) == ("mp-bs1", "NOT_ENOUGH_DATA")
    assert missed.launches_needed is not None
    assert missed.launches_needed > 10


def test_a_slowdown_that_only_a_copy_shows_is_not_detected() -> None:
    """A copy has the noise of its original, so one launch with 0.6 % noise shows exactly 5 %; another run may not."""
    found = _tested(_full(), calibration=Calibration(typical=0.006))
    missed = _trial(found, "time").missed[0]
    assert missed.verdict == "REGRESSED"
    assert "noise of its original" in missed.reason
    assert missed.launches_needed is not None
    assert missed.launches_needed > 1


@pytest.mark.parametrize(("launches", "named"), [(4, FEWEST), (FEWEST, None), (FEWEST + 1, None)])
def test_at_least_five_launches_are_recommended(launches: int, named: int | None) -> None:
    """With as many launches there is no recommendation, because something else is missing."""
    policy = Policy(time=TimeRule(gate=False))
    (missed,) = _trial(_tested(_full([1.0] * launches), policy=policy), "time").missed
    assert (missed.reason, missed.launches_needed) == ("The policy does not gate time.", named)


def test_the_recommended_launches_are_enough() -> None:
    """A report with twice as many launches of that noise detects the slowdown; one with half of them does not."""
    noise = random.Random(5)

    def report(launches: int) -> CaseResult:
        levels = [noise.gauss(0, 0.02) for _ in range(launches)]
        return with_latencies([[1 + level] * 20 for level in levels])

    needed = _trial(_tested(report(1), calibration=Calibration(typical=0.02)), "time").missed[0].launches_needed
    assert needed is not None
    quieter = Calibration(typical=0.018)  # what these launches happen to show is no more than was calibrated, or little
    enough = _tested(report(2 * needed), calibration=quieter)
    assert _trial(enough, "time").caught
    assert not _trial(_tested(report(needed // 2), calibration=quieter), "time").caught


def test_noise_between_sessions_counts() -> None:
    """A run of another day differs by this noise, and no number of launches is enough."""
    known = Calibration(typical=0.002, typical_session=0.01)
    missed = _trial(_tested(_full([1.0] * 5), calibration=known), "time").missed[0]
    assert missed.launches_needed is None
    assert _trial(_tested(_full([1.0] * 5), calibration=known.of_one_session()), "time").caught


def test_noise_between_the_reports_own_launches_counts() -> None:
    """The spread of the launches is used if it is larger than the calibrated noise."""
    missed = _trial(_tested(_full([1.0, 1.1, 0.9])), "time").missed[0]
    assert missed.launches_needed is not None
    assert missed.launches_needed > 50


def test_the_largest_completed_batch_size_runs_out_of_memory() -> None:
    """The order of the cases does not matter."""
    known = [Known(case="mp-bs4", metric="outcome", reason="tight", expires=TODAY)]
    cases = [_full(batch_size=size) for size in (2, 4, 1)]
    found = _tested(*cases, make_failed(batch_size=8), policy=Policy(known=known))
    assert [(miss.id, miss.verdict) for miss in _trial(found, "batch-size").missed] == [
        ("mp-bs4", "CAPACITY_REGRESSED")
    ]


def test_a_threshold_above_the_slowdown_never_detects_it() -> None:
    """No number of launches is enough; a larger slowdown is detected."""
    policy = Policy(time=TimeRule(margin=0.06))
    missed = _trial(_tested(_full(), policy=policy), "time").missed[0]
    assert (missed.verdict, missed.launches_needed) == ("OK", None)
    assert _trial(_tested(_full(), policy=policy, slowdown=0.08), "time").caught


def test_a_regression_that_the_policy_accepts_is_not_detected() -> None:
    """This holds for metrics that are not gated and for known regressions until they expire."""
    known = [Known(case="mp-bs1", metric="memory", reason="a cache", expires=TODAY)]
    found = _tested(_full(), policy=Policy(traffic=AmountRule(gate=False), known=known))
    missed = {trial.plant: trial.missed[0].reason for trial in found.trials if not trial.caught}
    assert missed == {
        "collective": "The policy does not gate traffic.",
        "memory": "The policy accepts this regression: a cache.",
    }
    expired = [Known(case="mp-bs1", metric="memory", reason="a cache", expires=datetime.date(2026, 5, 1))]
    assert _tested(_full(), policy=Policy(known=expired)).ok


def test_a_case_without_the_figure_is_not_detected() -> None:
    """Each such case is listed, independent of the other cases."""
    blind = with_launches([1.0], batch_size=2)
    found = _tested(_full(), blind)
    assert {trial.plant: [miss.id for miss in trial.missed] for trial in found.trials} == {
        "time": [],
        "collective": ["mp-bs2"],
        "memory": ["mp-bs2"],
        "batch-size": [],
        "answers": ["mp-bs2"],
    }


def test_a_disturbed_case_is_not_detected() -> None:
    """Its time is INVALID with and without the regression."""
    result = _full()
    make_invalid(result.launches[0], "throttled by heat")
    missed = _trial(_tested(result), "time").missed[0]
    assert missed.verdict == "INVALID"
    assert "throttled" in missed.reason


@pytest.mark.parametrize("cases", [[], [make_failed("oom")]])
def test_a_report_in_which_nothing_completed_proves_nothing(cases: list[CaseResult]) -> None:
    """A regression that could not be injected is not detected."""
    found = _tested(*cases)
    assert not found.ok
    assert [(trial.cases, trial.caught) for trial in found.trials] == [(0, False)] * 5


def test_an_unchanged_copy_that_is_worse_is_listed() -> None:
    """A gate that fails on equal reports proves nothing."""
    result = _full()
    result.accuracy_check = AccuracyCheck(
        metric="acc", value=0.2, baseline=0.8, source="x", tolerance=0.01, ok=False, text="60 points below"
    )
    found = _tested(result, make_failed("crashed", strategy="tp"))
    assert [(row.id, row.metric, row.verdict) for row in found.control] == [
        ("tp-bs1", "outcome", "FAILED"),
        ("mp", "accuracy", "REGRESSED"),
    ]
    assert all(trial.caught for trial in found.trials)
    assert not found.ok
