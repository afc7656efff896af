from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.faked_runs import BENCHMARK, FakedRuns

from pytest_llmgpu.render.html import report

pytest.importorskip("jinja2", reason="needs the extra report")
pytest.importorskip("vl_convert", reason="needs the extra report")


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> FakedRuns:
    """Return runs whose cases take no time."""
    pytester.makepyfile(test_it=BENCHMARK)
    runs = FakedRuns(pytester)
    runs.start(monkeypatch)
    return runs


@pytest.mark.slow
def test_an_unwritable_page_does_not_lose_the_report(
    run: FakedRuns, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is written, and the run fails."""

    def full(_page: str, path: Path) -> None:
        raise ValueError(f"{path.name}: no space left on device")

    monkeypatch.setattr(report, "write", full)
    result = run("--llmgpu-html=page.html")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FAILED no page: page.html: no space left on device"])
    assert (pytester.path / ".llmgpu" / "last.json").exists()


@pytest.mark.slow
def test_junit_has_each_case_once(run: FakedRuns, pytester: pytest.Pytester) -> None:
    """The properties of its test are those of all launches together."""
    run("--junitxml=junit.xml", "--llmgpu-launches=2", sizes="4")
    (case,) = ET.parse(pytester.path / "junit.xml").getroot().iter("testcase")
    found = [(one.get("name"), one.get("value")) for one in case.iter("property")]
    assert [value for name, value in found if name == "llmgpu.id"] == ["mp-bs4"]
    assert [value for name, value in found if name == "llmgpu.launches"] == ["2"]
