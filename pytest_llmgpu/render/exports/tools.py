"""Figures and names of cases for other tools: JUnit properties, Bencher, github-action-benchmark.

Bencher has numbers only: the outcome is `completed` and `out-of-memory`, each 1 or 0, and verdicts are not exported,
because it has its own thresholds. `latency` in nanoseconds and `throughput` are the measures of every Bencher project.

github-action-benchmark reads one file with metrics that should be small and one with those that should be large. It
rejects an empty list and values that are not numbers: each file begins with a number of cases, whose names are in
`extra`, which the chart shows at a point, as the verdicts and findings of a case are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pytest_llmgpu.analysis.capacity import capacities
from pytest_llmgpu.render.summary import by_id
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.case import DEFAULT_TASK, Case
from pytest_llmgpu.report.metrics import BY_NAME, METRICS, Figure, MetricSpec, own_metrics
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import OUT_OF_MEMORY, CaseResult
from pytest_llmgpu.report.text import GIB, one_line, plural
from pytest_llmgpu.report.verdicts import Row

_IN_COMMENTS = str.maketrans({"`": "'", "|": "/"})
"""A comment of github-action-benchmark has the name in backticks in a table; these two characters would end it."""


def figures(result: CaseResult) -> list[tuple[MetricSpec, Figure]]:
    """Return the exported figures of a case with their metrics; none if it did not complete."""
    found = [(spec, spec.of(result)) for spec in (*METRICS, *own_metrics([result])) if spec.exported]
    return [(spec, figure) for spec, figure in found if figure is not None]


def names(results: Sequence[CaseResult]) -> list[str]:
    """Return one line as the name of each result: `mp-bs8 (llama-7b, float16, 4 x cuda, hellaswag)`.

    The name has only what the user chose, and is the same in every report. The second of two equal ones ends in `#2`.
    """
    return _numbered(f"{result.case.id} ({describe(result.case)})" for result in results)


def describe(case: Case) -> str:
    """Return model, dtype, devices and dataset of a case: what it measures without strategy and batch size."""
    parts = [
        f"{case.model} with random weights" if case.load_format == "dummy" else case.model,
        case.dtype,
        f"{case.devices} x {case.device}",
        case.dataset if case.limit is None else f"first {case.limit} of {case.dataset}",
    ]
    if case.task != DEFAULT_TASK:
        parts.append(f"task {case.task}")
    if case.generates:
        parts.append(f"{case.new_tokens} tokens after {case.prompt_tokens}")
    if case.gpu_memory_bytes is not None:
        parts.append(f"{case.gpu_memory_bytes / GIB:g} GiB each")
    return one_line(", ".join([*parts, *(f"{key}={value}" for key, value in case.strategy_options.items() if value)]))


def _largest_batches(report: Report) -> list[tuple[str, int, str]]:
    """Return name, largest batch size and its description for each series where it is known; 0 if none fits."""
    cases = {result.case.series: result.case for result in report.cases}
    known = [one for one in capacities(report.cases) if one.largest_fit is not None or one.smallest_oom is not None]
    numbered = _numbered(f"{one.strategy} ({describe(cases[one.series])})" for one in known)
    return [(name, one.largest_fit or 0, one.text) for name, one in zip(numbered, known, strict=True)]


def _numbered(lines: Iterable[str]) -> list[str]:
    used: Counter[str] = Counter()
    found = []
    for line in map(one_line, lines):
        used[line] += 1
        found.append(line if used[line] == 1 else f"{line} #{used[line]}")
    return found


def junit_properties(result: CaseResult) -> list[tuple[str, str]]:
    """Return outcome and figures of a case to append to `item.user_properties`: `("llmgpu.time_s", "60.0")`.

    The name of a figure ends in its unit. No name contains text that users write.
    """
    pairs = [
        ("llmgpu.id", one_line(result.id)),
        ("llmgpu.outcome", result.outcome),
        ("llmgpu.strategy", one_line(result.case.strategy)),
        ("llmgpu.batch_size", str(result.case.batch_size)),
        ("llmgpu.model", one_line(result.case.model)),
        ("llmgpu.launches", str(len(result.launches))),
    ]
    for spec, figure in figures(result):
        unit = figure.unit.replace("/", "_per_")
        # The unit of a rate is its name: `sequences_per_s`.
        name = unit if unit.startswith(spec.name) or spec.name == "accuracy" else f"{spec.name}_{unit}"
        name = name if spec.name in BY_NAME else spec.name
        pairs.append((f"llmgpu.{name}", repr(figure.value)))
    if result.failure is not None:
        pairs.append(("llmgpu.failure", one_line(result.failure.message)))
    findings = [one for one in result.findings if one.severity != "info"]
    return pairs + [(f"llmgpu.finding.{one_line(one.code)}", one_line(one.text)) for one in findings]


def junit_verdicts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return names and values of the verdicts on a test: `("llmgpu.verdict.time", "REGRESSED: ...")`.

    If the rows belong to several cases, the value begins with the id of the case.
    """
    several = len({row.id for row in rows}) > 1
    return [
        (f"llmgpu.verdict.{row.metric}", one_line(f"{f'{row.id}: ' if several else ''}{row.verdict}: {row.reason}"))
        for row in rows
    ]


