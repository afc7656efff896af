"""What `llmgpu trend` shows: tables in the terminal, and a page of charts."""

from __future__ import annotations

from pathlib import Path

import altair
import pytest
from support.report_factory import make_failed, make_result, make_traffic
from support.verdict_factory import keep, summed

from pytest_llmgpu.cli import main
from pytest_llmgpu.render import trend as rendered
from pytest_llmgpu.render.charts import Chart

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_the_command_prints_the_newest_reports_with_their_changes(capsys: pytest.CaptureFixture[str]) -> None:
    """The heading has date, number and commit, a changed figure has a mark, and the reasons follow."""
    for number in (1, 2, 3):
        keep(number, make_failed("oom") if number == 3 else summed(1.0))
    assert main(["trend", ".llmgpu", "--last", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(", 2 reports")
    assert lines[2].startswith(
        "1 change in 2 reports. Steps were searched in 0 of 1 line of times: that needs 6 undisturbed "
    )
    assert [line.split() for line in lines[4:8]] == [
        ["time", "(s)"],
        ["case", "2026-01-02", "2026-01-03"],
        ["0002", "0003"],
        ["00000002", "00000003"],
    ]
    assert lines[9].split(maxsplit=2) == ["mp-bs1", "210", "! OOM"]
    assert lines[-1] == "! 0003 00000003 mp-bs1 time: oom, was completed in report 0002."
    assert main(["trend", "--last", "0"]) == 2
    assert main(["trend", "--last", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(", 1 report")


def test_broken_reports_are_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status shows that the trend is incomplete."""
    paths = [keep(number, summed(1.0)) for number in (1, 2)]
    paths[0].write_bytes(b"{")
    assert main(["trend"]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{paths[0].parent.name}, 1 report\n")
    assert "\nNo change was found in 1 report. Steps were searched in 0 of 1 line of times: " in printed.out
    assert str(paths[0]) in printed.err


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_page_has_charts_and_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chart is valid Vega-Lite, marks its changes and names its lines; a line has a gap without the case."""
    drawn: dict[str, Chart] = {}

    def image(chart: Chart, *_: object, **__: object) -> bytes:
        drawn[chart.id] = chart
        return b"<svg/>"

    monkeypatch.setattr(rendered, "image", image)
    for number in (1, 2, 3):
        traffic = make_traffic(wire_bytes_per_sequence=1e6 * (1 + number // 3))
        keep(number, make_result(strategy="<b>", traffic=traffic), *([summed(1.0)] if number != 2 else []))
    assert main(["trend", "--html", "site/trend.html"]) == 0
    page = Path("site/trend.html").read_text("utf-8")
    assert "&lt;b&gt;-bs1" in page
    assert not {"<b>", "://"} & {found for found in ("<b>", "://") if found in page}
    assert page.count('<source media="screen and (prefers-color-scheme: dark)" srcset="data:image/svg+xml;base64,') == 3
    assert "<h1>1 change in 3 reports. Steps were searched in 0 of 2 lines of times: " in page
    assert "! 0003 00000003 &lt;b&gt;-bs1 traffic: " in page
    assert page.count('<a href="#trend-') == 3
    assert list(drawn) == ["trend-time", "trend-sequences", "trend-traffic"]
    for chart in drawn.values():
        altair.Chart.from_dict(chart.spec)
    assert drawn["trend-traffic"].summary == "1 case over 3 reports of one machine, oldest first."
    rows = drawn["trend-time"].spec["data"]["values"]
    assert [row["p"] for row in rows if row["s"] == "mp"] == [0, 1]
    marked = [row for row in drawn["trend-traffic"].spec["data"]["values"] if "k" in row]
    assert [(row["x"], row["k"]) for row in marked] == [("2026-01-03|0003|00000003", "worse")]
