"""The report as text for the terminal; three strategies fit into 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from pytest_llmgpu.profiling.machine import Machine
from pytest_llmgpu.render.comparison import with_reference
from pytest_llmgpu.render.grouping import blocks, capacities, captions, dataset, model, unique
from pytest_llmgpu.render.summary import Problem, finding_problems
from pytest_llmgpu.render.terminal.cases import (
    WIDTH,
    Painter,
    device_tables,
    filled,
    painter,
    summary_table,
    work_table,
)
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import listed, plural

_RED, _YELLOW, _BOLD = "31", "33", "1"
_STYLES = {"failure": _RED, "warning": _YELLOW, "info": _BOLD}

_MOST_ROWS = 30
"""Largest number of rows of the short tables."""
_MOST_LINES = 3
"""Largest number of comparisons and of findings in the short text."""
_MOST_IDS = 8
"""Largest number of further cases of a finding in the short text."""


def headline(machine: Machine, cases: Sequence[Case], batch_sizes: Iterable[int]) -> str:
    """Return one line with the machine and the selected cases; tests that choose their batch size give none."""
    parts = [machine.describe()]
    if cases:
        parts += unique(model(case) for case in cases)
        parts.append(", ".join(unique(case.dtype for case in cases)))
        parts += unique(dataset(case) for case in cases)
        workloads = unique("generate" if case.generates else "score" for case in cases)
        if workloads != ["score"]:
            parts.append(("workload " if len(workloads) == 1 else "workloads ") + ", ".join(workloads))
        strategies = unique(case.strategy for case in cases)
        parts.append(("strategy " if len(strategies) == 1 else "strategies ") + ", ".join(strategies))
    if sizes := sorted(set(batch_sizes)):
        parts.append(("batch size " if len(sizes) == 1 else "batch sizes ") + ", ".join(map(str, sizes)))
    return f"llmgpu: {'; '.join(parts)}"


def progress(name: str, done: int, total: int, elapsed_s: float, *, batch_size: int) -> str:
    """Return the live line of a case: `mp-bs8  120/502 batches  1 234 seq/s  ETA 0:41`."""
    line = f"{name}  {done}/{total} batches"
    if not done or elapsed_s <= 0:
        return f"{line}  {_clock(elapsed_s)}"
    rate = done * batch_size / elapsed_s
    digits = 0 if rate >= 10 else 2  # noqa: PLR2004 - two significant digits at least
    return f"{line}  {rate:,.{digits}f} seq/s  ETA {_clock(elapsed_s / done * (total - done))}".replace(",", " ")


def tables(report: Report, color: bool = False, *, verbose: bool = False) -> str:
    """Return the report as tables: a summary of the cases, differences from mp, then the findings.

    Cases that differ in more than strategy and batch size are in separate blocks, each with a caption. The worst
    finding comes first. There are about 40 lines; with `verbose` every case and finding, and the tables of work,
    communication and memory.
    """
    paint = painter(color)
    found = blocks(report.cases)
    parts: list[str] = []
    left, hidden = len(report.cases) if verbose else _MOST_ROWS, len(report.cases)
    for (caption, _), cases in zip(captions(found, report), found, strict=True):
        if not left:
            break
        table, rows = summary_table(cases, paint, left)
        left, hidden = left - rows, hidden - rows
        lines = []
        for differences in with_reference(cases, verbose=verbose):
            line = ", ".join(differences)
            lines.append(line if len(line) <= WIDTH else ",\n  ".join(differences))
        if not verbose and len(lines) > _MOST_LINES:
            more = plural(len(lines) - _MOST_LINES, "more comparison")
            lines = [*lines[:_MOST_LINES], f"and {more} with mp"]
        lines += _largest(cases, report, verbose=verbose)
        parts.append("\n".join([paint(caption, _BOLD), table, *lines]))
        if verbose:
            parts += [work_table(cases), device_tables(cases, report.environment)]
    if hidden:
        parts.append(f"{plural(hidden, 'case')} not shown: -v shows all, llmgpu export csv writes them.")
    problems = finding_problems(report.cases)
    shown = problems if verbose else problems[:_MOST_LINES]
    parts.append("\n".join(_finding(problem, paint, verbose=verbose) for problem in shown))
    if len(shown) < len(problems):
        labels = listed(dict.fromkeys(problem.label for problem in problems[len(shown) :]), _MOST_LINES)
        parts.append(f"and {plural(len(problems) - len(shown), 'more finding')}: {labels} (-v shows all)")
    parts.append("\n".join(resumptions(report)))
    return "\n\n".join(filter(None, parts))


def resumptions(report: Report) -> list[str]:
    """Return a line for each time that the session was resumed."""
    return [f"resumed {one.created} from {one.source}, with {plural(one.kept, 'case')}" for one in report.resumed]


def _largest(cases: Sequence[CaseResult], report: Report, *, verbose: bool) -> list[str]:
    """Return the largest batch size of each series, if it was searched or limited by memory."""
    searched = report.options.get("--llmgpu-find-max-batch") is True
    series = {result.case.series for result in cases}
    found = [
        capacity
        for capacity in capacities(report)
        if capacity.series in series and (searched or capacity.smallest_oom is not None)
    ]
    if verbose:
        return [filled(f"{capacity.strategy}: {capacity.text}") for capacity in found]
    texts = []
    for capacity in found:
        oom = capacity.smallest_oom
        ending = " or more" if oom is None else f" ({oom} is out of memory)"
        texts.append(f"{capacity.strategy} {capacity.largest_fit or 'none'}{ending}")
    return [filled(f"Largest batch size: {listed(texts, _MOST_LINES)}")] if found else []


def _finding(problem: Problem, paint: Painter, *, verbose: bool) -> str:
    """Return findings with the same next step: the text of the first case, or of the first three.

    The short text of an information is its first sentence, without a next step.
    """
    indent = " " * 9
    shown = problem.texts if verbose else problem.texts[:1]
    full = verbose or problem.severity != "info"
    lines = [f"{name}: {text if full else text.split('. ')[0].rstrip('.') + '.'}" for name, text in shown]
    if more := [*(name for name, _ in problem.texts[len(shown) :]), *problem.more]:
        lines.append(f"The same finding: {listed(more, len(more) if verbose else _MOST_IDS)}.")
    if full:
        lines.append(f"-> {problem.next_step}")
    text = "\n".join(
        textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        for line in lines
    )
    return paint(problem.severity.upper().ljust(9), _STYLES[problem.severity]) + text[9:]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
