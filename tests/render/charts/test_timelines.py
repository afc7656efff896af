from __future__ import annotations

import msgspec
import pytest
from support.chart_data import sampled, values_of
from support.report_factory import make_failed, make_profile, make_report, make_result

from pytest_llmgpu.render.charts import timelines
from pytest_llmgpu.report.result import Series


def test_time_lines_show_every_gpu_in_at_most_200_points() -> None:
    """The table has at most 20 lines."""
    found = {chart.id: chart for chart in list(timelines.charts(sampled(2000), make_report().environment))}
    assert sorted(found) == [f"timeline-{name}" for name in ("memory", "power", "utilization")]
    chart = found["timeline-utilization"]
    rows = list(values_of(chart.spec))
    assert len(rows) == 200
    assert set(rows[0]) == {"t", "0", "1", "2", "3"}
    assert len(chart.rows) == 20
    assert rows[0]["3"] == pytest.approx(rows[0]["0"] + 10)
    assert "extremes of 20 samples" in chart.summary
    assert "4 x NVIDIA H200" in chart.summary


@pytest.mark.parametrize("points", [1, 2, 199, 200, 201, 202, 203, 1999])
def test_a_series_of_any_length_is_drawn(points: int) -> None:
    """The last bin may have a single sample."""
    chart = next(iter(list(timelines.charts(sampled(points, 1), make_report().environment))))
    rows = list(values_of(chart.spec))
    assert min(points, 130) <= len(rows) <= 200
    assert [row["t"] for row in rows] == sorted(row["t"] for row in rows)


@pytest.mark.parametrize("place", [0, 777, 1999])
def test_a_peak_of_one_sample_is_drawn_at_its_height(place: int) -> None:
    """A mean would flatten it; a GPU without the metric has no line."""
    result = sampled(2000, 2)
    profile = result.launches[0].profile
    assert profile is not None
    assert profile.series is not None
    profile.series.devices[0]["power_w"][place] = 700.0
    del profile.series.devices[1]["power_w"]
    found = {chart.id: chart for chart in list(timelines.charts(result, make_report().environment))}
    rows = list(values_of(found["timeline-power"].spec))
    assert [row["t"] for row in rows] == sorted({row["t"] for row in rows})
    (spike,) = [row for row in rows if row["0"] == 700]
    assert not any("1" in row for row in rows)
    assert spike["t"] == pytest.approx(place / 6, abs=20 / 6)


def test_missing_samples_are_gaps_in_a_time_line() -> None:
    """A driver that refreshes slowly leaves gaps, which are not 0."""
    series = Series(t_s=[0.0, 0.2, 0.4], devices=[{"utilization_pct": [None, 40.0, None]}])
    (chart,) = list(timelines.charts(make_result(profile=make_profile(1, series=series)), make_report().environment))
    assert [row.get("0") for row in values_of(chart.spec)] == [None, 40.0, None]
    assert [row[1] for row in chart.rows] == ["-", "40", "-"]


def test_a_case_without_samples_has_no_time_lines() -> None:
    """It ran on a CPU, never started, or was shorter than a period: the only sample is from before it began."""
    environment = make_report().environment
    short = sampled(1, 1)
    (launch,) = short.launches
    assert launch.profile is not None
    launch.profile = msgspec.structs.replace(launch.profile, samples=0)
    assert list(timelines.charts(short, environment)) == []
    assert list(timelines.charts(make_result(), environment)) == []
    assert list(timelines.charts(make_failed("skipped_after_oom"), environment)) == []
