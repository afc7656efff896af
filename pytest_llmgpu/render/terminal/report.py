"""The report as text for the terminal; three strategies fit into 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from pytest_llmgpu.analysis.sign_test import written
from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.render.grouping import blocks, capacities, captions, dataset, model, unique
from pytest_llmgpu.render.summary import finding_problems
from pytest_llmgpu.render.terminal.cases import WIDTH, Painter, device_tables, painter, time_table, work_table
from pytest_llmgpu.render.time_table import layout
from pytest_llmgpu.report.case import REFERENCE_STRATEGY, Case
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, Comparison

_RED, _YELLOW, _BOLD = "31", "33", "1"
_STYLES = {"failure": _RED, "warning": _YELLOW, "info": _BOLD}


def headline(machine: Machine, cases: Sequence[Case]) -> str:
    """Return one line with the machine and the selected cases."""
    parts = [machine.describe()]
    if cases:
        parts += unique(model(case) for case in cases)
        parts.append(", ".join(unique(case.dtype for case in cases)))
        parts += unique(dataset(case) for case in cases)
        strategies = unique(case.strategy for case in cases)
        parts.append(("strategy " if len(strategies) == 1 else "strategies ") + ", ".join(strategies))
        sizes = sorted({case.batch_size for case in cases})
        parts.append(("batch size " if len(sizes) == 1 else "batch sizes ") + ", ".join(map(str, sizes)))
    return f"llmgpu: {'; '.join(parts)}"


def progress(name: str, done: int, total: int, elapsed_s: float, *, batch_size: int) -> str:
    """Return the live line of a case: `mp-bs8  120/502 batches  1 234 seq/s  ETA 0:41`.

    Args:
        name: the id of the case.
        done: the number of finished batches.
        total: the number of batches of the case.
        elapsed_s: the seconds since the batches started.
        batch_size: the number of sequences per batch.
    """
    line = f"{name}  {done}/{total} batches"
    if not done or elapsed_s <= 0:
        return f"{line}  {_clock(elapsed_s)}"
    rate = done * batch_size / elapsed_s
    digits = 0 if rate >= 10 else 2  # noqa: PLR2004 - two significant digits at least
    return f"{line}  {rate:,.{digits}f} seq/s  ETA {_clock(elapsed_s / done * (total - done))}".replace(",", " ")


def tables(report: Report, color: bool = False) -> str:
    """Return the report as tables: times, accuracy and differences from mp, then the devices, then the findings.

    Cases that differ in more than strategy and batch size are in separate blocks, each with a caption. The worst
    finding comes first.
    """
    paint = painter(color)
    found = blocks(report.cases)
    parts: list[str] = []
    for caption, cases in zip(captions(found, report), found, strict=True):
        timed = "\n".join([time_table(cases, paint), *_comparisons(cases)])
        largest = "\n".join(_capacities(cases, report))
        parts += [paint(caption, _BOLD), timed, work_table(cases), device_tables(cases, report.environment), largest]
    return "\n\n".join(filter(None, [*parts, *_findings(report.cases, paint)]))


def _capacities(cases: Sequence[CaseResult], report: Report) -> Iterator[str]:
    """Yield the largest batch size of each series, if it was searched, predicted or limited by memory."""
    searched = report.options.get("--llmgpu-find-max-batch") is True
    series = {result.case.series for result in cases}
    for capacity in capacities(report):
        known = capacity.smallest_oom is not None or capacity.prediction is not None
        if capacity.series in series and (searched or known):
            yield textwrap.fill(f"{capacity.strategy}: {capacity.text}", WIDTH, subsequent_indent="  ")


def _comparisons(cases: Sequence[CaseResult]) -> Iterator[str]:
    """Yield how much each strategy differs from mp, at the batch size with the largest difference."""
    columns, rows = layout(cases)
    for title in columns:
        results = [row[title] for row in rows.values() if title in row]
        compared = [(result, result.comparison) for result in results if result.comparison is not None]
        if not compared:
            continue
        result, worst = max(compared, key=lambda pair: _severity(*pair))
        where = f" at batch size {result.case.batch_size}"
        if len(compared) > 1:
            where = f", worst{where}" if any(_severity(result, worst)) else " at every batch size"
        first, *rest = _differences(result, worst)
        line = f"{title} compared with {REFERENCE_STRATEGY}{where}: {first}"
        text = ", ".join([line, *rest])
        yield text if len(text) <= WIDTH else ",\n  ".join([line, *rest])


def _severity(result: CaseResult, comparison: Comparison) -> tuple[bool, int, int, float]:
    """Return the sort key of the worst case: with random weights the numbers decide, else the predictions."""
    difference = comparison.largest_difference
    if result.case.load_format == "dummy":
        return (difference is None, 0, 0, difference or 0.0)
    return (difference is None, comparison.lost or 0, len(comparison.flipped), difference or 0.0)


def _differences(result: CaseResult, comparison: Comparison) -> list[str]:
    dummy = result.case.load_format == "dummy"
    parts = []
    if not dummy:
        text = f"{len(comparison.flipped):,} of {comparison.items:,} items flipped"
        if comparison.mcnemar_p is not None:
            text += f" ({comparison.lost:,} lost, {comparison.won:,} won, {written(comparison.mcnemar_p)})"
        parts.append(text)
    # The accuracy check uses the same figures: the largest difference of random weights, and the typical difference of
    # trained weights, because the relative difference of a log-likelihood near 0 is always large.
    difference = comparison.largest_difference if dummy else comparison.typical_difference
    if difference is None:
        parts.append("not all log-likelihoods are finite")
    elif not difference:
        parts.append("log-likelihoods equal")
    else:
        parts.append(f"log-likelihoods differ by {100 * difference:.2g} % ({'largest' if dummy else 'typical'})")
    return parts


def _findings(cases: Sequence[CaseResult], paint: Painter) -> Iterator[str]:
    """Yield the findings, worst first; findings with the same next step are joined."""
    indent = " " * 9
    for problem in finding_problems(cases):
        lines = [f"{name}: {text}" for name, text in problem.texts]
        if problem.more:
            lines.append(f"The same finding: {', '.join(problem.more)} (see the report).")
        text = "\n".join(
            textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
            for line in [*lines, f"-> {problem.next_step}"]
        )
        yield paint(problem.severity.upper().ljust(9), _STYLES[problem.severity]) + text[9:]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
