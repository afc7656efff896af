"""Charts as files of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast, get_args

from pytest_llmgpu.render.charts.chart import Chart
from pytest_llmgpu.render.charts.images import Format, image

__all__ = ["formats", "write"]


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
