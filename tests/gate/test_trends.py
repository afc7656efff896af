from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import altair
import msgspec
import pytest
from support.chart_data import texts_of
from support.report_factory import (
    make_answers,
    make_failed,
    make_generation,
    make_profile,
    make_report,
    make_result,
    make_traffic,
    make_work,
)
from support.stored_reports import H200, gpus, measured
from support.verdict_factory import BATCHES, with_launches

from pytest_llmgpu.cli import main
from pytest_llmgpu.gate import promotion
from pytest_llmgpu.gate.calibration import Measured, Noise, default_path, dump
from pytest_llmgpu.gate.noise_model import Deviation
from pytest_llmgpu.gate.trends import Trend, chosen, trends
from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.trends import of_trends
from pytest_llmgpu.render.html.trend import render
from pytest_llmgpu.render.terminal.trends import tables
from pytest_llmgpu.report.derived import derive
from pytest_llmgpu.report.file import load
from pytest_llmgpu.report.report import Commit, Session
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.store.store import save, stored

pytestmark = pytest.mark.usefixtures("empty_folder")

_STORE = Path(".llmgpu")
_DAY = "2026-01-02"
_SVG_WIDTH = re.compile(r'<svg[^>]* width="([\d.]+)')


def _timed(level: float, **fields: Any) -> CaseResult:
    result = with_launches([level] * 3, sequences=BATCHES * fields.get("batch_size", 1), **fields)
    derive(result)
    return result


def _keep(number: int, *results: CaseResult) -> None:
    report = make_report(results)
    report.commit = Commit(sha=f"{number:08x}" * 5)
    report.session = Session(complete=True)
    report.environment.gpus = gpus(*["NVIDIA H200"] * 4)
    save(report, _STORE)


def _trend(metric: str = "time") -> Trend:
    return next(trend for trend in trends(chosen(_STORE)) if trend.metric == metric)


def _plain(text: str, _style: str) -> str:
    return text


def test_a_trend_has_each_report() -> None:
    """The oldest comes first, and each has its commit."""
    for number, level in enumerate((1.0, 1.0, 1.5, 1.5), 1):
        _keep(number, _timed(level))
    trend = _trend()
    assert [column.number for column in trend.columns] == [1, 2, 3, 4]
    assert trend.columns[0].commit == "00000001"
    (line,) = trend.lines
    assert [figure.value if figure else None for figure in line.figures] == [210.0, 210.0, 315.0, 315.0]
    assert [figure.change if figure else None for figure in line.figures] == [None, None, "worse", None]


def test_a_report_without_the_case_is_skipped() -> None:
    """The case is compared with the last earlier report that has it."""
    _keep(1, _timed(1.0), _timed(1.0, strategy="tp"))
    _keep(2, _timed(1.0))
    _keep(3, _timed(1.0), _timed(0.5, strategy="tp"))
    _, tp = _trend().lines
    assert tp.figures[1] is None
    assert tp.figures[2] is not None
    assert tp.figures[2].change == "better"


def test_a_batch_that_no_longer_fits_is_worse() -> None:
    """The case has no figure then."""
    _keep(1, _timed(1.0))
    _keep(2, make_failed("oom"))
    (line,) = _trend().lines
    assert line.figures[1] is not None
    assert (line.figures[1].value, line.figures[1].outcome, line.figures[1].change) == (None, "oom", "worse")
    assert "! OOM" in tables([_trend()], _plain)


def test_more_bytes_are_worse_however_few() -> None:
    """Traffic has no threshold."""
    for number, calls in ((1, 960), (2, 961)):
        result = _timed(1.0)
        traffic = make_traffic(wire_bytes_per_sequence=1e6 * calls)
        ranks = [[msgspec.structs.replace(one, calls=calls) for one in rank] for rank in traffic.ranks]
        result.traffic = msgspec.structs.replace(traffic, ranks=ranks)
        _keep(number, result)
    (line,) = _trend("sent").lines
    assert line.figures[1] is not None
    assert line.figures[1].change == "worse"


