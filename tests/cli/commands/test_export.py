from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import msgspec
import pytest
from support.export_reports import judged, two_strategies
from support.verdict_factory import make_row, make_verdicts

from pytest_llmgpu.cli import main
from pytest_llmgpu.cli.arguments import read_verdicts
from pytest_llmgpu.render.exports import FORMATS, export
from pytest_llmgpu.report.file import dump, load
from pytest_llmgpu.report.report import Commit
from pytest_llmgpu.store.store import save

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize("name", FORMATS)
def test_export_writes_to_stdout_or_to_a_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The text is the same with `-`, with nothing and with a path."""
    report = two_strategies()
    dump(report, Path("report.json"))
    expected = export(name, report) + "\n"
    for arguments in ([], ["--output", "-"]):
        assert main(["export", name, "report.json", *arguments]) == 0
        assert capsys.readouterr().out == expected
    save(report, Path(".llmgpu"))
    assert main(["export", name, "latest", "--output", "out"]) == 0
    assert capsys.readouterr().out == ""
    assert Path("out").read_text(encoding="utf-8") == expected


def test_export_judges_the_report_against_a_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    """The verdicts are those of the gate under the policy in force."""
    base = two_strategies(oom=())
    dump(base, Path("base.json"))
    dump(two_strategies(), Path("head.json"))
    assert main(["export", "csv", "head.json", "--baseline", str(Path("base.json").resolve())]) == 0
    rows = {row["id"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert "REGRESSED" in rows["tp-bs64"]["verdict_outcome"]


def test_export_takes_the_verdicts_of_a_gate(capsys: pytest.CaptureFixture[str]) -> None:
    """They replace the verdicts of the report."""
    dump(judged(two_strategies(), two_strategies()), Path("report.json"))
    Path("verdicts.json").write_bytes(msgspec.json.encode(make_verdicts(make_row("REGRESSED", "outcome"))))
    assert main(["export", "github-annotations", "report.json", "--verdicts", "verdicts.json"]) == 0
    assert "REGRESSED%3A mp-bs8%3A as said" in capsys.readouterr().out


def test_verdicts_of_an_older_version_have_the_present_names() -> None:
    """INCONCLUSIVE is read as UNDECIDED in verdicts and in reports, but not within a text."""
    old = make_row("UNDECIDED", reason='"verdict": "INCONCLUSIVE"')
    report = judged(two_strategies(), two_strategies())
    report.verdicts = make_verdicts(old)
    for path, record in (("report.json", report), ("verdicts.json", report.verdicts)):
        data = msgspec.json.format(msgspec.json.encode(record))
        data = data.replace(b'"UNDECIDED"', b'"INCONCLUSIVE"')
        assert data.count(b': "INCONCLUSIVE"') == 1
        Path(path).write_bytes(data)
    assert load(Path("report.json")).verdicts == report.verdicts
    assert read_verdicts(Path("verdicts.json"), report) == report.verdicts


def test_export_refuses_the_verdicts_of_another_report(capsys: pytest.CaptureFixture[str]) -> None:
    """The verdicts belong to the report that was judged, under any file name."""
    ours, other = two_strategies(), two_strategies()
    ours.created, other.created = "2026-01-02T03:04:05Z", "2026-01-02T03:04:06Z"
    other.commit = Commit(sha="b" * 40)
    for report, path in ((ours, "ours.json"), (ours, "copy.json.gz"), (other, "other.json")):
        dump(report, Path(path))
    main(["gate", "other.json", "ours.json", "--json", "verdicts.json"])
    capsys.readouterr()
    for path in ("ours.json", "copy.json.gz"):
        assert main(["export", "csv", path, "--verdicts", "verdicts.json"]) == 0
    capsys.readouterr()
    assert main(["export", "csv", "other.json", "--verdicts", "verdicts.json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"llmgpu: verdicts verdicts.json: .*03:04:05Z; .*03:04:06Z and commit b{8}\n", printed.err)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["missing.json"], "missing.json"),
        (["report.json", "--baseline", "missing.json"], "missing.json"),
        (["report.json", "--policy", "p.toml"], "--policy: has an effect only with a baseline"),
        (["report.json", "--today", "2026-01-02"], "--today: has an effect only with a baseline"),
        (["report.json", "--verdicts", "missing.json"], "verdicts missing.json: cannot be read: No such file"),
        (["report.json", "--verdicts", "report.json"], "verdicts report.json: Object missing required field"),
        (["report.json", "--verdicts", "deep.json"], "verdicts deep.json: "),
        (["report.json", "--baseline=a", "--verdicts=b"], "--verdicts: cannot be combined with a baseline"),
        (["report.json", "--output", "report.json/x"], "report.json/x: cannot be written: "),
        (["report.json", "--output", "."], ".: cannot be written: Is a directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the file or the option and the reason."""
    dump(two_strategies(), Path("report.json"))
    Path("deep.json").write_bytes(b"[" * 100_000)
    assert main(["export", "csv", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("llmgpu: ")
    assert named in printed.err
    assert printed.err.count("\n") == 1
