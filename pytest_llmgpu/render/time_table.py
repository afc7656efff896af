"""The study's Table 2 as data: batch sizes down, strategies across, time and accuracy, or how a case ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from pytest_llmgpu.render.device_columns import digits
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import measured
from pytest_llmgpu.report.result import CaseResult

__all__ = ["LEGEND", "Cell", "Kind", "Rows", "StudyTable", "layout", "row_name", "study_table", "wrong"]

Kind = Literal["plain", "best", "wrong", "oom", "skipped", "failed", "absent"]
"""What a cell is to be marked as."""

LEGEND: dict[str, tuple[str, str]] = {
    "best": ("★", "fastest of its strategy"),
    "wrong": ("✗", "wrong answers"),
    "oom": ("OoM", "out of memory"),
    "skipped": ("-", "not run, a smaller batch size was out of memory"),
    "failed": ("!", "did not complete"),
    "graphs": ("g", "as CUDA graphs"),
}
"""A page's mark and its meaning, by a cell's kind, and `graphs`."""

_USUAL_BACKENDS = {"mp": "accelerate", "tp": "transformers", "iok": "deepspeed"}
"""Backends that a title need not name."""

Rows = dict[tuple[int, int], dict[str, CaseResult]]
"""Batch size and number of the measurement to the result of each column."""

_LONG_S = 600  # from here on people think in minutes


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One case of the table."""

    id: str = ""
    """Of the case; empty where there is none."""
    kind: Kind = "absent"
    time: str = ""
    """With its unit; empty where the case did not complete."""
    accuracy: str = ""
    """In percent; empty where nothing was scored, and of random weights, whose accuracy is chance."""
    word: str = ""
    """How a case ended that has no time."""
    graphs: bool = False
    """Whether its forwards ran as CUDA graphs."""


class StudyTable(msgspec.Struct, frozen=True, kw_only=True):
    """The table of one block of cases."""

    title: str
    """What its cells hold: `Time for 10,042 items / acc_norm`."""
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
    """Batch size, with the number of the measurement from the second on; a cell per column."""
    used: list[str]
    """The keys of `LEGEND` that occur."""

    @property
    def marks(self) -> list[tuple[str, str]]:
        """What a page's legend explains."""
        return [LEGEND[key] for key in self.used]


def study_table(cases: Sequence[CaseResult]) -> StudyTable:
    """Return the table of cases that differ in strategy and batch size only."""
    columns, rows = layout(cases)
    show_s = _seconds_format([result.inference_s for result in cases if result.inference_s is not None])
    metric = next((check.metric for result in cases if (check := result.accuracy_check) is not None), "acc_norm")
    dummy = cases[0].case.load_format == "dummy"
    best = [_fastest(row[title] for row in rows.values() if title in row) for title in columns]

    def cell(result: CaseResult | None) -> Cell:
        if result is None:
            return Cell()
        kind = _kind(result, best)
        if result.outcome != "completed":
            words = {"oom": "OoM", "skipped": "-"}
            return Cell(id=result.id, kind=kind, word=words.get(kind, result.outcome))
        value = result.acc if metric == "acc" else result.acc_norm
        return Cell(
            id=result.id,
            kind=kind,
            time="done" if result.inference_s is None else show_s(result.inference_s),
            accuracy="" if value is None or dummy else f"{100 * value:.1f} %",
            graphs=result.case.execution == "cuda_graphs",
        )

    body = [(row_name(row), [cell(found.get(title)) for title in columns]) for row, found in rows.items()]
    found = [cell for _, cells in body for cell in cells]
    kinds = {*(cell.kind for cell in found), *(["graphs"] if any(cell.graphs for cell in found) else [])}
    used = [key for key in LEGEND if key in kinds]
    return StudyTable(title=_table_title(cases, metric, dummy=dummy), columns=columns, rows=body, used=used)


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


def _table_title(cases: Sequence[CaseResult], metric: str, *, dummy: bool) -> str:
    items = next((accuracy.items for result in cases if (accuracy := measured(result)) is not None), None)
    title = "Time" if items is None else f"Time for {items:,} items"
    launches = [count for result in cases if (count := sum(bool(one.batches.latency_s) for one in result.launches))]
    if max(launches, default=1) > 1:
        fewest = f"{min(launches):,} to " if min(launches) < max(launches) else ""
        title += f", median of {fewest}{max(launches):,} launches"
    if dummy:
        return f"{title} (the accuracy of random weights is chance)"
    return title if items is None else f"{title} / {metric}"


def _kind(result: CaseResult, best: Sequence[CaseResult | None]) -> Kind:
    if result.outcome == "completed":
        if wrong(result):
            return "wrong"
        return "best" if any(result is fastest for fastest in best) else "plain"
    if result.outcome == "oom":
        return "oom"
    return "skipped" if result.outcome == "skipped_after_oom" else "failed"


def wrong(result: CaseResult) -> bool:
    """Return whether answers are known to be wrong: the time that they took is then no achievement."""
    return result.accuracy_check is not None and result.accuracy_check.ok is False


def _fastest(results: Iterable[CaseResult]) -> CaseResult | None:
    """Return the fastest result whose answers are not known to be wrong; None where there is no choice."""
    timed = [result for result in results if result.inference_s is not None]
    right = [result for result in timed if not wrong(result)]
    return min(right, key=lambda result: result.inference_s or 0.0) if len(timed) > 1 and right else None


def _seconds_format(values_s: Sequence[float]) -> Callable[[float], str]:
    """Return a format with one unit and the decimals that the smallest value needs, so that a column compares."""
    smallest = min(values_s, default=0.0)
    unit, name = (60, "min") if smallest >= _LONG_S else (1, "s")
    places = digits(smallest / unit)
    return lambda value_s: f"{value_s / unit:.{places}f} {name}"


def row_name(row: tuple[int, int]) -> str:
    """Return the batch size, with the number of the measurement from the second on."""
    return f"{row[0]}" if row[1] == 1 else f"{row[0]} #{row[1]}"
