"""GitHub: a page for the step summary, the same page as a comment on a pull request, annotations at the tests.

`llmgpu export github-summary latest >> "$GITHUB_STEP_SUMMARY"`. GitHub rejects what is larger than 1024 KiB, and
a page has a quarter of that. Worst rows come first, and each table is cut to fit, with the number of lines left out.

Annotations are workflow commands that a step prints, shown at the line of the test. GitHub shows the first 10 of a
step: the worst come first, and the last one has the number of those that are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_llmgpu.gate import headline
from pytest_llmgpu.gate.judge import ExitStatus, Level, level
from pytest_llmgpu.gate.policy import policy_of
from pytest_llmgpu.render import summary
from pytest_llmgpu.render.exports.tables import code, markdown, markdown_header, markdown_line, markdown_lines
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import OUT_OF_MEMORY
from pytest_llmgpu.report.text import listed, one_line, plural
from pytest_llmgpu.report.verdicts import worst_first
from pytest_llmgpu.store import git
from pytest_llmgpu.store.store import commit, hardware

LIMIT_BYTES = 250 * 1024  # most bytes of the page: a quarter of what GitHub allows, which other pages need, too
COMMENT_BYTES = 60_000  # most bytes of a comment, for which GitHub allows 65,536 characters
COMMENT_MARK = "<!-- pytest-llmgpu -->"  # the first line of a comment, by which a workflow finds its own and edits it
ANNOTATIONS = 10  # most annotations of one step
_FOLD = "<details>"
_NOTE_BYTES = 200  # bytes reserved for the line on the rows that are left out of a table

_MARKS: dict[Level, str] = {"failure": "❌", "warning": "⚠️", "info": "✅"}  # the levels, worst first, with their marks

_COMMANDS: dict[Level, str] = {"failure": "error", "warning": "warning", "info": "notice"}
_COLUMNS = ("", "case", "metric", "verdict", "baseline", "now", "change", "reason")
_VERDICT_HEADER = (markdown_line(_COLUMNS), "|---|---|---|---|---:|---:|---:|---|")


class Notice(NamedTuple):
    """One notice and how severe it is."""

    level: Level
    title: str
    """The finding and the case in a few words: `REGRESSED: mp-bs8 wall time +5.0 % (220.5 s, was 210 s)`."""
    text: str
    """The reason in a few lines: the result, then its cause, then the other cases and the next step."""
    nodeid: str | None = None
    """The node id of the test; None if the notice belongs to no test."""


def notices(report: Report) -> list[Notice]:
    """Return all notices, worst first; unchanged and better rows have none."""
    found = []
    if (verdicts := report.verdicts) is not None:
        policy = policy_of(verdicts)
        decided = headline.headline(verdicts, policy)
        if decided.status is ExitStatus.NOT_JUDGED and not decided.worst:
            found.append(Notice("failure", "Gate", decided.text))
        for group in summary.by_cause(verdicts, policy):
            worst = group.rows[0]
            severity = min((level(row, policy) for row in group.rows), key=list(_MARKS).index)
            title = f"{worst.verdict}: {headline.row_in_words(worst)}"
            found.append(Notice(severity, title, "\n".join([*group.lines, f"Next: {group.next_step}"]), worst.nodeid))
    return sorted([*found, *other_notices(report)], key=_order)


def other_notices(report: Report) -> list[Notice]:
    """Return the notices except those of rows, worst first: warnings of the comparison, findings and outcomes."""
    rows, warnings = ([], []) if report.verdicts is None else (report.verdicts.rows, report.verdicts.warnings)
    found = [Notice("warning", "Comparison", text) for text in warnings]
    judged = {row.id for row in rows if row.metric == "outcome"}
    for result in report.cases:
        if result.outcome != "completed" and not result.findings and result.id not in judged:
            # Out of memory is a result, not a failure.
            severity: Level = "info" if result.outcome in OUT_OF_MEMORY else "failure"
            text = result.failure.message if result.failure is not None else "The case did not complete."
            found.append(Notice(severity, f"{result.outcome.replace('_', ' ')}: {result.id}", text, result.nodeid))
        for finding in result.findings:
            if finding.severity != "info" and (result.outcome == "completed" or result.id not in judged):
                text = f"{finding.text}\n{finding.next_step}"
                found.append(Notice(finding.severity, f"{finding.code}: {result.id}", text, result.nodeid))
    return sorted(found, key=_order)


def _order(notice: Notice) -> int:
    return list(_MARKS).index(notice.level)


def render_annotations(report: Report) -> str:
    """Return the notices of the report as workflow commands, one at the line of each test or of its file."""
    found = notices(report)
    if len(found) > ANNOTATIONS:
        rest = found[ANNOTATIONS - 1 :]
        text = f"{len(rest)} more are not shown, because GitHub shows {ANNOTATIONS}: see the summary or the report."
        found = [*found[: ANNOTATIONS - 1], Notice(rest[0].level, "And more", text)]
    lines = {result.nodeid: result.line for result in report.cases}
    commands = []
    for notice in found:
        properties = [f"title={command_property(one_line(f'pytest-llmgpu: {notice.title}'))}"]
        if notice.nodeid:
            file = command_property(one_line(notice.nodeid.partition("::")[0]))
            properties = [f"file={file}", f"line={lines.get(notice.nodeid) or 1}", *properties]
        text = "\n".join(one_line(line) for line in notice.text.splitlines() if line.strip())
        # GitHub ignores an annotation without a message.
        message = command_value(text or notice.level)
        commands.append(f"::{_COMMANDS[notice.level]} {','.join(properties)}::{message}")
    return "\n".join(commands)


def command_value(text: str) -> str:
    """Return text as the message of a GitHub workflow command; line breaks are kept."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def command_property(text: str) -> str:
    """Return text as the value of a property of a GitHub workflow command."""
    return command_value(text).replace(":", "%3A").replace(",", "%2C")


