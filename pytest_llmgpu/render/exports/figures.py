"""The figures and the names of cases in the formats of other tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pytest_llmgpu.render.exports.escaping import one_line
from pytest_llmgpu.render.grouping import capacities
from pytest_llmgpu.report.case import DEFAULT_TASK, Case
from pytest_llmgpu.report.metrics import METRICS, Exported, Figure, spec_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import GIB


def figures(result: CaseResult) -> dict[str, Figure]:
    """Return the exported figures of a case by metric; none if it did not complete."""
    if result.outcome != "completed":
        return {}
    found = {spec.name: spec.figure(result) for spec in METRICS if spec.exported and spec.figure}
    return {name: figure for name, figure in found.items() if figure is not None}


def exported(metric: str) -> Exported:
    """Return the names of a metric in the formats of other tools."""
    names = spec_of(metric).exported
    assert names is not None, f"{metric} is not exported"
    return names


def names(results: Sequence[CaseResult]) -> list[str]:
    """Return one line as the name of each result: `mp-bs8 (llama-7b, float16, 4 x cuda, hellaswag)`.

    The name has only what the user chose, and a case has the same name in every report. The second of two equal names
    ends in `#2`.
    """
    return _numbered(f"{result.case.id} ({describe(result.case)})" for result in results)


def largest_batches(report: Report) -> list[tuple[str, int, str]]:
    """Return name, largest batch size and its description for each series where it is known; 0 if none fits."""
    cases = {result.case.series: result.case for result in report.cases}
    known = [
        (cases[one.series], one.largest_fit or 0, one.text)
        for one in capacities(report)
        if one.series in cases and (one.largest_fit is not None or one.smallest_oom is not None)
    ]
    numbered = _numbered(f"{case.strategy} ({describe(case)})" for case, _, _ in known)
    return [(name, size, text) for name, (_, size, text) in zip(numbered, known, strict=True)]


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


def _numbered(lines: Iterable[str]) -> list[str]:
    used: Counter[str] = Counter()
    found = []
    for line in map(one_line, lines):
        used[line] += 1
        found.append(line if used[line] == 1 else f"{line} #{used[line]}")
    return found
