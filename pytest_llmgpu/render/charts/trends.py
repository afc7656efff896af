"""Trends as charts: one line per case over the reports, with its name at its end and a mark at each change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import repeat

from pytest_llmgpu.gate.trends import Change, Column, Figure, Line, Trend
from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.chart import Chart, Charts, Spec, rounded
from pytest_llmgpu.render.charts.theme import domain
from pytest_llmgpu.render.terminal.trends import before, cell
from pytest_llmgpu.report.metrics import METRICS
from pytest_llmgpu.report.text import capital, plural

MARKS: dict[Change, str] = {
    "worse": "\N{BLACK UP-POINTING TRIANGLE}",
    "better": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "changed": "\N{BLACK DIAMOND}",
    "disturbed": "?",
}
"""The mark of a change, in a chart and in the list below it."""

_LINEAR = ("accuracy", "memory", "utilization")
"""Metrics with a linear axis, because they change little."""

_UNMARKED = {"throughput": "marked in the chart of time"}
"""The text for metrics whose changes are marked in another chart."""


def of_trends(trends: Sequence[Trend], batch_sizes: Collection[int] | None = None) -> Charts:
    """Return one chart per metric; a metric that is 0 in every report has no place on a logarithmic axis.

    Args:
        trends: the trends of the metrics.
        batch_sizes: the batch sizes that are drawn; None: the smallest and the largest of each strategy, and those that
            changed. The tables of the charts have all.
    """
    charts: list[Chart] = []
    omitted: list[str] = []
    for trend in trends:
        values = [
            one.value for line in trend.lines for one in line.figures if one is not None and one.value is not None
        ]
        if trend.metric in _LINEAR or any(value > 0 for value in values):
            charts.append(_chart(trend, _drawn(trend, batch_sizes)))
        else:
            omitted.append(f"{_title(trend)}: {trend.title.partition(' (')[0]} is 0 in every report.")
    return Charts(charts=charts, omitted=omitted)


def _title(trend: Trend) -> str:
    return f"{capital(trend.title.partition(' (')[0])} by report"


def _drawn(trend: Trend, batch_sizes: Collection[int] | None) -> list[Line]:
    """Return the lines of the batch sizes; without these the lines that a reader can tell apart."""
    if batch_sizes is not None:
        return [line for line in trend.lines if line.batch_size is None or line.batch_size in batch_sizes]
    sizes: dict[str, list[int]] = {}
    for line in trend.lines:
        if line.batch_size is not None and any(one is not None and one.value is not None for one in line.figures):
            sizes.setdefault(line.strategy, []).append(line.batch_size)
    ends = {(strategy, end) for strategy, of_strategy in sizes.items() for end in (min(of_strategy), max(of_strategy))}
    return [
        line
        for line in trend.lines
        if line.batch_size is None
        or (line.strategy, line.batch_size) in ends
        or any(one is not None and one.changed for one in line.figures)
    ]


def _chart(trend: Trend, drawn: Sequence[Line]) -> Chart:
    labels = ["|".join((column.created[:10], f"{column.number:04}", _commit(column))) for column in trend.columns]
    log = trend.metric not in _LINEAR
    rows: list[Spec] = []
    above: list[list[Spec]] = []  # what has no place on the axis: for each case a line of crosses and one of texts
    for line in drawn:
        part = 0
        ended = ""
        crosses: list[Spec] = []
        texts: list[Spec] = []
        for label, one in zip(labels, line.figures, strict=True):
            row: Spec = {"c": line.name, "s": line.strategy, "x": label}
            if one is not None and one.change is not None:
                row |= {"k": one.change, "m": MARKS[one.change], "w": one.reason.partition("\n")[0][:160]}
            if one is not None and one.value is not None and (one.value > 0 or not log):
                rows.append({**row, "p": part, "v": rounded(one.value)})
            else:
                part += 1  # a line has a gap where it has no figure
            text = "" if one is None or one.value is not None else f"{line.name}: {cell(one, None)}"
            if one is not None and text and (one.outcome == "oom" or one.change is not None):
                crosses.append({**row, "l": "\N{BALLOT X}"})
                if text != ended:  # the first of several reports is named
                    texts.append({**row, "l": f"{row.get('m', '')} {text}".strip()})
            ended = text
        above += [found for found in (crosses, texts) if found]
    counted = Counter(one.change for line in trend.lines for one in line.figures if one is not None and one.change)
    disturbed = f", {counted.pop('disturbed')} disturbed ({MARKS['disturbed']})" if "disturbed" in counted else ""
    changes = ", ".join(f"{count} {change} ({MARKS[change]})" for change, count in counted.items())
    judged = next(spec.trended.judged_by for spec in METRICS if spec.trended and spec.trended.name == trend.metric)
    none = "none is significant" if judged else _UNMARKED.get(trend.metric, "the gate does not judge this metric")
    left_out = len(trend.lines) - len(drawn)
    return Chart(
        id=f"trend-{trend.metric}",
        title=_title(trend),
        summary=(
            f"{plural(len(trend.lines), trend.of)} over {plural(len(labels), 'report')} of one machine, "
            f"oldest first; changes: {changes or none}{disturbed}."
            + (f" The data has {plural(left_out, 'more case')} of other batch sizes." if left_out else "")
        ),
        spec=_spec(trend, drawn, labels, rows, above, log=log),
        headers=[trend.of, *(" ".join(label.split("|")) for label in labels)],
        rows=[[line.name, *map(_cell, line.figures, before(line.figures), repeat(trend))] for line in trend.lines],
    )


def _commit(column: Column) -> str:
    return column.commit.split(" ")[0]


def _spec(
    trend: Trend, drawn: Sequence[Line], labels: list[str], rows: list[Spec], above: list[list[Spec]], *, log: bool
) -> Spec:
    strategies = list(dict.fromkeys(line.strategy for line in drawn))
    colour = {
        **axes.text("s", "strategy"),
        "scale": {"domain": domain([(name, name) for name in strategies])},
        "legend": {"values": strategies},
    }
    case, report = axes.text("c", "case"), axes.text("x", "report")
    why = axes.text("k", "change"), axes.text("w", "reason")
    tooltip = [case, report, axes.number("v", trend.title), *why]
    layers: list[Spec] = [
        {
            "mark": {"type": "line", "strokeWidth": 1.5},
            "encoding": {"color": colour, "detail": [case, axes.text("p")]},
        },
        {"mark": {"type": "point", "size": 40}, "encoding": {"color": colour, "shape": colour, "tooltip": tooltip}},
        {
            "transform": [{"filter": "isValid(datum.k)"}],
            "mark": {"type": "text", "fontSize": 16, "dy": -13},
            "encoding": {"color": colour, "text": axes.text("m"), "tooltip": tooltip},
        },
        {
            "data": {"values": _names(rows, log=log)},
            "mark": {"type": "text", "style": "note", "align": "left", "dx": 9, "dy": {"expr": "datum.d"}},
            "encoding": {"color": colour, "text": case},
        },
        *axes.notes(above, x="x", color=colour, tooltip=[case, report, axes.text("l", trend.title), *why]),
    ]
    x = {
        **axes.text("x", "date, report and commit"),
        "type": "ordinal",
        "scale": {"domain": labels},
        "axis": {"labelAngle": 0, "labelOverlap": "greedy", "labelExpr": "split(datum.label, '|')"},
    }
    return axes.layered(layers, rows, x=x, y=axes.levels([row["v"] for row in rows], trend.title, log=log))


def _names(rows: list[Spec], *, log: bool) -> list[Spec]:
    """Return the last point of each line, where its name stands.

    The field `d` is the distance in pixels from a point down to its name, so that no two names overlap.
    """
    levels = [row["v"] for row in rows]
    ends: dict[str, list[Spec]] = {}
    for row in {row["c"]: row for row in rows}.values():
        ends.setdefault(row["x"], []).append(row)
    found = []
    for of_report in ends.values():
        ordered = sorted(of_report, key=lambda row: -row["v"])
        places = [_pixels(row["v"], min(levels), max(levels), log=log) for row in ordered]
        found += [{**row, "d": round(to - at)} for row, at, to in zip(ordered, places, _apart(places), strict=True)]
    return found


def _pixels(value: float, low: float, high: float, *, log: bool) -> float:
    """Return the distance in pixels from the top of the plot down to a value."""
    if low == high:
        return axes.HEIGHT / 2
    low, high, at = (math.log(one) if log else one for one in (low, high, value))
    return axes.PADDING + (axes.HEIGHT - 2 * axes.PADDING) * (high - at) / (high - low)


def _apart(places: Sequence[float]) -> list[float]:
    """Return ascending places moved at least one line of text apart, and none on the axis below the plot."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + axes.LINE) if moved else place)
    lowest = axes.HEIGHT - axes.LINE / 2
    for number in reversed(range(len(moved))):
        moved[number] = min(moved[number], lowest)
        lowest = moved[number] - axes.LINE
    return moved


def _cell(one: Figure | None, then: float | None, trend: Trend) -> str:
    text = cell(one, then, points=trend.metric == "accuracy")
    return text if one is None or one.change is None else f"{text}, {one.change}"
