from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.report_factory import make_memory, make_profile, make_report, make_result

from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.result import Series


@pytest.fixture(autouse=True)
def _report(empty_folder: None) -> None:  # noqa: ARG001
    """Write a report of two batch sizes."""
    series = Series(t_s=[0.0, 0.2], devices=[{"power_w": [100.0, 200.0]}] * 4)
    results = [
        make_result(60.0 / size, profile=make_profile(series=series), memory=make_memory(), batch_size=size)
        for size in (1, 2)
    ]
    dump(make_report(results), Path("head.json"))


@pytest.mark.slow
def test_plot_writes_each_chart_in_each_format(llmgpu: Callable[..., str]) -> None:
    """The output lists the files, and the charts that are left out with the reason."""
    printed = llmgpu("plot", "head.json", "--output", "out", "--format", "png,svg").splitlines()
    written = sorted(str(file) for file in Path("out").iterdir())
    assert sorted(line for line in printed if not line.startswith("left out")) == written
    assert {"out/time.png", "out/time.svg", "out/memory.png"} <= set(written)
    assert "left out: NVLink traffic by batch size: there was none." in printed
    assert Path("out/time.png").read_bytes().startswith(b"\x89PNG")
    assert Path("out/time.svg").read_bytes().startswith(b"<svg")


def test_an_image_stands_alone_in_a_readme(llmgpu: Callable[..., str]) -> None:
    """It has a title, a caption, model and machine, and no address; one for dark backgrounds has its own name."""
    for more in ("head.json", "--dark"):  # a baseline, too
        llmgpu("plot", "head.json", more, "--output", "out", "--format", "svg", "--case", "mp-bs2")
    text, dark = (Path(f"out/time{end}.svg").read_text("utf-8") for end in ("", "-dark"))
    assert "Time by batch size" in text
    assert "Best of each strategy" in text
    assert "Faint: the baseline." in text
    assert "Faint" not in dark
    assert text.replace("http://www.w3.org/", "").count("://") == 0
    assert "#ffffff" in text
    assert "#ffffff" not in dark
    assert "huggyllama/llama-30b, float16, 4 x NVIDIA H200" in text
    assert "huggyllama/llama-30b, float16, 4 x NVIDIA H200" in Path("out/timeline-power.svg").read_text("utf-8")


def test_without_the_extra_one_line_names_it(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no traceback and no empty folder."""
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    error = refused("plot", "head.json", "--output", "out")
    assert error == "llmgpu: images of charts need vl-convert: pip install 'pytest-llmgpu[report]'\n"
    assert not Path("out").exists()