_Table = tuple[Sequence[str], Sequence[str], Sequence[str]]
"""The title and the header, the lines that may be left out, and the lines after them."""


def render_summary(report: Report) -> str:
    """Return the page of the report."""
    return _page(report, [], list(_tables(report)), LIMIT_BYTES)


def render_comment(report: Report) -> str:
    """Return the page as a comment on a pull request: what changed, the next step, and the commits since the baseline.

    The commits are those of the repository of the working directory.
    """
    tables, verdicts = list(_tables(report)), report.verdicts
    if verdicts is not None:
        # What did not change is on the page of the step.
        tables = [table for table in tables if _FOLD not in table[0]]
        if step := headline.next_steps(verdicts, policy_of(verdicts)):
            tables.append(((), [markdown(step)], ()))
        base = verdicts.baseline.commit if verdicts.baseline is not None else None
        commits = git.subjects(Path(), base, report.commit.sha) if base and report.commit.sha else []
        if commits:
            title = f"<summary>{plural(len(commits), 'commit')} since the baseline</summary>"
            tables.append(([_FOLD, title, ""], [f"- {markdown(line)}" for line in commits], ["", "</details>"]))
    return _page(report, [COMMENT_MARK], tables, COMMENT_BYTES)


def _page(report: Report, first: Sequence[str], tables: Sequence[_Table], limit_bytes: int) -> str:
    verdicts = report.verdicts
    if verdicts is None:
        counted: Counter[str] = Counter(map(summary.outcome, report.cases))
        failing = sum(notice.level == "failure" for notice in notices(report))
        result = f"{_MARKS['failure']} {failing} to look at" if failing else "nothing was compared"
    else:
        policy = policy_of(verdicts)
        counted = Counter(row.word for row in worst_first(verdicts.rows) if row.gated)
        found = headline.headline(verdicts, policy)
        # It is green only if gated rows were compared and none is unclear.
        clear = not found.states and any(row.compared for row in verdicts.rows)
        clear = clear and all(level(row, policy) != "warning" for row in verdicts.rows)
        mark = _MARKS["failure" if found.status != ExitStatus.PASSED else "info" if clear else "warning"]
        result = f"{mark} {markdown(found.text)}"
    counts = ", ".join(f"{number:,} {word}" for word, number in counted.items())
    parts = [f"Commit {code(commit(report.commit))} on {markdown(hardware(report))}, {markdown(report.created)}."]
    if not report.session.complete:
        parts.append("**The run is not complete.**")
    if verdicts is not None and verdicts.baseline is not None:
        name, sha = verdicts.baseline.name, verdicts.baseline.commit
        named = [*([code(name)] if name else []), *([f"commit {code(sha[:8])}"] if sha else [])]
        parts.append(f"Compared with {', '.join(named) or 'a baseline'}: {markdown(summary.counts(verdicts))}.")
    elif verdicts is not None:
        parts.append("There is no baseline.")
    title = f"## LLM inference: {result}{f' ({counts})' if counts else ''}"
    return _fitted([*first, title, "", " ".join(parts), ""], tables, limit_bytes)


