"""A report against a baseline: how the time of each case changed, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.chart import Chart, Spec, rounded, written
from pytest_llmgpu.report.verdicts import Row, Verdicts

__all__ = ["charts"]

_STEP = 20  # pixels of a case
_KINDS = ("not told apart", "slower", "faster")
"""What is said of a case, in the order of the theme's range `ordinal` and of shapes."""
_SHAPES = ["circle", "triangle-up", "triangle-down"]
_SAYS = {"REGRESSED": "slower", "IMPROVED": "faster"}


def charts(verdicts: Verdicts | None) -> Iterator[Chart | str]:
    """Yield the chart of the changes of time by the gate's verdicts, or in a sentence why there is none."""
    if verdicts is None or verdicts.baseline is None:
        return
    title = "Time against the baseline"
    said = [row for row in verdicts.rows if row.metric == "time"]
    if not said:
        yield f"{title}: no case of the report has a counterpart that completed."
        return
    rows = [row for one in said if (row := _row(one)) is not None]
    if not rows:
        yield f"{title}: no case can be compared ({said[0].reason.splitlines()[0].rstrip('.')})."
        return
    counts = {kind: sum(row["k"] == kind for row in rows) for kind in _KINDS}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    yield Chart(
        id="ratio",
        title=title,
        summary=f"Time of each case as a multiple of the baseline's, with its interval; above 1 is slower: {told}.",
        spec=_spec(rows, [kind for kind in _KINDS if counts[kind]]),
        headers=["case", "verdict", "time / baseline", "from", "to", "launches a side", "reason"],
        rows=[
            [
                one.id,
                one.verdict,
                written(one.ratio),
                written(one.low),
                written(one.high),
                "-" if one.n is None else str(one.n),
                one.reason,
            ]
            for one in said
        ],
    )


def _row(one: Row) -> Spec | None:
    if one.ratio is None:
        return None
    row: Spec = {"c": one.id, "r": rounded(one.ratio), "k": _SAYS.get(one.verdict, "not told apart")}
    if one.low is not None and one.high is not None:
        row |= {"l": rounded(one.low), "h": rounded(one.high)}
    return {**row, "w": one.verdict, "t": one.reason.splitlines()[0][:160]}


def _spec(rows: Sequence[Spec], kinds: list[str]) -> Spec:
    values = [row[name] for row in rows for name in ("r", "l", "h") if name in row]
    ratio = axes.levels([*values, 1.0], "time / baseline's", log=True, field="r")
    colour = {
        "field": "k",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(_KINDS), "range": "ordinal"},
        "legend": {"values": kinds},
    }
    shape = {**colour, "scale": {"domain": list(_KINDS), "range": _SHAPES}}
    tooltip = [
        {"field": "c", "type": "nominal", "title": "case"},
        {"field": "r", "type": "quantitative", "title": "time / baseline's", "format": axes.NUMBER},
        {"field": "l", "type": "quantitative", "title": "from", "format": axes.NUMBER},
        {"field": "h", "type": "quantitative", "title": "to", "format": axes.NUMBER},
        {"field": "w", "type": "nominal", "title": "verdict"},
        {"field": "t", "type": "nominal", "title": "reason"},
    ]
    layers: list[Spec] = [
        {
            "data": {"values": [{"r": 1}]},
            "mark": {"type": "rule", "style": "limit", "tooltip": "as long as the baseline"},
            "encoding": {"y": {"value": 0}, "y2": {"value": "height"}},
        },
        {
            "transform": [{"filter": "isValid(datum.l)"}],
            "mark": {"type": "rule", "strokeWidth": 2},
            "encoding": {"x": {"field": "l", "type": "quantitative"}, "x2": {"field": "h"}, "color": colour},
        },
        {"mark": {"type": "point"}, "encoding": {"x": ratio, "color": colour, "shape": shape, "tooltip": tooltip}},
    ]
    case = {
        "field": "c",
        "type": "nominal",
        "title": None,
        "sort": [row["c"] for row in rows],
        "axis": {"grid": True},
    }
    return {**axes.sized(layers, rows, height={"step": _STEP}), "encoding": {"x": ratio, "y": case}}
