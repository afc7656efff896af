"""Colours, shapes and fonts of the charts, and charts as PNG and SVG images by vl-convert, without a browser."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pytest_llmgpu.render.charts.axes import Chart, Spec
from pytest_llmgpu.report import file
from pytest_llmgpu.report.text import printable, with_texts

# Strategies differ in shape as well as in colour (WCAG 2.2, 1.4.1).
_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]

# Okabe and Ito's palette, which readers with colour blindness can distinguish. Some colours are lighter or darker than
# theirs, for a contrast of at least 3 to 1 with the background (WCAG 2.2, 1.4.11), and of 4.5 to 1 for text.
_LIGHT = ["#0072b2", "#c25500", "#00805d", "#a0508a", "#8a6d00", "#26749e", "#5a5a5a", "#b3404a"]
_DARK = ["#56b4e9", "#ff9a4d", "#2fd0a0", "#e59ccb", "#f0e442", "#9ad0ff", "#bdbdbd", "#ff8f98"]

_GROUND = {  # background, text, muted text, grid, limit
    False: ("#ffffff", "#24292f", "#57606a", "#e3e6ea", "#b3261e"),
    True: ("#16181d", "#e6e8eb", "#a8b0ba", "#32363d", "#ff8f85"),
}

Format = Literal["png", "svg"]
"""The format of an image."""

_WIDTH_PX = 720
_CAPTION_LETTERS = 120  # characters of a line of the caption at that width
_LEGEND_PADDING_PX = 14
"""Between a legend's title and its symbols in an SVG: a browser may use a wider font than the layout."""
_SCALE = 2.0  # pixels of a PNG per pixel of the layout, for screens of high resolution


def theme(*, dark: bool) -> Spec:
    """Return the Vega-Lite `config` with which a page or an image draws the charts.

    The specifications use the ranges `category` and `symbol` (strategies and GPUs) and these styles: `limit` and
    `limit-note` (the capacity), `note` (text inside a chart), `halo` (background around such text) and `muted`.
    """
    background, text, muted, grid, limit = _GROUND[dark]
    label: Spec = {"labelColor": text, "titleColor": muted, "labelFontSize": 12, "titleFontSize": 12}
    label["titleFontWeight"] = "normal"
    title = {"color": text, "subtitleColor": muted, "fontSize": 16, "subtitleFontSize": 12}
    return {
        "background": background,
        "font": "system-ui, Liberation Sans, Arial, sans-serif",
        "view": {"stroke": None},
        "range": {"category": _DARK if dark else _LIGHT, "symbol": _SHAPES},
        "axis": label
        | {"domainColor": muted, "tickColor": muted, "gridColor": grid, "titlePadding": 8, "labelFlush": False},
        "axisX": {"grid": False},
        "legend": label
        | {"orient": "bottom", "titleOrient": "left", "symbolStrokeColor": text, "symbolSize": 90}
        | {"layout": {"bottom": {"anchor": "start", "direction": "vertical"}}},
        "title": {**title, "anchor": "start", "frame": "group", "offset": 12},
        "line": {"strokeWidth": 2},
        "point": {"size": 70, "filled": True, "opacity": 1},
        "rule": {"color": muted},
        "text": {"color": text},
        "style": {
            "limit": {"color": limit, "stroke": limit, "strokeDash": [6, 4], "strokeWidth": 1.5},
            "limit-note": {"color": limit, "fill": limit, "fontSize": 12},
            "note": {"fontSize": 12},
            "halo": {"fontSize": 12, "stroke": background, "strokeWidth": 4, "strokeJoin": "round"},
            "muted": {"color": muted},
        },
    }


def image(chart: Chart, format: Format, *, dark: bool = False, titled: bool = True) -> bytes:  # noqa: A002 - the usual name
    """Return a chart as an image, `titled` with title and caption; ValueError without the extra `report`."""
    try:
        import vl_convert
    except ImportError:
        raise ValueError("images of charts need vl-convert: pip install 'pytest-llmgpu[report]'") from None
    spec: Spec = {**chart.spec, "width": _WIDTH_PX, "padding": 16}
    if titled:
        lines = [line for text in (chart.measured, chart.summary) for line in textwrap.wrap(text, _CAPTION_LETTERS)]
        spec["title"] = {"text": chart.title, "subtitle": lines}
    # vl-convert ends the process on some control characters.
    spec, config = with_texts(spec, printable), theme(dark=dark)
    if format == "svg":
        config["legend"]["titlePadding"] = _LEGEND_PADDING_PX
        return vl_convert.vegalite_to_svg(spec, config=config, allowed_base_urls=[]).encode()
    return vl_convert.vegalite_to_png(spec, config=config, allowed_base_urls=[], scale=_SCALE)


def write(charts: Sequence[Chart], folder: Path, chosen: Sequence[Format], *, dark: bool = False) -> Iterator[Path]:
    """Write each chart in each format, and yield its path: `memory.png`, `memory-dark.png`; ValueError if it cannot."""
    for chart in charts:
        for one in chosen:
            data = image(chart, one, dark=dark)  # before the folder is made: an image that cannot be drawn leaves none
            path = folder / f"{chart.id}{'-dark' if dark else ''}.{one}"
            file.save(path, data, "image")
            yield path
