"""The tables of one block of cases: time and accuracy as the study's Table 2, communication and memory per GPU."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

from tabulate import tabulate

from pytest_llmgpu.device_figures import (
    COMMUNICATION,
    MEMORY,
    Figure,
    mean_and_largest,
    of_devices,
    why_missing,
)
from pytest_llmgpu.report import Environment
from pytest_llmgpu.result import CaseResult
from pytest_llmgpu.study_table import LEGEND, Cell, layout, row_name, study_table

__all__ = ["WIDTH", "Painter", "device_tables", "painter", "time_table"]

WIDTH = 100
"""Columns of a terminal that everything fits in, with three strategies."""

Painter = Callable[[str, str], str]
"""Text and the number of an ANSI style to the text in that style."""

_RED, _GREEN, _YELLOW = "31", "32", "33"
_MARKS = {"best": "*", "wrong": "!", "graphs": "g:", "oom": "OoM:", "skipped": "-:"}
"""What the legend explains; how a case failed explains itself."""


def time_table(cases: Sequence[CaseResult], paint: Painter) -> str:
    """Return batch sizes down and strategies across: time and accuracy, or how a case ended without them."""
    table = study_table(cases)
    body = [[name, *(_cell(cell, paint) for cell in cells)] for name, cells in table.rows]
    legend = "   ".join(f"{_MARKS[key]} {LEGEND[key][1]}" for key in table.used if key in _MARKS)
    columns = ["batch size", *table.columns]
    return "\n".join([table.title, _table(columns, body, ["right"] * len(columns)), *_wrap(legend)])


def device_tables(cases: Sequence[CaseResult], environment: Environment) -> str:
    """Return communication and memory of the completed cases, or a line that says why there are none."""
    columns, rows = layout(cases)
    order = [(title, row, rows[row][title]) for title in columns for row in rows if title in rows[row]]
    order = [(title, row, result) for title, row, result in order if result.outcome == "completed"]
    if not order:
        return ""
    if cases[0].case.device == "cpu":
        return "No communication or memory table: this ran on a CPU, and NVML and torch's counters see GPUs only."
    reasons: dict[str, list[str]] = {}
    tables = [
        _device_table("Communication per GPU", COMMUNICATION, order, reasons, environment),
        _device_table("Memory per GPU", MEMORY, order, reasons, environment),
    ]
    lines = [wrapped for why, names in reasons.items() for wrapped in _wrap(f"No {', '.join(names)}: {why}.")]
    return "\n\n".join(filter(None, [*tables, "\n".join(lines)]))


def _device_table(
    title: str,
    figures: Sequence[Figure],
    order: Sequence[tuple[str, tuple[int, int], CaseResult]],
    reasons: dict[str, list[str]],
    environment: Environment,
) -> str:
    """Return a table of the figures that there are, and add to `reasons` those that there are not."""
    results = [result for _, _, result in order]
    spread = any(result.case.devices > 1 for result in results)
    values = {
        figure: [of_devices(result, figure) for result in results] for figure in figures if spread or not figure.several
    }
    for figure in [figure for figure, found in values.items() if not any(found)]:
        del values[figure]
        if figure.key != "workspace_bytes":  # most strategies have none, which is nothing to explain
            why = why_missing(results, figure, environment)
            reasons.setdefault(why, []).append(figure.name)
    if not values:
        return ""
    written = {figure: mean_and_largest(column) for figure, column in values.items()}
    names = [name if number == 0 or order[number - 1][0] != name else "" for number, (name, *_) in enumerate(order)]
    firsts = [[name, row_name(row)] for name, (_, row, _) in zip(names, order, strict=True)]
    table, left_out = _fitted(firsts, written)
    several = any(len(each) > 1 for column in values.values() for each in column)
    lines = [f"{title}{': mean over the GPUs (largest)' if several else ''}", table]
    if left_out:
        lines.append(f"For want of width without {', '.join(figure.name for figure in left_out)}.")
    return "\n".join(lines)


def _fitted(firsts: Sequence[Sequence[str]], written: Mapping[Figure, Sequence[str]]) -> tuple[str, list[Figure]]:
    """Return the table of the figures that fit the width, and those left out for it."""
    figures = list(written)
    left_out: list[Figure] = []
    while True:
        body = [
            [*first, *cells] for first, *cells in zip(firsts, *(written[figure] for figure in figures), strict=True)
        ]
        headers = ["strategy", "batch\nsize", *(figure.title for figure in figures)]
        table = _table(headers, body, ["left"] + ["right"] * (len(headers) - 1))
        spare = max(figures, key=lambda figure: figure.spare)
        if max(map(len, table.splitlines())) <= WIDTH or not spare.spare:
            return table, left_out
        figures.remove(spare)
        left_out.append(spare)


def painter(color: bool) -> Painter:
    """Return a function that styles text, or one that leaves it as it is."""
    return lambda text, style: f"\x1b[{style}m{text}\x1b[0m" if color and text else text


def _cell(cell: Cell, paint: Painter) -> str:
    if cell.word:
        return paint(cell.word, _RED if cell.kind == "failed" else _YELLOW)
    text = f"{'g ' * cell.graphs}{cell.time}{f' / {cell.accuracy}' if cell.accuracy else ''}"
    if cell.kind == "wrong":
        return paint(f"! {text}", _RED)
    return paint(f"* {text}", _GREEN) if cell.kind == "best" else text


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _table(headers: Sequence[str], body: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    return tabulate(body, headers=list(headers), colalign=list(align), disable_numparse=True)
