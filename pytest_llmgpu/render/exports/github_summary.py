"""A page for GitHub's step summary: `llmgpu export github-summary latest >> "$GITHUB_STEP_SUMMARY"`.

GitHub rejects the whole page of a step if it is larger than 1024 KiB. The worst rows come first, and each table is cut
at its end to fit, with a line that has the number of rows left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from pytest_llmgpu.gate import headline
from pytest_llmgpu.gate.classify import ExitStatus
from pytest_llmgpu.gate.headline import Headline
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.policy_file import policy_of
from pytest_llmgpu.render.comparison import figures
from pytest_llmgpu.render.exports.escaping import code, markdown
from pytest_llmgpu.render.exports.markdown_table import case_lines, header, line
from pytest_llmgpu.render.exports.notices import Level, Notice, level, notices, other_notices
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Row, Verdicts, worst_first
from pytest_llmgpu.store.store import commit, hardware

LIMIT_BYTES = 1000 * 1024
"""Most bytes of the page: 24 KiB less than GitHub allows, for other output of the step."""

COMMENT_BYTES = 60_000
"""Most bytes of a comment, for which GitHub allows 65,536 characters."""

COMMENT_MARK = "<!-- pytest-llmgpu -->"
"""The first line of a comment, by which a workflow finds its own comment and edits it."""

_NOTE_BYTES = 200
"""Bytes reserved for the line on the rows that are left out of a table."""

_REASONS = 5
"""Most reasons that are listed for rows that were not compared."""

_MARKS = {"failure": "❌", "warning": "⚠️", "info": "✅"}
_COLUMNS = ("", "case", "metric", "verdict", "baseline", "now", "change", "reason")
_VERDICT_HEADER = (line(_COLUMNS), "|---|---|---|---|---:|---:|---:|---|")


class _Table(msgspec.Struct, frozen=True):
    """A table that may be cut at its end."""

    before: Sequence[str]
    """The title and the header."""
    lines: Sequence[str]
    """The lines that may be left out."""
    after: Sequence[str] = ()
    """The lines after the table."""


def render(report: Report) -> str:
    """Return the page of the report."""
    return _page(report, [], LIMIT_BYTES)


def render_comment(report: Report) -> str:
    """Return the page as a comment on a pull request."""
    return _page(report, [COMMENT_MARK], COMMENT_BYTES)


def _page(report: Report, first: Sequence[str], limit_bytes: int) -> str:
    head = [*first, f"## {_headline(report)}", "", _measured(report), ""]
    return _fitted(head, list(_tables(report)), limit_bytes)


def _headline(report: Report) -> str:
    verdicts = report.verdicts
    if verdicts is None:
        counted: Counter[str] = Counter(result.outcome.replace("_", " ") for result in report.cases)
        failing = sum(notice.level == "failure" for notice in notices(report))
        result = f"{_MARKS['failure']} {failing} to look at" if failing else "nothing was compared"
    else:
        policy = policy_of(verdicts)
        counted = Counter(row.verdict for row in worst_first(verdicts.rows) if row.gated)
        found = headline.decide(verdicts, policy)
        result = f"{_MARKS[_severity(found, verdicts, policy)]} {markdown(headline.describe(found))}"
    counts = ", ".join(f"{number:,} {word}" for word, number in counted.items())
    return f"LLM inference: {result}{f' ({counts})' if counts else ''}"


def _severity(found: Headline, verdicts: Verdicts, policy: Policy) -> Level:
    """Return the severity of a headline; it is green only if gated rows were compared and none is unclear."""
    if found.status != ExitStatus.PASSED:
        return "failure"
    unclear = any(level(row, policy) == "warning" for row in verdicts.rows)
    return "warning" if unclear or found.states or not verdicts.armed.gated else "info"


def _measured(report: Report) -> str:
    parts = [f"Commit {code(commit(report.commit))} on {markdown(hardware(report))}, {markdown(report.created)}."]
    if not report.session.complete:
        parts.append("**The run is not complete.**")
    if report.verdicts is not None:
        parts.append(_against(report.verdicts))
    return " ".join(parts)


def _against(verdicts: Verdicts) -> str:
    baseline, armed = verdicts.baseline, verdicts.armed
    if baseline is None:
        return "There is no baseline."
    named = [code(baseline.name)] if baseline.name else []
    named += [f"commit {code(baseline.commit[:8])}"] if baseline.commit else []
    often = sorted(armed.unarmed.items(), key=lambda pair: -pair[1])
    unarmed = "; ".join(f"{markdown(why)} ({number:,})" for why, number in often[:_REASONS])
    if len(often) > _REASONS:
        unarmed += f"; and {len(often) - _REASONS:,} more reasons"
    return (
        f"Compared with {', '.join(named) or 'a baseline'}: {armed.compared:,} rows compared, {armed.gated:,} of them "
        f"gated.{f' Not compared: {unarmed}.' if unarmed else ''}"
    )


def _tables(report: Report) -> Iterator[_Table]:
    if report.verdicts is not None:
        policy = policy_of(report.verdicts)
        levels = [(level(row, policy), row) for row in worst_first(report.verdicts.rows)]
        levels.sort(key=lambda pair: list(_MARKS).index(pair[0]))
        noticed = [_verdict_line(severity, row) for severity, row in levels if severity != "info"]
        others = [_verdict_line(severity, row) for severity, row in levels if severity == "info"]
        if noticed:
            yield _Table(["### To look at", "", *_VERDICT_HEADER], noticed)
        yield _notice_table(other_notices(report))
        yield _Table(_folded("Cases", header(report)), list(case_lines(report)), ["", "</details>"])
        if others:
            yield _Table(_folded("All other verdicts", _VERDICT_HEADER), others, ["", "</details>"])
    else:
        yield _notice_table(notices(report))
        yield _Table(["### Cases", "", *header(report)], list(case_lines(report)))


def _notice_table(found: Sequence[Notice]) -> _Table:
    lines = [
        f"- {_MARKS[notice.level]} **{markdown(notice.title)}**: {'<br>'.join(map(markdown, notice.text.splitlines()))}"
        for notice in found
        if notice.level != "info"
    ]
    return _Table(["### Findings", ""] if lines else [], lines)


def _verdict_line(severity: str, row: Row) -> str:
    was, now, change, interval = figures(row)
    reason = [*row.reason.splitlines(), *([f"Known: {row.known}"] if row.known is not None else [])]
    verdict = row.verdict + ("" if row.gated else " (not gated)")
    words = [row.metric.replace("_", " "), verdict, was, now, f"{change} ({interval})" if interval else change]
    return line([_MARKS[severity], code(row.id), *words, "<br>".join(map(markdown, reason))])


def _folded(title: str, header: Sequence[str]) -> list[str]:
    return ["<details>", f"<summary>{title}</summary>", "", *header]


def _fitted(head: Sequence[str], tables: Sequence[_Table], limit_bytes: int) -> str:
    """Return the page with its tables cut, the last ones first, to the limit."""
    frames = [sum(map(_size, (*table.before, *table.after, ""))) + _NOTE_BYTES for table in tables]
    left = limit_bytes - sum(map(_size, head)) - sum(frames)
    page = list(head)
    for table in tables:
        if not table.lines:
            continue
        taken = 0
        for text in table.lines:
            if _size(text) > left:
                break
            left -= _size(text)
            taken += 1
        page += [*table.before, *table.lines[:taken], *table.after, ""]
        if rest := len(table.lines) - taken:
            page += [f"**{rest:,} more lines are left out: GitHub limits the size. The report has all of them.**", ""]
    return "\n".join(page).rstrip("\n")


def _size(text: str) -> int:
    return len(text.encode()) + 1
