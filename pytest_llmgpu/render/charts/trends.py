"""Trends as charts: a line a case, report by report, with marks where the gate says that it changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import repeat

from pytest_llmgpu.gate.trends import Change, Figure, Trend
from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.chart import Chart, Charts, Spec, rounded
from pytest_llmgpu.render.charts.theme import SHAPES, domain
from pytest_llmgpu.render.terminal.trends import before, cell
from pytest_llmgpu.report.metrics import METRICS

__all__ = ["MARKS", "of_trends"]

MARKS: dict[Change, str] = {
    "worse": "\N{BLACK UP-POINTING TRIANGLE}",
    "better": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "changed": "\N{BLACK DIAMOND}",
}
"""What stands at a change, in a chart and in the list below it."""

_FEW = 8  # lines that can all be named
_LINEAR = ("accuracy", "memory", "utilization")
"""Metrics that are not drawn on a logarithmic axis: they move by little."""

_UNMARKED = {"throughput": "marked in the chart of time"}
"""What stands for the changes of a metric that has them in another chart."""


def of_trends(trends: Sequence[Trend]) -> Charts:
    """Return a chart a metric, but for those that are 0 throughout, which a logarithmic axis does not have."""
    charts: list[Chart] = []
    omitted: list[str] = []
    for trend in trends:
        values = [
            one.value for line in trend.lines for one in line.figures if one is not None and one.value is not None
        ]
        if trend.metric in _LINEAR or any(value > 0 for value in values):
            charts.append(_chart(trend))
        else:
            omitted.append(f"{_title(trend)}: {trend.title.partition(' (')[0]} is 0 in every report.")
    return Charts(charts=charts, omitted=omitted)


def _title(trend: Trend) -> str:
    title = trend.title.partition(" (")[0]
    return f"{title[0].upper()}{title[1:]} by report"


def _chart(trend: Trend) -> Chart:
    labels = [f"{column.number:04} {column.commit.split(' ')[0]}" for column in trend.columns]
    log = trend.metric not in _LINEAR
    rows: list[Spec] = []
    ended: list[Spec] = []
    for line in trend.lines:
        for label, one in zip(labels, line.figures, strict=True):
            if one is None:
                continue
            row: Spec = {"c": line.name, "s": line.strategy, "x": label}
            if one.change is not None:
                row |= {"k": one.change, "m": MARKS[one.change], "w": one.reason.partition("\n")[0][:160]}
            if one.value is not None and (one.value > 0 or not log):
                rows.append({**row, "v": rounded(one.value)})
            elif one.change is not None:
                # Where it has no place on the axis, a change stands at the top edge.
                text = f"{row['m']} {line.name}: {cell(one, None)}"
                ended.append({**row, "o": text, "a": axes.side(labels.index(label), range(len(labels)))})
    counted = Counter(one.change for line in trend.lines for one in line.figures if one is not None and one.change)
    told = ", ".join(f"{count} {change} ({MARKS[change]})" for change, count in counted.items())
    judged = next(spec.trended.judged_by for spec in METRICS if spec.trended and spec.trended.name == trend.metric)
    told = told or ("none that the gate is sure of" if judged else _UNMARKED.get(trend.metric, "the gate judges none"))
    return Chart(
        id=f"trend-{trend.metric}",
        title=_title(trend),
        summary=(
            f"{_counted(len(trend.lines), 'case')} over {_counted(len(labels), 'report')} of one machine, "
            f"oldest first; changes: {told}."
        ),
        spec=_spec(trend, labels, rows, ended, log=log),
        headers=["case", *labels],
        rows=[[line.name, *map(_cell, line.figures, before(line.figures), repeat(trend))] for line in trend.lines],
    )


def _spec(trend: Trend, labels: list[str], rows: list[Spec], ended: list[Spec], *, log: bool) -> Spec:
    strategies = list(dict.fromkeys(line.strategy for line in trend.lines))
    places = domain([(name, name) for name in strategies])
    colour = {
        "field": "s",
        "type": "nominal",
        "title": "strategy",
        "scale": {"domain": places, "range": "category"},
        "legend": {"values": strategies},
    }
    shape = {**colour, "scale": {"domain": places, "range": (SHAPES * len(places))[: len(places)]}}
    tooltip = [
        {"field": "c", "type": "nominal", "title": "case"},
        {"field": "x", "type": "nominal", "title": "report"},
        {"field": "v", "type": "quantitative", "title": trend.title, "format": axes.NUMBER},
        {"field": "k", "type": "nominal", "title": "change"},
        {"field": "w", "type": "nominal", "title": "why"},
    ]
    above = _lines(ended)
    level = axes.levels([row["v"] for row in rows], trend.title, log=log, lines=len(above))
    layers: list[Spec] = [
        {
            "mark": {"type": "line", "strokeWidth": 1.5},
            "encoding": {"color": colour, "detail": {"field": "c", "type": "nominal"}},
        },
        {"mark": {"type": "point", "size": 40}, "encoding": {"color": colour, "shape": shape, "tooltip": tooltip}},
        {
            "transform": [{"filter": "isValid(datum.k)"}],
            "mark": {"type": "text", "fontSize": 16, "dy": -13},
            "encoding": {"text": {"field": "m", "type": "nominal"}, "tooltip": tooltip},
        },
        {
            "data": {"values": _names(trend, rows, level["scale"]["domain"], log=log)},
            "mark": {"type": "text", "style": "note", "align": "left", "dx": 9, "dy": {"expr": "datum.d"}},
            "encoding": {"color": colour, "text": {"field": "c", "type": "nominal"}},
        },
    ]
    text = {"field": "o", "type": "nominal"}
    layers += [
        {
            "data": {"values": line},
            "mark": axes.EDGE_NOTE,
            "encoding": {
                "y": {"value": axes.LINE * number + axes.LINE // 2},
                "color": colour,
                "text": text,
                "tooltip": [*tooltip[:2], {**text, "title": trend.title}, *tooltip[3:]],
            },
        }
        for number, line in enumerate(above)
    ]
    report = {
        "field": "x",
        "type": "ordinal",
        "title": "report and commit",
        "scale": {"domain": labels},
        "axis": {"labelAngle": -40, "labelOverlap": "greedy"},
    }
    return {**axes.sized(layers, rows), "encoding": {"x": report, "y": level}}


def _names(trend: Trend, rows: Sequence[Spec], domain: Sequence[float], *, log: bool) -> list[Spec]:
    """Return the last point of the lines that are named: those that changed, or all where they are few.

    The field `d` of each is how far below its point its name stands, in pixels, so that no two meet.
    """
    changed = {row["c"] for row in rows if "k" in row}
    named = changed or ({line.name for line in trend.lines} if len(trend.lines) <= _FEW else set())
    ends: dict[str, list[Spec]] = {}
    for row in {row["c"]: row for row in rows if row["c"] in named}.values():
        ends.setdefault(row["x"], []).append(row)
    found = []
    for of_report in ends.values():
        below = sorted(of_report, key=lambda row: -row["v"])
        places = [_pixels(row["v"], domain, log=log) for row in below]
        moved = _apart(places)
        found += [{**row, "d": round(to - at)} for row, at, to in zip(below, places, moved, strict=True)]
    return found


def _pixels(value: float, domain: Sequence[float], *, log: bool) -> float:
    """Return how far below the top of the plot a value stands."""
    low, high, at = (math.log(one) if log else one for one in (*domain, value))
    return axes.HEIGHT * (high - at) / (high - low)


def _apart(places: Sequence[float]) -> list[float]:
    """Return places that ascend, moved a line of letters apart, and up again from below the plot."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + axes.LINE) if moved else place)
    lowest: float = axes.HEIGHT
    for number in reversed(range(len(moved))):
        moved[number] = min(moved[number], lowest)
        lowest = moved[number] - axes.LINE
    return moved


def _lines(rows: Sequence[Spec]) -> list[list[Spec]]:
    """Return the rows in lines one above the other, each with one of a report at most."""
    lines: list[list[Spec]] = []
    for row in rows:
        free = next((line for line in lines if row["x"] not in {other["x"] for other in line}), None)
        if free is None:
            lines.append([row])
        else:
            free.append(row)
    return lines


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _cell(one: Figure | None, then: float | None, trend: Trend) -> str:
    text = cell(one, then, points=trend.metric == "accuracy")
    return text if one is None or one.change is None else f"{text}, {one.change}"
