from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import pytest
from support.quiet_policy import with_noise
from support.report_factory import make_answers, make_failed, make_memory, make_report, make_work
from support.verdict_factory import make_invalid, make_traffic, with_launches

from pytest_llmgpu.gate.policy import AmountRule, ExactRule, Known, Policy, TimeRule
from pytest_llmgpu.gate.selftest.injected_regressions import regressions
from pytest_llmgpu.gate.selftest.selftest import SelfTest, Trial, selftest
from pytest_llmgpu.report.file import encode
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult

TODAY = datetime.date(2026, 6, 1)

_OF_TEXTS = ["first-token", "token-time", "prefill"]
"""The regressions that only a case that generates can have."""


def _full(levels: Sequence[float] = (1.0,), **fields: Any) -> CaseResult:
    """Return a completed result that has every metric."""
    result = with_launches(levels, accuracy=make_answers([True] * 100), memory=make_memory(2), **fields)
    result.traffic = make_traffic(link="nvlink")
    for launch in result.launches:
        launch.work = make_work()
    return result


def _tested(*cases: CaseResult, policy: Policy | None = None, s0: float = 0.001, slowdown: float = 0.05) -> SelfTest:
    report = make_report(cases)
    return selftest(report, with_noise(s0, policy), today=TODAY, injected=regressions(slowdown))


def _trial(found: SelfTest, name: str) -> Trial:
    return next(trial for trial in found.trials if trial.plant == name)


def test_all_regressions_are_detected_in_a_report_with_little_noise() -> None:
    """A lost batch size is injected into the largest of each series only; an unchanged copy is not worse."""
    found = _tested(_full(), _full(batch_size=2), _full(strategy="tp"), make_failed(strategy="tp", batch_size=2))
    assert found.ok
    assert found.control == []
    assert {trial.plant: trial.cases for trial in found.trials} == {
        "time": 3,
        "device-time": 3,
        "flops": 3,
        "host-sync": 3,
        "collective": 3,
        "memory": 3,
        "batch-size": 2,
        "answers": 3,
    }
    assert all(trial.caught and not trial.missed for trial in found.trials)


def test_memory_is_left_out_on_a_cpu() -> None:
    """It is not measured there: that is stated, and is no regression that would pass."""
    cpu = _full(device="cpu")
    cpu.launches[0].memory = []
    found = _tested(cpu)
    assert found.left_out == [*_OF_TEXTS, "memory"]
    assert not any(trial.plant == "memory" for trial in found.trials)
    assert _tested(_full()).left_out == _OF_TEXTS


def test_regressions_of_work_are_detected_where_it_was_measured() -> None:
    """A kernel call more is injected where the policy gates it."""
    worked, without = _full(), _full(batch_size=2)
    without.launches[0].work = None
    for policy, trials in (
        (Policy(), ["device-time", "flops", "host-sync"]),
        (Policy(kernels=ExactRule()), ["kernel"]),
    ):
        found = _tested(worked, without, policy=policy)
        assert found.ok
        assert {name: _trial(found, name).cases for name in trials} == dict.fromkeys(trials, 1)
    only_shown = selftest(make_report([worked]), Policy(), today=TODAY, injected=[regressions()[7]])
    assert (only_shown.trials, only_shown.not_gated, only_shown.ok) == ([], ["kernel"], False)


def test_the_report_is_not_changed() -> None:
    """Its bytes stay the same, and a second self-test has the same result."""
    report = make_report([with_launches([1.0, 1.01], sequences=20, accuracy=make_answers([True] * 100))])
    before = encode(report, compressed=False)
    first = selftest(report, Policy(), today=TODAY)
    assert encode(report, compressed=False) == before
    assert selftest(report, Policy(), today=TODAY) == first


def test_one_launch_with_noise_does_not_detect_five_percent() -> None:
    """The minimum number of launches is stated; with large noise there is none."""
    (noisy,) = _trial(_tested(_full(), s0=0.3), "time").missed
    assert (noisy.verdict, noisy.launches_needed) == ("NOT_ENOUGH_DATA", None)
    found = _tested(_full(), s0=0.02)
    assert not found.ok
    assert [trial.plant for trial in found.trials if not trial.caught] == ["time", "device-time"]
    missed = _trial(found, "time").missed[0]
    assert (missed.id, missed.verdict) == ("mp-bs1", "NOT_ENOUGH_DATA")
    assert missed.launches_needed is not None
    assert missed.launches_needed > 10


def test_a_slowdown_that_only_a_copy_shows_is_not_detected() -> None:
    """A copy has the noise of its original, so one launch with 0.8 % noise shows exactly 5 %; another run may not."""
    missed = _trial(_tested(_full(), s0=0.008), "time").missed[0]
    assert missed.verdict == "REGRESSED"
    assert "noise of its original" in missed.reason
    assert missed.launches_needed is not None
    assert missed.launches_needed > 1
    enough = _full([1.0] * missed.launches_needed)
    assert _trial(_tested(enough, s0=0.008), "time").caught


def test_noise_between_the_reports_own_launches_counts() -> None:
    """Launches that differ by 10 % do not show 5 %, whatever the prior is worth of a few launches."""
    policy = with_noise(0.001, df0=2)
    report = make_report([_full([1.0, 1.1, 0.9])])
    found = selftest(report, policy, today=TODAY, injected=regressions())
    assert not _trial(found, "time").caught


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
    """This holds for known regressions until they expire. One that is not gated in any case is not injected."""
    known = [Known(case="mp-bs1", metric="memory", reason="a cache", expires=TODAY)]
    found = _tested(_full(), policy=Policy(traffic=AmountRule(gate=False), known=known))
    missed = {trial.plant: trial.missed[0].reason for trial in found.trials if not trial.caught}
    assert missed == {"memory": "The policy accepts this regression: a cache."}
    assert found.not_gated == ["kernel", "collective"]
    assert found.left_out == _OF_TEXTS
    expired = [Known(case="mp-bs1", metric="memory", reason="a cache", expires=datetime.date(2026, 5, 1))]
    assert _tested(_full(), policy=Policy(known=expired)).ok


def test_a_case_without_the_figure_is_not_detected() -> None:
    """Each such case is listed, independent of the other cases."""
    blind = with_launches([1.0], batch_size=2)
    found = _tested(_full(), blind)
    assert {trial.plant: [miss.id for miss in trial.missed] for trial in found.trials} == {
        "time": [],
        "device-time": [],
        "flops": [],
        "host-sync": [],
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
    assert {(trial.cases, trial.caught) for trial in found.trials} == {(0, False)}


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