def test_cases_of_one_id_are_distinguished_by_what_differs() -> None:
    """A limit of the GPU memory makes another case."""
    _keep(1, _timed(1.0), _timed(1.0, strategy="tp"))
    _keep(2, _timed(1.0, gpu_memory_bytes=16 << 30))
    assert [line.name for line in _trend().lines] == ["mp-bs1 uncapped", "mp-bs1 16 GiB", "tp-bs1"]


def _texts(new_tokens: int = 3) -> CaseResult:
    """Return a case that generated."""
    result = _timed(1.0, workload="generate", prompt_tokens=9, new_tokens=new_tokens)
    batches = len(result.launches[0].batches.latency_s)
    texts = make_generation(
        [[1] * new_tokens] * batches,
        [[-1.0] * new_tokens] * batches,
        [[-1.0] * new_tokens] * batches,
        first_token_s=[0.02] * batches,
        step_s=[0.01] * (new_tokens - 1) * batches,
    )
    result.launches = [msgspec.structs.replace(one, generation=texts, load_s=2.0) for one in result.launches]
    derive(result)
    return result


def test_cases_of_both_workloads_have_the_tables_of_their_figures() -> None:
    """A score has no tokens; names have the workload where it alone differs."""
    scored = _timed(1.0)
    scored.launches = [msgspec.structs.replace(one, load_s=2.0) for one in scored.launches]
    _keep(1, scored, _texts())
    _keep(2, _texts(new_tokens=4))
    names = {trend.metric: [line.name for line in trend.lines] for trend in trends(chosen(_STORE))}
    texts = ["mp-generate-bs1 3 tokens after 9", "mp-generate-bs1 4 tokens after 9"]
    assert names["time"] == ["mp-bs1", *texts]
    assert names["first_token"] == names["token_time"] == texts
    assert names["load_time"] == ["mp score", "mp 3 tokens after 9", "mp 4 tokens after 9"]


@pytest.mark.parametrize("undisturbed", [0, 1])
def test_times_of_disturbed_launches_are_marked_and_found_as_no_change(undisturbed: int) -> None:
    """The gate calls them INVALID; exact figures, and times of which most launches are undisturbed, are not marked."""
    profile = msgspec.structs.replace(make_profile(), invalid=["processes of other programs: GPU 0 has 2"])
    for number in range(1, 9):
        result = _timed(1.0 if number < 7 else 1.5)
        result.traffic = make_traffic()
        for launch in result.launches[undisturbed:] if number >= 7 else result.launches[:1]:
            launch.profile = profile
        _keep(number, result)
    (line,) = _trend().lines
    assert [one.change if one else None for one in line.figures] == [None] * 6 + ["disturbed"] * 2
    (sent,) = _trend("sent").lines
    assert not any(one and one.change for one in sent.figures)
    text = tables(trends(chosen(_STORE)), _plain)
    assert "? 315 " in text
    assert "? 0008 mp-bs1: processes of other programs" in text
    page = render(trends(chosen(_STORE)), "m")
    assert "? 0008 mp-bs1: processes of other programs" in page


def test_a_slower_prefill_is_marked_where_the_history_has_decode_steps() -> None:
    """The gate's verdict on the device time of the prefill stands, since no history is searched for it."""
    for number in range(1, 9):
        result = _texts()
        for launch in result.launches:
            launch.work = make_work()
            ranks = [
                msgspec.structs.replace(
                    rank, device_time_s=[time_s * (1.2 if number == 8 else 1.0) for time_s in times]
                )
                for rank in launch.work.ranks
                if (times := rank.device_time_s) is not None
            ]
            launch.prefill_work = msgspec.structs.replace(launch.work, ranks=ranks)
        _keep(number, result)
    (line,) = _trend("device_time").lines
    assert [one.change if one else None for one in line.figures] == [None] * 7 + ["worse"]


def test_load_time_has_one_line_for_each_series() -> None:
    """A strategy loads its model once for all batch sizes; a case that failed has the load time too."""
    for number in (1, 2):
        results = [_timed(1.0, batch_size=size, strategy=name) for name in ("mp", "tp") for size in (1, 8)]
        for result in results:
            result.launches = [msgspec.structs.replace(one, load_s=float(number)) for one in result.launches]
        results[0].outcome = "error"
        _keep(number, *results)
    trend = _trend("load_time")
    figures = {line.name: [one.value if one else None for one in line.figures] for line in trend.lines}
    assert figures == {"mp": [1.0, 2.0], "tp": [1.0, 2.0]}
    assert (trend.of, _trend().of) == ("series", "case")
    assert len(of_trends([trend]).charts[0].rows) == len(of_trends([trend], {64}).charts[0].rows) == 2


