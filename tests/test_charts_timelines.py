from __future__ import annotations

import pytest
from chart_data import sampled, values_of
from report_factory import make_failed, make_profile, make_report, make_result

from pytest_llmgpu import charts
from pytest_llmgpu.result import Series


def test_time_lines_show_every_gpu_and_are_thinned() -> None:
    """At most 100 points of means; the table is coarser still."""
    found = {chart.id: chart for chart in charts.of_case(sampled(2000), make_report().environment)}
    assert sorted(found) == [f"timeline-{name}" for name in ("memory", "nvlink", "pcie", "power", "utilization")]
    chart = found["timeline-utilization"]
    rows = list(values_of(chart.spec))
    assert len(rows) == 100
    assert set(rows[0]) == {"t", "GPU 0", "GPU 1", "GPU 2", "GPU 3"}
    assert len(chart.rows) == 20
    assert rows[0]["GPU 3"] == pytest.approx(rows[0]["GPU 0"] + 10)
    assert "each point is the mean of 20 samples" in chart.summary
    assert "4 x NVIDIA H200" in chart.summary


def test_what_was_not_read_is_no_figure_of_a_time_line() -> None:
    """A driver that refreshes slowly leaves gaps, which are neither 0 nor an end."""
    series = Series(t_s=[0.0, 0.2, 0.4], devices=[{"utilization_pct": [None, 40.0, None]}])
    (chart,) = charts.of_case(make_result(profile=make_profile(1, series=series)), make_report().environment)
    assert [row.get("GPU 0") for row in values_of(chart.spec)] == [None, 40.0, None]
    assert [row[1] for row in chart.rows] == ["-", "40", "-"]


def test_a_case_without_samples_has_no_time_lines() -> None:
    """On a CPU, or where it never started."""
    environment = make_report().environment
    assert charts.of_case(make_result(), environment) == []
    assert charts.of_case(make_failed("skipped_after_oom"), environment) == []
