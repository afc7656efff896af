"""Trends as one page without network and script: images for the light and the dark theme, and tables."""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence

from pytest_llmgpu.gate.trends import Trend
from pytest_llmgpu.render.charts.chart import Chart
from pytest_llmgpu.render.charts.images import image
from pytest_llmgpu.render.charts.trends import MARKS, of_trends
from pytest_llmgpu.render.html.templates import asset, content_security_policy, templates
from pytest_llmgpu.render.terminal.trends import changes, disturbed

_NARROW_PX = 240  # width of a plot that fits on the screen of a phone, with its axis and names


def render(trends: Sequence[Trend], machine: str, batch_sizes: Collection[int] | None = None) -> str:
    """Return the page of one machine; `batch_sizes` is that of `of_trends`.

    Raises:
        ValueError: the extra `report` is not installed.
    """
    template = templates().get_template("trend.html")
    style = asset("page.css")
    drawn = of_trends(trends, batch_sizes)
    charts = {chart.id: chart for chart in drawn.charts}
    return template.render(
        machine=machine,
        style=style,
        policy_header=content_security_policy([], [style]),
        sections=[
            {
                "chart": charts[name],
                "changes": list(changes(trend, MARKS, named=False)),
                "pictures": [
                    {"narrow": narrow, "dark": dark, "address": _address(charts[name], narrow=narrow, dark=dark)}
                    for narrow in (True, False)
                    for dark in (True, False)
                ],
            }
            for trend in trends
            if (name := f"trend-{trend.metric}") in charts
        ],
        notes=[*disturbed(trends), *(f"Left out: {reason}" for reason in drawn.omitted)],
    )


def _address(chart: Chart, *, narrow: bool, dark: bool) -> str:
    drawn = image(chart, "svg", dark=dark, titled=False, **({"width": _NARROW_PX} if narrow else {}))
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn).decode()}"
