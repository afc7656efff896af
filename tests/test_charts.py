from __future__ import annotations

import json
import re

import altair
import msgspec
import pytest
from chart_data import sampled, values_of
from report_factory import (
    GIB,
    make_answers,
    make_failed,
    make_memory,
    make_profile,
    make_report,
    make_result,
    make_traffic,
    paper_results,
)

from pytest_llmgpu import charts
from pytest_llmgpu.capacity import capacities
from pytest_llmgpu.charts import Chart
from pytest_llmgpu.comparison import compare
from pytest_llmgpu.report import Report

_OF_PAPER = [
    "time",
    "throughput",
    "traffic-pcie",
    "sent",
    "traffic-utilization",
    "memory",
    "accuracy",
    "balance-utilization",
    "balance-memory",
]


def _paper(memory_gib: int = 32) -> Report:
    report = make_report(paper_results())
    gpus = [msgspec.structs.replace(gpu, memory_bytes=memory_gib * GIB) for gpu in report.environment.gpus]
    report.environment.gpus = gpus
    report.capacity = capacities(report.cases, gpus)
    return report


def _by_id(report: Report, baseline: Report | None = None) -> dict[str, Chart]:
    return {chart.id: chart for chart in charts.of_report(report, baseline).charts}


def test_a_report_has_every_chart_that_it_has_data_for() -> None:
    """In the order of the page; what there is none of is named with its reason."""
    found = charts.of_report(_paper())
    assert [chart.id for chart in found.charts] == _OF_PAPER
    assert found.omitted == ["NVLink traffic by batch size: nothing went over it."]


def test_a_report_without_a_completed_case_says_why_it_has_no_chart() -> None:
    """Nothing is drawn, and nothing fails."""
    found = charts.of_report(make_report([make_failed("oom"), make_failed("skipped_after_oom", batch_size=2)]))
    assert found.charts == []
    assert "Time by batch size: no case completed." in found.omitted
    assert charts.of_report(make_report()) == charts.Charts(charts=[], omitted=[])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_specification_is_valid_vega_lite() -> None:
    """Altair checks it against Vega-Lite's schema."""
    found = charts.of_report(_paper(), _paper()).charts + charts.of_case(sampled(), make_report().environment)
    assert len(found) == len(_OF_PAPER) + 6
    for chart in found:
        altair.Chart.from_dict(chart.spec)


def test_a_specification_fits_its_container_and_brings_all_it_needs() -> None:
    """Data inside, no address, no colour: light and dark are the page's."""
    for chart in charts.of_report(_paper(), _paper()).charts:
        text = json.dumps(chart.spec)
        assert chart.spec["width"] == "container"
        assert "://" not in text
        assert "#" not in text
        assert "url" not in text
        assert list(values_of(chart.spec))


def test_the_table_behind_a_chart_is_rectangular_and_has_units() -> None:
    """A row has a cell for every header."""
    for chart in charts.of_report(_paper(), _paper()).charts:
        assert chart.rows
        assert {len(row) for row in chart.rows} == {len(chart.headers)}
        assert re.fullmatch(r"[a-z0-9-]+", chart.id)
        assert chart.summary.endswith(".")


def test_time_is_the_studys_table() -> None:
    """Batch sizes down, strategies across, OoM where it was."""
    chart = _by_id(_paper())["time"]
    assert chart.headers == ["batch size", "mp (s)", "tp (s)", "iok (s)"]
    assert chart.rows[0] == ["1", "10,260", "6,548", "4,959"]
    assert chart.rows[-1] == ["64", "3,800", "4,079", "OoM"]
    assert "iok 4,030 s at batch size 16" in chart.summary


def test_what_did_not_complete_is_marked_in_the_chart() -> None:
    """Its batch size is on the axis, and its name says what happened to which strategy."""
    chart = _by_id(_paper())["time"]
    assert {"s": "iok", "b": 64, "o": "iok: OoM", "w": "CUDA out of memory"} in list(values_of(chart.spec))
    low, high = chart.spec["encoding"]["x"]["scale"]["domain"]
    assert low < 1
    assert high > 64


