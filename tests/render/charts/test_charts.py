from __future__ import annotations

import json
import re

import altair
import msgspec
import pytest
from support.page_reports import sampled, texts_of, values_of
from support.prose import Prose
from support.report_factory import (
    GIB,
    known,
    make_check,
    make_failed,
    make_memory,
    make_profile,
    make_report,
    make_result,
    make_traffic,
    paper_results,
)
from support.verdict_factory import with_launches

from pytest_llmgpu.render import charts
from pytest_llmgpu.render.charts import Chart, timelines
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, Series

_OF_PAPER = ["time", "throughput", "traffic-pcie", "sent", *(f"traffic-utilization-{n}" for n in (1, 2, 3)), "memory"]

_NOT_COUNTED = "the counters cover less than half of the bytes that"
_TOOK_NVLINK = "; not included, because it took NVLink: GPU-to-GPU traffic of {}"


def _paper(memory_gib: int = 32) -> Report:
    report = make_report(paper_results())
    gpus = [msgspec.structs.replace(gpu, memory_bytes=memory_gib * GIB) for gpu in report.environment.gpus]
    report.environment.gpus = gpus
    return report


def test_texts_have_the_times_of_a_token() -> None:
    """Decode steps and the first token take the place of the whole time; with one new token there is no step."""
    cases = [make_result(workload="generate", batch_size=size) for size in (1, 8)]
    for case, first_token_s in zip(cases, (0.008, 0.02), strict=True):
        case.first_token_s, case.token_p50_s = first_token_s, first_token_s / 2
    found = _by_id(make_report(cases))
    assert [*found][:3] == ["time-to-first-token", "time-per-token", "throughput"]
    assert [row["v"] for row in values_of(found["time-per-token"].spec)] == [4, 10]
    assert found["time-to-first-token"].rows == [["mp", "1", "8", "completed"], ["mp", "8", "20", "completed"]]
    for case in cases:
        case.token_p50_s = None
    _, omitted = charts.of_report(make_report(cases))
    assert "Time per token by batch size: no completed case has one." in omitted


def _by_id(report: Report) -> dict[str, Chart]:
    return {chart.id: chart for chart in charts.of_report(report)[0]}


def _timelines(result: CaseResult) -> dict[str, Chart]:
    return {chart.id: chart for chart in timelines.charts(result, make_report().environment)}


@pytest.fixture
def every() -> list[Chart]:
    """Return the charts of Table 2 of Shin et al. 2024, and those of a case."""
    return [*charts.of_report(_paper())[0], *_timelines(sampled()).values()]


def test_a_report_has_every_chart_that_it_has_data_for() -> None:
    """The charts come in the order of the page; each chart that is left out has a reason."""
    drawn, omitted = charts.of_report(_paper())
    assert [chart.id for chart in drawn] == _OF_PAPER
    assert omitted == ["NVLink traffic by batch size: there was none."]


def test_every_summary_is_reviewed(every: list[Chart], prose: Prose) -> None:
    """The snapshot has the titles and captions of all charts of a report and of a case."""
    assert prose == "\n".join(f"{chart.title}: {chart.summary}" for chart in every)


