"""One line a case with every figure in the report's own units, then one for each verdict that is of no case here."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import get_args

from pytest_llmgpu.render.exports.escaping import spreadsheet
from pytest_llmgpu.render.exports.figures import Figure, figures
from pytest_llmgpu.render.exports.notices import rows_by_id
from pytest_llmgpu.render.exports.protocol import Export
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import MetricName, Row

__all__ = ["COLUMNS", "EXPORT"]

_CASE = (
    "strategy",
    "batch_size",
    "model",
    "load_format",
    "dtype",
    "device",
    "devices",
    "dataset",
    "limit",
    "execution",
)
_FIGURES = {
    "time": "inference_s",
    "sequences": "sequences_per_s",
    "tokens": "tokens_per_s",
    "accuracy": "accuracy",
    "memory": "peak_memory_bytes",
    "traffic": "wire_bytes_per_sequence",
}
_VERDICTS = {metric: f"verdict_{metric}" for metric in get_args(MetricName)}

COLUMNS = (
    "id",
    "nodeid",
    *_CASE,
    "outcome",
    "failure",
    "launches",
    *_FIGURES.values(),
    "inference_s_low",
    "inference_s_high",
    *_VERDICTS.values(),
    "reasons",
)
"""Header of the table; a column is only ever added at its end."""


class _Csv:
    def render(self, report: Report) -> str:
        rows = rows_by_id(report.verdicts)
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        for result in report.cases:
            writer.writerow({**_case(result), **_verdicts(rows.pop(result.id, ()))})
        # What only the baseline has, and series, whose id is their strategy.
        for name, others in rows.items():
            nodeid = spreadsheet(others[0].nodeid or "")
            writer.writerow({"id": spreadsheet(name), "nodeid": nodeid, **_verdicts(others)})
        return text.getvalue().rstrip("\n")


def _case(result: CaseResult) -> dict[str, object]:
    fields = {name: getattr(result.case, name) for name in _CASE}
    row: dict[str, object] = {
        name: spreadsheet(value) if isinstance(value, str) else value for name, value in fields.items()
    }
    row |= {
        "id": spreadsheet(result.id),
        "nodeid": spreadsheet(result.nodeid or ""),
        "outcome": result.outcome,
        "failure": spreadsheet(result.failure.message) if result.failure is not None else "",
        "launches": len(result.launches),
    }
    for figure in figures(result):
        row[_FIGURES[figure.name]] = figure.value
        if figure.name == "time":
            row |= _range(figure)
    return row


def _range(figure: Figure) -> dict[str, object]:
    if figure.low is None:
        return {}
    return {"inference_s_low": figure.low, "inference_s_high": figure.high}


def _verdicts(rows: Sequence[Row]) -> dict[str, object]:
    verdicts: dict[str, object] = {_VERDICTS[row.metric]: row.verdict for row in rows}
    reasons = " / ".join(f"{row.metric}: {row.reason}" for row in rows if row.verdict != "OK")
    return {**verdicts, "reasons": spreadsheet(reasons)}


EXPORT: Export = _Csv()