def _tables(report: Report) -> Iterator[_Table]:
    cases, verdicts = list(markdown_lines(report)), report.verdicts
    if verdicts is None:
        yield _notice_table(notices(report))
        yield ["### Cases", "", *markdown_header(report)], cases, ()
        return
    policy = policy_of(verdicts)
    folded = ["", "</details>"]
    lines: dict[bool, list[str]] = {True: [], False: []}
    stated: set[str] = set()  # causes: they are stated once
    for severity, sign in _MARKS.items():
        of_level = [row for row in worst_first(verdicts.rows) if level(row, policy) == severity]
        for row in of_level:
            was, now, change, interval = map(markdown, summary.figures(row))
            mark = "" if row.verdict == "CHANGED" else sign
            allowed = [] if row.allowed is None else [f"Allowed: {row.allowed}"]
            reasons = [text for text in row.reason.splitlines() if text not in stated]
            stated.update(text for text in reasons if text.startswith(("Cause: ", "Calls of ")))
            reason = "<br>".join(map(markdown, [*reasons, *allowed]))
            cells = [mark, code(row.id), row.metric.replace("_", " "), summary.verdict(row), was, now]
            line = markdown_line([*cells, f"{change} ({interval})" if interval else change, reason])
            lines[severity != "info"].append(line)
    yield ["### To look at", "", *_VERDICT_HEADER], lines[True], ()
    yield _notice_table(other_notices(report))
    yield [_FOLD, "<summary>Cases</summary>", "", *markdown_header(report)], cases, folded
    yield [_FOLD, "<summary>All other verdicts</summary>", "", *_VERDICT_HEADER], lines[False], folded


def _notice_table(found: Sequence[Notice]) -> _Table:
    alike: dict[tuple[Level, str], list[str]] = {}
    for notice in found:
        titles = alike.setdefault((notice.level, notice.text), [])
        titles.append(notice.title.partition(": ")[2] if titles else notice.title)  # the code is that of the first
    lines = [
        f"- {_MARKS[severity]} **{markdown(listed(titles, 3))}**: {'<br>'.join(map(markdown, text.splitlines()))}"
        for (severity, text), titles in alike.items()
        if severity != "info"
    ]
    return ["### Findings", ""], lines, ()


def _fitted(head: Sequence[str], tables: Sequence[_Table], limit_bytes: int) -> str:
    """Return the page with its tables cut, the last ones first, to the limit."""
    tables = [table for table in tables if table[1]]
    left = limit_bytes - sum(map(_size, head))
    left -= sum(_NOTE_BYTES + sum(map(_size, (*before, *after, ""))) for before, _, after in tables)
    page = list(head)
    for before, lines, after in tables:
        taken = 0
        while taken < len(lines) and _size(lines[taken]) <= left:
            left -= _size(lines[taken])
            taken += 1
        page += [*before, *lines[:taken], *after, ""]
        if rest := len(lines) - taken:
            page += [f"**{rest:,} more lines are left out: GitHub limits the size. The report has all of them.**", ""]
    return "\n".join(page).rstrip("\n")


def _size(text: str) -> int:
    return len(text.encode()) + 1
