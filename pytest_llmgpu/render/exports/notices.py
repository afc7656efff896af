"""The notices of a report, worst first: its verdicts, or its findings and outcomes if it has no verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from pytest_llmgpu.gate import cause_groups, headline
from pytest_llmgpu.gate.classify import ExitStatus, RowClass, classify, exit_status
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.policy_file import policy_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row, Verdicts, worst_first

Level = Literal["failure", "warning", "info"]
"""The severity of a notice."""

_LEVELS: dict[RowClass, Level] = {RowClass.FAILS: "failure", RowClass.ALLOWED: "warning", RowClass.UNCLEAR: "warning"}
_ORDER: tuple[Level, ...] = ("failure", "warning", "info")
_BROKEN = frozenset(("crashed", "timeout", "error"))


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One notice."""

    level: Level
    """How severe it is."""
    title: str
    """The finding and the case in a few words: `REGRESSED: mp-bs8 wall time +5.0 % (220.5 s, was 210 s)`."""
    text: str
    """The reason in a few lines: the result, then its cause, then the other cases and the next step."""
    nodeid: str | None = None
    """The node id of the test; None if the notice belongs to no test."""


def notices(report: Report) -> list[Notice]:
    """Return all notices, worst first; unchanged and better rows have none."""
    return _sorted([*_of_gate(report.verdicts), *_of_rows(report.verdicts), *other_notices(report)])


def other_notices(report: Report) -> list[Notice]:
    """Return the notices except those of rows, worst first: warnings of the comparison, findings and outcomes."""
    warnings = report.verdicts.warnings if report.verdicts is not None else []
    return _sorted([*(Notice(level="warning", title="Comparison", text=text) for text in warnings), *_of_cases(report)])


def level(row: Row, policy: Policy) -> Level:
    """Return the severity of a row under a policy."""
    return _LEVELS.get(classify(row, policy), "info")


def rows_by_id(verdicts: Verdicts | None) -> dict[str, list[Row]]:
    """Return the rows by id of their case, or by strategy for a series, worst first."""
    rows: dict[str, list[Row]] = {}
    for row in worst_first(verdicts.rows) if verdicts is not None else ():
        rows.setdefault(row.id, []).append(row)
    return rows


def _sorted(found: Iterable[Notice]) -> list[Notice]:
    return sorted(found, key=lambda notice: _ORDER.index(notice.level))


def _of_gate(verdicts: Verdicts | None) -> Iterator[Notice]:
    """Yield the reason if the gate fails because nothing was compared."""
    if verdicts is None:
        return
    policy = policy_of(verdicts)
    if exit_status(verdicts, policy) == ExitStatus.NOTHING_COMPARED:
        yield Notice(level="failure", title="Gate", text=headline.describe(headline.decide(verdicts, policy)))


def _of_rows(verdicts: Verdicts | None) -> Iterator[Notice]:
    """Yield one notice per cause."""
    if verdicts is None:
        return
    policy = policy_of(verdicts)
    for group in cause_groups.group(verdicts, policy):
        worst = group.rows[0]
        yield Notice(
            level=min((level(row, policy) for row in group.rows), key=_ORDER.index),
            title=f"{worst.verdict}: {cause_groups.title(group)}",
            text="\n".join([*cause_groups.lines(group), f"Next: {cause_groups.next_step(group)}"]),
            nodeid=group.largest.nodeid or worst.nodeid,
        )


def _of_cases(report: Report) -> Iterator[Notice]:
    judged = {row.id for row in report.verdicts.rows if row.metric == "outcome"} if report.verdicts else set()
    for result in report.cases:
        for finding in result.findings:
            if finding.severity != "info" and not (result.id in judged and result.outcome != "completed"):
                text = f"{finding.text}\n{finding.next_step}"
                title = f"{finding.code}: {result.id}"
                yield Notice(level=finding.severity, title=title, text=text, nodeid=result.nodeid)
        if result.outcome != "completed" and not result.findings and result.id not in judged:
            yield _of_outcome(result)


def _of_outcome(result: CaseResult) -> Notice:
    """Return the notice on the outcome of a case without findings; out of memory is a result, not a failure."""
    return Notice(
        level="failure" if result.outcome in _BROKEN else "info",
        title=f"{result.outcome.replace('_', ' ')}: {result.id}",
        text=result.failure.message if result.failure is not None else "The case did not complete.",
        nodeid=result.nodeid,
    )
