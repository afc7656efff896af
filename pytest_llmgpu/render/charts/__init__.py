"""The charts of a report as Vega-Lite specifications, for the HTML page and for images.

A specification has no `$schema`, because that is a network address (pass `{"mode": "vega-lite"}` to vega-embed).
`theme(dark=...)` is the `config` to draw it with. Only `image` needs the extra `report`.
"""

from __future__ import annotations

import msgspec

from pytest_llmgpu.render.charts import communication, sweeps
from pytest_llmgpu.render.charts.axes import Chart, panels
from pytest_llmgpu.render.charts.images import Format, image, theme
from pytest_llmgpu.report.report import Report

__all__ = ["Chart", "Format", "image", "of_report", "theme"]


def of_report(report: Report) -> tuple[list[Chart], list[str]]:
    """Return every chart of a report, and the reasons for those that it lacks.

    Cases that differ in more than strategy and batch size get their own charts, whose ids end in `-1`, `-2`.
    """
    drawn: list[Chart] = []
    omitted: list[str] = []
    for panel in panels(report):
        for charts in (sweeps.times, communication.charts, sweeps.memory):
            for one in charts(panel):
                if isinstance(one, str):
                    omitted.append(f"{panel.caption}: {one}" if panel.suffix else one)
                    continue
                title = f"{one.title}: {panel.caption}" if panel.suffix else one.title
                shared = {"measured": panel.measured, "filter": {"model": panel.entries[0].result.case.model}}
                drawn.append(msgspec.structs.replace(one, id=f"{one.id}{panel.suffix}", title=title, **shared))
    return drawn, omitted
