from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from support.report_factory import known, make_failed
from support.repository import first_commit
from support.verdict_factory import any_unseen, noise, on_h200, timed

from pytest_llmgpu.gate import judge as gate
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy, dump_policy, load_policy
from pytest_llmgpu.report import file
from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Candidate, Verdicts

pytestmark = pytest.mark.usefixtures("empty_folder")

_GATE = ("gate", "base.json", "head.json")


@pytest.fixture(autouse=True)
def _lenient() -> Iterator[None]:
    """One launch in each report shows no slowdown of 50 %; the tests here are about other things."""
    with any_unseen():
        yield


def _write(base: Report | None = None, head: Report | None = None) -> None:
    dump(base or on_h200(), Path("base.json"))
    dump(head or on_h200(sha="b" * 40), Path("head.json"))


@pytest.mark.parametrize(
    ("level", "flags", "status", "text"),
    [
        (1.0, [], 0, "PASSED: "),
        (40.0, [], 1, "REGRESSED: mp-bs1 wall time +3900.0 %"),
        (1.03, ["--strict"], 3, "UNDECIDED"),
    ],
)
def test_the_exit_status_is_the_result(
    llmgpu: Callable[..., str], level: float, flags: list[str], status: int, text: str
) -> None:
    """The first line has the result in words."""
    _write(head=on_h200([timed(level)], sha="b" * 40))
    assert llmgpu(*_GATE, *flags, ends=status).startswith(text)


def test_json_has_the_verdicts(llmgpu: Callable[..., str]) -> None:
    """It is the record `verdicts` of a report, and is written before the table is shown."""
    base, head = on_h200([timed(), timed(batch_size=2)]), on_h200([timed(40.0), timed(batch_size=2)])
    _write(base, head)
    llmgpu(*_GATE, "--json", "new/verdicts.json", ends=1)
    found = msgspec.json.decode(Path("new/verdicts.json").read_bytes(), type=Verdicts)
    assert found.rows == judge(base, head, Policy(), today=datetime.date(2026, 1, 1)).rows
    baseline = known(found.baseline)
    assert (baseline.name, baseline.commit) == ("base.json", "a" * 40)
    assert found.policy == dump_policy(Policy())
    assert found.head == Candidate(created=head.created, commit="a" * 40)
    assert msgspec.json.decode(llmgpu(*_GATE, "--json", "-", ends=1), type=Verdicts) == found


