from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.export_reports import judged, two_strategies
from support.verdict_factory import make_row, make_verdicts

from pytest_llmgpu.cli.arguments import read_verdicts
from pytest_llmgpu.render.exports import FORMATS, export
from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.report import Commit
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


def test_export_judges_the_report_against_a_baseline(llmgpu: Callable[..., str]) -> None:
    """The verdicts are those of the gate under the policy in force."""
    dump(two_strategies(oom=()), Path("base.json"))
    dump(two_strategies(), Path("head.json"))
    printed = llmgpu("export", "csv", "head.json", "--baseline", str(Path("base.json").resolve()))
    rows = {row["id"]: row for row in csv.DictReader(io.StringIO(printed))}
    assert "REGRESSED" in rows["tp-bs64"]["verdict_outcome"]


def test_export_takes_the_verdicts_of_a_gate(llmgpu: Callable[..., str]) -> None:
    """They replace the verdicts of the report."""
    dump(judged(two_strategies(), two_strategies()), Path("report.json"))
    Path("verdicts.json").write_bytes(msgspec.json.encode(make_verdicts(make_row("REGRESSED", "outcome"))))
    printed = llmgpu("export", "github-annotations", "report.json", "--verdicts", "verdicts.json")
    assert "REGRESSED%3A mp-bs8%3A as said" in printed


def test_verdicts_of_an_older_version_have_the_present_names() -> None:
    """INCONCLUSIVE is read as UNDECIDED, but not within a text."""
    verdicts = make_verdicts(make_row("UNDECIDED", reason='"verdict": "INCONCLUSIVE"'))
    data = msgspec.json.format(msgspec.json.encode(verdicts)).replace(b'"UNDECIDED"', b'"INCONCLUSIVE"')
    assert data.count(b': "INCONCLUSIVE"') == 1
    Path("verdicts.json").write_bytes(data)
    assert read_verdicts(Path("verdicts.json"), two_strategies()) == verdicts


def test_export_refuses_the_verdicts_of_another_report(llmgpu: Callable[..., str], refused: Callable[..., str]) -> None:
    """The verdicts belong to the report that was judged, under any file name."""
    ours, other = two_strategies(), two_strategies()
    ours.created, other.created = "2026-01-02T03:04:05Z", "2026-01-02T03:04:06Z"
    other.commit = Commit(sha="b" * 40)
    for report, path in ((ours, "ours.json"), (ours, "copy.json.gz"), (other, "other.json")):
        dump(report, Path(path))
    llmgpu("gate", "other.json", "ours.json", "--json", "verdicts.json", ends=3)
    for path in ("ours.json", "copy.json.gz"):
        llmgpu("export", "csv", path, "--verdicts", "verdicts.json")
    line = refused("export", "csv", "other.json", "--verdicts", "verdicts.json")
    assert re.fullmatch(r"llmgpu: verdicts verdicts.json: .*03:04:05Z; .*03:04:06Z and commit b{8}\n", line)
