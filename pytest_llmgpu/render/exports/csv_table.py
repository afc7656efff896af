"""CSV: one line per case with every figure in the units of the report, then one line per other id with verdicts."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from pytest_llmgpu.render.exports.escaping import spreadsheet
from pytest_llmgpu.render.exports.figures import exported, figures
from pytest_llmgpu.render.exports.notices import rows_by_id
from pytest_llmgpu.render.grouping import unique
from pytest_llmgpu.render.work_table import TOKENS, WORK
from pytest_llmgpu.report.metrics import JUDGED, METRICS
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.store.store import hardware

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
_FIRST = (
    "id",
    "nodeid",
    *_CASE,
    "outcome",
    "failure",
    "launches",
    "inference_s",
    "sequences_per_s",
    "tokens_per_s",
    "accuracy",
    "peak_memory_bytes",
    "wire_bytes_per_sequence",
    "inference_s_low",
    "inference_s_high",
    "verdict_outcome",
    "verdict_largest_batch",
    "verdict_time",
    "verdict_accuracy",
    "verdict_predictions",
    "verdict_traffic",
    "verdict_path",
    "verdict_memory",
    "reasons",
)
"""The columns of version 0.1 in their order, which must not change."""

_OF_METRICS = (*(spec.exported.column for spec in METRICS if spec.exported), *(f"verdict_{name}" for name in JUDGED))

_OF_WORK = tuple(column for column in (*WORK, *TOKENS) if column.name not in {*_FIRST, *_OF_METRICS})

_OF_REPORT = ("created", "commit", "machine", "gpu", "gpu_memory_bytes")

COLUMNS = (
    *_FIRST,
    *(name for name in _OF_METRICS if name not in _FIRST),
    *(column.name for column in _OF_WORK),
    *_OF_REPORT,
)
"""The header of the table; new columns are appended at the end."""


def render(report: Report) -> str:
    """Return the report as CSV."""
    rows = rows_by_id(report.verdicts)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    session = {
        "created": report.created,
        "commit": spreadsheet(report.commit.sha or ""),
        "machine": spreadsheet(hardware(report)),
        "gpu": spreadsheet(", ".join(unique(gpu.name for gpu in report.environment.gpus))),
    }
    for result in report.cases:
        writer.writerow({**session, **_case(result), **_verdicts(rows.pop(result.id, ()))})
    # Cases that only the baseline has, and series, whose id is their strategy.
    for name, others in rows.items():
        nodeid = spreadsheet(others[0].nodeid or "")
        writer.writerow({**session, "id": spreadsheet(name), "nodeid": nodeid, **_verdicts(others)})
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
        "gpu_memory_bytes": result.case.gpu_memory_bytes,  # the cap; empty without one
    }
    for metric, figure in figures(result).items():
        row[exported(metric).column] = figure.value
        if metric == "time" and figure.low is not None:
            row |= {"inference_s_low": figure.low, "inference_s_high": figure.high}
    row |= {column.name: value for column in _OF_WORK if (value := column.value(result)) is not None}
    return row


def _verdicts(rows: Sequence[Row]) -> dict[str, object]:
    verdicts: dict[str, object] = {f"verdict_{row.metric}": row.verdict for row in rows}
    reasons = " / ".join(f"{row.metric}: {row.reason}" for row in rows if row.verdict != "OK")
    return {**verdicts, "reasons": spreadsheet(reasons)}
