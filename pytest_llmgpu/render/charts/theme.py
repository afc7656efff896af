"""How charts look: colours, shapes and letters, for light and for dark."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llmgpu.render.charts.chart import Spec

__all__ = ["SHAPES", "domain", "theme"]

_FIRST = ("mp", "tp", "iok")
"""Strategies whose colours and shapes are the same in every chart of every report."""

SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]
"""Shapes of the strategies: what is told apart by colour is told apart by shape too."""

# Okabe and Ito's colours, which people who see few colours tell apart; lighter or darker where the ground asks for it:
# at least 3 to 1 against it (WCAG 2.2, 1.4.11), letters 4.5 to 1.
_LIGHT = ["#0072b2", "#c25500", "#00805d", "#a0508a", "#8a6d00", "#26749e", "#5a5a5a", "#b3404a"]
_DARK = ["#56b4e9", "#ff9a4d", "#2fd0a0", "#e59ccb", "#f0e442", "#9ad0ff", "#bdbdbd", "#ff8f98"]

_GROUND = {False: "#ffffff", True: "#16181d"}
_TEXT = {False: "#24292f", True: "#e6e8eb"}
_QUIET = {False: "#57606a", True: "#a8b0ba"}
_GRID = {False: "#e3e6ea", True: "#32363d"}
_LIMIT = {False: "#b3261e", True: "#ff8f85"}
_GOOD = {False: "#11632e", True: "#6fd08c"}

_FONT = "system-ui, Liberation Sans, Arial, sans-serif"


def domain(columns: Sequence[tuple[str, str]]) -> list[str]:
    """Return the titles in the order of their colours: mp, tp and iok have theirs whether they are there or not.

    Args:
        columns: title and strategy of each. The first of a strategy has the strategy's colour.
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
    """Return the `config` of Vega-Lite that a page or a picture draws the charts with.

    The specifications name the ranges `category` (strategies and GPUs) and `ordinal` (what is said of a change: quiet,
    worse, better, quiet; Vega-Lite has no range of another name) and the styles `limit`, `limit-note` (capacity,
    a published figure, no change), `note` (letters inside a chart), `halo` (the ground around them) and `quiet`.
    """
    text, quiet, grid = _TEXT[dark], _QUIET[dark], _GRID[dark]
    return {
        "background": _GROUND[dark],
        "font": _FONT,
        "view": {"stroke": None},
        "range": {"category": _DARK if dark else _LIGHT, "ordinal": [quiet, _LIMIT[dark], _GOOD[dark], quiet]},
        "axis": {
            "labelColor": text,
            "titleColor": quiet,
            "domainColor": quiet,
            "tickColor": quiet,
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
            "titleColor": quiet,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "symbolStrokeColor": text,
            "symbolSize": 90,
            "layout": {"bottom": {"anchor": "start", "direction": "vertical"}},
        },
        "title": {
            "color": text,
            "subtitleColor": quiet,
            "fontSize": 16,
            "subtitleFontSize": 12,
            "anchor": "start",
            "frame": "group",
            "offset": 12,
        },
        "line": {"strokeWidth": 2},
        "point": {"size": 70, "filled": True, "opacity": 1},
        "rule": {"color": quiet},
        "text": {"color": text},
        "style": {
            "limit": {"color": _LIMIT[dark], "stroke": _LIMIT[dark], "strokeDash": [6, 4], "strokeWidth": 1.5},
            "limit-note": {"color": _LIMIT[dark], "fill": _LIMIT[dark], "fontSize": 12},
            "note": {"fontSize": 12},
            "halo": {"fontSize": 12, "stroke": _GROUND[dark], "strokeWidth": 4, "strokeJoin": "round"},
            "quiet": {"color": quiet},
        },
    }
