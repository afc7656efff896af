"""Charts as pictures, for a README or a pull request: PNG and SVG by vl-convert, without a browser or a network."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, cast, get_args

from pytest_llmgpu.render.charts.chart import Chart, Spec
from pytest_llmgpu.render.charts.theme import theme

__all__ = ["Format", "formats", "image", "write"]

Format = Literal["png", "svg"]
"""What a picture can be."""

_WIDTH = 720
_LETTERS = 120  # of a caption's line in that width
_PADDING = 14  # pixels between a legend's title and its symbols
_SCALE = 2.0  # sharp on screens of today


def image(chart: Chart, format: Format, *, dark: bool = False, titled: bool = True, width: int = _WIDTH) -> bytes:  # noqa: A002 - what everybody calls it
    """Return a chart as a picture.

    Args:
        chart: what to draw.
        format: PNG, sharp on screens of today, or SVG.
        dark: whether it is for a dark ground.
        titled: whether title and caption are in the picture.
        width: of the plot, in pixels, to which axes and letters beside it come.

    Raises:
        ValueError: the format is unknown, or the extra `report` is not installed.
    """
    if format not in get_args(Format):
        raise ValueError(f"format {format!r}: allowed are {', '.join(get_args(Format))}")
    try:
        import vl_convert
    except ImportError:
        raise ValueError("pictures of charts need vl-convert: pip install 'pytest-llmgpu[report]'") from None
    spec: Spec = {**chart.spec, "width": width, "padding": 16}
    if titled:
        told = [line for text in (chart.measured, chart.summary) for line in textwrap.wrap(text, _LETTERS)]
        spec["title"] = {"text": chart.title, "subtitle": told}
    config = theme(dark=dark)
    if format == "svg":
        # A browser may draw it with a wider font than it is laid out with here: a title would touch what it is of.
        config["legend"]["titlePadding"] = _PADDING
        return vl_convert.vegalite_to_svg(spec, config=config, allowed_base_urls=[]).encode()
    return vl_convert.vegalite_to_png(spec, config=config, allowed_base_urls=[], scale=_SCALE)


def formats(text: str) -> list[Format]:
    """Return the formats of a list such as `png,svg`; ValueError names one that is unknown."""
    known = get_args(Format)
    chosen = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for one in chosen:
        if one not in known:
            raise ValueError(f"format {one!r}: allowed are {', '.join(known)}, or several with commas")
    return cast("list[Format]", chosen)


def write(charts: Sequence[Chart], folder: Path, chosen: Sequence[Format], *, dark: bool = False) -> Iterator[Path]:
    """Write each chart in each format, replacing what is there, and yield its path: `memory.png`, `memory-dark.png`.

    Raises:
        ValueError: a file cannot be written, or the extra `report` is not installed.
    """
    for chart in charts:
        for one in chosen:
            data = image(chart, one, dark=dark)  # before the folder is made: without the extra none is
            path = folder / f"{chart.id}{'-dark' if dark else ''}.{one}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            except OSError as error:
                raise ValueError(f"picture {path}: cannot be written: {error.strerror}") from None
            yield path
