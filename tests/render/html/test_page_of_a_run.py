from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.faked_runs import BENCHMARK, FakedRuns

from pytest_llmgpu.render.html import report

pytest.importorskip("jinja2", reason="needs the extra report")
pytest.importorskip("vl_convert", reason="needs the extra report")


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> FakedRuns:
    """Runs in which cases take no time."""
    pytester.makepyfile(test_it=BENCHMARK)
    runs = FakedRuns(pytester)
    runs.start(monkeypatch)
    return runs


def test_a_run_writes_its_page(run: FakedRuns, pytester: pytest.Pytester) -> None:
    """At the end, with every case, and the summary says where."""
    result = run("--llmgpu-html=page.html")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["page: page.html"])
    text = (pytester.path / "page.html").read_text()
    assert all(re.search(rf"<th [^>]*>\s*{size}\s*</th>", text) for size in (1, 4, 8))


def test_the_page_shows_what_the_run_was_compared_with(run: FakedRuns, pytester: pytest.Pytester) -> None:
    """The verdicts are those of the report."""
    run("--llmgpu-json=base.json", sizes="8")
    run.outcome = lambda _: "oom"
    result = run("--llmgpu-compare=base.json", "--llmgpu-html=page.html", sizes="8")
    assert result.ret == 1
    assert "CAPACITY REGRESSED" in (pytester.path / "page.html").read_text()


def test_a_page_that_cannot_be_written_is_refused_before_the_run(run: FakedRuns) -> None:
    """In one line, with nothing measured."""
    result = run("--llmgpu-html=page.txt")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *page.txt*.html*"])
    assert not run.did


def test_a_page_that_fails_at_the_end_costs_no_report(
    run: FakedRuns, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is there, and the run is not green."""

    def full(_page: str, path: Path) -> None:
        raise ValueError(f"{path.name}: no space left on device")

    monkeypatch.setattr(report, "write", full)
    result = run("--llmgpu-html=page.html")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FAILED no page: page.html: no space left on device"])
    assert (pytester.path / ".llmgpu" / "last.json").exists()


def test_junit_has_each_case_once(run: FakedRuns, pytester: pytest.Pytester) -> None:
    """As properties of its test, of all of its launches."""
    run("--junitxml=junit.xml", "--llmgpu-launches=2", sizes="4")
    (case,) = ET.parse(pytester.path / "junit.xml").getroot().iter("testcase")
    found = [(one.get("name"), one.get("value")) for one in case.iter("property")]
    assert [value for name, value in found if name == "llmgpu.id"] == ["mp-bs4"]
    assert [value for name, value in found if name == "llmgpu.launches"] == ["2"]
