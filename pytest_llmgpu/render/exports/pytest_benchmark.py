"""A file for `pytest-benchmark compare`: a round is a launch, and its time is the sum of all batches.

The format has no place for a case without a time. Such cases are in `llmgpu`, which pytest-benchmark does not read,
with the verdicts. Other figures of a case are in its `extra_info`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from pytest_llmgpu.render.exports.escaping import one_line
from pytest_llmgpu.render.exports.figures import describe, figures, names
from pytest_llmgpu.render.exports.notices import rows_by_id
from pytest_llmgpu.report.derived import batch_latency_s
from pytest_llmgpu.report.metrics import launches_s
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.store.store import hardware

_LAYOUT = "5.3.1"
"""The version of pytest-benchmark that writes such files."""


def render(report: Report) -> str:
    """Return the report in the form of pytest-benchmark."""
    rows = rows_by_id(report.verdicts)
    named = list(zip(names(report.cases), report.cases, strict=True))
    environment = report.environment
    document = {
        "machine_info": {
            "node": "",  # a report names no host
            "processor": environment.cpu or "",
            "python_version": environment.python,
            "platform": environment.platform,
            "cpu": {"brand_raw": environment.cpu, "count": environment.cores},
            "gpus": [gpu.name for gpu in environment.gpus],
            "driver": environment.driver,
            "cuda": environment.cuda,
            "versions": environment.versions,
        },
        "commit_info": {
            "id": report.commit.sha or "unknown",
            "time": None,
            "author_time": None,
            "dirty": bool(report.commit.dirty),
            "project": None,
            "branch": report.commit.branch or "(unknown)",
        },
        "benchmarks": [
            _benchmark(report, name, result, rows.get(result.id, ())) for name, result in named if launches_s(result)
        ],
        "datetime": report.created,
        "version": _LAYOUT,
        "llmgpu": {
            "not_completed": [_missing(name, result) for name, result in named if not launches_s(result)],
            "verdicts": msgspec.to_builtins(report.verdicts),
        },
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _benchmark(report: Report, name: str, result: CaseResult, rows: Sequence[Row]) -> dict[str, Any]:
    case = result.case
    return {
        # The strategies of a batch size side by side; `--group-by=name` has a case in several reports.
        "group": f"{describe(case)}, batch size {case.batch_size}",
        "name": f"{one_line(case.id)}[{one_line(case.model)}]",
        "fullname": name,
        "params": {
            "strategy": one_line(case.strategy),
            "batch_size": case.batch_size,
            "model": one_line(case.model),
            "dtype": one_line(case.dtype),
            "dataset": one_line(case.dataset),
        },
        "param": one_line(case.id),
        "extra_info": {
            "nodeid": result.nodeid,
            "outcome": result.outcome,
            "figures": {
                metric: {"value": figure.value, "unit": figure.unit} for metric, figure in figures(result).items()
            },
            "machine": hardware(report),
            "gpu_memory_bytes": case.gpu_memory_bytes,
            "energy_j_per_sequence": result.energy_j_per_sequence,
            "batch_latency_s": {f"p{percent}": batch_latency_s(result, percent / 100) for percent in (50, 95, 99)},
            "findings": [{"severity": one.severity, "code": one.code, "text": one.text} for one in result.findings],
            "verdicts": {row.metric: row.verdict for row in rows},
        },
        "options": {},
        "stats": _stats(launches_s(result)),
    }


def _missing(name: str, result: CaseResult) -> dict[str, str | None]:
    message = result.failure.message if result.failure is not None else None
    return {"name": name, "nodeid": result.nodeid, "outcome": result.outcome, "message": message}


def _stats(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the statistics of pytest-benchmark; its table needs all of them."""
    data = sorted(seconds)
    mean = statistics.fmean(data)
    stddev = statistics.stdev(data) if len(data) > 1 else 0.0
    first, third = _quartiles(data)
    low, high = first - 1.5 * (third - first), third + 1.5 * (third - first)
    far = sum(abs(value - mean) > stddev for value in data)
    outside = [value for value in data if not low <= value <= high]
    inside = [value for value in data if low <= value <= high]
    return {
        "min": data[0],
        "max": data[-1],
        "mean": mean,
        "stddev": stddev,
        "rounds": len(data),
        "median": statistics.median(data),
        "iqr": third - first,
        "q1": first,
        "q3": third,
        "iqr_outliers": len(outside),
        "stddev_outliers": far,
        "outliers": f"{far};{len(outside)}",
        "ld15iqr": inside[0],
        "hd15iqr": inside[-1],
        "ops": len(data) / sum(data) if sum(data) else 0.0,
        "total": sum(data),
        "data": list(seconds),
        "iterations": 1,
    }


def _quartiles(data: Sequence[float]) -> tuple[float, float]:
    """Return the medians of both halves; an odd number of values has the mean of halves with and without its middle."""
    if len(data) == 1:
        return data[0], data[0]
    half, rest = len(data) // 2, len(data) - len(data) // 2
    first = statistics.fmean((statistics.median(data[:half]), statistics.median(data[:rest])))
    third = statistics.fmean((statistics.median(data[half:]), statistics.median(data[rest:])))
    return first, third