def test_the_table_has_a_column_for_each_report_and_the_changes() -> None:
    """The heading has date, number and commit, a changed figure has a mark and the change, and the reasons follow."""
    for number, level in ((1, 1.0), (2, 1.5)):
        _keep(number, _timed(level))
    lines = tables([_trend()], _plain).splitlines()
    assert lines[0] == "time (s)"
    assert lines[1].split() == ["case", _DAY, _DAY]
    assert lines[2].split() == ["0001", "0002"]
    assert lines[3].split() == ["00000001", "00000002"]
    assert lines[5].split(maxsplit=2) == ["mp-bs1", "210", "! 315 (+50.0 %)"]
    assert re.fullmatch(r"! 0002 mp-bs1 time: Time \+50\.0 % .*", lines[-1])


def test_a_table_without_changes_states_it() -> None:
    """The last line states it."""
    for number in (1, 2):
        _keep(number, _timed(1.0))
    assert tables([_trend()], _plain).endswith("\n\nNo change was found.")


def test_a_trend_is_of_one_machine() -> None:
    """With several machines a name or the folder of one is needed."""
    save(measured(), _STORE)
    save(measured(seen=gpus("NVIDIA A100")), _STORE)
    with pytest.raises(ValueError, match=f"give --machine, one of 1x-NVIDIA-A100-140GiB, {H200}"):
        chosen(_STORE)
    assert [one.machine for one in chosen(_STORE, H200)] == [H200]
    assert [one.machine for one in chosen(_STORE / H200)] == [H200]
    with pytest.raises(ValueError, match=r"machine 'other': storage \.llmgpu has no report of it; allowed are"):
        chosen(_STORE, "other")
    for place in (Path("nothing"), stored(_STORE)[0].path):
        with pytest.raises(
            ValueError, match=f"storage {place}: it has no numbered report that can be read; .* show REPORT shows one"
        ):
            chosen(place)


def test_a_promoted_report_appears_once() -> None:
    """A copy under the name of the baseline is left out, but not another run of the same commit."""
    for number, level in ((1, 1.0), (2, 1.5)):
        _keep(number, _timed(level))
    _keep(2, _timed(1.6))
    for kept in stored(_STORE):
        promotion.keep(load(kept.path), None, path=None, store=_STORE)
    assert len(stored(_STORE)) == 6
    assert [one.number for one in chosen(_STORE)] == [1, 2, 3]


