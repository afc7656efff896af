from __future__ import annotations

import datetime
import json
import re

import altair
import msgspec
import pytest
from support.chart_data import sampled, values_of
from support.report_factory import (
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

from pytest_llmgpu.analysis.capacity import capacities
from pytest_llmgpu.analysis.reference import compare
from pytest_llmgpu.gate import judge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.render import charts
from pytest_llmgpu.render.charts import Chart, axes
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult, Path

_OF_PAPER = [
    "time",
    "throughput",
    "traffic-pcie",
    "sent",
    "traffic-utilization-1",
    "traffic-utilization-2",
    "traffic-utilization-3",
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


def _by_id(report: Report) -> dict[str, Chart]:
    return {chart.id: chart for chart in charts.of_report(report).charts}


def _judged(memory_gib: int = 32) -> Report:
    """Return the study's report with what the gate says of it against itself."""
    report = _paper(memory_gib)
    report.verdicts = judge.judge(_paper(memory_gib), report, Policy(), today=datetime.date(2026, 1, 1))
    return report


def _answers_wrongly(result: CaseResult) -> CaseResult:
    result.accuracy_check = AccuracyCheck(
        metric="acc_norm", value=0.26, baseline=0.82, source="x", tolerance=0.01, ok=False, text="26 % is not 82 %"
    )
    return result


def test_a_report_has_every_chart_that_it_has_data_for() -> None:
    """In the order of the page; what there is none of is named with its reason."""
    found = charts.of_report(_paper())
    assert [chart.id for chart in found.charts] == _OF_PAPER
    assert found.omitted == ["NVLink traffic by batch size: nothing went over it."]


def test_a_caption_rounds_once() -> None:
    """As the terminal's table does: of 7.4652 neither 7.465 nor the 7.46 that it would be then."""
    chart = _by_id(make_report([make_result(7.4652, batch_size=1)]))["time"]
    assert chart.summary == "Best of each strategy: mp 7.47 s at batch size 1."
    assert [row["v"] for row in values_of(chart.spec)] == [7.465]


def test_a_caption_of_two_figures_rounds_once() -> None:
    """Of the utilisation and of the traffic beside it."""
    profile = make_profile(1, busy=55.5502, tx=7.4652e9)
    chart = _by_id(make_report([make_result(60.0, profile=profile)]))["traffic-utilization-1"]
    assert "55.6 % and 7.47 GB/s at batch size" in chart.summary
    assert [(row["u"], row["v"]) for row in values_of(chart.spec)] == [(55.55, 7.465)]


def test_a_report_without_a_completed_case_says_why_it_has_no_chart() -> None:
    """Nothing is drawn, and nothing fails."""
    found = charts.of_report(make_report([make_failed("oom"), make_failed("skipped_after_oom", batch_size=2)]))
    assert found.charts == []
    assert "Time by batch size: no case completed." in found.omitted
    assert charts.of_report(make_report()) == charts.Charts(charts=[], omitted=[])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_specification_is_valid_vega_lite() -> None:
    """Altair checks it against Vega-Lite's schema."""
    found = charts.of_report(_judged()).charts + charts.of_case(sampled(), make_report().environment)
    assert len(found) == len(_OF_PAPER) + 6
    for chart in found:
        altair.Chart.from_dict(chart.spec)


def test_a_specification_fits_its_container_and_brings_all_it_needs() -> None:
    """Data inside, no address, no colour: light and dark are the page's."""
    for chart in charts.of_report(_judged()).charts:
        text = json.dumps(chart.spec)
        assert chart.spec["width"] == "container"
        assert "://" not in text
        assert "#" not in text
        assert "url" not in text
        assert list(values_of(chart.spec))


def test_the_table_behind_a_chart_is_rectangular_and_has_units() -> None:
    """A row has a cell for every header."""
    for chart in charts.of_report(_judged()).charts:
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
    row = {"s": "iok", "b": 64, "o": "iok: OoM", "l": "iok: OoM", "w": "CUDA out of memory", "a": "right"}
    assert row in list(values_of(chart.spec))
    low, high = chart.spec["encoding"]["x"]["scale"]["domain"]
    assert low < 1
    assert high > 64


def test_wrong_answers_are_marked_and_never_the_best() -> None:
    """However fast they were: the caption's best is another case, and each has a mark in every chart."""
    results = [make_result(60.0), *(_answers_wrongly(make_result(1.0, batch_size=size)) for size in (2, 4))]
    found = _by_id(make_report(results))
    assert found["time"].summary == "Best of each strategy: mp 60 s at batch size 1."
    assert found["throughput"].summary.endswith("at batch size 1.")
    marks = [row for row in values_of(found["time"].spec) if "o" in row]
    assert [(row["b"], row["l"]) for row in marks] == [(2, "mp: wrong answers"), (4, "\N{BALLOT X}")]
    assert {row["w"] for row in marks} == {"26 % is not 82 %"}
    assert found["time"].rows[1] == ["2", "1 (wrong answers)"]
    alone = _by_id(make_report(results[1:]))["time"]
    assert alone.summary == "Best of each strategy: mp none, as all its answers are wrong."


def test_what_stands_at_the_top_lies_within_the_chart() -> None:
    """Of the first batch size it begins there, of the last it ends there: an axis or an edge is beside them."""
    report = make_report([make_failed("error"), make_failed("error", batch_size=2), make_result(batch_size=4)])
    rows = [row for row in values_of(_by_id(report)["time"].spec) if "o" in row]
    assert [row["a"] for row in rows] == ["left", "center"]
    assert axes.side(4, (1, 2, 4)) == "right"
    assert axes.side(4, (4,)) == "center"


def test_a_mark_has_room_to_the_edges_however_long_the_axis() -> None:
    """A fixed factor is nothing beside three orders of magnitude."""
    low, high = axes.levels([1.03e-2, 9.7], "x", log=True)["scale"]["domain"]
    assert 1.03e-2 / low >= (9.7 / 1.03e-2) ** 0.04 * 0.999
    assert high / 9.7 >= 1.03


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
    chart = _by_id(make_report(results))["traffic-utilization-1"]
    assert chart.rows == [["mp", "1", "89", "3"], ["mp", "2", "88", "3"], ["mp", "4", "86", "3"]]
    assert chart.summary == (
        "Means over the GPUs, points joined by batch size: 89 % and 3 GB/s at batch size 1 to 86 % and 3 GB/s at batch "
        "size 4."
    )


def test_each_strategy_has_its_own_scales_of_traffic_and_utilisation() -> None:
    """Two orders apart, neither would show how it moves on the scale of the other."""
    found = _by_id(_paper())
    of_mp, of_tp = (found[f"traffic-utilization-{number}"] for number in (1, 2))
    assert of_mp.spec["encoding"]["y"]["scale"]["domain"][1] < 0.1
    assert of_tp.spec["encoding"]["y"]["scale"]["domain"][0] > 6
    assert {row["s"] for row in values_of(of_mp.spec)} == {"mp"}


def test_what_took_another_link_than_pcie_is_said_beside_its_counters() -> None:
    """Else a chart shows mp sending next to nothing where its copies took NVLink."""
    results = []
    for strategy, link in (("mp", "nvlink"), ("tp", "host")):
        path = msgspec.convert({"link": link, "expected_bytes": 1, "text": "x"}, Path)
        traffic = msgspec.structs.replace(make_traffic(), path=path)
        results.append(make_result(profile=make_profile(nvlink=1e9), traffic=traffic, strategy=strategy))
    found = _by_id(make_report(results))
    assert found["traffic-pcie"].summary.endswith("; not in it, as it went over NVLink: what mp sends from GPU to GPU.")
    assert "host" in found["traffic-pcie"].summary
    assert "host" not in found["traffic-nvlink"].summary
    assert "not in it" not in found["traffic-nvlink"].summary


def test_what_took_a_link_that_was_not_counted_is_said() -> None:
    """The study's profiler reads PCIe only: where less than half of what was sent was on it, it is a host's chatter."""
    traffic = make_traffic(wire_bytes_per_sequence=5e6)
    results = [
        make_result(1.0, profile=make_profile(tx=rate), traffic=traffic, strategy=name)
        for name, rate in (("mp", 0.03e9), ("tp", 0.06e9))
    ]
    found = _by_id(make_report(results))
    told = "; less than half of what mp sent was seen, as it took a link that was not counted."
    for name in ("traffic-pcie", "traffic-utilization-1"):
        assert found[name].summary.endswith(told)
        assert "what tp sent" not in found[name].summary
    assert "was not counted" not in found["traffic-utilization-2"].summary


def test_a_link_that_was_counted_is_believed_whatever_the_sum() -> None:
    """What a switch adds up takes fewer bytes than a ring's: the path is known, so nothing took another link."""
    path = msgspec.convert({"link": "nvlink", "expected_bytes": 1, "text": "x"}, Path)
    for known in (True, False):
        traffic = msgspec.structs.replace(make_traffic(wire_bytes_per_sequence=5e9), path=path if known else None)
        found = _by_id(make_report([make_result(1.0, profile=make_profile(tx=1e6, nvlink=1e9), traffic=traffic)]))
        assert ("was not counted" in found["traffic-pcie"].summary) is not known
        assert ("was not counted" in found["traffic-utilization-1"].summary) is not known


def test_a_link_that_was_not_counted_once_is_said_of_that_batch_size() -> None:
    """NVLink's counter could not be read in two cases of four: of the others it is known where their bytes went."""
    results = []
    for size in (1, 2, 4, 8):
        counted = size in {1, 4}
        profile = make_profile(tx=1e6, nvlink=1e9)
        if not counted:
            for device in profile.devices:
                del device.metrics["nvlink_tx_bytes_per_s"]
        path = msgspec.convert({"link": "nvlink" if counted else None, "expected_bytes": 1, "text": "x"}, Path)
        traffic = msgspec.structs.replace(make_traffic(wire_bytes_per_sequence=6e7), path=path)
        results.append(make_result(1.0, profile=profile, traffic=traffic, strategy="tp", batch_size=size))
    found = _by_id(make_report(results))
    told = "; less than half of what tp sent at batch sizes 2 and 8 was seen, as it took a link that was not counted."
    assert found["traffic-pcie"].summary.endswith(
        f"; not in it, as it went over NVLink: what tp sends from GPU to GPU{told}"
    )
    assert found["traffic-utilization-1"].summary.endswith(told)


def test_memory_has_capacity_and_the_predicted_threshold_where_they_are_near() -> None:
    """The axes reach both."""
    chart = _by_id(_paper())["memory"]
    rows = list(values_of(chart.spec))
    assert {"v": 32.0, "t": "32 GiB of each GPU"} in rows
    assert {"s": "iok", "b": 112, "v": 32.0, "t": "iok: 112 should fit"} in rows
    assert chart.spec["encoding"]["x"]["scale"]["domain"][1] > 112
    assert chart.spec["encoding"]["y"]["scale"]["domain"][1] > 32
    assert (
        "32 GiB of each GPU may be used; the largest batch size that should fit: mp 112, tp 112, iok 112."
        in chart.summary
    )


def test_each_prediction_is_written_on_a_line_of_its_own() -> None:
    """However far apart they are: how wide a chart is, is the page's. Below the curves, on top of all dotted lines."""
    spec = _by_id(_paper())["memory"].spec
    layers = spec["layer"]
    rules = [place for place, layer in enumerate(layers) if layer["mark"].get("strokeDash") == [2, 3]]
    texts = [place for place, layer in enumerate(layers) if "dx" in layer["mark"] and "expr" in layer["mark"]["dx"]]
    assert (len(rules), len(texts)) == (3, 6)
    assert max(rules) < min(texts)
    assert [layers[place]["mark"]["style"] for place in texts] == ["halo", "note"] * 3
    heights = [-layers[place]["mark"]["dy"] for place in texts]
    assert heights == [9, 9, 9 + axes.LINE, 9 + axes.LINE, 9 + 2 * axes.LINE, 9 + 2 * axes.LINE]
    low, high = spec["encoding"]["y"]["scale"]["domain"]
    least = min(row["v"] for row in values_of(spec) if "v" in row)
    assert axes.HEIGHT * (least - low) / (high - low) > heights[-1] + 5


def test_a_capacity_far_above_is_said_and_not_drawn() -> None:
    """Else every curve would lie on the ground."""
    chart = _by_id(_paper(memory_gib=1000))["memory"]
    assert chart.spec["encoding"]["y"]["scale"]["domain"][1] < 40
    assert "1,000 GiB of each GPU may be used, far above this chart" in chart.summary


def test_a_cap_is_the_capacity() -> None:
    """Of a GPU of which a case may use a part."""
    results = [make_result(memory=make_memory(), gpu_memory_bytes=20 * GIB)]
    assert "20 GiB of each GPU may be used" in _by_id(make_report(results))["memory"].summary


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


def test_a_case_of_one_device_on_several_gpus_has_nothing_to_balance() -> None:
    """Its launches ran on one GPU after the other: what they differ in is no imbalance."""
    result = make_result(profile=make_profile(1), devices=1, memory=make_memory(1))
    (launch,) = result.launches
    (device,) = make_profile(1).devices
    other = make_profile(devices=[msgspec.structs.replace(device, index=1)])
    memory = [msgspec.structs.replace(launch.memory[0], index=1)]
    result.launches.append(msgspec.structs.replace(launch, profile=other, memory=memory))
    found = charts.of_report(make_report([result]))
    assert "Memory of each GPU: there is one device." in found.omitted
    assert "GPU utilisation of each GPU: there is one device." in found.omitted


def test_strategies_beside_each_other_have_room_to_the_axis() -> None:
    """The first stands left of its batch size; no batch size below 1 is ticked."""
    for name in ("balance-memory", "accuracy"):
        spec = _by_id(_paper())[name].spec
        low, _ = spec["encoding"]["x"]["scale"]["domain"]
        places = [row["b"] for row in values_of(spec) if "n" in row]
        assert min(places) < 1
        assert min(places) / low >= 1.2
        assert spec["encoding"]["x"]["axis"]["values"][0] == 1
    assert axes.batch_sizes([0.4, 1, 4])["axis"]["values"] == [1, 2, 4], "as many strategies as it takes"


def test_cases_of_several_models_are_charts_of_their_own() -> None:
    """Ids stay unique, titles say which."""
    report = make_report([make_result(model="small"), make_result(model="large")])
    found = charts.of_report(report)
    assert [chart.id for chart in found.charts] == ["time-1", "throughput-1", "time-2", "throughput-2"]
    assert [chart.title for chart in found.charts][::2] == ["Time by batch size: small", "Time by batch size: large"]
    assert all(line.startswith(("small: ", "large: ")) for line in found.omitted)


def test_panels_are_told_apart_in_words_for_people() -> None:
    """A cap in GiB, and of the one without a cap that it has none."""
    report = make_report([make_result(), make_result(gpu_memory_bytes=18575523840)])
    assert [chart.title for chart in charts.of_report(report).charts][::2] == [
        "Time by batch size: no memory limit",
        "Time by batch size: memory limit 17.3 GiB per GPU",
    ]


def test_a_chart_knows_what_was_measured() -> None:
    """For a picture, which stands alone; a time line too."""
    report = _judged()
    measured = "huggyllama/llama-30b, float16, 4 x NVIDIA H200, hellaswag dataset"
    found = charts.of_report(report).charts + charts.of_case(sampled(30), report.environment)
    assert {chart.measured for chart in found} == {measured}


def test_the_threshold_is_predicted_of_old_reports_too() -> None:
    """Those that were written before it was kept."""
    report = _paper()
    report.capacity = []
    assert "mp 112, tp 112, iok 112" in _by_id(report)["memory"].summary


def test_all_specifications_of_a_large_report_stay_small() -> None:
    """3 strategies, 7 batch sizes, 4 GPUs, long runs: under 2 MB with the time lines of every case."""
    report = _judged()
    text = [json.dumps(chart.spec) for chart in charts.of_report(report).charts]
    lines = charts.of_case(sampled(2000), report.environment)
    text += [json.dumps(chart.spec) for chart in lines] * 21
    assert sum(map(len, text)) < 2e6
