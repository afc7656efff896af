"""The tables of one block of cases: the summary; work, communication and memory in full."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from tabulate import tabulate

from pytest_llmgpu.render.device_columns import (
    COMMUNICATION,
    MEMORY,
    Column,
    collectives,
    device_values,
    digits,
    mean_and_largest,
    missing,
)
from pytest_llmgpu.render.time_table import LEGEND, Cell, layout, make_time_table, row_name
from pytest_llmgpu.render.work_table import SUMMARY, WorkColumn, make_work_table, written
from pytest_llmgpu.report.machine import Environment
from pytest_llmgpu.report.result import CaseResult, Path

WIDTH = 100
"""The largest width of a table or message, in columns of the terminal; three strategies fit."""

Painter = Callable[[str, str], str]
"""A function of a text and the number of an ANSI style that returns the styled text."""

_Column = TypeVar("_Column", bound=Column | WorkColumn)

_ANSI = re.compile(r"\x1b\[\d+m")

_BYTES_PER_MB = 1e6

_RED, _GREEN, _YELLOW = "31", "32", "33"
_MARKS = {"best": "*", "wrong": "x", "graphs": "g:", "oom": "OOM:", "skipped": "-:"}
"""The marks of the legend. A case that failed needs none: its cell has the outcome."""


def summary_table(cases: Sequence[CaseResult], paint: Painter, most: int | None = None) -> tuple[str, int]:
    """Return the table with one row per case, and the number of its rows.

    Args:
        cases: the cases of a block.
        paint: styles text.
        most: the largest number of rows; None for all cases. With more cases, the table has the fastest of each series.
    """
    table = make_time_table(cases)
    titles, rows = layout(cases)
    order = [
        (title, name, cells[place], found[title])
        for place, title in enumerate(titles)
        for (name, cells), found in zip(table.rows, rows.values(), strict=True)
        if title in found
    ]
    if most is not None and len(order) > most:
        fastest = {id(best) for best in _fastest_of_series([result for *_, result in order])}
        order = [entry for entry in order if id(entry[3]) in fastest][:most]
    shown, results = [cell for *_, cell, _ in order], [result for *_, result in order]
    cells: dict[WorkColumn, Sequence[str]] = {_text_column(table.time_title): [_cell(cell, paint) for cell in shown]}
    rate, *others = [(column, [column.value(result) for result in results]) for column in SUMMARY]
    cells[rate[0]] = written(rate[1], rate[0].unit)
    cells[_text_column(table.metric)] = [cell.second for cell in shown]
    known = {column.name for column, values in others if any(values)}
    if "device_busy" in known:
        known.discard("utilization_pct")  # the less exact one of the two
    cells |= {column: written(values, column.unit) for column, values in others if column.name in known}
    names = [title if n == 0 or order[n - 1][0] != title else "" for n, (title, *_) in enumerate(order)]
    firsts = [[title, name] for title, (_, name, *_) in zip(names, order, strict=True)]
    text, _ = _fitted(firsts, {column: texts for column, texts in cells.items() if any(texts)})
    entries = [f"{_MARKS[key]} {LEGEND[key][1]}" for key in table.used if key in _MARKS]
    entries += ["#2: measured again, by another test or strategy"] * any("#" in name for _, name, *_ in order)
    legend = textwrap.wrap("   ".join(entries), WIDTH)
    return "\n".join([table.title.removesuffix(f" / {table.metric}"), text, *legend]), len(order)


def _text_column(title: str) -> WorkColumn:
    return WorkColumn(name=title, title=title, value=lambda _: None)


def _fastest_of_series(results: Sequence[CaseResult]) -> Iterator[CaseResult]:
    """Yield the case with the largest throughput of each series; the first case of a series without one."""
    by_series: dict[str, list[CaseResult]] = {}
    for result in results:
        by_series.setdefault(result.case.series, []).append(result)
    for found in by_series.values():
        yield max(found, key=lambda result: (not result.has_wrong_answers, result.sequences_per_s or 0.0))


def work_table(cases: Sequence[CaseResult]) -> str:
    """Return the table of device time, share of the bound, energy and latencies; empty if none of it was measured."""
    table = make_work_table(cases)
    if table is None:
        return ""
    names = [name if n == 0 or table.rows[n - 1][0] != name else "" for n, (name, *_) in enumerate(table.rows)]
    firsts = [[name, size] for name, (_, size, _) in zip(names, table.rows, strict=True)]
    cells = {column: [row[2][n] for row in table.rows] for n, column in enumerate(table.columns)}
    text, dropped = _fitted(firsts, cells)
    return "\n".join(
        [
            "Work, energy and latency of a batch",
            text,
            *_names_of_dropped([one.title.replace("\n", " ") for one in dropped]),
        ]
    )


def device_tables(cases: Sequence[CaseResult], environment: Environment) -> str:
    """Return the communication, path and memory of the completed cases, or the reason why there are no tables."""
    columns, rows = layout(cases)
    order = [(title, row, rows[row][title]) for title in columns for row in rows if title in rows[row]]
    order = [(title, row, result) for title, row, result in order if result.outcome == "completed"]
    if not order:
        return ""
    by_title = {title: [result for other, _, result in order if other == title] for title, _, _ in order}
    if cases[0].case.device == "cpu":
        return "\n".join(_collectives(by_title))
    reasons: dict[str, list[str]] = {}
    communication = _device_table("Communication per GPU", COMMUNICATION, order, reasons, environment)
    tables = [
        "\n".join(filter(None, [communication, *_collectives(by_title), *_paths(by_title)])),
        _device_table("Memory per GPU", MEMORY, order, reasons, environment),
    ]
    lines = [line for why, names in reasons.items() for line in textwrap.wrap(f"No {', '.join(names)}: {why}.", WIDTH)]
    return "\n\n".join(filter(None, [*tables, "\n".join(lines)]))


def painter(color: bool) -> Painter:
    """Return a function that styles text; without colour it returns the text unchanged."""
    return lambda text, style: f"\x1b[{style}m{text}\x1b[0m" if color and text else text


def _device_table(
    title: str,
    columns: Sequence[Column],
    order: Sequence[tuple[str, tuple[int, int], CaseResult]],
    reasons: dict[str, list[str]],
    environment: Environment,
) -> str:
    """Return a table of the columns that have values, and add the others to `reasons`: reason -> names of columns."""
    results = [result for _, _, result in order]
    several = any(result.case.devices > 1 for result in results)
    values = {
        column: [device_values(result, column) for result in results]
        for column in columns
        if several or not column.several
    }
    for column in [column for column, found in values.items() if not any(found)]:
        del values[column]
        if column.key != "workspace_bytes":  # most strategies have no workspace
            reasons.setdefault(missing(results, column, environment), []).append(column.name)
    if not values:
        return ""
    cells = {column: mean_and_largest(found) for column, found in values.items()}
    names = [name if number == 0 or order[number - 1][0] != name else "" for number, (name, *_) in enumerate(order)]
    firsts = [[name, row_name(row)] for name, (_, row, _) in zip(names, order, strict=True)]
    table, dropped = _fitted(firsts, cells)
    with_largest = any(len(each) > 1 for found in values.values() for each in found)
    lines = [f"{title}{': mean over the GPUs (largest)' if with_largest else ''}", table]
    return "\n".join([*lines, *_names_of_dropped([one.name for one in dropped])])


def _names_of_dropped(names: Sequence[str]) -> list[str]:
    return [f"Columns dropped to fit the width (the report has them): {', '.join(names)}."] if names else []


def _collectives(by_title: Mapping[str, Sequence[CaseResult]]) -> Iterator[str]:
    """Yield per strategy how often its ranks communicate and how many bytes they send, by kind of collective."""
    for title, results in by_title.items():
        found = [collectives(result) for result in results]
        parts = []
        for kind in dict.fromkeys(kind for of_case in found for kind in of_case):
            calls, sizes = zip(*(of_case[kind] for of_case in found if kind in of_case), strict=True)
            megabytes = _range(size / _BYTES_PER_MB for size in sizes)
            parts.append(f"{_range(calls)} {kind} per batch ({megabytes} MB/sequence)")
        if parts:
            ranks = [result.traffic.ranks for result in results if result.traffic is not None]
            equal = all(rank == of_case[0] for of_case in ranks for rank in of_case)
            several = any(len(of_case) > 1 for of_case in ranks)
            sender = "each rank" if several and equal else "mean over the ranks" if several else "one process"
            yield filled(f"{title}, {sender}: {', '.join(parts)}")


def _paths(by_title: Mapping[str, Sequence[CaseResult]]) -> Iterator[str]:
    """Yield which links carried the traffic of each strategy: one line per link, about the case with the largest error.

    A text that is also a finding of its case is left out.
    """
    for title, results in by_title.items():
        links: dict[str | None, list[tuple[float, CaseResult, Path]]] = {}
        for result in results:
            path = result.traffic.path if result.traffic is not None else None
            if path is not None and path.expected_bytes and path.text not in (one.text for one in result.findings):
                counted = path.pcie_bytes if path.link in ("pcie", "host") else path.nvlink_bytes
                error = abs((counted or 0.0) / path.expected_bytes - 1)
                links.setdefault(path.link, []).append((error, result, path))
        for found in links.values():
            _, result, path = max(found, key=lambda one: one[0])
            where = f"at batch size {result.case.batch_size}"
            yield filled(f"{title} {f'(largest error {where})' if len(found) > 1 else where}: {path.text}")


def _range(values: Iterable[float]) -> str:
    """Return `least to most` with about three digits, or a single value if all are equal."""
    ends = sorted(set(values))
    shown = [f"{value:,.{0 if value.is_integer() else digits(value)}f}" for value in (ends[0], ends[-1])]
    return " to ".join(dict.fromkeys(shown))


def _fitted(firsts: Sequence[Sequence[str]], cells: Mapping[_Column, Sequence[str]]) -> tuple[str, list[_Column]]:
    """Return the table of the columns that fit the width, and the columns that were dropped."""
    columns: list[_Column] = list(cells)
    dropped: list[_Column] = []
    while True:
        shown = [cells[column] for column in columns]
        body = [[*first, *(column[number] for column in shown)] for number, first in enumerate(firsts)]
        headers = ["strategy", "batch\nsize", *(column.title for column in columns)]
        table = _table(headers, body, ["left"] + ["right"] * (len(headers) - 1))
        last = max(columns, key=lambda column: column.drop_order)
        if max(map(len, _ANSI.sub("", table).splitlines())) <= WIDTH or not last.drop_order:
            return table, dropped
        columns.remove(last)
        dropped.append(last)


def _cell(cell: Cell, paint: Painter) -> str:
    if cell.word:
        return paint(cell.word, _RED if cell.kind == "failed" else _YELLOW)
    text = f"{'g ' * cell.graphs}{cell.time}"
    if cell.kind == "wrong":
        return paint(f"{_MARKS['wrong']} {text}", _RED)
    return paint(f"* {text}", _GREEN) if cell.kind == "best" else text


def filled(text: str) -> str:
    """Return text in lines of the largest width."""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _table(headers: Sequence[str], body: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    return tabulate(body, headers=list(headers), colalign=list(align), disable_numparse=True)
