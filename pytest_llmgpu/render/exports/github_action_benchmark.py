"""Input of github-action-benchmark: one file for what should be small, one for what should be large.

    - uses: benchmark-action/github-action-benchmark@v1
      with: {tool: customSmallerIsBetter, output-file-path: smaller.json}

An empty list is an error to it and a value has to be a number, so that each file begins with how many cases there are
of an outcome; which ones, and what was said of a case, is in `extra`, which shows beside a point of the chart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from pytest_llmgpu.render.exports.escaping import one_line
from pytest_llmgpu.render.exports.figures import exported, figures, largest_batches, names
from pytest_llmgpu.render.exports.notices import rows_by_id
from pytest_llmgpu.render.exports.protocol import Export
from pytest_llmgpu.report.metrics import Figure, spec_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row

__all__ = ["BIGGER", "SMALLER"]

_IN_COMMENTS = str.maketrans({"`": "'", "|": "/"})
"""A name stands in backticks in a table of a comment: these two would end it."""

_Entry = dict[str, str | float]


class _GitHubActionBenchmark:
    def __init__(self, *, bigger: bool) -> None:
        self._bigger = bigger

    def render(self, report: Report) -> str:
        entries = [self._count(report), *self._entries(report)]
        return json.dumps(entries, indent=2, allow_nan=False)

    def _count(self, report: Report) -> _Entry:
        completed = [result for result in report.cases if result.outcome == "completed"]
        if self._bigger:
            return {"name": "cases that completed", "unit": "cases", "value": len(completed)}
        others = [result for result in report.cases if result.outcome != "completed"]
        entry: _Entry = {"name": "cases that did not complete", "unit": "cases", "value": len(others)}
        if others:
            named = dict(zip((result.id for result in report.cases), names(report.cases), strict=True))
            entry["extra"] = "\n".join(f"{result.outcome.replace('_', ' ')}: {named[result.id]}" for result in others)
        return entry

    def _entries(self, report: Report) -> Iterator[_Entry]:
        rows = rows_by_id(report.verdicts)
        for name, result in zip(names(report.cases), report.cases, strict=True):
            for metric, figure in figures(result).items():
                if spec_of(metric).bigger_is_better == self._bigger:
                    yield _entry(f"{name}: {exported(metric).label}", result, figure, rows.get(result.id, ()))
        if self._bigger:
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
    said = [f"{row.verdict} ({row.metric.replace('_', ' ')}): {row.reason}" for row in rows]
    said += [f"{finding.severity}: {finding.text}" for finding in result.findings if finding.severity != "info"]
    launches = f"{len(result.launches)} launch{'es' if len(result.launches) > 1 else ''}"
    entry["extra"] = "\n".join([launches, *map(one_line, said)])
    return entry


SMALLER: Export = _GitHubActionBenchmark(bigger=False)
BIGGER: Export = _GitHubActionBenchmark(bigger=True)
