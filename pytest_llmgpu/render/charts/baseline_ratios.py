"""Time compared with a baseline: the ratio of each case with its confidence interval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.axes import Chart, Spec, formatted, rounded
from pytest_llmgpu.report.verdicts import Verdicts

_STEP = 20
"""Pixels of each case."""

_CHANGES = {
    "no significant change": "circle",
    "slower": "triangle-up",
    "faster": "triangle-down",
    "not enough data": "diamond",
}
"""Change to its shape, in the order of the colours of the theme's range `ordinal`."""

_CHANGE_OF_VERDICT = {"REGRESSED": "slower", "IMPROVED": "faster", "UNDECIDED": "not enough data"}


def charts(verdicts: Verdicts | None) -> Iterator[Chart | str]:
    """Yield the chart of the gate's verdicts on time, or a sentence with the reason why there is none."""
    if verdicts is None or verdicts.baseline is None:
        return
    title = "Time compared with the baseline"
    of_time = [row for row in verdicts.rows if row.metric == "time"]
    if not of_time:
        yield f"{title}: no case of the report has a completed counterpart in the baseline."
        return
    rows: list[Spec] = []
    for one in of_time:
        if one.ratio is not None:
            change = _CHANGE_OF_VERDICT.get(one.result, "no significant change")
            row = {"c": one.id, "r": rounded(one.ratio), "k": change, "w": one.verdict}
            if one.low is not None and one.high is not None:
                row |= {"l": rounded(one.low), "h": rounded(one.high)}
            rows.append({**row, "t": one.reason.splitlines()[0][:160]})
    if not rows:
        yield f"{title}: no case can be compared ({of_time[0].reason.splitlines()[0].rstrip('.')})."
        return
    counts = {change: sum(row["k"] == change for row in rows) for change in _CHANGES}
    changes = [change for change in _CHANGES if counts[change]]
    counted = ", ".join(f"{counts[change]} {change}" for change in changes)
    yield Chart(
        id="ratio",
        title=title,
        summary=f"Time / time in the baseline with confidence interval; above 1 is slower: {counted}.",
        spec=_spec(rows, changes),
        headers=["case", "verdict", "time / baseline", "from", "to", "launches in each report", "reason"],
        rows=[
            [
                one.id,
                one.verdict,
                *(formatted(value) for value in (one.ratio, one.low, one.high)),
                "-" if one.n is None else str(one.n),
                one.reason,
            ]
            for one in of_time
        ],
    )


def _spec(rows: Sequence[Spec], changes: list[str]) -> Spec:
    values = [row[name] for row in rows for name in ("r", "l", "h") if name in row]
    scale = {"domain": list(_CHANGES)}
    colour = {**axes.text("k"), "scale": {**scale, "range": "ordinal"}, "legend": {"values": changes}}
    shape = {**colour, "scale": {**scale, "range": list(_CHANGES.values())}}
    tooltip = [
        axes.text("c", "case"),
        axes.number("r", "time / baseline"),
        axes.number("l", "from"),
        axes.number("h", "to"),
        axes.text("w", "verdict"),
        axes.text("t", "reason"),
    ]
    layers: list[Spec] = [
        {
            "data": {"values": [{"r": 1}]},
            "mark": {"type": "rule", "style": "limit", "tooltip": "the time of the baseline"},
            "encoding": {"y": {"value": 0}, "y2": {"value": "height"}},
        },
        {
            "transform": [{"filter": "isValid(datum.l)"}],
            "mark": {"type": "rule", "strokeWidth": 2},
            "encoding": {"x": {"field": "l", "type": "quantitative"}, "x2": {"field": "h"}, "color": colour},
        },
        {"mark": {"type": "point"}, "encoding": {"color": colour, "shape": shape, "tooltip": tooltip}},
    ]
    x = axes.levels([*values, 1.0], "time / baseline", log=True, field="r")
    y = {**axes.text("c"), "sort": [row["c"] for row in rows], "axis": {"grid": True}}
    return axes.layered(layers, rows, height={"step": _STEP}, x=x, y=y)