@pytest.mark.parametrize(
    ("head", "policy", "status"),
    [
        (timed(), "", 0),
        (timed(40.0), "", 1),
        (timed(1.03), "strict = true", 3),
        (timed(dtype="bfloat16"), "", 3),
    ],
)
def test_verdicts_are_not_judged_again(llmgpu: Callable[..., str], head: CaseResult, policy: str, status: int) -> None:
    """A report that pytest compared has the table and the status of that day and policy, and states when it was."""
    Path("policy.toml").write_text(policy)
    _write(head=on_h200([head]))
    judged = llmgpu(*_GATE, "--policy", "policy.toml", "--json", "verdicts.json", ends=status)
    report = file.load(Path("head.json"))
    report.verdicts = msgspec.json.decode(Path("verdicts.json").read_bytes(), type=Verdicts)
    dump(report, Path("last.json.gz"))
    Path("base.json").unlink()
    printed = llmgpu("gate", "--verdicts", "last.json.gz", ends=status)
    table, _, line = printed.rstrip("\n").rpartition("\n")
    assert judged.replace("\npolicy: policy.toml", "") == f"{table}\n"
    assert line == f"measured: {report.created}", "it may be that of an earlier run"
    again = llmgpu("gate", "--verdicts", "last.json.gz", "--json", "-", ends=status)
    assert msgspec.json.decode(again, type=Verdicts) == report.verdicts


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """The process, its hash seed and its folder do not matter."""
    _write(head=on_h200([timed(1.5), timed(calls=65, batch_size=2), make_failed("crashed", strategy="tp")]))
    command = [sys.executable, "-m", "pytest_llmgpu.cli", "gate", str(tmp_path / "base.json"), "head.json"]
    command += ["--json", "-"]
    done = [
        subprocess.run(command, check=False, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]
    assert [one.returncode for one in done] == [1, 1]
    assert done[0].stdout == done[1].stdout
    assert str(tmp_path).encode() not in done[0].stdout


def test_the_policy_of_the_folder_is_in_force(llmgpu: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder below has it too; flags override the policy. The last line names it."""
    _write(head=on_h200([timed(1.03)]))
    llmgpu(*_GATE)
    Path("pyproject.toml").write_text("[tool.llmgpu.gate]\nstrict = true\n")
    Path("mine.toml").write_text("[time]\ngate = false\n")
    llmgpu(*_GATE, ends=3)
    llmgpu(*_GATE, "--policy", "mine.toml", "--strict")
    Path("sub").mkdir()
    monkeypatch.chdir("sub")
    assert llmgpu("gate", "../base.json", "../head.json", ends=3).splitlines()[-1] == "policy: pyproject.toml"


def test_dump_policy_prints_the_policy_in_force(llmgpu: Callable[..., str]) -> None:
    """It is TOML that gives the same policy; reports are not needed."""
    Path("pyproject.toml").write_text("[tool.llmgpu.gate.time]\nthreshold = 0.1\n")
    Path("dumped.toml").write_text(llmgpu("gate", "--dump-policy", "--strict"))
    found = load_policy(Path("dumped.toml"))
    assert (found.time.threshold, found.strict) == (0.1, True)


def test_an_absent_baseline_passes_only_if_allowed(llmgpu: Callable[..., str], refused: Callable[..., str]) -> None:
    """Else nothing is judged. A flag or the policy allows it; the first line shows that there is none."""
    _write()
    for reference in ("none.json", "latest"):
        command = ("gate", reference, "head.json")
        printed = llmgpu(*command, ends=3)
        assert printed.startswith("NOTHING COMPARED: there is no baseline")
        assert printed.endswith("; use --allow-no-baseline if this is the first run\n")
        assert "--allow-no" not in refused("export", "csv", "head.json", "--baseline", reference)
        printed = llmgpu(*command, "--allow-no-baseline")
        assert printed.startswith("PASSED: there is no baseline")
        assert f"`llmgpu promote head.json --to {'FILE' if reference == 'latest' else reference}`" in printed
        found = msgspec.json.decode(llmgpu(*command, "--allow-no-baseline", "--json", "-"), type=Verdicts)
        assert found.baseline is None
    Path("pyproject.toml").write_text("[tool.llmgpu.gate]\nallow_no_baseline = true\n")
    llmgpu("gate", "none.json", "head.json")
    misspelt = llmgpu("gate", "basse.json", "head.json", ends=3)
    assert misspelt.startswith("NOTHING COMPARED")
    assert "did you mean base.json?" in misspelt
    assert "promote head.json" not in misspelt, "the report is no baseline for a misspelt name"


def test_a_change_cannot_edit_files_of_a_commit(llmgpu: Callable[..., str], refused: Callable[..., str]) -> None:
    """`git:REV:PATH` is read from the commit; an unknown path is an absent baseline, an unknown commit is an error."""
    Path("pyproject.toml").write_text("[tool.llmgpu.gate.time]\nthreshold = 0.04\n")
    _write()
    first_commit(Path())
    Path("pyproject.toml").write_text("[tool.llmgpu.gate.time]\ngate = false\n")
    _write(on_h200([timed(40.0)]), on_h200([timed(40.0)]))
    llmgpu(*_GATE)
    printed = llmgpu("gate", "git:main:base.json", "head.json", "--policy", "git:main:pyproject.toml", ends=1)
    assert "policy: git:main:pyproject.toml" in printed
    llmgpu("gate", "git:main:other.json", "head.json", "--allow-no-baseline")
    assert "no commit 'unknown'" in refused("gate", "git:unknown:base.json", "head.json", "--allow-no-baseline")


def test_in_turn_has_the_smaller_threshold(llmgpu: Callable[..., str]) -> None:
    """A host drifts from day to day: 3 % is a regression only if the launches alternated."""
    _write(on_h200([timed(1.0, 1.001, 1.002)]), on_h200([timed(1.03, 1.031, 1.032)]))
    with noise():
        llmgpu(*_GATE)
        llmgpu(*_GATE, "--in-turn", ends=1)


def test_an_overflow_is_exit_2(monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    """The exit status 1 of an exception would mean a regression."""
    monkeypatch.setattr(gate, "judge", Mock(side_effect=OverflowError("int too large to convert to float")))
    _write()
    text = "llmgpu: a figure is too large to compute with: int too large to convert to float\n"
    assert refused(*_GATE) == text


def test_several_reports_are_compared_side_by_side(llmgpu: Callable[..., str]) -> None:
    """`show` has the table of `gate` and no exit status: a line and a column for each report."""
    _write(on_h200([timed(), timed(batch_size=2)]), on_h200([timed(), timed(2.0, calls=65, batch_size=2)]))
    assert llmgpu("show", "base.json", "head.json") == llmgpu(*_GATE, ends=1)
    lines = llmgpu("show", "base.json", "base.json", "head.json").splitlines()
    heads = [["1  base.json", " UNDECIDED"], ["2  head.json", " REGRESSED"]]
    assert [line.split(":")[:2] for line in lines[:2]] == heads
    assert lines[3].split() == ["case", "metric", "was", "1", "2"]
    assert [line.split()[-2:] for line in lines if line.strip().startswith("traffic")] == [["%", "REGRESSED"]]
    times = [line.split() for line in lines if line.strip().startswith("time ")]
    assert [words.count("s") for words in times] == [3, 3], "an equal time, too"
