"""The tables of one block of cases: time and accuracy as the study's Table 2, communication and memory per GPU."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from tabulate import tabulate

from pytest_llmgpu.case import Case
from pytest_llmgpu.device_figures import (
    COMMUNICATION,
    MEMORY,
    Figure,
    digits,
    mean_and_largest,
    of_devices,
    why_missing,
)
from pytest_llmgpu.metrics import measured
from pytest_llmgpu.report import Environment
from pytest_llmgpu.result import CaseResult

__all__ = ["WIDTH", "Painter", "Rows", "device_tables", "layout", "painter", "time_table"]

WIDTH = 100
"""Columns of a terminal that everything fits in, with three strategies."""

Painter = Callable[[str, str], str]
"""Text and the number of an ANSI style to the text in that style."""

_LONG_S = 600  # from here on people think in minutes

_RED, _GREEN, _YELLOW = "31", "32", "33"
_WORDS = {"oom": "OoM", "skipped_after_oom": "-"}
_LEGEND = {
    "*": "* fastest of its strategy",
    "!": "! wrong answers",
    "g": "g: as CUDA graphs",
    "OoM": "OoM: out of memory",
    "-": "-: not run, a smaller batch size was out of memory",
}

_USUAL_BACKENDS = {"mp": "accelerate", "tp": "transformers", "iok": "deepspeed"}
"""Backends that a title need not name."""

Rows = dict[tuple[int, int], dict[str, CaseResult]]
"""Batch size and number of the measurement to the result of each column."""


def time_table(cases: Sequence[CaseResult], paint: Painter) -> str:
    """Return batch sizes down and strategies across: time and accuracy, or how a case ended without them."""
    columns, rows = layout(cases)
    show_s = _seconds_format([result.inference_s for result in cases if result.inference_s is not None])
    metric = next((check.metric for result in cases if (check := result.accuracy_check) is not None), "acc_norm")
    dummy = cases[0].case.load_format == "dummy"
    best = [_fastest([row[title] for row in rows.values() if title in row]) for title in columns]
    marks: set[str] = set()

    def cell(result: CaseResult | None) -> str:
        if result is None:
            return ""
        if result.outcome != "completed":
            word = _WORDS.get(result.outcome, result.outcome)
            marks.add(word)
            return paint(word, _YELLOW if result.outcome in _WORDS else _RED)
        text = "done" if result.inference_s is None else show_s(result.inference_s)
        value = result.acc if metric == "acc" else result.acc_norm
        if value is not None and not dummy:
            text += f" / {100 * value:.1f} %"
        if result.case.execution == "cuda_graphs":
            marks.add("g")
            text = f"g {text}"
        if _wrong(result):
            marks.add("!")
            return paint(f"! {text}", _RED)
        if any(result is fastest for fastest in best):
            marks.add("*")
            return paint(f"* {text}", _GREEN)
        return text

    body = [[_row_name(row), *(cell(results.get(title)) for title in columns)] for row, results in rows.items()]
    items = next((accuracy.items for result in cases if (accuracy := measured(result)) is not None), None)
    title = "Time" if items is None else f"Time for {items:,} items"
    if dummy:
        title += " (the accuracy of random weights is chance)"
    elif items is not None:
        title += f" / {metric}"
    legend = "   ".join(text for mark, text in _LEGEND.items() if mark in marks)
    table = _table(["batch size", *columns], body, ["right"] * (1 + len(columns)))
    return "\n".join([title, table, *_wrap(legend)])


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
    firsts = [[name, _row_name(row)] for name, (_, row, _) in zip(names, order, strict=True)]
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


def layout(cases: Sequence[CaseResult]) -> tuple[list[str], Rows]:
    """Return the columns' titles, and the results by row."""
    by_series = {result.case.series: result.case for result in cases}
    titles = {series: _title(case, list(by_series.values())) for series, case in by_series.items()}
    rows: Rows = {}
    for result in cases:
        title, number = titles[result.case.series], 1
        while title in rows.get((result.case.batch_size, number), {}):
            number += 1
        rows.setdefault((result.case.batch_size, number), {})[title] = result
    return list(titles.values()), dict(sorted(rows.items()))


def _title(case: Case, columns: Sequence[Case]) -> str:
    """Return the strategy, with what is not usual of it and what tells it from other columns of the same strategy."""
    alike = [other for other in columns if other.strategy == case.strategy]
    unusual = _USUAL_BACKENDS.get(case.strategy, case.backend) != case.backend
    backend = case.backend if unusual or any(other.backend != case.backend for other in alike) else None
    options = [
        f"{name}={value}"
        for name, value in case.strategy_options.items()
        if value or any(name not in other.strategy_options or other.strategy_options[name] != value for other in alike)
    ]
    return " ".join(filter(None, [case.strategy, backend, *options]))


def _wrong(result: CaseResult) -> bool:
    return result.accuracy_check is not None and result.accuracy_check.ok is False


def _fastest(results: Iterable[CaseResult]) -> CaseResult | None:
    """Return the fastest result whose answers are not known to be wrong; None where there is no choice."""
    timed = [result for result in results if result.inference_s is not None]
    right = [result for result in timed if not _wrong(result)]
    return min(right, key=lambda result: result.inference_s or 0.0) if len(timed) > 1 and right else None


def _seconds_format(values_s: Sequence[float]) -> Callable[[float], str]:
    """Return a format with one unit and the decimals that the smallest value needs, so that a column compares."""
    smallest = min(values_s, default=0.0)
    unit, name = (60, "min") if smallest >= _LONG_S else (1, "s")
    places = digits(smallest / unit)
    return lambda value_s: f"{value_s / unit:.{places}f} {name}"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _table(headers: Sequence[str], body: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    return tabulate(body, headers=list(headers), colalign=list(align), disable_numparse=True)


def _row_name(row: tuple[int, int]) -> str:
    return f"{row[0]}" if row[1] == 1 else f"{row[0]} #{row[1]}"