def render_bencher(report: Report) -> str:
    """Return the report in Bencher Metric Format: values and their ranges by benchmark and measure."""
    found = {}
    for name, result in zip(names(report.cases), report.cases, strict=True):
        measures: dict[str, dict[str, float]] = {}
        for spec, figure in figures(result):
            if spec.exported is not None and spec.exported.measure is not None:
                scale = 1e9 if figure.unit == "s" else 1.0  # Bencher has nanoseconds
                ends = {"value": figure.value, "lower_value": figure.low, "upper_value": figure.high}
                measures[spec.exported.measure] = {key: end * scale for key, end in ends.items() if end is not None}
        measures["disturbed"] = {"value": float(disturbances.of_case(result) is not None)}
        failures = sum(finding.severity == "failure" for finding in result.findings)
        measures["completed"] = {"value": float(result.outcome == "completed")}
        measures["out-of-memory"] = {"value": float(result.outcome in OUT_OF_MEMORY)}
        measures["failure-findings"] = {"value": float(failures)}
        found[name] = measures
    for name, size, _ in _largest_batches(report):
        found[name] = {"largest-batch-size": {"value": float(size)}}
    return json.dumps(found, indent=2, allow_nan=False)


def render_smaller(report: Report) -> str:
    """Return the metrics of the report that should be small, for `tool: customSmallerIsBetter`."""
    named = zip(report.cases, names(report.cases), strict=True)
    lines = [f"{one.outcome.replace('_', ' ')}: {name}" for one, name in named if one.outcome != "completed"]
    count: dict[str, str | float] = {"name": "cases that did not complete", "unit": "cases", "value": len(lines)}
    if lines:
        count["extra"] = "\n".join(lines)
    return json.dumps([count, *_entries(report, bigger=False)], indent=2, allow_nan=False)


def render_bigger(report: Report) -> str:
    """Return the metrics of the report that should be large, for `tool: customBiggerIsBetter`."""
    completed = sum(result.outcome == "completed" for result in report.cases)
    count: dict[str, str | float] = {"name": "cases that completed", "unit": "cases", "value": completed}
    largest = [
        {"name": f"{name}: largest batch size".translate(_IN_COMMENTS), "unit": "sequences", "value": size}
        | {"extra": one_line(text)}
        for name, size, text in _largest_batches(report)
    ]
    return json.dumps([count, *_entries(report, bigger=True), *largest], indent=2, allow_nan=False)


def _entries(report: Report, *, bigger: bool) -> Iterator[dict[str, str | float]]:
    rows = by_id(report.verdicts)
    for name, result in zip(names(report.cases), report.cases, strict=True):
        lines = [f"{row.verdict} ({row.metric.replace('_', ' ')}): {row.reason}" for row in rows.get(result.id, ())]
        lines += [f"{finding.severity}: {finding.text}" for finding in result.findings if finding.severity != "info"]
        for spec, figure in figures(result):
            label = spec.exported.label if spec.exported is not None else None
            if label is None or spec.bigger_is_better != bigger:
                continue
            title = f"{name}: {label}".translate(_IN_COMMENTS)
            entry: dict[str, str | float] = {"name": title, "unit": figure.unit, "value": figure.value}
            if figure.low is not None and figure.high is not None:
                entry["range"] = f"± {(figure.high - figure.low) / 2:.6g}"
            entry["extra"] = "\n".join([plural(len(result.launches), "launch"), *map(one_line, lines)])
            yield entry
