"""Markdown: one line per case, to paste into an issue or a page, then the verdicts on other ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_llmgpu.render import comparison
from pytest_llmgpu.render.exports.escaping import code, markdown, one_line
from pytest_llmgpu.render.exports.figures import describe, figures
from pytest_llmgpu.render.exports.notices import rows_by_id
from pytest_llmgpu.report.metrics import spec_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row

_MESSAGE = 120
"""Most characters of a failure's message; its numbers come first."""

_FIGURES = {
    "time": "time",
    "sequences": "sequences/s",
    "first_token": "time to first token",
    "token_time": "time per token",
    "accuracy": "accuracy",
    "memory": "peak memory",
    "traffic": "sent/sequence, all ranks",
}
"""Metric to its column; the table has only these, so that it fits a page."""


def render(report: Report) -> str:
    """Return the report as a table of Markdown."""
    return "\n".join([*header(report), *case_lines(report)])


def header(report: Report) -> tuple[str, str]:
    """Return the first two lines of the table."""
    titles = [_FIGURES[name] for name in _columns(report)]
    return (
        line(["case", "measured", "outcome", *titles, "verdict"]),
        f"|---|---|---|{'---:|' * len(titles)}---|",
    )


def case_lines(report: Report) -> Iterator[str]:
    """Yield the lines of the cases in the order of the report, then those of other ids with verdicts."""
    rows, columns = rows_by_id(report.verdicts), _columns(report)
    for result in report.cases:
        yield _case(result, columns, rows.pop(result.id, ()))
    for name, others in rows.items():
        yield line([code(name), *[""] * (2 + len(columns)), _verdict(others)])


def line(cells: Sequence[str]) -> str:
    """Return a line of the table; its cells must be escaped."""
    return f"| {' | '.join(cells)} |"


def _columns(report: Report) -> list[str]:
    """Return the metrics of the table, which are those that a case has."""
    measured = {name for result in report.cases for name in figures(result)}
    return [name for name in _FIGURES if name in measured]


def _case(result: CaseResult, columns: Sequence[str], rows: Sequence[Row]) -> str:
    found = figures(result)
    shown = [spec_of(name).written(found[name].value) if name in found else "" for name in columns]
    outcome = result.outcome.replace("_", " ") + (", wrong answers" if result.has_wrong_answers else "")
    if result.failure is not None:
        outcome += f": {one_line(result.failure.message, _MESSAGE)}"
    return line([code(result.id), markdown(describe(result.case)), markdown(outcome), *shown, _verdict(rows)])


def _verdict(rows: Sequence[Row]) -> str:
    """Return the worst verdict with all metrics that have it."""
    if not rows:
        return ""
    worst = comparison.verdict(rows[0])
    return f"{worst}: {', '.join(row.metric.replace('_', ' ') for row in rows if comparison.verdict(row) == worst)}"
