"""Reports and verdicts for pages and charts, and the data and drawn texts of a chart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pytest_llmgpu.render.charts import Chart, image
from pytest_llmgpu.report.report import Commit, Report, Session
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Decided, Row
from support.report_factory import make_profile, make_report, make_result, make_series, paper_results
from support.verdict_factory import make_row

EVIL = "<script>window.evil = 1</script><!-- &amp; "
"""A text that must never become markup."""


def paper_report(points: int = 30) -> Report:
    """Return Table 2 of Shin et al. 2024 as a complete report: every case has timelines, and one is out of memory."""
    report = make_report(paper_results())
    report.session = Session(complete=True, exit_status=0, collected=len(report.cases))
    report.commit = Commit(sha="3b1f09ac" * 5, branch="main", dirty=False)
    report.options = {"--strategy": ["mp", "tp", "iok"], "--llmgpu-dataset": "a b", "--llmgpu-dtype": "auto"}
    report.environment.versions = {"torch": "2.11.0", "absent": None}
    for result in report.cases:
        for launch in result.launches:
            launch.profile = make_profile(series=make_series(points))
    return report


def time_row(report: Report, number: int = 0, verdict: Decided = "REGRESSED", **fields: Any) -> Row:
    """Return a verdict on the time of a case of the report."""
    result = report.cases[number]
    plain = {"key": result.key, "id": result.id, "reason": "time changed by +9.0 %."}
    return make_row(verdict, **{**plain, **fields})


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
