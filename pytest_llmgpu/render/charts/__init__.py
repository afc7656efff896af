"""The charts of a report, as data: what a page embeds and what pictures are made of.

`of_report` returns `Charts`: its `charts` are drawn in their order, each under its `title` with its `summary` as the
caption and its `headers` and `rows` as the table behind it; its `omitted` are sentences that say what there is no
chart of, and why. A `spec` is Vega-Lite without `$schema`, which would be an address of the network (`{"mode":
"vega-lite"}` tells vega-embed), as wide as its container, and without a colour of its own: `theme(dark=...)` is the
`config` to embed it with.

Nothing here needs the extra `report` but `image`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pytest_llmgpu.render.charts import accuracy, balance, baseline_ratios, communication, memory, timelines, timing
from pytest_llmgpu.render.charts.chart import Chart, Charts
from pytest_llmgpu.render.charts.images import Format, image
from pytest_llmgpu.render.charts.panels import Panel, panels
from pytest_llmgpu.render.charts.theme import theme
from pytest_llmgpu.report.machine import Environment
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult

__all__ = ["Chart", "Charts", "Format", "image", "of_case", "of_report", "theme"]


def of_report(report: Report) -> Charts:
    """Return every chart of a report.

    Cases that differ in more than strategy and batch size get charts of their own, whose ids end in `-1`, `-2`.
    Against a baseline it shows what the report's verdicts say.
    """
    found: list[Chart] = []
    omitted: list[str] = []
    parts = panels(report)
    for one in baseline_ratios.charts(report.verdicts):
        measured = "; ".join(panel.measured for panel in parts)
        _add(one if isinstance(one, str) else msgspec.structs.replace(one, measured=measured), found, omitted)
    for panel in parts:
        for one in _of_panel(panel):
            _add(_named(one, panel), found, omitted)
    return Charts(charts=found, omitted=omitted)


def of_case(result: CaseResult, environment: Environment) -> list[Chart]:
    """Return the time lines of one case, a chart a metric with every GPU in it; none where nothing was sampled.

    Args:
        result: the case.
        environment: of its report; what kinds of GPUs they are.
    """
    return list(timelines.charts(result, environment))


def _of_panel(panel: Panel) -> Iterator[Chart | str]:
    for room in (timing, communication, memory, accuracy, balance):
        yield from room.charts(panel)


def _named(one: Chart | str, panel: Panel) -> Chart | str:
    if isinstance(one, str):
        return f"{panel.caption}: {one}" if panel.suffix else one
    title = f"{one.title}: {panel.caption}" if panel.suffix else one.title
    return msgspec.structs.replace(one, id=f"{one.id}{panel.suffix}", title=title, measured=panel.measured)


def _add(one: Chart | str, found: list[Chart], omitted: list[str]) -> None:
    if isinstance(one, str):
        omitted.append(one)
    else:
        found.append(one)
