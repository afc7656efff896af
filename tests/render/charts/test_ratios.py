from __future__ import annotations

import datetime

import msgspec
from support.report_factory import make_report, make_result
from support.verdict_factory import with_launches

from pytest_llmgpu.gate import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.render import charts
from pytest_llmgpu.render.charts import Chart
from pytest_llmgpu.report.report import Commit, Report


def _report(level: float, sha: str = "a") -> Report:
    results = [with_launches([level] * 3, strategy=strategy) for strategy in ("mp", "tp")]
    report = make_report(results)
    report.commit = Commit(sha=sha * 40)
    return report


def _ratio(report: Report) -> Chart | None:
    return next((chart for chart in charts.of_report(report).charts if chart.id == "ratio"), None)


def _judged(report: Report, base: Report) -> Report:
    report.verdicts = judge.judge(base, report, Policy(), today=datetime.date(2026, 1, 1))
    return report


def test_a_slower_case_has_its_ratio_and_interval() -> None:
    """They are those of the gate's verdict."""
    chart = _ratio(_judged(_report(1.5), _report(1.0)))
    assert chart is not None
    name, verdict, ratio, low, high, launches, _ = chart.rows[0]
    assert (name, verdict, ratio, launches) == ("mp-bs1", "REGRESSED", "1.5", "3")
    assert float(low) < 1.5 < float(high)
    assert "2 slower" in chart.summary


def test_without_a_baseline_there_is_no_chart_of_ratios() -> None:
    """Nor is it listed as left out."""
    found = charts.of_report(_report(1.0))
    assert not [line for line in found.omitted if "baseline" in line]
    assert _ratio(_report(1.0)) is None


def test_a_case_that_cannot_be_compared_is_in_the_table_with_its_reason() -> None:
    """Its batches differ from the baseline's; the chart has the other cases."""
    report = _report(1.5)
    launches = report.cases[0].launches
    report.cases[0].launches = [msgspec.structs.replace(launch, plan_sha256="0" * 64) for launch in launches]
    chart = _ratio(_judged(report, _report(1.0)))
    assert chart is not None
    assert [row["c"] for row in chart.spec["data"]["values"]] == ["tp-bs1"]
    assert chart.rows[0][:3] == ["mp-bs1", "NOT_COMPARABLE", "-"]


def test_a_baseline_of_other_cases_is_the_reason_for_no_chart() -> None:
    """An empty chart is not drawn."""
    found = charts.of_report(_judged(make_report([make_result()]), make_report([make_result(strategy="tp")])))
    (reason,) = [line for line in found.omitted if line.startswith("Time compared with the baseline")]
    assert reason.startswith("Time compared with the baseline: no case")
