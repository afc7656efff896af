from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.report_factory import make_failed, make_report, make_result

from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.policy_file import dump, policy_of
from pytest_llmgpu.render.summary import conclude
from pytest_llmgpu.report.report import Report, Session
from pytest_llmgpu.report.result import CaseResult, Finding
from pytest_llmgpu.report.verdicts import Armed, Baseline, Row, Verdicts


def _report(*cases: CaseResult, **session: Any) -> Report:
    report = make_report(cases or [make_result()])
    report.session = Session(**{"complete": True, "exit_status": 0, **session})
    return report


def _finding(severity: str, code: str = "slow", step: str = "Look.") -> Finding:
    return msgspec.convert({"code": code, "severity": severity, "text": f"It is {code}.", "next_step": step}, Finding)


def _verdicts(*rows: tuple[str, str], policy: Policy | None = None) -> Verdicts:
    plain = [
        msgspec.convert(
            {"key": "k", "id": f"mp-bs{n}", "metric": metric, "verdict": verdict, "reason": f"{metric}; x"}, Row
        )
        for n, (metric, verdict) in enumerate(rows)
    ]
    armed = Armed(compared=len(plain), gated=len(plain))
    text = "" if policy is None else dump(policy)
    return Verdicts(baseline=Baseline(name="base"), policy=text, policy_sha256="0", armed=armed, rows=plain)


def test_a_run_that_completed_passes() -> None:
    """Nothing was found, all is there."""
    conclusion = conclude(_report(make_result(), make_result(strategy="tp")))
    assert conclusion.status == "pass"
    assert conclusion.sentence == "All 2 cases completed."
    assert conclusion.problems == []


def test_out_of_memory_is_a_measurement() -> None:
    """It is told, and fails nothing by itself."""
    conclusion = conclude(_report(make_result(), make_failed("oom", batch_size=2)))
    assert (conclusion.status, conclusion.sentence) == ("pass", "1 of 2 cases completed, 1 out of memory.")


@pytest.mark.parametrize("session", [{"complete": False}, {"interrupted": True}, {"exit_status": 2}])
def test_a_run_that_is_not_whole_is_not_passed(session: dict[str, object]) -> None:
    """What was not measured may have been wrong."""
    assert conclude(_report(**session)).status == "unclear"


@pytest.mark.parametrize("cases", [[make_failed("oom")], [make_failed("skipped_after_oom")]])
def test_a_run_without_a_figure_is_not_passed(cases: list[CaseResult]) -> None:
    """Nothing was seen that could have been right."""
    assert conclude(_report(*cases)).status == "unclear"


def test_a_failed_test_fails() -> None:
    """What a test of the user's own found counts too, and pytest's exit status says it."""
    conclusion = conclude(_report(exit_status=1))
    assert conclusion.status == "fail"
    assert "pytest ended with exit status 1" in conclusion.sentence


def test_a_strategy_that_never_fitted_explains_the_failed_test() -> None:
    """Tests fail for it unless they expect it, which pytest's exit status says; another batch size makes it a limit."""
    cases = [make_result(), make_failed("oom", batch_size=2), make_failed("oom", strategy="tp")]
    conclusion = conclude(_report(*cases, exit_status=1))
    assert [problem.told for problem in conclusion.problems] == [[("tp-bs1", "No selected batch size of tp fits.")]]
    assert conclusion.sentence == (
        "1 of 3 cases completed, 2 out of memory. Worst: tp-bs1: No selected batch size of tp fits."
    )
    assert conclude(_report(*cases)).problems == []


def test_what_to_do_about_memory_is_what_the_case_says() -> None:
    """At batch size 1 there is no smaller one to take; the finding knows what there is, and is told once."""
    case = make_failed("oom", strategy="tp")
    text, step = "Out of memory at batch size 1; no smaller one completed.", "Spread it over more GPUs."
    case.findings = [
        msgspec.convert({"code": "out-of-memory", "severity": "info", "text": text, "next_step": step}, Finding)
    ]
    (problem,) = conclude(_report(make_result(), case, exit_status=1)).problems
    assert (problem.severity, problem.label, problem.told) == ("failure", "nothing-fits", [("tp-bs1", text)])
    assert problem.next_step == step
    assert [problem.label for problem in conclude(_report(make_result(), case)).problems] == ["out-of-memory"]
    for size, words in ((1, "Take more GPUs"), (2, "Take smaller batch sizes")):
        (problem,) = conclude(_report(make_failed("oom", batch_size=size), exit_status=1)).problems
        assert problem.next_step.startswith(words)


