"""The table of time and accuracy as data: batch sizes down, strategies across, as Table 2 of Shin et al. 2024."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from pytest_llmgpu.render.device_columns import digits
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import generated, measured
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import percent, plural

Kind = Literal["plain", "best", "wrong", "oom", "skipped", "failed", "absent"]
"""The state that a cell is marked with."""

LEGEND: dict[str, tuple[str, str]] = {
    "best": ("★", "most sequences/s of its strategy"),
    "wrong": ("✗", "wrong answers"),
    "oom": ("OOM", "out of memory"),
    "skipped": ("-", "not run, a smaller batch size was out of memory"),
    "failed": ("!", "did not complete"),
    "graphs": ("g", "run as CUDA graphs"),
}
"""The mark on the page and its meaning: one entry per kind of cell, and one for `graphs`."""

_USUAL_BACKENDS = {"mp": "accelerate", "tp": "transformers", "iok": "deepspeed", "compile": "transformers"}
"""The title of a column names the backend only if it is not the usual one."""

_MINUTES_FROM_S = 600  # times are written in minutes if the smallest one is at least this long


class Entry(NamedTuple):
    """A case and its place in the tables and charts of its block."""

    title: str
    """The title of its column and of its curve: `mp`."""
    row: str
    """The name of its row: the batch size, and from the second measurement on its number."""
    result: CaseResult
    """The case."""

    @property
    def batch_size(self) -> int:
        """The sequences per forward."""
        return self.result.case.batch_size


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One case in the table."""

    id: str = ""
    """The id of the case; empty if the cell has no case."""
    kind: Kind = "absent"
    """The state of the case."""
    time: str = ""
    """The time with its unit, for a case that generates per token; empty if the case did not complete."""
    second: str = ""
    """The accuracy in percent, or the time to first token; empty if nothing was scored or the weights are random."""
    word: str = ""
    """How the case ended; empty if it completed."""
    graphs: bool = False
    """True if the forwards ran as CUDA graphs."""


class TimeTable(msgspec.Struct, frozen=True, kw_only=True):
    """The table of one block of cases."""

    title: str
    """The content of the cells: `Time for 10,042 items / acc_norm`."""
    time_title: str
    """The title of the times where they have a column of their own."""
    metric: str
    """The title of the second figure of each cell: the metric of the accuracies, or the time to first token."""
    columns: list[str]
    """The titles of the columns, one per strategy."""
    rows: list[tuple[str, list[Cell]]]
    """The name of each row (batch size and, from the second measurement on, its number) and a cell per column."""
    used: list[str]
    """The keys of `LEGEND` that occur in the table."""

    @property
    def marks(self) -> list[tuple[str, str]]:
        """The entries of `LEGEND` that occur in the table."""
        return [LEGEND[key] for key in self.used]


def make_time_table(cases: Sequence[CaseResult]) -> TimeTable:
    """Return the table of cases that differ in strategy and batch size only."""
    columns, rows = _layout(cases)
    show_s = _seconds_format([result.inference_s for result in cases if result.inference_s is not None])
    metric = next((check.metric for result in cases if (check := result.accuracy_check) is not None), "acc_norm")
    random_weights = cases[0].case.load_format == "dummy"
    best = [_fastest(row[title] for row in rows.values() if title in row) for title in columns]

    def cell(result: CaseResult | None) -> Cell:
        if result is None:
            return Cell()
        kind = _kind(result, best)
        if result.outcome != "completed":
            words = {"oom": "OOM", "skipped": "-"}
            return Cell(id=result.id, kind=kind, word=words.get(kind, result.outcome))
        if result.case.generates:
            time, second = _milliseconds(result.token_p50_s), _milliseconds(result.first_token_s)
        else:
            value = result.acc if metric == "acc" else result.acc_norm
            time = "done" if result.inference_s is None else show_s(result.inference_s)
            second = "" if value is None or random_weights else percent(value)
        graphs = result.case.execution == "cuda_graphs"
        return Cell(id=result.id, kind=kind, time=time, second=second, graphs=graphs)

    body = [(_row_name(row), [cell(found.get(title)) for title in columns]) for row, found in rows.items()]
    found = [cell for _, cells in body for cell in cells]
    kinds = {*(cell.kind for cell in found), *(["graphs"] if any(cell.graphs for cell in found) else [])}
    used = [key for key in LEGEND if key in kinds]
    title = _table_title(cases, metric, random_weights=random_weights)
    generates = cases[0].case.generates
    return TimeTable(
        title=title,
        time_title="time per token" if generates else "time",
        metric="time to first token" if generates else metric,
        columns=columns,
        rows=body,
        used=used,
    )


