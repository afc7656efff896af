"""Colours, shapes and fonts of the charts, for a light and a dark background."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llmgpu.render.charts.chart import Spec

_FIRST = ("mp", "tp", "iok")
"""Strategies that have the same colours and shapes in every chart of every report."""

# Strategies differ in shape as well as in colour (WCAG 2.2, 1.4.1).
_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]

# Okabe and Ito's palette, which readers with colour blindness can distinguish. Some colours are lighter or darker than
# theirs, for a contrast of at least 3 to 1 with the background (WCAG 2.2, 1.4.11), and of 4.5 to 1 for text.
_LIGHT = ["#0072b2", "#c25500", "#00805d", "#a0508a", "#8a6d00", "#26749e", "#5a5a5a", "#b3404a"]
_DARK = ["#56b4e9", "#ff9a4d", "#2fd0a0", "#e59ccb", "#f0e442", "#9ad0ff", "#bdbdbd", "#ff8f98"]

_BACKGROUND = {False: "#ffffff", True: "#16181d"}
_TEXT = {False: "#24292f", True: "#e6e8eb"}
_MUTED = {False: "#57606a", True: "#a8b0ba"}
_GRID = {False: "#e3e6ea", True: "#32363d"}
_LIMIT = {False: "#b3261e", True: "#ff8f85"}
_IMPROVED = {False: "#11632e", True: "#6fd08c"}
_UNDECIDED = {False: "#7a4a00", True: "#f2bd5c"}

_FONT = "system-ui, Liberation Sans, Arial, sans-serif"


def domain(columns: Sequence[tuple[str, str]]) -> list[str]:
    """Return the titles in the order of their colours; mp, tp and iok keep their places also when they are absent.

    Args:
        columns: title and strategy of each curve. The first title of a strategy gets the strategy's colour.
    """
    places = list(_FIRST)
    for title, strategy in columns:
        if title in places:
            continue
        if strategy in places and strategy not in {other for other, _ in columns}:
            places[places.index(strategy)] = title
        else:
            places.append(title)
    return places


def theme(*, dark: bool) -> Spec:
    """Return the Vega-Lite `config` with which a page or an image draws the charts.

    The specifications use the ranges `category` and `symbol` (strategies and GPUs) and `ordinal` (changes: none,
    slower, faster, undecided; Vega-Lite allows no range of another name) and these styles: `limit` and `limit-note`
    (capacity, a published figure, no change), `note` (text inside a chart), `halo` (background around such text) and
    `muted`.
    """
    text, muted, grid = _TEXT[dark], _MUTED[dark], _GRID[dark]
    return {
        "background": _BACKGROUND[dark],
        "font": _FONT,
        "view": {"stroke": None},
        "range": {
            "category": _DARK if dark else _LIGHT,
            "symbol": _SHAPES,
            "ordinal": [muted, _LIMIT[dark], _IMPROVED[dark], _UNDECIDED[dark]],
        },
        "axis": {
            "labelColor": text,
            "titleColor": muted,
            "domainColor": muted,
            "tickColor": muted,
            "gridColor": grid,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titlePadding": 8,
            "labelFlush": False,
        },
        "axisX": {"grid": False},
        "legend": {
            "orient": "bottom",
            "titleOrient": "left",
            "labelColor": text,
            "titleColor": muted,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "symbolStrokeColor": text,
            "symbolSize": 90,
            "layout": {"bottom": {"anchor": "start", "direction": "vertical"}},
        },
        "title": {
            "color": text,
            "subtitleColor": muted,
            "fontSize": 16,
            "subtitleFontSize": 12,
            "anchor": "start",
            "frame": "group",
            "offset": 12,
        },
        "line": {"strokeWidth": 2},
        "point": {"size": 70, "filled": True, "opacity": 1},
        "rule": {"color": muted},
        "text": {"color": text},
        "style": {
            "limit": {"color": _LIMIT[dark], "stroke": _LIMIT[dark], "strokeDash": [6, 4], "strokeWidth": 1.5},
            "limit-note": {"color": _LIMIT[dark], "fill": _LIMIT[dark], "fontSize": 12},
            "note": {"fontSize": 12},
            "halo": {"fontSize": 12, "stroke": _BACKGROUND[dark], "strokeWidth": 4, "strokeJoin": "round"},
            "muted": {"color": muted},
        },
    }
