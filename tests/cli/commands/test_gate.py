from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from support.report_factory import make_failed
from support.repository import first_commit
from support.verdict_factory import any_unseen, noise, on_h200, timed

from pytest_llmgpu.cli import main
from pytest_llmgpu.gate import judge as gate
from pytest_llmgpu.gate.judge import judge
from pytest_llmgpu.gate.policy import Policy, load_policy, sha256_of
from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Candidate, Verdicts
from pytest_llmgpu.store.store import save

pytestmark = pytest.mark.usefixtures("empty_folder")

STORE = Path(".llmgpu")


@pytest.fixture(autouse=True)
def _lenient() -> Iterator[None]:
    """One launch in each report shows no slowdown of 50 %; the tests here are about other things."""
    with any_unseen():
        yield


def _write(base: Report | None = None, head: Report | None = None) -> None:
    dump(base or on_h200(), Path("base.json"))
    dump(head or on_h200(sha="b" * 40), Path("head.json"))


def _gate(*arguments: str) -> int:
    return main(["gate", "base.json", "head.json", *arguments])


def _verdicts(path: str = "verdicts.json") -> Verdicts:
    return msgspec.json.decode(Path(path).read_bytes(), type=Verdicts)


@pytest.mark.parametrize(
    ("head", "arguments", "status", "text"),
    [
        ([timed()], [], 0, "PASSED: "),
        ([timed(40.0)], [], 1, "REGRESSED: mp-bs1 wall time +3900.0 %"),
        ([make_failed("oom")], [], 1, "REGRESSED: mp-bs1: Out of memory"),
        ([timed(batch_size=2)], [], 1, "MISSING: "),
        ([timed(1.03)], ["--strict"], 3, "UNDECIDED"),
        ([timed(dtype="float32")], [], 3, "NOT COMPARABLE"),
    ],
)
def test_the_exit_status_is_the_result(
    head: Sequence[CaseResult], arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is 0, 1 or 3, and the first line has the result in words."""
    _write(head=on_h200(head, sha="b" * 40))
    assert _gate(*arguments) == status
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith(text)


def test_json_has_the_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the record `verdicts` of a report, and is written before the table is shown."""
    base, head = on_h200([timed(), timed(batch_size=2)]), on_h200([timed(40.0), timed(batch_size=2)])
    _write(base, head)
    assert _gate("--json", "new/verdicts.json") == 1
    found = _verdicts("new/verdicts.json")
    assert found.rows == judge(base, head, Policy(), today=datetime.date(2026, 1, 1)).rows
    assert found.baseline is not None
    assert (found.baseline.name, found.baseline.commit) == ("base.json", "a" * 40)
    assert found.policy_sha256 == sha256_of(Policy())
    assert found.head == Candidate(created=head.created, commit="a" * 40)
    capsys.readouterr()
    assert _gate("--json", "-") == 1
    assert msgspec.json.decode(capsys.readouterr().out, type=Verdicts) == found


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """The process, its hash seed and its folder do not matter."""
    _write(head=on_h200([timed(1.5), timed(calls=65, batch_size=2), make_failed("crashed", strategy="tp")]))
    seen = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "pytest_llmgpu.cli", "gate", str(tmp_path / "base.json"), "head.json"]
        done = subprocess.run(
            [*command, "--json", "-", "--today", "2026-01-01"],
            check=False,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.returncode == 1
        seen.add(done.stdout)
    assert len(seen) == 1
    assert str(tmp_path).encode() not in seen.pop()


def test_the_policy_of_the_folder_is_in_force_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder below has it too; flags override the policy. The last line names it."""
    _write(head=on_h200([timed(1.03)]))
    assert _gate() == 0
    Path("pyproject.toml").write_text("[tool.llmgpu.gate]\nstrict = true\n")
    Path("mine.toml").write_text("[time]\ngate = false\n")
    assert _gate() == 3
    assert _gate("--policy", "mine.toml", "--strict") == 0
    capsys.readouterr()
    Path("sub").mkdir()
    monkeypatch.chdir("sub")
    assert main(["gate", "../base.json", "../head.json"]) == 3
    assert capsys.readouterr().out.splitlines()[-1] == "policy: pyproject.toml"


def test_dump_policy_prints_the_policy_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    """It is TOML that gives the same policy; reports are not needed."""
    Path("pyproject.toml").write_text("[tool.llmgpu.gate.time]\nthreshold = 0.1\n")
    assert main(["gate", "--dump-policy", "--strict"]) == 0
    Path("dumped.toml").write_text(capsys.readouterr().out)
    found = load_policy(Path("dumped.toml"))
    assert (found.time.threshold, found.strict) == (0.1, True)


def test_an_absent_baseline_passes_only_if_it_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag or the policy allows it; the rows then have no baseline, and the first line shows that."""
    _write()
    for reference in ("none.json", "latest"):
        assert main(["gate", reference, "head.json"]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("; use --allow-no-baseline if this is the first run\n")) == ("", 1)
        assert main(["gate", reference, "head.json", "--allow-no-baseline", "--json", "verdicts.json"]) == 0
        assert capsys.readouterr().out.startswith("PASSED: there is no baseline")
        assert _verdicts().baseline is None
    Path("pyproject.toml").write_text("[tool.llmgpu.gate]\nallow_no_baseline = true\n")
    assert main(["gate", "none.json", "head.json"]) == 0


def test_baseline_and_policy_of_a_commit_cannot_be_edited_by_the_change(capsys: pytest.CaptureFixture[str]) -> None:
    """`git:REV:PATH` is read from the commit; an unknown path is an absent baseline, an unknown commit is an error."""
    Path("pyproject.toml").write_text("[tool.llmgpu.gate.time]\nthreshold = 0.04\n")
    _write()
    first_commit(Path())
    Path("pyproject.toml").write_text("[tool.llmgpu.gate.time]\ngate = false\n")
    _write(on_h200([timed(40.0)]), on_h200([timed(40.0)]))
    assert _gate() == 0
    assert main(["gate", "git:main:base.json", "head.json", "--policy", "git:main:pyproject.toml"]) == 1
    assert "policy: git:main:pyproject.toml" in capsys.readouterr().out
    assert main(["gate", "git:main:other.json", "head.json", "--allow-no-baseline"]) == 0
    capsys.readouterr()
    assert main(["gate", "git:unknown:base.json", "head.json", "--allow-no-baseline"]) == 2
    assert "no commit 'unknown'" in capsys.readouterr().err


def test_in_turn_has_the_smaller_threshold() -> None:
    """A host drifts from day to day: 3 % is a regression only if the launches alternated."""
    _write(on_h200([timed(1.0, 1.001, 1.002)]), on_h200([timed(1.03, 1.031, 1.032)]))
    with noise():
        assert (_gate(), _gate("--in-turn")) == (0, 1)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("text.json", b"hello", "is not valid JSON"),
        ("other.json", b'{"benchmarks": [], "version": "5.3.1"}', "is not a report of pytest-llmgpu"),
        ("gzip.json.gz", b"\x1f\x8b\x08\x00", "cannot be decompressed"),
    ],
)
def test_a_broken_report_is_one_line_and_exit_2(
    name: str, data: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the file; a broken baseline is not an absent one."""
    _write()
    Path(name).write_bytes(data)
    for command in (["gate", name, "head.json", "--allow-no-baseline"], ["show", "base.json", name]):
        assert main(command) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert printed.err.startswith(f"llmgpu: report {name}: ")
        assert reason in printed.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gate", "base.json"], "BASE and HEAD are needed"),
        (["gate", "base.json", "none.json", "--allow-no-baseline"], "report none.json: cannot be read"),
        (["gate", "base.json", "head.json", "--policy", "none.toml"], "policy none.toml: cannot be read"),
        (["gate", "base.json", "head.json", "--json", "base.json/x"], "base.json/x: cannot be written"),
        (["gate", "--dump-policy", "--policy", "bad.toml"], "policy bad.toml: Object contains unknown field `margn`"),
        (["show", "none.json", "head.json"], "report none.json: cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout is empty."""
    _write()
    Path("bad.toml").write_text("margn = 1\n")
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("llmgpu: ")
    assert text in printed.err


def test_an_overflow_is_exit_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status 1 of an exception would mean a regression."""

    def overflow(*_: object, **__: object) -> Verdicts:
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr(gate, "judge", overflow)
    _write()
    assert _gate() == 2
    text = "llmgpu: a figure is too large to compute with: int too large to convert to float\n"
    assert capsys.readouterr() == ("", text)


def test_calibrate_prints_the_scatter_between_launches(capsys: pytest.CaptureFixture[str]) -> None:
    """Reports of one launch are merged; a case with too few launches has no row."""
    for number in range(3):
        save(on_h200([timed(1 + number / 1000), make_failed(batch_size=2)]), STORE)
    assert main(["calibrate", "1", "2", "3"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:]] == [["mp-bs1", "3", "0.1", "%"]]
    assert main(["calibrate", "1"]) == 2
    assert "no case has 2 undisturbed launches" in capsys.readouterr().err


def test_several_reports_are_compared_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """`show` has the table of `gate` and no exit status: a line and a column for each report."""
    _write(on_h200([timed(), timed(batch_size=2)]), on_h200([timed(), timed(2.0, calls=65, batch_size=2)]))
    assert _gate() == 1
    judged = capsys.readouterr().out
    assert main(["show", "base.json", "head.json"]) == 0
    assert capsys.readouterr().out == judged
    assert main(["show", "base.json", "base.json", "head.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [["1  base.json", " UNDECIDED"], ["2  head.json", " REGRESSED"]]
    assert [line.split(":")[:2] for line in lines[:2]] == heads
    assert lines[3].split() == ["case", "metric", "was", "1", "2"]
    assert [line.split()[-2:] for line in lines if line.strip().startswith("traffic")] == [["%", "REGRESSED"]]
