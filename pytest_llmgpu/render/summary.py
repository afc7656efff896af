"""What a whole report comes to: pass or fail in one sentence, and what is wrong, worst first, with what to do next."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from pytest_llmgpu.gate.classify import ExitStatus, exit_status, fails
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.policy_file import policy_of
from pytest_llmgpu.report.metrics import spec_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, Finding
from pytest_llmgpu.report.verdicts import BETTER, UNCLEAR, WORSE, Row, Verdicts, worst_first

__all__ = ["Conclusion", "Problem", "conclude"]

Status = Literal["pass", "unclear", "fail"]

_SHOWN = 3  # cases of one problem that are told in full
_SEVERITIES = ("failure", "warning", "info")  # worst first
_NO_ROOM = frozenset(("oom", "skipped_after_oom"))
_WORDS = {
    "completed": "completed",
    "oom": "out of memory",
    "skipped_after_oom": "not run after out of memory",
    "timeout": "timed out",
    "crashed": "crashed",
    "error": "failed",
    "interrupted": "interrupted",
}
_NEXT_BY_VERDICT = {
    "MISSING": "Measure it again; set allow_missing in the policy if it was taken out on purpose.",
    "NOT_COMPARABLE": "Measure both with the same settings, or make this report the baseline.",
    "INVALID": "Measure again with nothing else on the GPUs.",
    "INCONCLUSIVE": "Measure again with more launches: --llmgpu-launches.",
}
_Unfit = tuple[CaseResult, Finding]
"""A series of which no batch size fitted: one of its cases, and what is said of its memory."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of one kind."""

    severity: Literal["failure", "warning", "info"]
    label: str
    """What kind it is: `accuracy-collapsed`, `time REGRESSED`."""
    told: list[tuple[str, str]]
    """Id of a case to what is the matter with it, of the first ones."""
    more: list[str] = []
    """Ids of the cases with the same that are not told."""
    next_step: str


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """A report in one sentence, and its problems."""

    status: Status
    """`unclear`: the run is not whole, or too little of it could be compared."""
    sentence: str
    problems: list[Problem]
    """Worst first."""


def conclude(report: Report, verdicts: Verdicts | None = None, policy: Policy | None = None) -> Conclusion:
    """Return what a report comes to.

    Args:
        report: what was measured.
        verdicts: what the gate says of it; None where nothing was compared.
        policy: the gate's, which decides what fails; None: the one that the verdicts carry.
    """
    policy = policy or policy_of(verdicts)
    rows = [] if verdicts is None else [row for row in worst_first(verdicts.rows) if fails(row, policy)]
    unfit = _unfit(report)
    found = [*_of_findings(report.cases, unfit), *_of_memory(unfit)]
    problems = sorted([*found, *_of_rows(rows)], key=_order)
    judged = 0 if verdicts is None else exit_status(verdicts, policy)
    status = _status(report, judged, broken=any(problem.severity == "failure" for problem in found))
    worst = next((problem for problem in problems if problem.severity == "failure"), None)
    told = [_measured(report, explained=worst is not None)]
    if verdicts is not None and verdicts.baseline is not None:
        told.append(_compared(verdicts, rows))
    if worst is not None:
        name, text = worst.told[0]
        told.append(f"Worst: {name}: {text.splitlines()[0].partition('; ')[0].rstrip('.')}.")
    return Conclusion(status=status, sentence=" ".join(told), problems=problems)


def _status(report: Report, judged: int, *, broken: bool) -> Status:
    """Return the status, of the gate's exit status and of whether a finding says that something failed."""
    if judged == ExitStatus.REGRESSED or broken or report.session.exit_status == 1:
        return "fail"
    whole = report.session.complete and not report.session.interrupted and not report.session.exit_status
    if judged or not whole or not any(result.outcome == "completed" for result in report.cases):
        return "unclear"
    return "pass"


