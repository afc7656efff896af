"""Reports and verdicts for the tests of the page."""

from __future__ import annotations

from typing import Any

from pytest_llmgpu.report.report import Commit, Report, Session
from pytest_llmgpu.report.verdicts import Decided, Row
from support.report_factory import make_profile, make_report, make_series, paper_results
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
    plain = {"key": result.key, "id": result.id, "reason": "time changed by +9.0 %.\nAlso changed: the driver."}
    return make_row(verdict, **{**plain, **fields})