def test_a_report_without_a_completed_case_has_reasons_instead_of_charts() -> None:
    """Each chart is replaced by its reason; a report without cases has neither."""
    drawn, omitted = charts.of_report(make_report([make_failed("oom"), make_failed("skipped_after_oom", batch_size=2)]))
    assert drawn == []
    assert "Time by batch size: no completed case has one." in omitted
    assert charts.of_report(make_report()) == ([], [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_specification_is_valid_vega_lite(every: list[Chart]) -> None:
    """Altair checks each one with Vega-Lite's schema."""
    assert len(every) == len(_OF_PAPER) + 3
    for chart in every:
        altair.Chart.from_dict(chart.spec)


def test_a_chart_stands_alone(every: list[Chart]) -> None:
    """It fits its container, names model and machine, and has its data, but neither an address nor a colour."""
    for chart in every:
        text = json.dumps(chart.spec)
        assert chart.spec["width"] == "container"
        assert not re.search("://|#|url", text)
        assert chart.measured == "huggyllama/llama-30b, float16, 4 x NVIDIA H200, hellaswag dataset"
        assert list(values_of(chart.spec))
        assert {len(row) for row in chart.rows} == {len(chart.headers)}
        assert re.fullmatch(r"[a-z0-9-]+", chart.id)
        assert chart.summary.endswith(".")


def test_the_time_chart_has_the_figures_of_table_2_of_shin_et_al() -> None:
    """A case out of memory has its outcome in the table and a note above the plot."""
    chart = _by_id(_paper())["time"]
    assert chart.headers == ["strategy", "batch size", "time (s)", "outcome"]
    found = {(strategy, size): (time, outcome) for strategy, size, time, outcome in chart.rows}
    assert [found[strategy, "1"][0] for strategy in ("mp", "tp", "iok")] == ["10,260", "6,548", "4,959"]
    assert [found[strategy, "64"][0] for strategy in ("mp", "tp", "iok")] == ["3,800", "4,079", "-"]
    assert found["iok", "64"][1] == "oom"
    row = {"s": "iok", "b": 64, "o": "iok: OOM", "l": "iok: OOM", "w": "CUDA out of memory"}
    assert row in list(values_of(chart.spec))
    texts = texts_of(chart)
    x, y = texts["iok: OOM"]
    assert y < 0
    assert x == pytest.approx(texts["64"][0], abs=1)


def test_wrong_answers_are_marked_and_never_the_best() -> None:
    """The best in the caption is a case with right answers, however slow it was."""
    results = [make_result(59.6652), *(make_result(1.0, batch_size=size) for size in (2, 4))]
    for result in results[1:]:
        result.accuracy_check = make_check()
    found = _by_id(make_report(results))
    assert found["time"].summary == "Best of each strategy: mp 59.7 s at batch size 1."
    assert found["throughput"].summary.endswith("at batch size 1.")
    marks = [row for row in values_of(found["time"].spec) if "o" in row]
    assert [(row["b"], row["l"]) for row in marks] == [(2, "mp: wrong answers"), (4, "\N{BALLOT X}")]
    assert {row["w"] for row in marks} == {"26 % is not 82 %"}
    assert found["time"].rows[1] == ["mp", "2", "1", "completed, wrong answers"]
    alone = _by_id(make_report(results[1:]))["time"]
    assert alone.summary == "Best of each strategy: mp none, because all its answers are wrong."


def test_a_logarithmic_axis_has_ticks_however_wide_it_is() -> None:
    """Its ticks are 1, 2 and 5 over a wide range and linear over a narrow one; a single figure has a tick too."""
    for seconds, ticks in (
        ((0.9, 60.0), {"1", "2", "5", "10", "20", "50"}),
        ((1.0, 1.04), {"1", "1.01", "1.02", "1.03", "1.04"}),
        ((90.0, 91.0), {"90", "90.2", "90.4", "90.6", "90.8", "91"}),
        ((60.0,), {"60"}),
    ):
        results = [make_result(value, batch_size=3 * 2**place) for place, value in enumerate(seconds)]
        assert set(texts_of(_by_id(make_report(results))["time"])) >= ticks


def test_strategies_keep_their_colours() -> None:
    """The third colour is that of iok also in a report of iok alone; another strategy gets the fourth."""
    for strategies, others in ((["iok"], []), (["tp", "iok", "other"], ["other"]), (["other", "mp"], ["other"])):
        chart = _by_id(make_report([make_result(strategy=strategy) for strategy in strategies]))["time"]
        for layer in chart.spec["layer"]:
            assert layer["encoding"]["color"]["scale"]["domain"] == ["mp", "tp", "iok", *others]


def test_traffic_is_a_mean_over_the_gpus_in_both_directions() -> None:
    """A rate of zero is in the table and not on the logarithmic axis. What the program sends is its own count in MB."""
    traffic = make_traffic(wire_bytes_per_sequence=466.574176e6)
    results = [make_result(profile=make_profile(2, tx=1e9, rx=0.0), traffic=traffic), make_result(batch_size=2)]
    found = _by_id(make_report(results))
    assert found["sent"].headers == ["strategy", "batch size", "sent (MB/sequence)", "outcome"]
    assert found["sent"].rows[0] == ["mp", "1", "466.6", "completed"]
    chart = found["traffic-pcie"]
    assert [row["v"] for row in values_of(chart.spec)] == [1.05]
    assert chart.rows[0] == ["mp", "1", "1.05", "0", "1.1", "0"]
    assert chart.rows[1] == ["mp", "2", "-", "-", "-", "-"]
    assert chart.spec["encoding"]["y"]["scale"]["type"] == "log"


def test_traffic_of_both_links_is_shown_by_utilisation() -> None:
    """There is one point per case; the caption has the first and the last."""
    results = [
        make_result(profile=make_profile(1, tx=1e9, nvlink=2e9, busy=90.0 - size), batch_size=size)
        for size in (1, 2, 4)
    ]
    chart = _by_id(make_report(results))["traffic-utilization-1"]
    assert chart.rows == [["mp", "1", "89", "3"], ["mp", "2", "88", "3"], ["mp", "4", "86", "3"]]
    assert "89 % and 3 GB/s at batch size 1 to 86 % and 3 GB/s at batch size 4" in chart.summary


def test_the_memory_chart_has_the_capacity() -> None:
    """It is within the plot if it is near the memory in use: far above it would flatten the curves; a cap counts."""
    far = _by_id(_paper(memory_gib=1000))["memory"]
    assert max(row["v"] for row in values_of(far.spec) if "v" in row) < 40
    assert "1,000 GiB per GPU, far above this chart" in far.summary
    capped = make_report([make_result(memory=make_memory(), gpu_memory_bytes=20 * GIB)])
    assert "capacity 20 GiB per GPU" in _by_id(capped)["memory"].summary
    chart = _by_id(_paper())["memory"]
    rows = list(values_of(chart.spec))
    assert {"v": 32.0, "t": "32 GiB per GPU"} in rows
    assert texts_of(chart)["32 GiB per GPU"][1] > 0
    assert "; capacity 32 GiB per GPU." in chart.summary


def test_each_model_has_its_own_charts() -> None:
    """Ids stay unique and titles name the model."""
    report = make_report([make_result(model="small"), make_result(model="large")])
    drawn, omitted = charts.of_report(report)
    assert [chart.id for chart in drawn] == ["time-1", "throughput-1", "time-2", "throughput-2"]
    assert [chart.title for chart in drawn][::2] == ["Time by batch size: small", "Time by batch size: large"]
    assert all(line.startswith(("small: ", "large: ")) for line in omitted)


def test_the_chart_of_times_has_launches() -> None:
    """A dot for each of several launches; the axes state that they are logarithmic."""
    (time, throughput, *_), _ = charts.of_report(make_report([with_launches([1.0, 1.1])]))
    assert {210.0, 231.0} <= {row["v"] for row in values_of(time.spec)}
    assert "Dots: launches." in time.summary
    assert "Dots" not in throughput.summary
    assert time.spec["encoding"]["y"]["title"] == "time (s), logarithmic"


def test_time_lines_show_every_gpu_in_at_most_200_points() -> None:
    """The table has at most 20 lines."""
    found = _timelines(sampled(2000))
    assert sorted(found) == [f"timeline-{name}" for name in ("memory", "power", "utilization")]
    chart = found["timeline-utilization"]
    rows = list(values_of(chart.spec))
    assert (len(rows), len(chart.rows)) == (200, 20)
    assert set(rows[0]) == {"t", "0", "1", "2", "3"}
    assert rows[0]["3"] == pytest.approx(rows[0]["0"] + 10)
    assert "extremes of 20 samples" in chart.summary
    assert "4 x NVIDIA H200" in chart.summary


@pytest.mark.parametrize("points", [1, 2, 199, 200, 201, 202, 203, 1999])
def test_a_series_of_any_length_is_drawn(points: int) -> None:
    """The last bin may have a single sample."""
    rows = list(values_of(_timelines(sampled(points, 1))["timeline-power"].spec))
    assert min(points, 130) <= len(rows) <= 200
    assert [row["t"] for row in rows] == sorted(row["t"] for row in rows)


@pytest.mark.parametrize("place", [0, 777, 1999])
def test_a_peak_of_one_sample_is_drawn_at_its_height(place: int) -> None:
    """A mean would flatten it; a GPU without the metric has no line."""
    result = sampled(2000, 2)
    first, second = known(known(result.launches[0].profile).series).devices
    first["power_w"][place] = 700.0
    del second["power_w"]
    rows = list(values_of(_timelines(result)["timeline-power"].spec))
    assert [row["t"] for row in rows] == sorted({row["t"] for row in rows})
    (spike,) = [row for row in rows if row["0"] == 700]
    assert not any("1" in row for row in rows)
    assert spike["t"] == pytest.approx(place / 6, abs=20 / 6)


def test_missing_samples_are_gaps_in_a_time_line() -> None:
    """A driver that refreshes slowly leaves gaps, which are not 0."""
    series = Series(t_s=[0.0, 0.2, 0.4], devices=[{"utilization_pct": [None, 40.0, None]}])
    (chart,) = _timelines(make_result(profile=make_profile(1, series=series))).values()
    assert [row.get("0") for row in values_of(chart.spec)] == [None, 40.0, None]
    assert [row[1] for row in chart.rows] == ["-", "40", "-"]


def test_a_case_without_samples_has_no_time_lines() -> None:
    """It ran on a CPU, never started, or was shorter than a period: the only sample is from before it began."""
    short = sampled(1, 1)
    (launch,) = short.launches
    launch.profile = msgspec.structs.replace(known(launch.profile), samples=0)
    for result in (short, make_result(), make_failed("skipped_after_oom")):
        assert _timelines(result) == {}