def test_reports_are_in_the_order_of_measurement() -> None:
    """A report that was stored later has a higher number, but can be older."""
    for created in ("2026-01-02T03:04:05Z", "2026-01-01T03:04:05Z"):
        report = measured()
        report.created = created
        save(report, _STORE)
    assert [one.number for one in chosen(_STORE)] == [2, 1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_chart_marks_and_names_what_changed() -> None:
    """The chart is valid Vega-Lite, and its caption explains the mark."""
    for number, level in ((1, 1.0), (2, 1.5)):
        _keep(number, _timed(level), _timed(1.0, strategy="tp"))
    (chart,) = [chart for chart in of_trends(trends(chosen(_STORE))).charts if chart.id == "trend-time"]
    altair.Chart.from_dict(chart.spec)
    marked = [row for row in chart.spec["data"]["values"] if "k" in row]
    assert [(row["c"], row["x"], row["k"]) for row in marked] == [("mp-bs1", f"{_DAY}|0002|00000002", "worse")]
    assert [row["c"] for row in chart.spec["layer"][3]["data"]["values"]] == ["mp-bs1", "tp-bs1"]
    assert "1 worse (\N{BLACK UP-POINTING TRIANGLE})" in chart.summary
    assert chart.rows == [["mp-bs1", "210", "315 (+50.0 %), worse"], ["tp-bs1", "210", "210"]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_counted_change_has_a_mark() -> None:
    """A case without a figure has a cross above the plot and its mark above that, and cases do not share a line."""
    _keep(1, _timed(1.0), _timed(1.0, strategy="tp"), _timed(1.0, strategy="iok"))
    _keep(2, make_failed("oom"), make_failed("oom", strategy="tp"), _timed(1.5, strategy="iok"))
    (chart,) = [chart for chart in of_trends(trends(chosen(_STORE))).charts if chart.id == "trend-time"]
    altair.Chart.from_dict(chart.spec)
    assert "3 worse" in chart.summary
    layers = [part["data"]["values"] for part in (chart.spec, *chart.spec["layer"]) if "data" in part]
    on_axis = [row["c"] for row in layers[0] if "k" in row]
    at_the_top = [[row["l"] for row in rows] for rows in layers if all("l" in row for row in rows)]
    assert on_axis == ["iok-bs1"]
    mark = "\N{BLACK UP-POINTING TRIANGLE}"
    cross = "\N{BALLOT X}"
    assert at_the_top == [[cross], [f"{mark} mp-bs1: OOM"], [cross], [f"{mark} tp-bs1: OOM"]]
    heights = [
        layer["encoding"]["y"]["value"] for layer in chart.spec["layer"] if "value" in layer["encoding"].get("y", {})
    ]
    assert len(set(heights)) == 4


def test_utilisation_is_not_judged() -> None:
    """It explains a change of time, but is not a change itself."""
    for number, busy in ((1, 80.0), (2, 40.0)):
        result = _timed(1.0)
        result.launches[0].profile = make_profile(1, busy=busy)
        _keep(number, result)
    (line,) = _trend("utilization").lines
    assert [(figure.value, figure.change) if figure else None for figure in line.figures] == [
        (80.0, None),
        (40.0, None),
    ]
    (chart,) = of_trends([_trend("utilization")]).charts
    assert chart.title == "Mean GPU utilisation by report"
    assert chart.summary.endswith("changes: the gate does not judge this metric.")


def test_the_calibration_of_the_machine_is_used() -> None:
    """One launch is not enough with the built-in noise, but with little calibrated noise."""
    for number, level in ((1, 1.0), (2, 1.1)):
        result = with_launches([level], sequences=BATCHES)
        derive(result)
        _keep(number, result)

    def marks(metric: str) -> list[str | None]:
        (line,) = _trend(metric).lines
        return [figure.change if figure else None for figure in line.figures]

    assert marks("time") == [None, None]
    newest = stored(_STORE)[-1]
    key = load(newest.path).cases[0].key
    noise = Noise(id="mp-bs1", launches=1000, time=Deviation(sd=0.005, degrees=999))
    measured = Measured(machine=newest.machine, cases={key: noise})
    dump(measured, default_path(_STORE, newest.machine))
    assert marks("time") == [None, "worse"]


def test_a_change_of_time_is_marked_once() -> None:
    """Throughput has the figures, but no mark and no reason."""
    for number, level in ((1, 1.0), (2, 1.5)):
        _keep(number, _timed(level))
    found = trends(chosen(_STORE))
    assert [trend.metric for trend in found] == ["time", "throughput", "load_time"]
    text = tables(found, _plain)
    assert text.count("! 0002") == text.count("! 315") == 1
    assert text.count("! ") == 3, "of the figure, the legend and the reason"
    time, throughput, _ = of_trends(found).charts
    assert "1 worse" in time.summary
    assert throughput.summary.endswith("changes: marked in the chart of time.")


def test_a_slower_load_is_marked_in_the_trend_of_its_metric() -> None:
    """The verdict is one per series, and the line of each of its cases has the mark."""
    for number, load_s in ((1, 10.0), (2, 100.0)):
        result = _timed(1.0)
        for launch in result.launches:
            launch.load_s = load_s
        _keep(number, result)
    (trend,) = [trend for trend in trends(chosen(_STORE)) if trend.metric == "load_time"]
    (line,) = trend.lines
    assert [(figure.value, figure.change) for figure in line.figures if figure] == [(10.0, None), (100.0, "worse")]


def test_other_log_likelihoods_of_random_weights_are_marked() -> None:
    """Their accuracy is chance, but a change of their log-likelihoods is a regression of accuracy."""
    for number, factor in ((1, 1.0), (2, 1.5)):
        accuracy = make_answers([True] * 50, [-3.0 * factor] * 200)
        _keep(number, make_result(accuracy=accuracy, load_format="dummy", dtype="float16"))
    (trend,) = [trend for trend in trends(chosen(_STORE)) if trend.metric == "accuracy"]
    (line,) = trend.lines
    assert [figure.change for figure in line.figures if figure] == [None, "worse"]


def test_a_loss_of_accuracy_is_marked_at_the_batch_sizes_that_lost() -> None:
    """One verdict is about all batch sizes, and names those that lost items."""
    for number, wrong in ((1, 0), (2, 40)):
        right, answers = [True] * 100, [item >= wrong for item in range(100)]
        cases = [make_result(accuracy=make_answers(hits), batch_size=size) for size, hits in ((1, right), (2, answers))]
        _keep(number, *cases)
    (trend,) = [trend for trend in trends(chosen(_STORE)) if trend.metric == "accuracy"]
    marks = {line.name: [figure.change if figure else None for figure in line.figures] for line in trend.lines}
    assert marks == {"mp-bs1": [None, None], "mp-bs2": [None, "worse"]}


def test_the_first_column_is_judged_too() -> None:
    """It is compared with a report without a column."""
    for number, level in enumerate((1.0, 1.5, 1.5), 1):
        _keep(number, _timed(level))
    (trend,) = [trend for trend in trends(chosen(_STORE), last=2) if trend.metric == "time"]
    assert [column.number for column in trend.columns] == [2, 3]
    (line,) = trend.lines
    assert [figure.change if figure else None for figure in line.figures] == ["worse", None]


def test_the_command_prints_the_newest_reports(capsys: pytest.CaptureFixture[str]) -> None:
    """`--last` is the number of reports."""
    for number in (1, 2, 3):
        _keep(number, _timed(1.0))
    assert main(["trend", str(_STORE), "--last", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{H200}, 2 reports\n\ntime (s)\n")
    assert "0001" not in printed
    assert main(["trend", "--last", "0"]) == 2
    assert capsys.readouterr().err == "llmgpu: --last 0: a number of at least 1 is needed\n"


def test_the_page_needs_no_network_and_escapes_names() -> None:
    """It contains the images for light and dark."""
    for number in (1, 2):
        _keep(number, _timed(1.0, strategy="<script>"))
    assert main(["trend", "--html", "site/trend.html", "--output", "site", "--format", "svg"]) == 0
    page = Path("site/trend.html").read_text("utf-8")
    assert "<script>" not in page
    assert "&lt;script&gt;-bs1" in page
    assert "://" not in page
    assert page.count('<source media="screen and (prefers-color-scheme: dark)" srcset="data:image/svg+xml;base64,') == 3
    assert page.count('<img src="data:image/svg+xml;base64,') == 3
    assert page.count('role="region" aria-label="') == page.count('tabindex="0"') == 2 * 3
    assert Path("site/trend-time.svg").is_file()


def test_a_narrow_screen_gets_a_narrow_image() -> None:
    """A wide image would be cut."""
    for number in (1, 2):
        _keep(number, _timed(1.0))
    page = render([_trend()], "x")
    narrow = "screen and (max-width: 34rem)"
    sources = dict(re.findall(r'<source media="([^"]+)" srcset="data:image/svg\+xml;base64,([^"]+)">', page))
    assert list(sources)[:2] == [f"{narrow} and (prefers-color-scheme: dark)", narrow], "the first that fits is shown"
    widths = {media: float(_SVG_WIDTH.findall(base64.b64decode(text).decode())[0]) for media, text in sources.items()}
    assert {media: width < 400 for media, width in widths.items()} == {media: narrow in media for media in widths}


def test_a_change_has_one_mark_in_the_chart_and_in_the_list() -> None:
    """The mark of the terminal is ASCII and does not appear in the page."""
    for number, level in ((1, 1.0), (2, 1.5)):
        _keep(number, _timed(level))
    page = render([_trend()], "x")
    assert "<li>\N{BLACK UP-POINTING TRIANGLE} 0002 mp-bs1: Time +50.0 %" in page
    assert "<li>!" not in page


def test_one_case_of_one_report_is_counted_as_one() -> None:
    """The summary has the singular."""
    _keep(1, _timed(1.0))
    (chart,) = of_trends([_trend()]).charts
    assert chart.summary.startswith("1 case over 1 report of one machine")
    _keep(2, _timed(1.0), _timed(1.0, strategy="tp"))
    (chart,) = of_trends([_trend()]).charts
    assert chart.summary.startswith("2 cases over 2 reports of one machine")


@pytest.mark.parametrize("lowest", [None, 0.5])
def test_names_of_lines_that_end_together_do_not_overlap(lowest: float | None) -> None:
    """A lower name moves down by the height of a line, and stays inside the chart."""
    levels = {"mp": 2.0, "tp": 1.0, "iok": 1.001, "other": 1.002, **({} if lowest is None else {"last": lowest})}
    _keep(1, *(_timed(level, strategy=name) for name, level in levels.items()))
    (chart,) = of_trends([_trend()]).charts
    texts = texts_of(chart)
    places = [texts[f"{name}-bs1"][1] for name in sorted(levels, key=levels.__getitem__, reverse=True)]
    assert all(after - place >= axes.LINE - 1 for place, after in itertools.pairwise(places))
    assert places[-1] <= axes.HEIGHT + axes.LINE / 2


def test_a_metric_that_is_always_0_has_no_chart_but_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """The other charts are drawn, and the page and the command state the reason."""
    for number in (1, 2):
        result = _timed(1.0)
        result.traffic = make_traffic(wire_bytes_per_sequence=0.0)
        _keep(number, result)
    assert main(["trend", "--html", "trend.html", "--output", "site", "--format", "svg"]) == 0
    reason = "Sent by report: sent is 0 in every report."
    assert f"left out: {reason}\n" in capsys.readouterr().out
    page = Path("trend.html").read_text("utf-8")
    assert reason in page
    assert "Time by report</h2>" in page
    assert "Sent by report</h2>" not in page
    assert Path("site/trend-time.svg").is_file()
    assert not Path("site/trend-sent.svg").exists()


def test_broken_reports_are_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status shows that the trend is incomplete; also a copy of a promotion can be broken."""
    paths = [save(measured(), _STORE) for _ in range(3)]
    for path in paths[:2]:
        path.write_bytes(b"{")
    assert main(["trend"]) == 2
    printed = capsys.readouterr()
    assert "1 report\n" in printed.out
    assert sorted(printed.err.splitlines()) == [
        f"llmgpu: report {path}: is not valid JSON: Input data was truncated" for path in paths[:2]
    ]
    paths[2].write_bytes(b"{")
    assert main(["trend"]) == 2
    assert "no numbered report that can be read" in capsys.readouterr().err.splitlines()[-1]


def _daily(
    levels: Sequence[float], gpu: str = "", *, execution: Literal["cuda_graphs", "eager"] = "cuda_graphs"
) -> None:
    """Store one report a day, with these times of a case."""
    for number, level in enumerate(levels, 1):
        result = _timed(level)
        result.case = msgspec.structs.replace(result.case, execution=execution)
        report = make_report([result])
        report.created = f"2026-01-{number:02}T03:04:05Z"
        report.commit = Commit(sha=f"{number:08x}" * 5)
        report.session = Session(complete=True)
        report.environment.gpus = [
            msgspec.structs.replace(one, uuid=f"{gpu}{place}") for place, one in enumerate(gpus(*["NVIDIA H200"] * 4))
        ]
        save(report, _STORE)


def test_a_step_is_found_over_the_history() -> None:
    """3 % of replayed graphs is less than the gate allows of one report, and is marked where it began."""
    _daily([1.0, 1.001, 0.999, 1.0, 1.001, 0.999, 1.0, 1.03, 1.031, 1.029])
    (line,) = _trend().lines
    [(place, figure)] = [(place, one) for place, one in enumerate(line.figures) if one is not None and one.change]
    assert (place, figure.change) == (7, "worse")
    assert figure.growth == pytest.approx(0.03, abs=0.002)
    (chart,) = of_trends([_trend()]).charts
    assert re.fullmatch(r"216\.3 \(\+3\.\d %\), worse", chart.rows[0][8])


def test_a_change_before_the_first_column_is_marked_where_it_was_found() -> None:
    """Reports without a column belong to the history."""
    _daily([1.0, 1.001, 0.999, 1.0, 1.001, 0.999, 1.0, 1.03, 1.031, 1.029])
    (line,) = next(trend for trend in trends(chosen(_STORE), last=2) if trend.metric == "time").lines
    assert [one.change if one else None for one in line.figures] == ["worse", None]
    (line,) = next(trend for trend in trends(chosen(_STORE), last=1) if trend.metric == "time").lines
    assert [one.change if one else None for one in line.figures] == [None]


@pytest.mark.parametrize(("other", "execution"), [("b", "cuda_graphs"), ("", "eager")])
def test_a_history_is_of_quiet_times_of_the_same_gpus(other: str, execution: Literal["cuda_graphs", "eager"]) -> None:
    """Reports of other GPUs, and times of eager forwards, do not show a change of 1 %."""
    _daily([1.0, 1.001, 0.999, 1.0, 1.001, 0.999, 1.0], execution=execution)
    for number, level in enumerate((1.01, 1.011, 1.009), 8):
        result = _timed(level)
        result.case = msgspec.structs.replace(result.case, execution=execution)
        report = make_report([result])
        report.created = f"2026-01-{number:02}T03:04:05Z"
        report.environment.gpus = [
            msgspec.structs.replace(one, uuid=f"{other}{place}") for place, one in enumerate(gpus(*["NVIDIA H200"] * 4))
        ]
        save(report, _STORE)
    (line,) = _trend().lines
    assert len(line.figures) == 10
    assert not any(one.change for one in line.figures if one is not None)


def test_a_chart_draws_few_batch_sizes_and_those_that_changed() -> None:
    """Each drawn line has its name; the data has every case."""
    sizes = (1, 2, 4, 8)
    _keep(1, *(_timed(1.0, batch_size=size) for size in sizes))
    _keep(2, *(_timed(1.5 if size == 4 else 1.0, batch_size=size) for size in sizes))

    def drawn(batch_sizes: tuple[int, ...] | None = None) -> list[str]:
        (chart,) = of_trends([_trend()], batch_sizes).charts
        assert [row[0] for row in chart.rows] == [f"mp-bs{size}" for size in sizes]
        named = chart.spec["layer"][3]["data"]["values"]
        assert {row["c"] for row in named} == {row["c"] for row in chart.spec["data"]["values"]}
        return sorted(row["c"] for row in named)

    assert drawn() == ["mp-bs1", "mp-bs4", "mp-bs8"]
    assert drawn((2,)) == ["mp-bs2"]


def test_a_line_has_a_gap_where_a_report_lacks_the_case() -> None:
    """The points before and after it are parts of different lines."""
    for number in (1, 2, 3):
        others = [] if number == 2 else [_timed(1.0, strategy="tp")]
        _keep(number, _timed(1.0), *others)
    (chart,) = of_trends([_trend()]).charts
    parts = {
        name: [row["p"] for row in chart.spec["data"]["values"] if row["c"] == name] for name in ("mp-bs1", "tp-bs1")
    }
    assert parts == {"mp-bs1": [0, 0, 0], "tp-bs1": [0, 1]}


def test_each_report_out_of_memory_has_a_cross(capsys: pytest.CaptureFixture[str]) -> None:
    """The first one has the name of the case; a wrong batch size is one line."""
    _keep(1, _timed(1.0, batch_size=8))
    for number in (2, 3):
        _keep(number, make_failed("oom", batch_size=8))
    (chart,) = of_trends([_trend()]).charts
    crosses, texts = chart.spec["layer"][-2:]
    assert len(crosses["data"]["values"]) == 2
    assert [row["l"] for row in texts["data"]["values"]] == ["\N{BLACK UP-POINTING TRIANGLE} mp-bs8: OOM"]
    assert main(["trend", "--batch-sizes", "1,x"]) == 2
    assert capsys.readouterr().err.startswith("llmgpu: --batch-sizes 1,x: ")
