from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.report_factory import make_answers, make_failed, make_memory, make_report
from support.verdict_factory import make_invalid, make_traffic, with_latencies, with_launches

from pytest_llmgpu.gate.policy import ExactRule, Known, Policy, TimeRule
from pytest_llmgpu.gate.selftest.injected_regressions import plants
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
    return selftest(report, policy or Policy(), today=TODAY, calibration=calibration, losses=plants(slowdown))


def _trial(found: SelfTest, name: str) -> Trial:
    return next(trial for trial in found.trials if trial.plant == name)


def test_a_quiet_report_catches_everything() -> None:
    """Each loss in each case, the lost batch size in the largest of each series; the unchanged copy loses nothing."""
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


def test_the_report_stays_as_it_is() -> None:
    """To the byte; the answer is the same each time."""
    report = make_report([with_launches([1.0, 1.01], sequences=20, accuracy=make_answers([True] * 100))])
    before = encode(report, compressed=False)
    first = selftest(report, Policy(), today=TODAY)
    assert encode(report, compressed=False) == before
    assert selftest(report, Policy(), today=TODAY) == first


def test_one_noisy_launch_cannot_tell_five_percent() -> None:
    """The launches that it takes are named; where the noise is only assumed, which is much, no number would do."""
    (assumed,) = _trial(_tested(_full(), calibration=Calibration()), "time").missed
    assert (assumed.verdict, assumed.launches_needed) == ("INCONCLUSIVE", None)
    found = _tested(_full(), calibration=Calibration(typical=0.05))
    assert not found.ok
    assert [trial.plant for trial in found.trials if not trial.caught] == ["time"]
    missed = _trial(found, "time").missed[0]
    assert (missed.id, missed.verdict) == ("mp-bs1", "INCONCLUSIVE")
    assert missed.launches_needed is not None
    assert missed.launches_needed > 10


def test_a_slowdown_that_only_a_copy_shows_is_missed() -> None:
    """A copy has the noise of its original: with it one launch at 0.6 % shows 5 % exactly, on its own often not."""
    found = _tested(_full(), calibration=Calibration(typical=0.006))
    missed = _trial(found, "time").missed[0]
    assert missed.verdict == "REGRESSED"
    assert "noise of its original" in missed.reason
    assert missed.launches_needed is not None
    assert missed.launches_needed > 1


@pytest.mark.parametrize(("launches", "named"), [(4, FEWEST), (FEWEST, None), (FEWEST + 1, None)])
def test_five_launches_are_asked_for_at_least(launches: int, named: int | None) -> None:
    """Of a quiet case, too; none where there are as many: something else than launches is missing."""
    policy = Policy(time=TimeRule(gate=False))
    (missed,) = _trial(_tested(_full([1.0] * launches), policy=policy), "time").missed
    assert (missed.reason, missed.launches_needed) == ("the policy does not gate time.", named)


def test_the_launches_that_are_named_are_enough() -> None:
    """A report with as many launches, of that noise, is not asked for more; with half of them it is."""
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
    """A copy is of the session of its original; a run of another day is not, and no number of launches is enough."""
    known = Calibration(typical=0.002, typical_session=0.01)
    missed = _trial(_tested(_full([1.0] * 5), calibration=known), "time").missed[0]
    assert missed.launches_needed is None
    assert _trial(_tested(_full([1.0] * 5), calibration=known.of_one_session()), "time").caught


def test_noise_between_the_reports_own_launches_counts() -> None:
    """However quiet the runner was when it was calibrated."""
    missed = _trial(_tested(_full([1.0, 1.1, 0.9])), "time").missed[0]
    assert missed.launches_needed is not None
    assert missed.launches_needed > 50


def test_the_largest_batch_size_is_lost() -> None:
    """Of those that completed, in whatever order they ran."""
    known = [Known(case="mp-bs4", metric="outcome", reason="tight", expires=TODAY)]
    cases = [_full(batch_size=size) for size in (2, 4, 1)]
    found = _tested(*cases, make_failed(batch_size=8), policy=Policy(known=known))
    assert [(miss.id, miss.verdict) for miss in _trial(found, "batch-size").missed] == [
        ("mp-bs4", "CAPACITY_REGRESSED")
    ]


def test_a_margin_above_the_slowdown_never_shows_it() -> None:
    """No number of launches would; a larger slowdown is seen."""
    policy = Policy(time=TimeRule(margin=0.06))
    missed = _trial(_tested(_full(), policy=policy), "time").missed[0]
    assert (missed.verdict, missed.launches_needed) == ("OK", None)
    assert _trial(_tested(_full(), policy=policy, slowdown=0.08), "time").caught


def test_what_the_policy_lets_pass_is_missed() -> None:
    """Metrics that are not gated and regressions that are known, until they expire."""
    known = [Known(case="mp-bs1", metric="memory", reason="a cache", expires=TODAY)]
    found = _tested(_full(), policy=Policy(traffic=ExactRule(gate=False), known=known))
    missed = {trial.plant: trial.missed[0].reason for trial in found.trials if not trial.caught}
    assert missed == {
        "collective": "the policy does not gate traffic.",
        "memory": "the policy lets it pass: a cache.",
    }
    expired = [Known(case="mp-bs1", metric="memory", reason="a cache", expires=datetime.date(2026, 5, 1))]
    assert _tested(_full(), policy=Policy(known=expired)).ok


def test_a_case_that_does_not_hold_a_figure_is_missed() -> None:
    """A loss there would pass unseen: each such case is named, whatever the others show."""
    blind = with_launches([1.0], batch_size=2)
    found = _tested(_full(), blind)
    assert {trial.plant: [miss.id for miss in trial.missed] for trial in found.trials} == {
        "time": [],
        "collective": ["mp-bs2"],
        "memory": ["mp-bs2"],
        "batch-size": [],
        "answers": ["mp-bs2"],
    }


def test_a_disturbed_case_is_missed() -> None:
    """Its time is INVALID, with or without a loss."""
    result = _full()
    make_invalid(result.launches[0], "throttled by heat")
    missed = _trial(_tested(result), "time").missed[0]
    assert missed.verdict == "INVALID"
    assert "throttled" in missed.reason


@pytest.mark.parametrize("cases", [[], [make_failed("oom")]])
def test_a_report_in_which_nothing_completed_proves_nothing(cases: list[CaseResult]) -> None:
    """No loss is caught where none could be planted."""
    found = _tested(*cases)
    assert not found.ok
    assert [(trial.cases, trial.caught) for trial in found.trials] == [(0, False)] * 5


def test_a_copy_that_loses_something_by_itself_is_named() -> None:
    """A gate that says REGRESSED of equal reports proves nothing by saying it of others."""
    result = _full()
    result.accuracy_check = AccuracyCheck(
        metric="acc", value=0.2, baseline=0.8, source="x", tolerance=0.01, ok=False, text="60 points below"
    )
    found = _tested(result, make_failed("crashed", strategy="tp"))
    assert [(row.id, row.metric, row.verdict) for row in found.control] == [
        ("mp-bs1", "accuracy", "REGRESSED"),
        ("tp-bs1", "outcome", "FAILED"),
    ]
    assert all(trial.caught for trial in found.trials)
    assert not found.ok
