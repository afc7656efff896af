from __future__ import annotations

import csv
from typing import Any

import pytest
from support.prose import Prose
from support.report_factory import make_failed, make_finding, make_profile, make_report, make_result
from support.verdict_factory import make_row, make_verdicts

from pytest_llmgpu.gate.policy import Policy, dump_policy, policy_of
from pytest_llmgpu.render.exports import export
from pytest_llmgpu.render.summary import cases_in_words, conclude
from pytest_llmgpu.render.table import make_time_table
from pytest_llmgpu.render.terminal.report import tables
from pytest_llmgpu.report.report import Report, Session
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Verdicts


def _report(*cases: CaseResult, **session: Any) -> Report:
    session = {"complete": True, "exit_status": 0, **session}
    return make_report(cases or [make_result()], session=Session(**session))


def _verdicts(*rows: tuple[str, Any], policy: Policy | None = None) -> Verdicts:
    plain = [make_row(verdict, metric, f"mp-bs{n}", reason=f"{metric}; x") for n, (metric, verdict) in enumerate(rows)]
    return make_verdicts(*plain, policy="" if policy is None else dump_policy(policy))


@pytest.mark.parametrize("session", [{"complete": False}, {"interrupted": True}, {"exit_status": 2}])
def test_an_incomplete_run_is_unclear(session: dict[str, object]) -> None:
    """The missing cases may have failed; a run without a completed case measured nothing; a failed test fails."""
    assert conclude(_report(**session)).status == "unclear"
    assert conclude(_report(make_failed("oom"))).status == "unclear"
    failed = conclude(_report(exit_status=1))
    assert (failed.status, "exit status 1" in failed.sentence) == ("fail", True)


def test_a_disturbed_case_is_marked_and_a_run_of_them_is_not_green() -> None:
    """The mark is on its row of each table and export, and the number is in the first sentence; power is no fault."""
    quiet, busy, *_ = cases = [make_result(batch_size=size, profile=make_profile()) for size in (1, 2, 4)]
    for result, text in ((quiet, "throttled by power or heat: GPU 0"), (busy, "CPU cores too busy: rank 0")):
        result.launches[0].profile = make_profile(invalid=[text])
    busy.inference_s = 0.001
    one = conclude(_report(*cases, duration_s=95.2))
    assert (one.status, one.sentence) == ("pass", "All 3 cases completed in 95 s; 1 disturbed.")
    every = conclude(_report(busy))
    assert (every.status, every.word) == ("unclear", "Disturbed")
    assert every.sentence.startswith("The case completed; 1 disturbed.")
    cells = [cell for _, row in make_time_table(cases).rows for cell in row]
    assert [(cell.disturbed, cell.kind) for cell in cells] == [(False, "best"), (True, "plain"), (False, "plain")]
    assert ["? 0.001" in line for line in tables(_report(*cases)).splitlines()].count(True) == 1
    kept = list(csv.DictReader(export("csv", _report(*cases)).splitlines()))
    assert [row["disturbed"] for row in kept] == ["", "CPU cores too busy: rank 0", ""]
    assert export("markdown", _report(*cases)).count("completed, disturbed") == 1


def test_an_allowed_regression_is_no_problem(prose: Prose) -> None:
    """It is neither better nor a failure."""
    rows = [make_row(gated=False, id="a"), make_row("OK", "traffic", "c")]
    conclusion = conclude(_report(), make_verdicts(*rows, make_row(metric="memory", id="b", allowed="accepted")))
    assert (conclusion.status, conclusion.problems) == ("pass", [])
    assert prose == conclusion.sentence


def test_findings_of_one_kind_are_one_problem() -> None:
    """It has the text of each case; the worst problem is first; each next step has its own."""
    results = [make_result(batch_size=2**n) for n in range(5)]
    for result in results:
        result.findings = [make_finding("info"), make_finding(code="broken", text="It is broken.")]
    results[0].findings.append(make_finding("info", next_step="Wait."))
    conclusion = conclude(_report(*results))
    assert conclusion.status == "fail"
    assert [(problem.severity, problem.label, problem.next_step) for problem in conclusion.problems] == [
        ("failure", "broken", "Look."),
        ("info", "slow", "Look."),
        ("info", "slow", "Wait."),
    ]
    worst = conclusion.problems[0]
    assert worst.texts == [(name, "It is broken.") for name in ("mp-bs1", "mp-bs2", "mp-bs4", "mp-bs8", "mp-bs16")]
    assert conclusion.sentence.endswith("Worst: mp-bs1: It is broken.")


def test_failures_with_other_messages_are_other_problems() -> None:
    """Two errors have the same kind and next step; a number, or the batch size of a case, is no other message."""
    results = [make_result(strategy=name, batch_size=size) for name in ("tp", "slow") for size in (1, 8)]
    texts = ["tp-bs1 sent 2.5 GB.", "tp-bs8 sent 1 MB.", "No file.", "No file."]
    for result, text in zip(results, texts, strict=True):
        result.findings = [make_finding(text=text)]
    problems = conclude(_report(*results)).problems
    found = [[name for name, _ in problem.texts] for problem in problems]
    assert found == [["tp-bs1", "tp-bs8"], ["slow-bs1", "slow-bs8"]]


def test_a_regression_comes_before_a_missing_comparison(prose: Prose) -> None:
    """Each problem has a next step; equal and better metrics are not problems."""
    verdicts = _verdicts(("path", "MISSING"), ("time", "REGRESSED"), ("memory", "OK"), ("traffic", "IMPROVED"))
    conclusion = conclude(_report(), verdicts)
    assert conclusion.status == "fail"
    assert [problem.verdict for problem in conclusion.problems] == ["REGRESSED", "MISSING"]
    assert all(problem.next_step for problem in conclusion.problems)
    assert prose == conclusion.sentence


@pytest.mark.parametrize(
    ("rows", "status"),
    [([("time", "NOT_COMPARABLE")], "unclear"), ([("time", "UNDECIDED"), ("memory", "OK")], "pass"), ([], "unclear")],
)
def test_the_exit_status_of_the_gate_decides(rows: list[tuple[str, str]], status: str) -> None:
    """A report that does not compare, and a report without a comparison, do not pass."""
    assert conclude(_report(), _verdicts(*rows)).status == status


def test_the_policy_of_the_verdicts_decides_what_fails() -> None:
    """A given policy has precedence."""
    strict = _verdicts(("time", "UNDECIDED"), policy=Policy(strict=True))
    assert policy_of(strict) == Policy(strict=True)
    assert conclude(_report(), strict).problems != []
    assert conclude(_report(), strict, Policy()).problems == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"complete": True}, "The case completed."),
        ({}, "The case completed; the run is incomplete."),
        ({"interrupted": True, "duration_s": 70.0}, "The case completed in 70 s; the run was interrupted."),
        ({"interrupted": True, "collected": 3}, "The case completed; the run was interrupted before 2 more tests."),
    ],
)
def test_a_run_that_ended_early_says_how(fields: dict[str, Any], text: str) -> None:
    """All of its cases may have completed, with fewer launches or without work passes."""
    assert cases_in_words(make_report([make_result()], session=Session(**fields)), explained=True) == text