def test_batch_sizes_are_ticked_at_powers_of_two() -> None:
    """Also where other sizes were measured."""
    sizes = (1, 3, 48, 64)
    chart = _by_id(make_report([make_result(sequences=192, batch_size=size) for size in sizes]))["time"]
    axis = chart.spec["encoding"]["x"]
    assert axis["axis"]["values"] == [1, 2, 4, 8, 16, 32, 64]
    assert (axis["scale"]["type"], axis["scale"]["base"]) == ("log", 2)
    assert [row["b"] for row in values_of(chart.spec)] == list(sizes)


def test_one_batch_size_is_a_chart_too() -> None:
    """A line of one point has an axis with room on both sides."""
    spec = _by_id(make_report([make_result(60.0)]))["time"].spec
    for channel in ("x", "y"):
        low, high = spec["encoding"][channel]["scale"]["domain"]
        assert 0 < low < high
        assert spec["encoding"][channel]["axis"]["values"]


def test_strategies_keep_their_colours_whatever_is_there() -> None:
    """The third colour is iok's in a report of iok alone; another strategy gets the fourth."""
    for strategies in (["iok"], ["tp", "iok", "other"], ["other", "mp"]):
        report = make_report([make_result(strategy=strategy) for strategy in strategies])
        (colours,) = {
            json.dumps(layer["encoding"]["color"]["scale"]["domain"]) for layer in _by_id(report)["time"].spec["layer"]
        }
        assert json.loads(colours)[:3] == ["mp", "tp", "iok"]
        assert json.loads(colours)[3:] == ["other"] * ("other" in strategies)


def test_a_strategy_under_another_title_keeps_its_colour() -> None:
    """`tp` carried out by another backend is still the second."""
    chart = _by_id(make_report([make_result(strategy="tp", backend="deepspeed")]))["time"]
    assert chart.spec["layer"][0]["encoding"]["color"]["scale"]["domain"] == ["mp", "tp deepspeed", "iok"]


def test_traffic_is_a_mean_over_the_gpus_in_both_directions() -> None:
    """GB/s by counters; zero is in the table and not on the logarithmic axis."""
    report = make_report([make_result(profile=make_profile(2, tx=1e9, rx=0.0)), make_result(batch_size=2)])
    chart = _by_id(report)["traffic-pcie"]
    assert [row["v"] for row in values_of(chart.spec)] == [1.05]
    assert chart.rows[0] == ["mp", "1", "1.05", "0", "1.1", "0"]
    assert chart.rows[1] == ["mp", "2", "-", "-", "-", "-"]
    assert chart.spec["encoding"]["y"]["scale"]["type"] == "log"


def test_a_reading_of_another_time_is_no_figure_of_the_case() -> None:
    """A metric without coverage is left out, as the path of the traffic leaves it out."""
    profile = make_profile(1)
    (device,) = profile.devices
    stale = {name: msgspec.structs.replace(metric, coverage=0.0) for name, metric in device.metrics.items()}
    profile = msgspec.structs.replace(profile, devices=[msgspec.structs.replace(device, metrics=stale)])
    omitted = charts.of_report(make_report([make_result(profile=profile)])).omitted
    assert "PCIe traffic by batch size: it was not counted." in omitted


def test_traffic_without_any_sampling_has_its_reason() -> None:
    """Nothing counted is not nothing sent."""
    omitted = charts.of_report(make_report([make_result()])).omitted
    assert "PCIe traffic by batch size: it was not counted." in omitted
    assert "Traffic against GPU utilisation: traffic or utilisation was not sampled." in omitted


def test_bytes_sent_are_exact_figures_per_sequence() -> None:
    """As the program counted them, in MB."""
    chart = _by_id(make_report([make_result(traffic=make_traffic(wire_bytes_per_sequence=466.574176e6))]))["sent"]
    assert chart.rows == [["1", "466.6"]]
    assert "466" not in chart.headers[1]
    assert chart.headers == ["batch size", "mp (MB/sequence)"]


def test_utilisation_stands_beside_traffic_of_both_links() -> None:
    """A point a case, joined by batch size; the ends are named."""
    results = [
        make_result(profile=make_profile(1, tx=1e9, nvlink=2e9, busy=90.0 - size), batch_size=size)
        for size in (1, 2, 4)
    ]
    chart = _by_id(make_report(results))["traffic-utilization"]
    assert chart.rows == [["mp", "1", "89", "3"], ["mp", "2", "88", "3"], ["mp", "4", "86", "3"]]
    assert [row["b"] for row in chart.spec["layer"][2]["data"]["values"]] == [1, 4]


