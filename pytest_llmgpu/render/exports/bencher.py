"""Bencher Metric Format: `{"benchmark": {"measure": {"value", "lower_value", "upper_value"}}}`.

`latency` in nanoseconds and `throughput` are the measures that every Bencher project has. The format has numbers only:
the outcome is `completed` and `out-of-memory`, each 1 or 0. Verdicts are not exported, because Bencher has its own
thresholds.
"""

from __future__ import annotations

import hashlib
import json

from pytest_llmgpu.render.exports.figures import exported, figures, largest_batches, names
from pytest_llmgpu.report.metrics import Figure
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import OUT_OF_MEMORY, CaseResult

_LONGEST_BYTES = 1024
"""Most bytes of a benchmark's name."""
_HASHED = 8
"""Digits of the digest of a longer name."""


def render(report: Report) -> str:
    """Return the report in Bencher Metric Format."""
    found = {_cut(name): _measures(result) for name, result in zip(names(report.cases), report.cases, strict=True)}
    for name, size, _ in largest_batches(report):
        found[_cut(name)] = {"largest-batch-size": {"value": float(size)}}
    return json.dumps(found, indent=2, allow_nan=False)


def _measures(result: CaseResult) -> dict[str, dict[str, float]]:
    measures = {}
    for metric, figure in figures(result).items():
        named = exported(metric)
        if named.measure is not None:
            measures[named.measure] = _metric(figure, named.measure_scale)
    failures = sum(finding.severity == "failure" for finding in result.findings)
    for name, number in (
        ("completed", result.outcome == "completed"),
        ("out-of-memory", result.outcome in OUT_OF_MEMORY),
        ("failure-findings", failures),
    ):
        measures[name] = {"value": float(number)}
    return measures


def _metric(figure: Figure, factor: float) -> dict[str, float]:
    metric = {"value": figure.value * factor}
    if figure.low is not None and figure.high is not None:
        metric |= {"lower_value": figure.low * factor, "upper_value": figure.high * factor}
    return metric


def _cut(name: str) -> str:
    """Return a name of the length that Bencher allows; a longer one ends in its digest."""
    data = name.encode()
    if len(data) <= _LONGEST_BYTES:
        return name
    digest = hashlib.sha256(data).hexdigest()[:_HASHED]
    return f"{data[: _LONGEST_BYTES - _HASHED - 1].decode(errors='ignore')} {digest}"
