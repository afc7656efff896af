"""One line a case for people, to paste into an issue or a page; what no case here has a line for comes after it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_llmgpu.render.exports.escaping import code, markdown, one_line
from pytest_llmgpu.render.exports.figures import describe, figures
from pytest_llmgpu.render.exports.notices import rows_by_id
from pytest_llmgpu.render.exports.protocol import Export
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row

__all__ = ["EXPORT", "HEADER", "case_lines", "line", "quantity"]

_GIB = 2**30
_MB = 10**6
_MESSAGE = 120  # characters of a failure's: its numbers come first

_COLUMNS = (
    "case",
    "measured",
    "outcome",
    "time",
    "sequences/s",
    "accuracy",
    "peak memory",
    "sent/sequence, all GPUs",
    "verdict",
)

HEADER = ("| " + " | ".join(_COLUMNS) + " |", "|---|---|---|---:|---:|---:|---:|---:|---|")
"""The two lines that begin the table."""


class _Markdown:
    def render(self, report: Report) -> str:
        return "\n".join([*HEADER, *case_lines(report)])


def case_lines(report: Report) -> Iterator[str]:
    """Yield the table's lines in the report's order, then those of verdicts without a case: gone, or of a series."""
    rows = rows_by_id(report.verdicts)
    for result in report.cases:
        yield _case(result, rows.pop(result.id, ()))
    for name, others in rows.items():
        yield line([code(name), *[""] * 7, _verdict(others)])


def line(cells: Sequence[str]) -> str:
    """Return a table's line of cells that are escaped."""
    return f"| {' | '.join(cells)} |"


def quantity(unit: str, value: float) -> str:
    """Return a figure as people read it, with its unit."""
    if unit == "s":
        return f"{value:.3g} s" if value < 100 else f"{value:,.1f} s"  # noqa: PLR2004 - three digits and no exponent
    if unit == "bytes":
        return f"{value / _GIB:.2f} GiB"
    if unit in {"bytes/sequence", "wire bytes"}:
        return f"{value / _MB:,.3f} MB"
    if unit in {"acc", "acc_norm"}:
        return f"{100 * value:.2f} %"
    return f"{value:,.{_decimals(value)}f}"


def _case(result: CaseResult, rows: Sequence[Row]) -> str:
    found = figures(result)
    shown = [
        quantity(found[name].unit, found[name].value) if name in found else ""
        for name in ("time", "sequences", "accuracy", "memory", "traffic")
    ]
    wrong = result.accuracy_check is not None and result.accuracy_check.ok is False
    outcome = result.outcome.replace("_", " ") + (", wrong answers" if wrong else "")
    if result.failure is not None:
        outcome += f": {one_line(result.failure.message, _MESSAGE)}"
    return line([code(result.id), markdown(describe(result.case)), markdown(outcome), *shown, _verdict(rows)])


def _verdict(rows: Sequence[Row]) -> str:
    """Return the worst verdict, with every metric it is of."""
    if not rows:
        return ""
    metrics = ", ".join(row.metric.replace("_", " ") for row in rows if row.verdict == rows[0].verdict)
    known = " (known)" if rows[0].known is not None else ""
    return f"{rows[0].verdict.replace('_', ' ')}{known}: {metrics}"


def _decimals(value: float) -> int:
    """Return the decimals, 3 at most, that leave about three digits."""
    return 3 if value <= 0 else min(3, max(0, 2 - math.floor(math.log10(value))))


EXPORT: Export = _Markdown()
