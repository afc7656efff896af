"""A figure by batch size and strategy: curves, what did not complete, and the table of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.chart import Spec, rounded, written
from pytest_llmgpu.render.charts.panels import Entry, Panel
from pytest_llmgpu.render.time_table import wrong

__all__ = ["Figure", "Point", "curves_of", "points", "table"]


Figure = Callable[[Entry], float | None]
"""A case's figure in the unit of an axis; None where it has none."""


class Point(NamedTuple):
    """One mark of a chart."""

    entry: Entry
    kind: str
    """Which of several curves of its strategy it is on: `TX`."""
    value: float
    """In the unit of the axis, not rounded: what is rounded twice may differ in its last digit."""


def points(panel: Panel, figures: Mapping[str, Figure]) -> list[Point]:
    """Return the points of a panel that there are.

    Args:
        panel: whose completed cases are drawn.
        figures: by name of the curve, in the axis's unit; None where a case has none.
    """
    return [
        Point(entry, kind, value)
        for kind, figure in figures.items()
        for entry in panel.completed
        if (value := figure(entry)) is not None
    ]


def curves_of(
    panel: Panel,
    drawn: Sequence[Point],
    *,
    title: str,
    unit: str,
    log: bool = True,
    within: Sequence[float] = (),
    sizes: Sequence[float] = (),
    more: Sequence[Spec] = (),
) -> Spec:
    """Return the specification of curves over batch sizes.

    Args:
        panel: of the points.
        drawn: what to draw; above 0 on a logarithmic axis.
        title: of the figure.
        unit: of the figure.
        log: whether its axis is logarithmic.
        within: other values that have to be seen.
        sizes: other batch sizes that have to be seen.
        more: further layers, below the curves.
    """
    kinds = list(dict.fromkeys(point.kind for point in drawn))
    rows = [
        {
            "s": point.entry.title,
            "b": point.entry.batch_size,
            "v": rounded(point.value),
            **({"k": point.kind} if len(kinds) > 1 else {}),
        }
        for point in drawn
    ]
    failed = axes.failures(panel)
    everything = [entry.batch_size for entry in (*panel.completed, *panel.failed)]
    shared = {
        "x": axes.batch_sizes([*everything, *sizes]),
        "y": axes.levels(
            [*(rounded(point.value) for point in drawn), *within], f"{title} ({unit})", log=log, lines=len(failed)
        ),
    }
    colour = axes.curves(panel)
    dash: Spec = {}
    tooltip = [
        {"field": "s", "type": "nominal", "title": "strategy"},
        {"field": "b", "type": "quantitative", "title": "batch size"},
        {"field": "v", "type": "quantitative", "title": f"{title} ({unit})", "format": axes.NUMBER},
    ]
    if len(kinds) > 1:
        channel = {"field": "k", "type": "nominal", "title": None, "scale": {"domain": kinds}}
        dash = {"strokeDash": {**channel, "scale": {"domain": kinds, "range": [[1, 0], [4, 4]]}}}
        tooltip.insert(1, {"field": "k", "type": "nominal", "title": "curve"})
    layers: list[Spec] = [
        *more,
        {
            "mark": {"type": "line"},
            "encoding": {"color": colour, "order": {"field": "b", "type": "quantitative"}, **dash},
        },
        {"mark": {"type": "point"}, "encoding": {"color": colour, "shape": axes.shapes(panel), "tooltip": tooltip}},
        *failed,
    ]
    return {**axes.sized(layers, rows), "encoding": shared}


def table(panel: Panel, figure: Figure, unit: str) -> tuple[list[str], list[list[str]]]:
    """Return a figure as a table, batch sizes down and strategies across, with how cases ended without it."""
    cells: dict[int, dict[str, list[str]]] = {}
    for entry in panel.entries:
        value = figure(entry) if entry.result.outcome == "completed" else None
        ended = {"completed": "-", "oom": "OoM", "skipped_after_oom": "not run"}
        text = written(value) if value is not None else ended.get(entry.result.outcome, entry.result.outcome)
        if wrong(entry.result):
            text += " (wrong answers)"
        cells.setdefault(entry.batch_size, {}).setdefault(entry.title, []).append(text)
    headers = ["batch size", *(f"{title} ({unit})" for title in panel.titles)]
    rows = [
        [str(size), *("; ".join(by_title.get(title, [])) for title in panel.titles)]
        for size, by_title in sorted(cells.items())
    ]
    return headers, rows
