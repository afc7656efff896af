"""A report against a baseline: how the time of each case changed, and how sure that is."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

from pytest_llmgpu import gate, matching
from pytest_llmgpu.charts import axes
from pytest_llmgpu.charts.chart import Chart, Spec, rounded, written
from pytest_llmgpu.policy import Policy
from pytest_llmgpu.report import Report
from pytest_llmgpu.verdicts import Row

__all__ = ["charts"]

_STEP = 20  # pixels of a case
_KINDS = ("not told apart", "slower", "faster", "no interval")
"""What is said of a case, in the order of colours and shapes."""
_SHAPES = ["circle", "triangle-up", "triangle-down", "diamond"]
_SAYS = {"REGRESSED": "slower", "IMPROVED": "faster"}


def charts(report: Report, baseline: Report | None) -> Iterator[Chart | str]:
    """Yield the chart of the changes of time, or in a sentence why there is none."""
    title = "Time against the baseline"
    said = _said(report, baseline)
    if not said:
        if baseline is not None:
            yield f"{title}: no case of the report has a counterpart that completed."
        return
    plain = _plain(report, baseline)
    rows = [row for one in said if (row := _row(one, plain)) is not None]
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
                written(one.ratio if one.ratio is not None else plain.get(one.id)),
                written(one.low),
                written(one.high),
                "-" if one.n is None else str(one.n),
                one.reason,
            ]
            for one in said
        ],
    )


def _said(report: Report, baseline: Report | None) -> list[Row]:
    """Return the verdicts on time: the report's own where they are of this baseline, else by the default policy."""
    verdicts = report.verdicts
    against = None if verdicts is None else verdicts.baseline
    if baseline is not None and (against is None or against.commit is None or against.commit != baseline.commit.sha):
        verdicts = gate.judge(baseline, report, Policy(), today=datetime.date.min)
    elif against is None:
        verdicts = None
    return [] if verdicts is None else [row for row in verdicts.rows if row.metric == "time"]


def _plain(report: Report, baseline: Report | None) -> dict[str, float]:
    """Return id to the ratio of the total times, for cases whose batches cannot be paired."""
    if baseline is None:
        return {}
    return {
        pair.head.id: pair.head.inference_s / pair.base.inference_s
        for pair in matching.pairs(baseline.cases, report.cases)
        if pair.base is not None and pair.head is not None and pair.base.inference_s and pair.head.inference_s
    }


def _row(one: Row, plain: dict[str, float]) -> Spec | None:
    if one.ratio is not None:
        row: Spec = {"c": one.id, "r": rounded(one.ratio), "k": _SAYS.get(one.verdict, "not told apart")}
        if one.low is not None and one.high is not None:
            row |= {"l": rounded(one.low), "h": rounded(one.high)}
    elif one.id in plain:
        row = {"c": one.id, "r": rounded(plain[one.id]), "k": "no interval"}
    else:
        return None
    return {**row, "w": one.verdict, "t": one.reason.splitlines()[0][:160]}


def _spec(rows: Sequence[Spec], kinds: list[str]) -> Spec:
    values = [row[name] for row in rows for name in ("r", "l", "h") if name in row]
    ratio = axes.levels([*values, 1.0], "time / baseline's", log=True, field="r")
    colour = {
        "field": "k",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(_KINDS), "range": "category"},
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
