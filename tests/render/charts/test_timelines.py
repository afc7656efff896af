from __future__ import annotations

import pytest
from support.chart_data import sampled, values_of
from support.report_factory import make_failed, make_profile, make_report, make_result

from pytest_llmgpu.render import charts
from pytest_llmgpu.report.result import Series


def test_time_lines_show_every_gpu_and_are_thinned() -> None:
    """At most 200 points; the table is coarser still."""
    found = {chart.id: chart for chart in charts.of_case(sampled(2000), make_report().environment)}
    assert sorted(found) == [f"timeline-{name}" for name in ("memory", "nvlink", "pcie", "power", "utilization")]
    chart = found["timeline-utilization"]
    rows = list(values_of(chart.spec))
    assert len(rows) == 200
    assert set(rows[0]) == {"t", "0", "1", "2", "3"}
    assert len(chart.rows) == 20
    assert rows[0]["3"] == pytest.approx(rows[0]["0"] + 10)
    assert "two points are the least and the largest of 20 samples" in chart.summary
    assert "4 x NVIDIA H200" in chart.summary


@pytest.mark.parametrize("points", [1, 2, 199, 200, 201, 202, 203, 1999])
def test_a_series_of_any_length_is_drawn(points: int) -> None:
    """Its last bin may be of one sample."""
    chart = next(iter(charts.of_case(sampled(points, 1), make_report().environment)))
    rows = list(values_of(chart.spec))
    assert min(points, 130) <= len(rows) <= 200
    assert [row["t"] for row in rows] == sorted(row["t"] for row in rows)


@pytest.mark.parametrize("place", [0, 777, 1999])
def test_a_spike_is_seen_however_short(place: int) -> None:
    """One sample of 2,000 is at its height, where a mean would flatten it; a GPU without the metric has no line."""
    result = sampled(2000, 2)
    profile = result.launches[0].profile
    assert profile is not None
    assert profile.series is not None
    profile.series.devices[0]["power_w"][place] = 700.0
    del profile.series.devices[1]["power_w"]
    found = {chart.id: chart for chart in charts.of_case(result, make_report().environment)}
    rows = list(values_of(found["timeline-power"].spec))
    assert [row["t"] for row in rows] == sorted({row["t"] for row in rows})
    (spike,) = [row for row in rows if row["0"] == 700]
    assert not any("1" in row for row in rows)
    assert spike["t"] == pytest.approx(place / 6, abs=20 / 6)


def test_gpus_are_told_apart_by_more_than_colour() -> None:
    """WCAG 2.2, 1.4.1: each has its dashes."""
    (chart, *_) = charts.of_case(sampled(30), make_report().environment)
    dashes = chart.spec["layer"][0]["encoding"]["strokeDash"]["scale"]
    assert dashes["domain"] == ["0", "1", "2", "3"]
    assert len(set(map(tuple, dashes["range"]))) == 4


def test_what_was_not_read_is_no_figure_of_a_time_line() -> None:
    """A driver that refreshes slowly leaves gaps, which are neither 0 nor an end."""
    series = Series(t_s=[0.0, 0.2, 0.4], devices=[{"utilization_pct": [None, 40.0, None]}])
    (chart,) = charts.of_case(make_result(profile=make_profile(1, series=series)), make_report().environment)
    assert [row.get("0") for row in values_of(chart.spec)] == [None, 40.0, None]
    assert [row[1] for row in chart.rows] == ["-", "40", "-"]


def test_a_case_without_samples_has_no_time_lines() -> None:
    """On a CPU, or where it never started."""
    environment = make_report().environment
    assert charts.of_case(make_result(), environment) == []
    assert charts.of_case(make_failed("skipped_after_oom"), environment) == []
