from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.export_reports import two_strategies
from support.report_factory import make_failed, make_memory, make_profile, make_report, make_result

from pytest_llmgpu.analysis.assess import assess
from pytest_llmgpu.render.exports import FORMATS, export
from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.result import CaseResult, Failure, Series
from pytest_llmgpu.store.store import DEFAULT, save

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize("name", FORMATS)
def test_export_writes_to_stdout_or_to_a_file(llmgpu: Callable[..., str], name: str) -> None:
    """The text is the same with `-`, with nothing and with a path."""
    report = two_strategies()
    dump(report, Path("report.json"))
    expected = export(name, report) + "\n"
    assert llmgpu("export", name, "report.json") == expected
    assert llmgpu("export", name, "report.json", "--output", "-") == expected
    save(report, DEFAULT)
    assert llmgpu("export", name, "latest", "--output", "out") == ""
    assert Path("out").read_text(encoding="utf-8") == expected


def test_the_command_that_shows_a_log_names_the_report_and_the_case(llmgpu: Callable[..., str]) -> None:
    """It can be copied. Cases that failed alike are one finding."""
    failure = Failure(phase="forward", message="bad shape", log_tail="RuntimeError: bad shape")
    launches = [make_failed("crashed", failure, batch_size=size) for size in (1, 8)]
    earlier: list[CaseResult] = []
    for launch in launches:
        earlier.append(assess([launch], earlier=earlier, environment=make_report().environment, options=Options()))
    dump(make_report(earlier), Path("a report.json"))
    printed = llmgpu("show", "a report.json")
    assert printed.count("`llmgpu show 'a report.json' --log mp-bs1`") == 1
    assert "mp-bs8`" not in printed
    assert llmgpu("show", "a report.json", "--log", "mp-bs1") == "RuntimeError: bad shape\n"


def test_an_export_replaces_a_planted_link(llmgpu: Callable[..., str]) -> None:
    """The file that the link names stays as it is; a device is written to."""
    dump(two_strategies(), Path("report.json"))
    Path("victim").write_text("mine")
    Path("out.csv").symlink_to("victim")
    assert llmgpu("export", "csv", "report.json", "--output", "out.csv") == ""
    assert (Path("victim").read_text(), Path("out.csv").is_symlink()) == ("mine", False)
    assert llmgpu("export", "csv", "report.json", "--output", "/dev/null") == ""
    assert Path("/dev/null").is_char_device()


def test_export_judges_the_report_against_a_baseline(llmgpu: Callable[..., str]) -> None:
    """The verdicts are those of the gate under the policy in force."""
    dump(two_strategies(oom=()), Path("base.json"))
    dump(two_strategies(), Path("head.json"))
    printed = llmgpu("export", "csv", "head.json", "--baseline", str(Path("base.json").resolve()))
    rows = {row["id"]: row for row in csv.DictReader(io.StringIO(printed))}
    assert "REGRESSED" in rows["tp-bs64"]["verdict_outcome"]


@pytest.fixture
def _two_sizes(empty_folder: None) -> None:  # noqa: ARG001
    """Write a report of two batch sizes."""
    series = Series(t_s=[0.0, 0.2], devices=[{"power_w": [100.0, 200.0]}] * 4)
    results = [
        make_result(60.0 / size, profile=make_profile(series=series), memory=make_memory(), batch_size=size)
        for size in (1, 2)
    ]
    dump(make_report(results), Path("head.json"))


@pytest.mark.slow
@pytest.mark.usefixtures("_two_sizes")
def test_plot_writes_each_chart_in_each_format(llmgpu: Callable[..., str]) -> None:
    """The output lists the files, and the charts that are left out with the reason."""
    printed = llmgpu("plot", "head.json", "--output", "out", "--format", "png", "--format", "svg").splitlines()
    written = sorted(str(file) for file in Path("out").iterdir())
    assert sorted(line for line in printed if not line.startswith("left out")) == written
    assert {"out/time.png", "out/time.svg", "out/memory.png"} <= set(written)
    assert "left out: NVLink traffic by batch size: there was none." in printed
    assert Path("out/time.png").read_bytes().startswith(b"\x89PNG")
    assert Path("out/time.svg").read_bytes().startswith(b"<svg")


@pytest.mark.usefixtures("_two_sizes")
def test_an_image_stands_alone_in_a_readme(llmgpu: Callable[..., str]) -> None:
    """It has a title, a caption, model and machine, and no address; one for dark backgrounds has its own name."""
    for more in ([], ["--dark"]):
        llmgpu("plot", "head.json", *more, "--output", "out", "--format", "svg", "--case", "mp-bs2")
    text, dark = (Path(f"out/time{end}.svg").read_text("utf-8") for end in ("", "-dark"))
    assert "Time by batch size" in text
    assert "Best of each strategy" in text
    assert text.replace("http://www.w3.org/", "").count("://") == 0
    assert "#ffffff" in text
    assert "#ffffff" not in dark
    assert "huggyllama/llama-30b, float16, 4 x NVIDIA H200" in text
    assert "huggyllama/llama-30b, float16, 4 x NVIDIA H200" in Path("out/timeline-power.svg").read_text("utf-8")


@pytest.mark.usefixtures("empty_folder")
def test_a_case_without_time_lines_is_named(llmgpu: Callable[..., str]) -> None:
    """A case on a CPU has no samples."""
    dump(make_report([make_result(device="cpu")]), Path("head.json"))
    printed = llmgpu("plot", "head.json", "--output", "out", "--format", "svg", "--case", "mp-bs1")
    assert "left out: time lines of mp-bs1: the case has no samples of a GPU" in printed


@pytest.mark.usefixtures("_two_sizes")
def test_without_the_extra_one_line_names_it(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no traceback and no empty folder."""
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    error = refused("plot", "head.json", "--output", "out")
    assert error == "llmgpu: images of charts need vl-convert: pip install 'pytest-llmgpu[report]'\n"
    assert not Path("out").exists()
