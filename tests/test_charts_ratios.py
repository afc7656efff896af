from __future__ import annotations

import msgspec
from report_factory import make_report, make_result
from verdict_factory import with_launches

from pytest_llmgpu import charts
from pytest_llmgpu.charts import Chart
from pytest_llmgpu.report import Commit, Report
from pytest_llmgpu.verdicts import Armed, Baseline, Row, Verdicts


def _report(level: float, sha: str = "a") -> Report:
    results = [with_launches([level] * 3, strategy=strategy) for strategy in ("mp", "tp")]
    report = make_report(results)
    report.commit = Commit(sha=sha * 40)
    return report


def _ratio(report: Report, baseline: Report | None) -> Chart | None:
    return next((chart for chart in charts.of_report(report, baseline).charts if chart.id == "ratio"), None)


def _verdicts(sha: str, ratio: float) -> Verdicts:
    row = Row(key="k", id="mp-bs1", metric="time", verdict="OK", reason="as before.", ratio=ratio, low=0.9, high=1.1)
    return Verdicts(
        baseline=Baseline(commit=sha * 40), policy="", policy_sha256="0" * 64, armed=Armed(compared=1), rows=[row]
    )


def test_a_slower_case_has_its_ratio_and_interval() -> None:
    """By the gate, which pairs batches."""
    chart = _ratio(_report(1.5), _report(1.0))
    assert chart is not None
    name, verdict, ratio, low, high, launches, _ = chart.rows[0]
    assert (name, verdict, ratio, launches) == ("mp-bs1", "REGRESSED", "1.5", "3")
    assert float(low) < 1.5 < float(high)
    assert "2 slower" in chart.summary


def test_without_a_baseline_nothing_is_compared() -> None:
    """And nothing is said to be missing."""
    found = charts.of_report(_report(1.0))
    assert not [line for line in found.omitted if "baseline" in line]
    assert _ratio(_report(1.0), None) is None


def test_the_reports_own_verdicts_are_shown() -> None:
    """They were made by the policy of whoever ran the gate."""
    report = _report(1.5)
    report.verdicts = _verdicts("b", 1.01)
    for baseline in (None, _report(1.0, "b")):
        chart = _ratio(report, baseline)
        assert chart is not None
        assert [row[:3] for row in chart.rows] == [["mp-bs1", "OK", "1.01"]]


def test_verdicts_against_another_baseline_are_not_shown() -> None:
    """A report that was gated against one commit is judged anew against the other."""
    report = _report(1.5)
    report.verdicts = _verdicts("c", 1.01)
    chart = _ratio(report, _report(1.0, "b"))
    assert chart is not None
    assert chart.rows[0][:3] == ["mp-bs1", "REGRESSED", "1.5"]


def test_cases_that_cannot_be_paired_show_their_totals_without_an_interval() -> None:
    """Other batches than the baseline's."""
    report = _report(1.5)
    for result in report.cases:
        result.launches = [msgspec.structs.replace(launch, plan_sha256="0" * 64) for launch in result.launches]
    chart = _ratio(report, make_report([make_result(30.0)]))
    assert chart is not None
    (row,) = chart.spec["data"]["values"]
    assert (row["c"], row["k"]) == ("mp-bs1", "no interval")
    assert "l" not in row
    assert chart.rows[0][1] == "NOT_COMPARABLE"


def test_a_baseline_of_other_cases_is_named_as_the_reason() -> None:
    """Rather than an empty chart."""
    found = charts.of_report(make_report([make_result()]), make_report([make_result(strategy="tp")]))
    (reason,) = [line for line in found.omitted if line.startswith("Time against the baseline")]
    assert reason.startswith("Time against the baseline: no case")
