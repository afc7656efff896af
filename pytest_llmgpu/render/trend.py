"""Trends over stored reports: tables for the terminal, and a page with charts that needs no network."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from pytest_llmgpu.gate.trends import FEWEST, Change, Figure, Trend
from pytest_llmgpu.render.charts import Chart, axes, image
from pytest_llmgpu.render.html.assets import asset, content_security_policy, templates
from pytest_llmgpu.render.terminal.report import Painter
from pytest_llmgpu.report.metrics import BY_NAME
from pytest_llmgpu.report.text import capital, plural, significant

_MARKS: dict[Change, tuple[str, str]] = {"worse": ("!", "31"), "better": ("*", "32"), "disturbed": ("?", "33")}
"""The mark of a change, and its ANSI style."""

_LINEAR = ("accuracy", "memory")  # metrics with a linear axis, because they change little


def tables(trends: Sequence[Trend], paint: Painter) -> str:
    """Return one table per metric, cases down and reports across, and the reason of each change."""
    parts = []
    for trend in trends:
        head = ["\n".join(name) for name in trend.columns]
        body = []
        for line in trend.lines:
            cells = []
            for one in line.figures:
                mark, style = _MARKS[one.change] if one is not None and one.change is not None else ("", "")
                cells.append(paint(f"{mark} {_cell(one)}", style) if mark else _cell(one))
            body.append([line.name, *cells])
        align = ["left", *["right"] * len(head)]
        parts.append(f"{trend.title}\n" + tabulate(body, ["case", *head], disable_numparse=True, colalign=align))
    changes = [line for trend in trends for line in _changes(trend)]
    legend = "   ".join(f"{mark} {change}" for change, (mark, _) in _MARKS.items())
    return "\n\n".join(filter(None, [first_sentence(trends), *parts, "\n".join([legend, *changes] if changes else [])]))


def first_sentence(trends: Sequence[Trend]) -> str:
    """Return how many changes there are in which reports, and in how many lines of times steps were searched."""
    changes = sum(not line.startswith("?") for trend in trends for line in _changes(trend))
    text = plural(changes, "change") if changes else "No change was found"
    tested = [line.tested for trend in trends for line in trend.lines if line.tested is not None]
    text += f" in {plural(len(trends[0].columns), 'report')}."
    if not all(tested):
        needed = f"that needs {FEWEST} undisturbed reports of the same devices"
        text += f" Steps were searched in {sum(tested):,} of {plural(len(tested), 'line')} of times: {needed}."
    return text


def page(trends: Sequence[Trend], machine: str) -> str:
    """Return the page of one machine; ValueError if the extra `report` is not installed."""
    template = templates().get_template("trend.html")
    style, theme = asset("page.css"), asset("theme.js")
    sections = []
    for trend in trends:
        chart = _chart(trend)
        # The page shows the first picture whose condition holds, and the last one has none.
        drawn = [image(chart, "svg", dark=dark, titled=False) for dark in (True, False)]
        pictures = [f"data:image/svg+xml;base64,{base64.b64encode(one).decode()}" for one in drawn]
        sections.append({"chart": chart, "pictures": pictures})
    sentence = first_sentence(trends) if trends else "No case has figures."
    scripts = {"style": style, "theme": theme, "policy_header": content_security_policy([theme], [style])}
    changes = [line for trend in trends for line in _changes(trend)]
    return template.render(machine=machine, sentence=sentence, changes=changes, sections=sections, **scripts)


def _cell(one: Figure | None) -> str:
    if one is None:
        return ""
    if one.value is not None:
        return significant(one.value)
    return {"oom": "OOM", "skipped_after_oom": "-", "completed": "done"}.get(one.outcome, one.outcome)


def _changes(trend: Trend) -> Iterator[str]:
    """Yield one line per change, with its report, commit and reason."""
    for line in trend.lines:
        for (_, number, commit), one in zip(trend.columns, line.figures, strict=True):
            if one is not None and one.change is not None:
                metric = trend.metric.replace("_", " ")
                yield f"{_MARKS[one.change][0]} {number} {commit} {line.name} {metric}: {' '.join(one.reason.split())}"


def _chart(trend: Trend) -> Chart:
    """Return one line per case over the reports, with its name at its end and a mark at each change."""
    labels = ["|".join(name) for name in trend.columns]
    log = trend.metric not in _LINEAR and trend.metric in BY_NAME
    rows: list[axes.Spec] = []
    ends: dict[str, axes.Spec] = {}
    for line in trend.lines:
        part = 0
        for label, one in zip(labels, line.figures, strict=True):
            if one is None or one.value is None or (log and one.value <= 0):
                part += 1  # a line has a gap where it has no figure
                continue
            row: axes.Spec = {"c": line.name, "s": line.strategy, "x": label, "p": part, "v": axes.rounded(one.value)}
            if one.change is not None:
                row |= {"k": one.change, "m": _MARKS[one.change][0], "w": one.reason[:160]}
            rows.append(row)
            ends[line.name] = row
    strategies = list(dict.fromkeys(line.strategy for line in trend.lines))
    domain = axes.domain([(name, name) for name in strategies])
    colour = {**axes.text("s", "strategy"), "scale": {"domain": domain}, "legend": {"values": strategies}}
    case = axes.text("c", "case")
    layers: list[axes.Spec] = [
        {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": {"color": colour, "detail": [case, axes.text("p")]}},
        {"mark": {"type": "point", "size": 40}, "encoding": {"color": colour, "shape": colour}},
        {
            "transform": [{"filter": "isValid(datum.k)"}],
            "mark": {"type": "text", "fontSize": 16, "dy": -13},
            "encoding": {"color": colour, "text": axes.text("m")},
        },
        {
            "data": {"values": list(ends.values())},
            "mark": {"type": "text", "style": "note", "align": "left", "dx": 9},
            "encoding": {"color": colour, "text": case},
        },
    ]
    x = {
        **axes.text("x", "date, report and commit"),
        "type": "ordinal",
        "scale": {"domain": labels},
        "axis": {"labelAngle": 0, "labelOverlap": "greedy", "labelExpr": "split(datum.label, '|')"},
    }
    y = axes.levels([row["v"] for row in rows] or [1.0], trend.title, log=log)
    of = f"{plural(len(trend.lines), 'case')} over {plural(len(labels), 'report')} of one machine, oldest first"
    return Chart(
        id=f"trend-{trend.metric.replace('_', '-')}",
        title=f"{capital(trend.title.partition(' (')[0])} by report",
        summary=f"{of}.",
        spec=axes.layered(layers, rows, x=x, y=y),
        headers=["case", *(label.replace("|", " ") for label in labels)],
        rows=[[line.name, *map(_cell, line.figures)] for line in trend.lines],
    )