def _measured(report: Report, *, explained: bool) -> str:
    if not report.cases:
        return "No case was measured."
    counts = collections.Counter(result.outcome for result in report.cases)
    total = len(report.cases)
    wrong = sum(result.accuracy_check is not None and result.accuracy_check.ok is False for result in report.cases)
    if counts["completed"] == total:
        text = f"All {total} cases completed" if total > 1 else "The case completed"
    else:
        first = f"{counts.pop('completed', 0)} of {total} cases completed"
        text = ", ".join([first, *(f"{count} {_WORDS[outcome]}" for outcome, count in counts.items())])
    if wrong:
        text += f"; {wrong} answered wrongly"
    if report.session.exit_status and not explained:
        text += f"; pytest ended with exit status {report.session.exit_status}"
    if not report.session.complete:
        text += "; the run was not complete"
    return f"{text}."


def _compared(verdicts: Verdicts, failing: Sequence[Row]) -> str:
    counts = collections.Counter(row.verdict for row in verdicts.rows)
    better = sum(counts[verdict] for verdict in BETTER)
    worse = sum(row.verdict not in UNCLEAR for row in failing)
    untold = len(failing) - worse
    allowed = sum(row.verdict in WORSE for row in verdicts.rows) - sum(row.verdict in WORSE for row in failing)
    parts = [f"{verdicts.armed.compared} comparisons with the baseline: {worse} worse"]
    if allowed:
        parts.append(f"{allowed} worse but allowed")
    parts.append(f"{better} better")
    if untold:
        parts.append(f"{untold} not compared that have to be")
    return f"{', '.join(parts)}."


def _of_findings(cases: Iterable[CaseResult], unfit: Sequence[_Unfit]) -> Iterator[Problem]:
    """Yield the problems of the cases' findings, but for those that `_of_memory` tells."""
    told = [finding for _, finding in unfit]
    kinds: dict[tuple[str, str, str], list[tuple[str, Finding]]] = {}
    for result in cases:
        for finding in result.findings:
            if any(finding is other for other in told):
                continue
            kinds.setdefault((finding.severity, finding.code, finding.next_step), []).append((result.id, finding))
    for (_, code, next_step), found in kinds.items():
        yield Problem(
            severity=found[0][1].severity,
            label=code,
            told=[(name, finding.text) for name, finding in found[:_SHOWN]],
            more=[name for name, _ in found[_SHOWN:]],
            next_step=next_step,
        )


def _unfit(report: Report) -> list[_Unfit]:
    """Return the series of which no batch size fitted where tests failed for it: where it is expected, they pass."""
    by_series: dict[str, list[CaseResult]] = {}
    for result in report.cases:
        by_series.setdefault(result.case.series, []).append(result)
    ended = [found for found in by_series.values() if {result.outcome for result in found} <= _NO_ROOM]
    return [_room(found) for found in ended] if report.session.exit_status == 1 else []


def _room(series: Sequence[CaseResult]) -> _Unfit:
    """Return what is said of the memory of a series that never fitted: its own finding, with what can be done here."""
    for result in series:
        for finding in result.findings:
            if finding.code == "out-of-memory":
                return result, finding
    smaller = "smaller batch sizes, " if min(result.case.batch_size for result in series) > 1 else ""
    text = f"No selected batch size of {series[0].case.strategy} fits."
    next_step = f"Take {smaller}more GPUs or a smaller model."
    return series[0], Finding(code="out-of-memory", severity="info", text=text, next_step=next_step)


def _of_memory(unfit: Iterable[_Unfit]) -> Iterator[Problem]:
    """Yield a problem for each next step."""
    steps: dict[str, list[tuple[str, str]]] = {}
    for result, finding in unfit:
        steps.setdefault(finding.next_step, []).append((result.id, finding.text))
    for next_step, told in steps.items():
        yield Problem(severity="failure", label="nothing-fits", told=told, next_step=next_step)


def _of_rows(rows: Iterable[Row]) -> Iterator[Problem]:
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.metric, row.verdict), []).append(row)
    for (metric, verdict), found in kinds.items():
        yield Problem(
            severity="failure",
            label=f"{metric} {verdict}",
            told=[(row.id, row.reason) for row in found[:_SHOWN]],
            more=[row.id for row in found[_SHOWN:]],
            next_step=_NEXT_BY_VERDICT.get(verdict) or spec_of(metric).next_step,
        )


def _order(problem: Problem) -> tuple[int, bool]:
    """Worst first; what could not be told stands behind what got worse."""
    return (_SEVERITIES.index(problem.severity), problem.label.rpartition(" ")[2] in UNCLEAR)
