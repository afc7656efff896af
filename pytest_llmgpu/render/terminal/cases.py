"""The tables of one block of cases: the summary; work, communication and memory in full."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tabulate import tabulate

from pytest_llmgpu.analysis.reference import by_series
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
from pytest_llmgpu.render.time_table import LEGEND, Cell, Entry, entries, make_time_table
from pytest_llmgpu.render.work_table import SUMMARY, make_work_tables, written
from pytest_llmgpu.report.report import Environment
from pytest_llmgpu.report.result import CaseResult, Path

WIDTH = 100
"""The largest width of a table or message, in columns of the terminal; three strategies fit."""

Painter = Callable[[str, str], str]
"""A function of a text and the number of an ANSI style that returns the styled text."""

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
    cells = {cell.id: cell for _, row in table.rows for cell in row}
    shown = entries(cases)
    if most is not None and len(shown) > most:
        fastest = {id(max(found, key=_rank)) for found in by_series(entry.result for entry in shown)}
        shown = [entry for entry in shown if id(entry.result) in fastest][:most]
    shown_cells = [cells[entry.result.id] for entry in shown]
    rate, *others = [(column, [column.value(entry.result) for entry in shown]) for column in SUMMARY]
    known = {column.name for column, values in others if any(values)}
    if "device_busy" in known:
        known.discard("utilization_pct")  # the less exact one of the two
    columns = [
        _Column(table.time_title, [_cell(cell, paint) for cell in shown_cells]),
        _Column(rate[0].title, written(rate[1], rate[0].unit)),
        _Column(table.metric, [cell.second for cell in shown_cells]),
        *(
            _Column(column.title, written(values, column.unit), column.drop_order)
            for column, values in others
            if column.name in known
        ),
    ]
    text, *_ = _fitted([entry[:2] for entry in shown], [column for column in columns if any(column.texts)])
    notes = [f"{_MARKS[key]} {LEGEND[key][1]}" for key in table.used if key in _MARKS]
    notes += ["#2: measured again, by another test or strategy"] * any("#" in one.row for one in shown)
    legend = textwrap.wrap("   ".join(notes), WIDTH)
    return "\n".join([table.title.removesuffix(f" / {table.metric}"), text, *legend]), len(shown)


def _rank(result: CaseResult) -> tuple[bool, float]:
    """Return the sort key by which the best case of a series is the last one."""
    return not result.has_wrong_answers, result.sequences_per_s or 0.0


def work_table(cases: Sequence[CaseResult]) -> str:
    """Return the tables of work, energy, latencies and tokens; empty if none of it was measured."""
    texts = []
    for table in make_work_tables(cases):
        columns = [
            _Column(column.title, [texts[number] for _, _, texts in table.rows], column.drop_order)
            for number, column in enumerate(table.columns)
        ]
        texts.append("\n".join([table.title, *_fitted([row[:2] for row in table.rows], columns)]))
    return "\n\n".join(texts)


def device_tables(cases: Sequence[CaseResult], environment: Environment) -> str:
    """Return the communication, path and memory of the completed cases, or the reason why there are no tables."""
    order = [entry for entry in entries(cases) if entry.result.outcome == "completed"]
    if not order:
        return ""
    by_title: dict[str, list[CaseResult]] = {}
    for entry in order:
        by_title.setdefault(entry.title, []).append(entry.result)
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
    order: Sequence[Entry],
    reasons: dict[str, list[str]],
    environment: Environment,
) -> str:
    """Return a table of the columns that have values, and add the others to `reasons`: reason -> names of columns."""
    results = [entry.result for entry in order]
    several = any(result.case.devices > 1 for result in results)
    shown, with_largest = [], False
    for column in columns:
        values = [device_values(result, column) for result in results]
        if column.several and not several:
            continue
        if any(values):
            shown.append(_Column(column.title, mean_and_largest(values), column.drop_order))
            with_largest = with_largest or any(len(each) > 1 for each in values)
        elif column.key != "workspace_bytes":  # most strategies have no workspace
            reasons.setdefault(missing(results, column, environment), []).append(column.name)
    heading = f"{title}{': mean over the GPUs (largest)' if with_largest else ''}"
    return "\n".join([heading, *_fitted([entry[:2] for entry in order], shown)]) if shown else ""


def _collectives(by_title: Mapping[str, Sequence[CaseResult]]) -> Iterator[str]:
    """Yield per strategy how often its ranks communicate and how many bytes they send, by kind of collective."""
    for (title, results), of_step in itertools.product(by_title.items(), (False, True)):
        found = [collectives(result, of_step=of_step) for result in results]
        whole, share = ("decode step", "token") if of_step else ("batch", "sequence")
        parts = []
        for kind in dict.fromkeys(kind for of_case in found for kind in of_case):
            calls, sizes = zip(*(of_case[kind] for of_case in found if kind in of_case), strict=True)
            megabytes = _range(size / _BYTES_PER_MB for size in sizes)
            parts.append(f"{_range(calls)} {kind} per {whole} ({megabytes} MB/{share})")
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


class _Column(NamedTuple):
    """A column of a table of cases."""

    title: str
    """The first line is the name, the second line is the unit."""
    texts: Sequence[str]
    """The cell of each case."""
    drop_order: int = 0
    """If the table is too wide, the column with the largest number is dropped first; 0 is never dropped."""


def _fitted(places: Sequence[tuple[str, str]], columns: Sequence[_Column]) -> list[str]:
    """Return the table of the columns that fit the width, and a line with the names of those that were dropped.

    Args:
        places: strategy and batch size of each case, the first columns.
        columns: the other columns.
    """
    firsts = [("" if n and places[n - 1][0] == name else name, size) for n, (name, size) in enumerate(places)]
    shown, dropped = list(columns), []
    while True:
        headers = ["strategy", "batch\nsize", *(column.title for column in shown)]
        body = [[*first, *(column.texts[n] for column in shown)] for n, first in enumerate(firsts)]
        align = ["left"] + ["right"] * (len(headers) - 1)
        table = tabulate(body, headers=headers, colalign=align, disable_numparse=True)
        last = max(shown, key=lambda column: column.drop_order)
        if max(map(len, _ANSI.sub("", table).splitlines())) <= WIDTH or not last.drop_order:
            break
        shown.remove(last)
        dropped.append(last.title.replace("\n", " "))
    note = f"Columns dropped to fit the width (the report has them): {', '.join(dropped)}."
    return [table, note] if dropped else [table]


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
