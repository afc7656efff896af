"""The tables of one block of cases: time and accuracy as the study's Table 2, communication and memory per GPU."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tabulate import tabulate

from pytest_llmgpu.render.device_columns import (
    COMMUNICATION,
    MEMORY,
    Figure,
    digits,
    mean_and_largest,
    of_devices,
    sends,
    why_missing,
)
from pytest_llmgpu.render.time_table import LEGEND, Cell, layout, row_name, study_table
from pytest_llmgpu.report.machine import Environment
from pytest_llmgpu.report.result import CaseResult, Path

__all__ = ["WIDTH", "Painter", "device_tables", "painter", "time_table"]

WIDTH = 100
"""Columns of a terminal that everything fits in, with three strategies."""

Painter = Callable[[str, str], str]
"""Text and the number of an ANSI style to the text in that style."""

_MB = 1e6

_RED, _GREEN, _YELLOW = "31", "32", "33"
_MARKS = {"best": "*", "wrong": "!", "graphs": "g:", "oom": "OoM:", "skipped": "-:"}
"""What the legend explains; how a case failed explains itself."""


def time_table(cases: Sequence[CaseResult], paint: Painter) -> str:
    """Return batch sizes down and strategies across: time and accuracy, or how a case ended without them."""
    table = study_table(cases)
    body = [[name, *(_cell(cell, paint) for cell in cells)] for name, cells in table.rows]
    told = [f"{_MARKS[key]} {LEGEND[key][1]}" for key in table.used if key in _MARKS]
    told += ["#2: the same once more, by another test or strategy"] * any("#" in name for name, _ in table.rows)
    legend = "   ".join(told)
    columns = ["batch size", *table.columns]
    return "\n".join([table.title, _table(columns, body, ["right"] * len(columns)), *_wrap(legend)])


def device_tables(cases: Sequence[CaseResult], environment: Environment) -> str:
    """Return communication, path and memory of the completed cases, or a line that says why there are none."""
    columns, rows = layout(cases)
    order = [(title, row, rows[row][title]) for title in columns for row in rows if title in rows[row]]
    order = [(title, row, result) for title, row, result in order if result.outcome == "completed"]
    if not order:
        return ""
    by_title = {title: [result for other, _, result in order if other == title] for title, _, _ in order}
    if cases[0].case.device == "cpu":
        text = "No communication or memory table: this ran on a CPU, and NVML and torch's counters see GPUs only."
        return "\n".join([text, *_collectives(by_title)])
    reasons: dict[str, list[str]] = {}
    communication = _device_table("Communication per GPU", COMMUNICATION, order, reasons, environment)
    tables = [
        "\n".join(filter(None, [communication, *_collectives(by_title), *_paths(by_title)])),
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
        lines.append(f"Left out for want of width (the report has them): {', '.join(one.name for one in left_out)}.")
    return "\n".join(lines)


def _collectives(by_title: Mapping[str, Sequence[CaseResult]]) -> Iterator[str]:
    """Yield how often the ranks of each strategy communicate, and what that puts on the wire, by kind."""
    for title, results in by_title.items():
        found = [sends(result) for result in results]
        parts = []
        for kind in dict.fromkeys(kind for of_case in found for kind in of_case):
            calls, sizes = zip(*(of_case[kind] for of_case in found if kind in of_case), strict=True)
            parts.append(f"{_span(calls)} {kind} a batch ({_span(size / _MB for size in sizes)} MB/sequence)")
        if parts:
            ranks = [rank for result in results if result.traffic is not None for rank in (result.traffic.ranks,)]
            alike = all(rank == of_case[0] for of_case in ranks for rank in of_case)
            several = any(len(of_case) > 1 for of_case in ranks)
            who = "each rank" if several and alike else "a rank on average" if several else "its one process"
            yield _filled(f"{title}, {who}: {', '.join(parts)}")


def _paths(by_title: Mapping[str, Sequence[CaseResult]]) -> Iterator[str]:
    """Yield which links carried the traffic of each strategy: a line a link, of the case that is farthest off.

    What a finding says already is left out.
    """
    for title, results in by_title.items():
        links: dict[str | None, list[tuple[float, CaseResult, Path]]] = {}
        for result in results:
            path = result.traffic.path if result.traffic is not None else None
            if path is not None and path.expected_bytes and path.text not in (one.text for one in result.findings):
                counted = path.pcie_bytes if path.link in ("pcie", "host") else path.nvlink_bytes
                off = abs((counted or 0.0) / path.expected_bytes - 1)
                links.setdefault(path.link, []).append((off, result, path))
        for found in links.values():
            _, result, path = max(found, key=lambda one: one[0])
            where = f"at batch size {result.case.batch_size}"
            yield _filled(f"{title} {f'(farthest off {where})' if len(found) > 1 else where}: {path.text}")


def _span(values: Iterable[float]) -> str:
    """Return `least to most` to about three digits, or the one value that all are."""
    ends = sorted(set(values))
    shown = [f"{value:,.{0 if value.is_integer() else digits(value)}f}" for value in (ends[0], ends[-1])]
    return " to ".join(dict.fromkeys(shown))


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


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _table(headers: Sequence[str], body: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    return tabulate(body, headers=list(headers), colalign=list(align), disable_numparse=True)
