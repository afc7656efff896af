"""Charts as PNG and SVG images, drawn by vl-convert without a browser or a network."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pytest_llmgpu.render.charts.chart import Chart, Spec
from pytest_llmgpu.render.charts.theme import theme
from pytest_llmgpu.report import file
from pytest_llmgpu.report.text import printable

Format = Literal["png", "svg"]
"""The format of an image."""

_WIDTH_PX = 720
_CAPTION_LETTERS = 120
"""Characters of a line of the caption at that width."""
_LEGEND_PADDING_PX = 14
"""Between a legend's title and its symbols in an SVG: a browser may use a wider font than the layout."""
_SCALE = 2.0
"""Pixels of a PNG per pixel of the layout, for screens of high resolution."""


def image(chart: Chart, format: Format, *, dark: bool = False, titled: bool = True, width: int = _WIDTH_PX) -> bytes:  # noqa: A002 - the usual name
    """Return a chart as an image.

    Args:
        chart: the chart to draw.
        format: `png` or `svg`.
        dark: whether to draw for a dark background.
        titled: whether the image includes title and caption.
        width: width of the plot in pixels, without axes and text beside it.

    Raises:
        ValueError: the format is unknown, or the extra `report` is not installed.
    """
    formats(format)
    try:
        import vl_convert
    except ImportError:
        raise ValueError("images of charts need vl-convert: pip install 'pytest-llmgpu[report]'") from None
    spec: Spec = {**chart.spec, "width": width, "padding": 16}
    if titled:
        lines = [line for text in (chart.measured, chart.summary) for line in textwrap.wrap(text, _CAPTION_LETTERS)]
        spec["title"] = {"text": chart.title, "subtitle": lines}
    spec, config = _printable(spec), theme(dark=dark)
    if format == "svg":
        config["legend"]["titlePadding"] = _LEGEND_PADDING_PX
        return vl_convert.vegalite_to_svg(spec, config=config, allowed_base_urls=[]).encode()
    return vl_convert.vegalite_to_png(spec, config=config, allowed_base_urls=[], scale=_SCALE)


def _printable(value: Any) -> Any:
    """Return a specification without control characters: vl-convert ends the process on some of them."""
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def formats(text: str) -> list[Format]:
    """Return the formats in a list such as `png,svg`; ValueError names an unknown one."""
    known = get_args(Format)
    chosen = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for one in chosen:
        if one not in known:
            raise ValueError(f"format {one!r}: allowed are {', '.join(known)}, separated by commas")
    return cast("list[Format]", chosen)


def write(charts: Sequence[Chart], folder: Path, chosen: Sequence[Format], *, dark: bool = False) -> Iterator[Path]:
    """Write each chart in each format and yield its path: `memory.png`, `memory-dark.png`; existing files are replaced.

    Raises:
        ValueError: a file cannot be written, or the extra `report` is not installed.
    """
    for chart in charts:
        for one in chosen:
            data = image(chart, one, dark=dark)  # before the folder is made: an image that cannot be drawn leaves none
            path = folder / f"{chart.id}{'-dark' if dark else ''}.{one}"
            file.save(path, data, "image")
            yield path
