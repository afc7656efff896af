"""A figure by batch size and strategy: the curves, the cases that did not complete, and the table of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.chart import Spec, formatted, rounded
from pytest_llmgpu.render.charts.panels import Entry, Panel

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


def points(panel: Panel, figures: Mapping[str, Figure]) -> list[Point]:
    """Return the points of a panel's completed cases; `figures` maps the name of a curve to its figure."""
    return [
        Point(entry, kind, value)
        for kind, figure in figures.items()
        for entry in panel.completed
        if (value := figure(entry)) is not None
    ]


def curves_of(
    panel: Panel, drawn: Sequence[Point], *, title: str, log: bool = True, more: Sequence[Spec] = (), notes: int = 0
) -> Spec:
    """Return the specification of curves over batch sizes.

    Args:
        panel: the panel of the points.
        drawn: the points to draw; their values must be above 0 on a logarithmic axis.
        title: the title of the figure's axis, with its unit.
        log: whether that axis is logarithmic.
        more: further layers, drawn below the curves.
        notes: the lines of text above the plot that `more` has.
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
    dash: Spec = {}
    tooltip = [axes.text("s", "strategy"), axes.number("b", "batch size"), axes.number("v", title)]
    if len(kinds) > 1:
        dash = {"strokeDash": {**axes.text("k"), "scale": {"domain": kinds}}}
        tooltip.insert(1, axes.text("k", "curve"))
    colour = axes.curves(panel)
    batch_size = {"field": "b", "type": "quantitative"}
    layers = [
        *more,
        {"mark": {"type": "line"}, "encoding": {"color": colour, "order": batch_size, **dash}},
        {"mark": {"type": "point"}, "encoding": {"color": colour, "shape": colour, "tooltip": tooltip}},
        *axes.failures(panel, first=notes),
    ]
    sizes = [entry.batch_size for entry in (*panel.completed, *panel.failed)]
    y = axes.levels([rounded(point.value) for point in drawn], title, log=log)
    return axes.layered(layers, rows, x=axes.batch_sizes(sizes), y=y)


def table(panel: Panel, figure: Figure, unit: str) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of a figure: one row per batch size, one column per strategy, with failed cases."""
    cells: dict[int, dict[str, list[str]]] = {}
    for entry in panel.entries:
        value = figure(entry) if entry.result.outcome == "completed" else None
        ended = {"completed": "-", "oom": "OOM", "skipped_after_oom": "not run"}
        text = formatted(value) if value is not None else ended.get(entry.result.outcome, entry.result.outcome)
        if entry.result.has_wrong_answers:
            text += " (wrong answers)"
        cells.setdefault(entry.batch_size, {}).setdefault(entry.title, []).append(text)
    headers = ["batch size", *(f"{title} ({unit})" for title in panel.titles)]
    rows = [
        [str(size), *("; ".join(by_title.get(title, [])) for title in panel.titles)]
        for size, by_title in sorted(cells.items())
    ]
    return headers, rows