def test_memory_has_capacity_and_the_predicted_threshold_where_they_are_near() -> None:
    """The axes reach both."""
    chart = _by_id(_paper())["memory"]
    rows = list(values_of(chart.spec))
    assert {"v": 32.0, "t": "32 GiB of each GPU"} in rows
    assert {"s": "iok", "b": 112, "v": 32.0, "t": "iok: 112 should fit"} in rows
    assert chart.spec["encoding"]["x"]["scale"]["domain"][1] > 112
    assert chart.spec["encoding"]["y"]["scale"]["domain"][1] > 32
    assert "each GPU has 32 GiB; the largest batch size that should fit: mp 112, tp 112, iok 112." in chart.summary


def test_a_capacity_far_above_is_said_and_not_drawn() -> None:
    """Else every curve would lie on the ground."""
    chart = _by_id(_paper(memory_gib=1000))["memory"]
    assert chart.spec["encoding"]["y"]["scale"]["domain"][1] < 40
    assert "each GPU has 1,000 GiB, far above this chart" in chart.summary


def test_a_cap_is_the_capacity() -> None:
    """Of a GPU of which a case may use a part."""
    results = [make_result(memory=make_memory(), gpu_memory_bytes=20 * GIB)]
    assert "each GPU has 20 GiB" in _by_id(make_report(results))["memory"].summary


def test_accuracy_has_its_interval_and_the_items_that_flipped() -> None:
    """Wilson's interval of 95 %, and the number of other answers over it."""
    mp = make_result(accuracy=make_answers([True] * 80 + [False] * 20))
    tp = make_result(accuracy=make_answers([True] * 79 + [False] * 21), strategy="tp")
    tp.comparison = compare(tp, mp, "acc_norm")
    chart = _by_id(make_report([mp, tp]))["accuracy"]
    assert chart.rows[0] == ["mp", "1", "80", "71.12", "86.66", "100", "-"]
    assert chart.rows[1][-1] == "1"
    assert "at most 1 are answered otherwise than under mp (tp at batch size 1)" in chart.summary
    assert [row["t"] for row in values_of(chart.spec) if row.get("t")] == ["1", "1"]


def test_balance_names_the_gpus_that_are_furthest_apart() -> None:
    """A point a GPU; one device has nothing to balance."""
    chart = _by_id(_paper())["balance-memory"]
    assert chart.headers == ["strategy", "batch size", "GPU 0 (GiB)", "GPU 1 (GiB)", "GPU 2 (GiB)", "GPU 3 (GiB)"]
    assert chart.rows[0] == ["mp", "1", "17.12", "17.12", "17.12", "18.12"]
    assert "17.1 GiB on GPU 0 and 18.1 GiB on GPU 3" in chart.summary
    one = charts.of_report(make_report([make_result(profile=make_profile(1), devices=1)]))
    assert "GPU utilisation of each GPU: there is one device." in one.omitted


def test_cases_of_several_models_are_charts_of_their_own() -> None:
    """Ids stay unique, titles say which."""
    report = make_report([make_result(model="small"), make_result(model="large")])
    found = charts.of_report(report)
    assert [chart.id for chart in found.charts] == ["time-1", "throughput-1", "time-2", "throughput-2"]
    assert [chart.title for chart in found.charts][::2] == ["Time by batch size: small", "Time by batch size: large"]
    assert all(line.startswith(("small: ", "large: ")) for line in found.omitted)


def test_all_specifications_of_a_large_report_stay_small() -> None:
    """3 strategies, 7 batch sizes, 4 GPUs, long runs: under 1.5 MB with the time lines of every case."""
    report = _paper()
    baseline = _paper()
    text = [json.dumps(chart.spec) for chart in charts.of_report(report, baseline).charts]
    lines = charts.of_case(sampled(2000), report.environment)
    text += [json.dumps(chart.spec) for chart in lines] * 21
    assert sum(map(len, text)) < 1.5e6
