"""A page for GitHub's step summary: `llmgpu export github-summary latest >> "$GITHUB_STEP_SUMMARY"`.

GitHub drops the whole page of a step that is larger than 1024 KiB. So the worst comes first, and what does not fit is
left out from the end of each table, with a line that says how much that was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from pytest_llmgpu.gate.classify import exit_status
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.policy_file import policy_of
from pytest_llmgpu.render.exports.escaping import code, markdown
from pytest_llmgpu.render.exports.markdown_table import HEADER, case_lines, line, quantity
from pytest_llmgpu.render.exports.notices import Notice, besides_rows, level, notices
from pytest_llmgpu.render.exports.protocol import Export
from pytest_llmgpu.report.metrics import spec_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Row, Verdicts, worst_first
from pytest_llmgpu.store.listing import commit
from pytest_llmgpu.store.store import hardware

__all__ = ["EXPORT", "LIMIT_BYTES"]

LIMIT_BYTES = 1000 * 1024
"""Of the page: 24 KiB less than GitHub takes, for what else a step writes."""

_NOTE_BYTES = 200
"""Kept free for each table's line on what was left out."""

_REASONS = 5
"""Most reasons that are named why something was not compared."""

_MARKS = {"failure": "❌", "warning": "⚠️", "info": "✅"}
_COLUMNS = ("", "case", "metric", "verdict", "baseline", "now", "change", "reason")
_VERDICT_HEADER = (line(_COLUMNS), "|---|---|---|---|---:|---:|---:|---|")


class _Table(msgspec.Struct, frozen=True):
    """Lines that may be cut at their end."""

    before: Sequence[str]
    lines: Sequence[str]
    after: Sequence[str] = ()


class _GitHubSummary:
    def render(self, report: Report) -> str:
        head = [f"## {_headline(report)}", "", _measured(report), ""]
        return _fitted(head, list(_tables(report)), LIMIT_BYTES)


def _headline(report: Report) -> str:
    verdicts = report.verdicts
    if verdicts is None:
        counted: Counter[str] = Counter(result.outcome.replace("_", " ") for result in report.cases)
        failing = sum(notice.level == "failure" for notice in notices(report))
        said = f"{_MARKS['failure']} {failing} to look at" if failing else "nothing was compared"
    else:
        policy = policy_of(verdicts)
        counted = Counter(row.verdict.replace("_", " ") for row in worst_first(verdicts.rows))
        failing = sum(level(row, policy) == "failure" for row in verdicts.rows)
        said = f"{_MARKS['failure']} {failing} fail" if failing else _unfailing(verdicts, policy)
    counts = ", ".join(f"{number:,} {word}" for word, number in counted.items())
    return f"LLM inference: {said}{f' ({counts})' if counts else ''}"


def _unfailing(verdicts: Verdicts, policy: Policy) -> str:
    """Return how a gate ends of which no row fails: green only where something gated was compared, and told."""
    if verdicts.armed.gated == 0:
        said = "nothing that can fail was compared"
    elif exit_status(verdicts, policy):
        said = "not all that is gated was compared"
    else:
        open_rows = sum(level(row, policy) == "warning" for row in verdicts.rows)
        return (
            f"{_MARKS['warning']} none fails, {open_rows} to look at" if open_rows else f"{_MARKS['info']} none fails"
        )
    return f"{_MARKS['failure' if exit_status(verdicts, policy) else 'warning']} {said}"


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
        f"Held against {', '.join(named) or 'a baseline'}: {armed.compared:,} rows compared, {armed.gated:,} of them "
        f"gated.{f' Not compared: {unarmed}.' if unarmed else ''}"
    )


def _tables(report: Report) -> Iterator[_Table]:
    if report.verdicts is not None:
        policy = policy_of(report.verdicts)
        levels = [(level(row, policy), row) for row in worst_first(report.verdicts.rows)]
        levels.sort(key=lambda pair: list(_MARKS).index(pair[0]))
        told = [_verdict_line(loudness, row) for loudness, row in levels if loudness != "info"]
        fine = [_verdict_line(loudness, row) for loudness, row in levels if loudness == "info"]
        if told:
            yield _Table(["### To look at", "", *_VERDICT_HEADER], told)
        yield _notice_table(besides_rows(report))
        yield _Table(_folded("Cases", HEADER), list(case_lines(report)), ["", "</details>"])
        if fine:
            yield _Table(_folded("All other verdicts", _VERDICT_HEADER), fine, ["", "</details>"])
    else:
        yield _notice_table(notices(report))
        yield _Table(["### Cases", "", *HEADER], list(case_lines(report)))


def _notice_table(told: Sequence[Notice]) -> _Table:
    lines = [
        f"- {_MARKS[notice.level]} **{markdown(notice.title)}**: {'<br>'.join(map(markdown, notice.text.splitlines()))}"
        for notice in told
        if notice.level != "info"
    ]
    return _Table(["### Findings", ""] if lines else [], lines)


def _verdict_line(loudness: str, row: Row) -> str:
    unit = spec_of(row.metric).unit
    figures = [quantity(unit, value) if unit and value is not None else "" for value in (row.base, row.head)]
    reason = [*row.reason.splitlines(), *([f"Known: {row.known}"] if row.known is not None else [])]
    verdict = row.verdict.replace("_", " ") + ("" if row.gated else " (not gated)")
    words = [row.metric.replace("_", " "), verdict]
    return line([_MARKS[loudness], code(row.id), *words, *figures, _change(row), "<br>".join(map(markdown, reason))])


def _change(row: Row) -> str:
    if spec_of(row.metric).points and row.base is not None and row.head is not None:
        return f"{100 * (row.head - row.base):+.2f} points"
    if row.ratio is None:
        return ""
    ends = [_pct(end) for end in (row.low, row.high) if end is not None and row.low != row.high]
    return f"{_pct(row.ratio)} %{f' ({ends[0]} to {ends[1]})' if len(ends) > 1 else ''}"


def _pct(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{change:+.1f}" if abs(change) < 1e6 else f"{change:+.1e}"  # noqa: PLR2004


def _folded(title: str, header: Sequence[str]) -> list[str]:
    return ["<details>", f"<summary>{title}</summary>", "", *header]


def _fitted(head: Sequence[str], tables: Sequence[_Table], limit_bytes: int) -> str:
    """Return the page, its tables cut from the last one on until it is no larger than the limit."""
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
            page += [f"**{rest:,} more lines are left out: GitHub shows 1 MiB. The report has them all.**", ""]
    return "\n".join(page).rstrip("\n")


def _size(text: str) -> int:
    return len(text.encode()) + 1


EXPORT: Export = _GitHubSummary()
