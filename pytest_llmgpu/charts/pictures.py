"""Charts as pictures, for a README or a pull request: PNG and SVG by vl-convert, without a browser or a network."""

from __future__ import annotations

import textwrap
from typing import Literal, get_args

from pytest_llmgpu.charts.chart import Chart, Spec
from pytest_llmgpu.charts.theme import theme

__all__ = ["Format", "image"]

Format = Literal["png", "svg"]
"""What a picture can be."""

_WIDTH = 720
_LETTERS = 120  # of a caption's line in that width
_SCALE = 2.0  # sharp on screens of today


def image(chart: Chart, format: Format, *, dark: bool = False, titled: bool = True) -> bytes:  # noqa: A002 - what everybody calls it
    """Return a chart as a picture.

    Args:
        chart: what to draw.
        format: PNG, sharp on screens of today, or SVG.
        dark: whether it is for a dark ground.
        titled: whether title and caption are in the picture.

    Raises:
        ValueError: the format is unknown, or the extra `report` is not installed.
    """
    if format not in get_args(Format):
        raise ValueError(f"format {format!r}: allowed are {', '.join(get_args(Format))}")
    try:
        import vl_convert
    except ImportError:
        raise ValueError("pictures of charts need vl-convert: pip install 'pytest-llmgpu[report]'") from None
    spec: Spec = {**chart.spec, "width": _WIDTH, "padding": 16}
    if titled:
        told = [line for text in (chart.measured, chart.summary) for line in textwrap.wrap(text, _LETTERS)]
        spec["title"] = {"text": chart.title, "subtitle": told}
    if format == "svg":
        return vl_convert.vegalite_to_svg(spec, config=theme(dark=dark), allowed_base_urls=[]).encode()
    return vl_convert.vegalite_to_png(spec, config=theme(dark=dark), allowed_base_urls=[], scale=_SCALE)
