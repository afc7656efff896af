"""The table of the work of each case: device time, share of the bound, busy GPUs, energy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_llmgpu.render.device_columns import digits
from pytest_llmgpu.render.time_table import layout, row_name
from pytest_llmgpu.report.metrics import spec_of
from pytest_llmgpu.report.result import CaseResult


@dataclass(frozen=True, kw_only=True)
class WorkColumn:
    """One figure of a case."""

    name: str
    """Name of the CSV column."""
    title: str
    """The first line is the name, the second line is the unit."""
    value: Callable[[CaseResult], float | None]
    """Returns the figure in the unit of the report; None where it was not measured."""
    unit: float = 1.0
    """A value is divided by this number in tables."""
    drop_order: int = 0
    """If the table is too wide, the column with the largest number is dropped first; 0 is never dropped."""


@dataclass(frozen=True, kw_only=True)
class WorkTable:
    """The table of some cases."""

    columns: Sequence[WorkColumn]
    """The columns in which a case has a figure."""
    rows: Sequence[tuple[str, str, Sequence[str]]]
    """Strategy, batch size and figures of each case with work passes or energy."""


def _figure(metric: str) -> Callable[[CaseResult], float | None]:
    figure_of = spec_of(metric).figure
    assert figure_of is not None, f"{metric} has no figure"

    def value(result: CaseResult) -> float | None:
        figure = figure_of(result)
        return None if figure is None else figure.value

    return value


def _busy(result: CaseResult) -> float | None:
    """Return the share of a work pass during which a kernel ran, the mean over ranks and launches."""
    ranks = [rank for launch in result.launches for rank in launch.ranks]
    found = [rank.busy for rank in ranks if rank.busy is not None]
    return statistics.fmean(found) if found else None


WORK: tuple[WorkColumn, ...] = (
    WorkColumn(name="inference_s", title="time\ns", value=_figure("time")),
    WorkColumn(name="device_time_s", title="device time\ns/work pass", value=_figure("device_time")),
    WorkColumn(
        name="bound_share",
        title="of bound\n%",
        value=lambda result: None if result.bound is None else result.bound.share,
        unit=0.01,
    ),
    WorkColumn(name="device_busy", title="device busy\n%", value=_busy, unit=0.01, drop_order=1),
    WorkColumn(
        name="energy_j_per_sequence",
        title="energy\nJ/sequence",
        value=lambda result: result.energy_j_per_sequence,
        drop_order=2,
    ),
    WorkColumn(
        name="energy_j_per_token", title="energy\nJ/token", value=lambda result: result.energy_j_per_token, drop_order=3
    ),
)
"""The columns in their order."""


def make_work_table(cases: Sequence[CaseResult]) -> WorkTable | None:
    """Return the table of one block of cases; None if no case has more than its time."""
    titles, rows = layout(cases)
    order = [(title, row, rows[row][title]) for title in titles for row in rows if title in rows[row]]
    found = [(title, row, [column.value(result) for column in WORK]) for title, row, result in order]
    found = [entry for entry in found if any(value is not None for value in entry[2][1:])]
    used = [number for number in range(len(WORK)) if any(values[number] is not None for *_, values in found)]
    if not found:
        return None
    cells = [_written([values[number] for *_, values in found], WORK[number].unit) for number in used]
    return WorkTable(
        columns=[WORK[number] for number in used],
        rows=[
            (title, row_name(row), [column[number] for column in cells]) for number, (title, row, _) in enumerate(found)
        ],
    )


def _written(values: Sequence[float | None], unit: float) -> list[str]:
    """Return the figures of a column with the decimals that the smallest one needs."""
    shown = [None if value is None else value / unit for value in values]
    places = digits(min((value for value in shown if value), default=1.0))
    return ["" if value is None else f"{value:.{places}f}" for value in shown]