def entries(cases: Sequence[CaseResult]) -> list[Entry]:
    """Return the cases of a block, strategy by strategy and in ascending batch size."""
    columns, rows = _layout(cases)
    return [
        Entry(title, _row_name(row), found[title]) for title in columns for row, found in rows.items() if title in found
    ]


def _layout(cases: Sequence[CaseResult]) -> tuple[list[str], dict[tuple[int, int], dict[str, CaseResult]]]:
    """Return the titles of the columns, and the results by row (batch size, number of the measurement) and title."""
    by_series = {result.case.series: result.case for result in cases}
    titles = {series: _column_title(case, list(by_series.values())) for series, case in by_series.items()}
    rows: dict[tuple[int, int], dict[str, CaseResult]] = {}
    for result in cases:
        title, number = titles[result.case.series], 1
        while title in rows.get((result.case.batch_size, number), {}):
            number += 1
        rows.setdefault((result.case.batch_size, number), {})[title] = result
    return list(titles.values()), dict(sorted(rows.items()))


def _row_name(row: tuple[int, int]) -> str:
    return f"{row[0]}" if row[1] == 1 else f"{row[0]} #{row[1]}"


def _column_title(case: Case, columns: Sequence[Case]) -> str:
    """Return the strategy with its unusual settings and those that other columns of the same strategy do not share."""
    alike = [other for other in columns if other.strategy == case.strategy]
    unusual = _USUAL_BACKENDS.get(case.strategy, case.backend) != case.backend
    backend = case.backend if unusual or any(other.backend != case.backend for other in alike) else None
    options = [
        f"{name}={value}"
        for name, value in case.strategy_options.items()
        if value or any(name not in other.strategy_options or other.strategy_options[name] != value for other in alike)
    ]
    # On a CPU devices are processes, and cases of different numbers share a table.
    processes = plural(case.devices, "process") if any(other.devices != case.devices for other in alike) else None
    return " ".join(filter(None, [case.strategy, backend, *options, processes]))


def _table_title(cases: Sequence[CaseResult], metric: str, *, random_weights: bool) -> str:
    items = next((accuracy.items for result in cases if (accuracy := measured(result)) is not None), None)
    title = "Time" if items is None else f"Time for {items:,} items"
    if cases[0].case.generates:
        texts = next((len(found.new_tokens) for result in cases if (found := generated(result)) is not None), None)
        title = "Time per token / time to first token" + ("" if texts is None else f", {plural(texts, 'text')}")
    launches = [count for result in cases if (count := sum(bool(one.batches.latency_s) for one in result.launches))]
    if max(launches, default=1) > 1:
        fewest = f"{min(launches):,} to " if min(launches) < max(launches) else ""
        title += f", median of {fewest}{max(launches):,} launches"
    if cases[0].case.generates:
        return title
    if random_weights:
        return f"{title} (no accuracy: the weights are random)"
    return title if items is None else f"{title} / {metric}"


def _kind(result: CaseResult, best: Sequence[CaseResult | None]) -> Kind:
    if result.outcome == "completed":
        if result.has_wrong_answers:
            return "wrong"
        return "best" if any(result is fastest for fastest in best) else "plain"
    if result.outcome == "oom":
        return "oom"
    return "skipped" if result.outcome == "skipped_after_oom" else "failed"


def _fastest(results: Iterable[CaseResult]) -> CaseResult | None:
    """Return the fastest result without wrong answers; None if fewer than two results have a time."""
    timed = [result for result in results if result.inference_s is not None]
    right = [result for result in timed if not result.has_wrong_answers]
    return min(right, key=lambda result: result.inference_s or 0.0) if len(timed) > 1 and right else None


def _milliseconds(value_s: float | None) -> str:
    """Return a time in milliseconds; `-` where there is none, as for the next token of texts of one token."""
    return "-" if value_s is None else f"{1000 * value_s:,.{digits(1000 * value_s)}f} ms"


def _seconds_format(values_s: Sequence[float]) -> Callable[[float], str]:
    """Return a format with one unit, and the decimals of the smallest value: the times of a column then compare."""
    smallest = min(values_s, default=0.0)
    unit, name = (60, "min") if smallest >= _MINUTES_FROM_S else (1, "s")
    places = digits(smallest / unit)
    return lambda value_s: f"{value_s / unit:.{places}f} {name}"