def test_a_regression_that_is_allowed_is_counted_apart() -> None:
    """`0 worse` above a list of what is worse would be wrong."""
    verdicts = _verdicts(("time", "REGRESSED"), ("memory", "REGRESSED"), ("traffic", "OK"))
    rows = [
        msgspec.structs.replace(verdicts.rows[0], gated=False),
        msgspec.structs.replace(verdicts.rows[1], known="accepted"),
        verdicts.rows[2],
    ]
    conclusion = conclude(_report(), msgspec.structs.replace(verdicts, rows=rows))
    assert conclusion.status == "pass"
    assert "3 comparisons with the baseline: 0 worse, 2 worse but allowed, 0 better." in conclusion.sentence


def test_findings_are_worst_first_and_those_of_a_kind_are_one() -> None:
    """Three cases are told, the rest named; another step is another problem."""
    results = [make_result(batch_size=2**n) for n in range(5)]
    for result in results:
        result.findings = [_finding("info"), _finding("failure", "broken")]
    results[0].findings.append(_finding("info", step="Wait."))
    conclusion = conclude(_report(*results))
    assert conclusion.status == "fail"
    assert [(problem.severity, problem.label, problem.next_step) for problem in conclusion.problems] == [
        ("failure", "broken", "Look."),
        ("info", "slow", "Look."),
        ("info", "slow", "Wait."),
    ]
    worst = conclusion.problems[0]
    assert worst.told == [(name, "It is broken.") for name in ("mp-bs1", "mp-bs2", "mp-bs4")]
    assert worst.more == ["mp-bs8", "mp-bs16"]
    assert conclusion.sentence.endswith("Worst: mp-bs1: It is broken.")


def test_a_warning_alone_fails_nothing() -> None:
    """It is shown."""
    result = make_result()
    result.findings = [_finding("warning")]
    conclusion = conclude(_report(result))
    assert conclusion.status == "pass"
    assert len(conclusion.problems) == 1


def test_a_regression_fails_and_comes_before_what_could_not_be_told() -> None:
    """Each kind with what to do next; what is equal or better is no problem."""
    verdicts = _verdicts(("path", "MISSING"), ("time", "REGRESSED"), ("memory", "OK"), ("traffic", "IMPROVED"))
    conclusion = conclude(_report(), verdicts)
    assert conclusion.status == "fail"
    assert [problem.label for problem in conclusion.problems] == ["time REGRESSED", "path MISSING"]
    assert all(problem.next_step for problem in conclusion.problems)
    assert conclusion.sentence == (
        "The case completed. 4 comparisons with the baseline: 1 worse, 1 better, 1 not compared that have to be. "
        "Worst: mp-bs1: time."
    )


@pytest.mark.parametrize(
    ("rows", "status"),
    [([("time", "NOT_COMPARABLE")], "unclear"), ([("time", "INCONCLUSIVE")], "pass"), ([], "unclear")],
)
def test_the_gates_exit_status_decides(rows: list[tuple[str, str]], status: str) -> None:
    """A comparison that could not be made, and none at all, is no pass."""
    assert conclude(_report(), _verdicts(*rows)).status == status


def test_the_policy_of_the_verdicts_decides_what_fails() -> None:
    """It was in force when they were made; one that is given wins."""
    strict = _verdicts(("time", "INCONCLUSIVE"), policy=Policy(on_inconclusive="fail"))
    assert policy_of(strict) == Policy(on_inconclusive="fail")
    assert conclude(_report(), strict).problems != []
    assert conclude(_report(), strict, Policy()).problems == []


@pytest.mark.parametrize("text", ["", "not TOML", "confidence = 'high'"])
def test_a_policy_that_cannot_be_read_is_the_default(text: str) -> None:
    """A page of an odd report is better than none."""
    assert policy_of(msgspec.structs.replace(_verdicts(), policy=text)) == Policy()
