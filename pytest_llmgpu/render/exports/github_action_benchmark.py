"""Input of github-action-benchmark: one file with metrics that should be small, one with those that should be large.

    - uses: benchmark-action/github-action-benchmark@v1
      with: {tool: customSmallerIsBetter, output-file-path: smaller.json}

The tool rejects an empty list and values that are not numbers. Each file therefore begins with a number of cases. The
names of these cases, and the verdicts and findings of a case, are in `extra`, which the chart shows at a point.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from pytest_llmgpu.render.exports.escaping import one_line
from pytest_llmgpu.render.exports.figures import exported, figures, largest_batches, names
from pytest_llmgpu.render.exports.notices import rows_by_id
from pytest_llmgpu.report.metrics import Figure, spec_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import plural
from pytest_llmgpu.report.verdicts import Row

_IN_COMMENTS = str.maketrans({"`": "'", "|": "/"})
"""A comment has the name in backticks in a table; these two characters would end it."""

_Entry = dict[str, str | float]


def render_smaller(report: Report) -> str:
    """Return the metrics of the report that should be small."""
    return _render(report, bigger=False)


def render_bigger(report: Report) -> str:
    """Return the metrics of the report that should be large."""
    return _render(report, bigger=True)


def _render(report: Report, *, bigger: bool) -> str:
    entries = [_count(report, bigger=bigger), *_entries(report, bigger=bigger)]
    return json.dumps(entries, indent=2, allow_nan=False)


def _count(report: Report, *, bigger: bool) -> _Entry:
    completed = [result for result in report.cases if result.outcome == "completed"]
    if bigger:
        return {"name": "cases that completed", "unit": "cases", "value": len(completed)}
    others = [result for result in report.cases if result.outcome != "completed"]
    entry: _Entry = {"name": "cases that did not complete", "unit": "cases", "value": len(others)}
    if others:
        named = dict(zip((result.id for result in report.cases), names(report.cases), strict=True))
        entry["extra"] = "\n".join(f"{result.outcome.replace('_', ' ')}: {named[result.id]}" for result in others)
    return entry


def _entries(report: Report, *, bigger: bool) -> Iterator[_Entry]:
    rows = rows_by_id(report.verdicts)
    for name, result in zip(names(report.cases), report.cases, strict=True):
        for metric, figure in figures(result).items():
            label = exported(metric).label
            if label is not None and spec_of(metric).bigger_is_better == bigger:
                yield _entry(f"{name}: {label}", result, figure, rows.get(result.id, ()))
    if bigger:
        for name, size, text in largest_batches(report):
            label = f"{name}: largest batch size".translate(_IN_COMMENTS)
            yield {"name": label, "unit": "sequences", "value": size, "extra": one_line(text)}


def _entry(name: str, result: CaseResult, figure: Figure, rows: Sequence[Row]) -> _Entry:
    entry: _Entry = {
        "name": name.translate(_IN_COMMENTS),
        "unit": figure.unit,
        "value": figure.value,
    }
    if figure.low is not None and figure.high is not None:
        entry["range"] = f"± {(figure.high - figure.low) / 2:.6g}"
    lines = [f"{row.verdict} ({row.metric.replace('_', ' ')}): {row.reason}" for row in rows]
    lines += [f"{finding.severity}: {finding.text}" for finding in result.findings if finding.severity != "info"]
    entry["extra"] = "\n".join([plural(len(result.launches), "launch"), *map(one_line, lines)])
    return entry
