"""A figure by batch size and strategy: the curves, the cases that did not complete, and the table of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.chart import Spec, formatted, rounded
from pytest_llmgpu.render.charts.panels import Panel
from pytest_llmgpu.render.time_table import Entry

Figure = Callable[[Entry], float | None]
"""A function that returns a case's figure in the unit of an axis; None where the case has none."""


class Point(NamedTuple):
    """One mark of a chart."""

    entry: Entry
    """The result that the mark shows."""
    kind: str
    """The curve among several curves of one strategy, such as `TX`."""
    value: float
    """The figure in the unit of the axis, not rounded: rounding twice may change the last digit."""


def points(entries: Iterable[Entry], figures: Mapping[str, Figure]) -> list[Point]:
    """Return the points of completed cases; `figures` maps the name of a curve to its figure."""
    completed = list(entries)
    return [
        Point(entry, kind, value)
        for kind, figure in figures.items()
        for entry in completed
        if (value := figure(entry)) is not None
    ]


def curves_of(
    panel: Panel,
    drawn: Sequence[Point],
    figures: Mapping[str, Figure],
    *,
    title: str,
    log: bool = True,
    more: Sequence[Spec] = (),
) -> Spec:
    """Return the specification of curves over batch sizes, with those of the baseline.

    Args:
        panel: the panel of the points.
        drawn: the points to draw; their values must be above 0 on a logarithmic axis.
        figures: the figures of the points, by the names of their curves.
        title: the title of the figure's axis, with its unit.
        log: whether that axis is logarithmic.
        more: further layers, drawn below the curves.
    """
    kinds = list(dict.fromkeys(point.kind for point in drawn))
    several = len(kinds) > 1
    rows = [_row(point, several=several) for point in drawn]
    then = [point for point in points(panel.before, figures) if point.kind in kinds and (point.value > 0 or not log)]
    before = [_row(point, several=several) for point in then]
    dash: Spec = {}
    tooltip = axes.tooltip(axes.number("v", title))
    if several:
        dash = {"strokeDash": {**axes.text("k"), "scale": {"domain": kinds}}}
        tooltip.insert(1, axes.text("k", "curve"))
    colour = axes.curves(panel)
    batch_size = {"field": "b", "type": "quantitative"}
    layers = [
        *more,
        *axes.with_baseline(
            [
                {"mark": {"type": "line"}, "encoding": {"color": colour, "order": batch_size, **dash}},
                {"mark": {"type": "point"}, "encoding": {"color": colour, "shape": colour, "tooltip": tooltip}},
            ],
            before,
        ),
        *axes.failures(panel),
    ]
    sizes = [entry.batch_size for entry in (*panel.completed, *panel.failed, *panel.before)]
    y = axes.levels([row["v"] for row in (*rows, *before)], title, log=log)
    return axes.layered(layers, rows, x=axes.batch_sizes(sizes), y=y)


def _row(point: Point, *, several: bool) -> Spec:
    row = {"s": point.entry.title, "b": point.entry.batch_size, "v": rounded(point.value)}
    return {**row, "k": point.kind} if several else row


def row_of(entry: Entry, values: Iterable[float | None]) -> list[str]:
    """Return a row of a table with one case per row: strategy, batch size, and these figures."""
    return [entry.title, str(entry.batch_size), *map(formatted, values)]


def table(panel: Panel, figure: Figure, unit: str) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of a figure: one row per batch size, one column per strategy, with failed cases."""
    before = {(entry.title, entry.batch_size): figure(entry) for entry in panel.before}
    cells: dict[int, dict[str, list[str]]] = {}
    for entry in panel.entries:
        value = figure(entry) if entry.result.outcome == "completed" else None
        ended = {"completed": "-", "oom": "OOM", "skipped_after_oom": "not run"}
        text = formatted(value) if value is not None else ended.get(entry.result.outcome, entry.result.outcome)
        if entry.result.has_wrong_answers:
            text += " (wrong answers)"
        if (then := before.get((entry.title, entry.batch_size))) is not None:
            text += f" (was {formatted(then)})"
        cells.setdefault(entry.batch_size, {}).setdefault(entry.title, []).append(text)
    headers = ["batch size", *(f"{title} ({unit})" for title in panel.titles)]
    rows = [
        [str(size), *("; ".join(by_title.get(title, [])) for title in panel.titles)]
        for size, by_title in sorted(cells.items())
    ]
    return headers, rows
