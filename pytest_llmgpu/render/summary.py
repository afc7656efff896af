"""The conclusion of a whole report: its status, the figures behind it, and the problems, worst first."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from pytest_llmgpu.analysis.reference import by_series
from pytest_llmgpu.gate import headline, rows_by_cause
from pytest_llmgpu.gate.judge import ExitStatus, exit_status
from pytest_llmgpu.gate.policy import Policy, policy_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import OUT_OF_MEMORY, CaseResult, Finding
from pytest_llmgpu.report.text import without_numbers
from pytest_llmgpu.report.verdicts import UNCLEAR, Verdict, Verdicts

Status = Literal["pass", "unclear", "fail"]

_MOST_TEXTS = 3  # cases of a problem whose text is shown
_SEVERITIES = ("failure", "warning", "info")  # worst first
_OUTCOMES = {
    "oom": "out of memory",
    "skipped_after_oom": "not run after out of memory",
    "timeout": "timed out",
    "crashed": "crashed",
    "error": "ended with an error",
    "interrupted": "interrupted",
}


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of one kind, or verdicts with one cause."""

    severity: Literal["failure", "warning", "info"]
    verdict: Verdict | None = None
    """The worst verdict of a cause; None for findings."""
    label: str
    """The code of the finding (`wrong-answers`), or the largest change of the cause with its numbers."""
    texts: list[tuple[str, str]]
    """The id of each of the first cases, and the text about it."""
    more: list[str] = []
    """The ids of the other cases."""
    next_step: str
    """The next step for the reader."""


class Conclusion(NamedTuple):
    """The status of a report and the reasons for it."""

    status: Status
    """`unclear` means that the run is incomplete or that too little was compared."""
    word: str
    """The status in a word: that of the gate where it decides."""
    sentence: str
    """Up to three sentences: the headline of the gate without the word, the cases, the worst problem."""
    problems: list[Problem]
    """The problems, worst first."""


def conclude(report: Report, verdicts: Verdicts | None = None, policy: Policy | None = None) -> Conclusion:
    """Return the conclusion of a report and the verdicts on it, by the policy given or that of the verdicts."""
    policy = policy or policy_of(verdicts)
    session = report.session
    # A test that expects that nothing fits does not fail.
    unfit = _unfit(report) if session.exit_status == 1 else {}
    found = finding_problems(report.cases, [finding for finding, _ in unfit.values()])
    steps: dict[str, list[tuple[str, str]]] = {}
    for finding, name in unfit.values():
        steps.setdefault(finding.next_step, []).append((name, finding.text))
    for step, texts in steps.items():
        found.append(Problem(severity="failure", label="nothing-fits", texts=texts, next_step=step))
    gate = ExitStatus.PASSED if verdicts is None else exit_status(verdicts, policy)
    completed = any(result.outcome == "completed" for result in report.cases)
    status: Status = "pass"
    if gate is ExitStatus.REGRESSED or any(one.severity == "failure" for one in found) or session.exit_status == 1:
        status = "fail"
    elif gate or not session.complete or session.interrupted or session.exit_status or not completed:
        status = "unclear"
    problems = sorted([*_of_gate(verdicts, policy), *found], key=_order)
    word = {"pass": "Completed", "unclear": "Not complete", "fail": "Failed"}[status]
    worst = next((problem for problem in problems if problem.severity == "failure"), None)
    sentences = [_cases(report, explained=worst is not None)]
    if verdicts is not None:
        decided = headline.decide(verdicts, policy)
        text = f"{headline.describe(decided)}."
        if decided.status is not ExitStatus.PASSED or status == "pass":
            word, _, text = text.partition(": ")  # the gate decides
        sentences.insert(0, text)
    elif worst is not None:
        name, text = worst.texts[0]
        sentences.append(f"Worst: {name}: {text.splitlines()[0].partition('; ')[0].rstrip('.')}.")
    return Conclusion(status, word, " ".join(sentences), problems)


def finding_problems(cases: Iterable[CaseResult], without: Sequence[Finding] = ()) -> list[Problem]:
    """Return the findings of cases as problems, worst first: one per kind, next step and message of a failure."""
    kinds: dict[tuple[str, str, str, str], list[tuple[str, Finding]]] = {}
    for result in cases:
        for finding in result.findings:
            if not any(finding is other for other in without):
                text = without_numbers(finding.text) if finding.severity == "failure" else ""
                kind = (finding.severity, finding.code, finding.next_step, text)
                kinds.setdefault(kind, []).append((result.id, finding))
    problems = [
        Problem(
            severity=found[0][1].severity,
            label=code,
            texts=[(name, finding.text) for name, finding in found[:_MOST_TEXTS]],
            more=[name for name, _ in found[_MOST_TEXTS:]],
            next_step=next_step,
        )
        for (_, code, next_step, _), found in kinds.items()
    ]
    return sorted(problems, key=_order)


def _cases(report: Report, *, explained: bool) -> str:
    """Return how many cases completed, how the others ended, and the exit status of pytest unless it is explained."""
    outcomes = collections.Counter(result.outcome for result in report.cases)
    total, completed = outcomes.total(), outcomes["completed"]
    if not total:
        return "No case was measured."
    text = f"All {total} cases completed" if total > 1 else "The case completed"
    if completed < total:
        failed = [f"{count} {_OUTCOMES[name]}" for name, count in outcomes.items() if name != "completed"]
        text = ", ".join([f"{completed} of {total} cases completed", *failed])
    if wrong := sum(result.has_wrong_answers for result in report.cases):
        text += f"; {wrong} with wrong answers"
    if report.session.exit_status and not explained:
        text += f"; pytest ended with exit status {report.session.exit_status}"
    return f"{text}." if report.session.complete else f"{text}; the run is incomplete."


def _unfit(report: Report) -> dict[str, tuple[Finding, str]]:
    """Return the finding about memory of each series that never fitted, and its case; a new one if it has none."""
    unfit: dict[str, tuple[Finding, str]] = {}
    for series in by_series(report.cases):
        if not {result.outcome for result in series} <= OUT_OF_MEMORY:
            continue
        of_memory = [(one, result.id) for result in series for one in result.findings if one.code == "out-of-memory"]
        smaller = "smaller batch sizes, " if min(result.case.batch_size for result in series) > 1 else ""
        text = f"No selected batch size of {series[0].case.strategy} fits."
        step = f"Use {smaller}more GPUs or a smaller model."
        new = Finding(code="out-of-memory", severity="info", text=text, next_step=step)
        unfit[series[0].case.series] = of_memory[0] if of_memory else (new, series[0].id)
    return unfit


def _of_gate(verdicts: Verdicts | None, policy: Policy) -> Iterator[Problem]:
    """Yield the causes that fail the gate, and gated slowdowns with not enough data, which the headline names."""
    for group in [] if verdicts is None else rows_by_cause.group(verdicts, policy):
        if group.fails or any(row.gated and row.verdict in UNCLEAR and headline.is_slower(row) for row in group.rows):
            yield Problem(
                severity="failure" if group.fails else "warning",
                verdict=group.rows[0].verdict,
                label=rows_by_cause.title(group),
                texts=[(group.largest.id, "\n".join(rows_by_cause.lines(group)))],
                next_step=rows_by_cause.next_step(group),
            )


def _order(problem: Problem) -> tuple[int, bool]:
    """Return the sort key: by severity, and regressions before missing or undecided comparisons."""
    return (_SEVERITIES.index(problem.severity), problem.verdict in UNCLEAR)
