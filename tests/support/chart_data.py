"""The data and the drawn texts of charts, and a result with time lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pytest_llmgpu.render.charts import Chart, image
from pytest_llmgpu.report.result import CaseResult
from support.report_factory import make_profile, make_result, make_series


def values_of(part: Any) -> Iterator[dict[str, Any]]:
    """Yield every row of data in a specification."""
    if isinstance(part, dict):
        if isinstance(part.get("data"), dict):
            yield from part["data"]["values"]
        for key, item in part.items():
            if key != "data":
                yield from values_of(item)
    elif isinstance(part, list):
        for item in part:
            yield from values_of(item)


def sampled(points: int = 2000, devices: int = 4) -> CaseResult:
    """Return a result whose profile has a series."""
    series = make_series(points, devices)
    return make_result(profile=make_profile(devices, series=series, duration_s=points / 6, nvlink=1e9))


def texts_of(chart: Chart) -> dict[str, tuple[float, float]]:
    """Return each text in the drawn chart with its place in pixels, from the left and from the top of its group."""
    svg = image(chart, "svg", titled=False).decode()
    found = re.findall(r'<text[^>]* transform="translate\(([^,]+),([^)]+)\)[^>]*>([^<]+)</text>', svg)
    return {text: (float(x), float(y)) for x, y, text in found}
