from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import pytest_llmgpu
from pytest_llmgpu.cli import main
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report

_MEASURE = '''
"""Replace pytest: write a report with the times in the worktree's behaviour.json."""
import json, os, signal, sys
from pathlib import Path
from support.report_factory import make_failed, make_report, make_result
from pytest_llmgpu.session.commit import commit
from pytest_llmgpu.report.file import dump
from pytest_llmgpu.report.report import Session

path = Path(next(part.partition("=")[2] for part in sys.argv if part.startswith("--llmgpu-json=")))
left_out = [part.partition("=")[2] for part in sys.argv if part.startswith("--deselect=")]
given = json.loads(Path("behaviour.json").read_text())
print("measuring", *sys.argv[1:], flush=True)
if given.get("interrupt"):
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
if "status" in given:
    print("last line", flush=True)
    sys.exit(given["status"])
number = int(path.name.split(".")[0].rpartition("-")[2])
cases = []
for size, seconds in given["seconds"].items():
    level = seconds[(number - 1) % len(seconds)]
    case = make_failed(batch_size=int(size)) if level is None else make_result(level, batch_size=int(size))
    case.nodeid = f"b.py::t[{case.id}]"
    if case.nodeid not in left_out:
        cases.append(case)
found = make_report(cases)
found.commit = commit(Path())
found.session = Session(complete=True)
dump(found, path)
sys.exit(given.get("ends", 0))
'''

Behaviour = dict[str, object]
STEADY = {"1": [10.0], "2": [20.0]}


class _Project:
    """A repository whose commits contain the times that they measure."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        (root / ".gitignore").write_text(".llmgpu\n.venv\n")
        (root / "measure.py").write_text(_MEASURE)

    def git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.root), "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def commit(self, name: str, policy: str | None = None, **behaviour: object) -> None:
        import json

        (self.root / "behaviour.json").write_text(json.dumps(behaviour))
        if policy is not None:
            (self.root / "pyproject.toml").write_text(policy)
        self.git("add", ".")
        self.git("commit", "--quiet", "--allow-empty", "-m", name)
        self.git("tag", name)

    @property
    def kept(self) -> Path:
        """The folder of the only run."""
        (folder,) = (self.root / ".llmgpu" / "ab").iterdir()
        return folder

    def reports(self) -> tuple[Report, Report]:
        return file.load(self.kept / "base.json.gz"), file.load(self.kept / "head.json.gz")

    def launches(self) -> list[str]:
        """Return the names of all launches in the order in which they ran."""
        logs = sorted((self.kept / "launches").glob("*.log"), key=lambda path: path.stat().st_mtime_ns)
        return [path.stem for path in logs]

    def untouched(self) -> None:
        assert self.git("status", "--porcelain") == ""
        assert len(self.git("worktree", "list").splitlines()) == 1
        assert list((self.root.parent / "tmp").iterdir()) == []


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Project:
    """An empty project in the working directory; temporary files are outside it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    path = [str(Path(__file__).parents[2]), str(Path(pytest_llmgpu.__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    found = _Project(tmp_path / "project")
    monkeypatch.chdir(found.root)
    return found


def _ab(*options: str, refs: Sequence[str] = ("base", "head"), command: Sequence[str] = ()) -> int:
    return main(["ab", *refs, *options, "--", *(command or (sys.executable, "measure.py", "-k", "x"))])


def _quiet(project: _Project, **sessions: Any) -> str:
    """Return the option with a calibration of little noise between launches."""
    from support.report_factory import make_report, make_result

    from pytest_llmgpu.gate.timing import calibration_file
    from pytest_llmgpu.gate.timing.calibration import Measured, Noise
    from pytest_llmgpu.store import store

    results = [make_result(batch_size=size) for size in (1, 2)]
    noise = {result.key: Noise(id=result.id, sd=0.001, launches=1000, **sessions) for result in results}
    path = project.root.parent / "calibration.json"
    calibration_file.dump(Measured(machine=store.hardware(make_report(results)), time=noise), path)
    return f"--calibration={path}"


def test_equal_commits_pass(project: _Project, capsys: pytest.CaptureFixture[str]) -> None:
    """Launches alternate, each has its own report, the merged reports are kept and the tree does not change."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds=STEADY)
    assert _ab("--launches", "2", _quiet(project)) == 0
    assert project.launches() == ["base-1", "head-1", "base-2", "head-2"]
    base, head = project.reports()
    assert [len(result.launches) for result in (*base.cases, *head.cases)] == [2] * 4
    assert [base.commit.sha, head.commit.sha] == project.git("rev-parse", "base", "head").split()
    assert [base.commit.branch, head.commit.branch] == ["base", "head"]
    assert head.verdicts is not None
    assert head.verdicts.baseline is not None
    assert head.verdicts.baseline.name == "base"
    assert {row.verdict for row in head.verdicts.rows if row.gated} == {"OK"}
    out = capsys.readouterr().out
    assert "PASSED" in out
    assert str(Path(".llmgpu") / "ab" / project.kept.name) in out
    project.untouched()


def test_a_slower_commit_is_regressed(project: _Project, capsys: pytest.CaptureFixture[str]) -> None:
    """A test that failed in a launch has its outcome in the report."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds={"1": [11.0], "2": [None]}, ends=1)
    assert _ab("--launches", "2", _quiet(project)) == 1
    out = capsys.readouterr().out
    assert "CAPACITY_REGRESSED" in out
    assert "Time +10.0 %" in out
    project.untouched()


def test_alternating_launches_ignore_the_noise_between_sessions(
    project: _Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """`llmgpu ab` detects 10 %; `llmgpu gate` on the same reports includes the noise between sessions and does not."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds={"1": [11.0], "2": [22.0]})
    assert _ab("--launches", "2", noise := _quiet(project, sessions=100, session_sd=0.05)) == 1
    assert "\nnoise: calibration.json, 1,000 launches\n" in capsys.readouterr().out
    assert main(["gate", str(project.kept / "base.json.gz"), str(project.kept / "head.json.gz"), noise]) == 0
    assert "1,000 launches in 100 sessions" in capsys.readouterr().out


def test_the_verdicts_can_be_reproduced(project: _Project, capsys: pytest.CaptureFixture[str]) -> None:
    """`llmgpu gate` with the kept reports and policy gives the same verdicts and exit status."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds={"1": [10.0], "2": [23.0]})
    assert _ab("--launches", "2", noise := _quiet(project)) == 1
    out = capsys.readouterr().out
    kept = project.kept
    policy = f"--policy={kept / 'policy.toml'}"
    assert main(["gate", str(kept / "base.json.gz"), str(kept / "head.json.gz"), policy, noise]) == 1
    again = capsys.readouterr().out.splitlines()
    table, conclusion = again[: next(n for n, line in enumerate(again) if line.startswith("noise: "))], again[-1]
    assert "\n".join(table) in out
    assert f"\npolicy: built-in\n{conclusion}\n" in out


@pytest.mark.slow
def test_undecided_cases_are_measured_again(project: _Project) -> None:
    """Only these cases are measured again, and the error rate is divided by the number of comparisons."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds={"1": [10.0], "2": [15.0, 25.0]})
    assert _ab("--launches", "2", "--again", "1", _quiet(project)) == 0
    names = ["base-1", "head-1", "base-2", "head-2"]
    assert project.launches() == [*names, *(name.replace("-", "-again1-") for name in names)]
    base, head = project.reports()
    assert [len(result.launches) for result in (*base.cases, *head.cases)] == [2, 4, 2, 4]
    assert "--deselect=b.py::t[mp-bs1]" in (project.kept / "launches" / "head-again1-2.log").read_text()
    assert "confidence = 0.975\n" in (project.kept / "policy.toml").read_text()
    assert head.verdicts is not None
    gated = {row.id: row.verdict for row in head.verdicts.rows if row.gated}
    assert gated == {"mp-bs1": "OK", "mp-bs2": "NOT_ENOUGH_DATA"}


def test_not_enough_data_fails_on_request(project: _Project) -> None:
    """The exit status is 3, as for the gate."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds={"1": [10.0], "2": [15.0, 25.0]})
    assert _ab("--launches", "2", "--again", "0", "--on-inconclusive", "fail", _quiet(project)) == 3


def test_a_change_cannot_edit_its_own_thresholds(project: _Project) -> None:
    """The policy is that of the base commit unless --policy names a file."""
    project.commit("base", "[tool.llmgpu.gate.time]\nmargin = 0.03\n", seconds=STEADY)
    project.commit("head", "[tool.llmgpu.gate.time]\nmargin = 0.5\n", seconds={"1": [11.0], "2": [22.0]})
    noise = _quiet(project)
    assert _ab("--launches", "1", "--again", "0", noise) == 1
    assert _ab("--launches", "1", "--again", "0", noise) == 1, "in a folder of its own"
    assert _ab("--launches", "1", "--again", "0", noise, "--policy", "pyproject.toml") == 0


def test_each_worktree_gets_its_own_environment(project: _Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The environment that --setup creates is first in PATH."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds=STEADY)
    setup = (
        f'mkdir -p .venv/bin && printf \'#!/bin/sh\\necho "in $VIRTUAL_ENV"\\nexec {sys.executable} measure.py "$@"\' '
        "> .venv/bin/measure && chmod +x .venv/bin/measure && echo made"
    )
    assert _ab("--launches", "1", "--setup", setup, _quiet(project), command=["measure"]) == 0
    first = [(project.kept / "launches" / f"{side}-1.log").read_text().splitlines()[0] for side in ("base", "head")]
    assert first[0] != first[1]
    assert all(line.startswith("in ") and line.endswith(".venv") for line in first)
    assert (project.kept / "base-setup.log").read_text() == "made\n"
    assert "no .venv" not in capsys.readouterr().out


def test_uncommitted_changes_and_a_shared_environment_are_noted(
    project: _Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are notes on stdout."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds=STEADY)
    (project.root / "behaviour.json").write_text("{}")
    assert _ab("--launches", "1", _quiet(project)) == 0
    out = capsys.readouterr().out
    assert "note: your uncommitted changes are not measured\n" in out
    assert "both commits run in the current environment" in out


@pytest.mark.parametrize(
    ("behaviour", "options", "reason"),
    [
        ({"status": 4}, [], "head-1: "),
        ({"status": 0}, [], "ended without a report with status 0: last line"),
        ({"seconds": STEADY, "ends": 2}, [], "ended with status 2"),
        ({"seconds": {"1": [1.0]}}, ["--setup", "echo broken; exit 9"], "base: --setup ended with status 9: broken"),
        ({"seconds": STEADY}, ["--policy", "nowhere.toml"], "policy nowhere.toml: cannot be read"),
    ],
)
def test_a_launch_without_a_complete_report_is_exit_2(
    project: _Project, behaviour: Behaviour, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the last output; only the logs remain."""
    project.commit("base", seconds=STEADY)
    project.commit("head", None, **behaviour)
    assert _ab("--launches", "1", *options) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    project.untouched()


def test_launches_with_different_cases_are_refused(project: _Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names both launches, and the report of each launch is kept."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds=STEADY)
    command = ["/bin/sh", "-c", f'rm -f "$0"; exec {sys.executable} measure.py "$@"', "nothing", "-x"]
    strange = 'case $* in *head-2*) echo \'{"seconds": {"1": [1.0]}}\' > behaviour.json;; esac; '
    command[2] = strange + command[2]
    assert _ab("--launches", "2", command=command) == 2
    assert "head-1 and head-2 measured different cases" in capsys.readouterr().err
    assert len(list((project.kept / "launches").glob("*.json.gz"))) == 4


def test_ctrl_c_leaves_nothing(project: _Project) -> None:
    """The current launch is ended and the worktrees are removed; the exit status is 130."""
    project.commit("base", seconds=STEADY)
    project.commit("head", interrupt=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert _ab("--launches", "1") == 130
    assert project.launches() == ["base-1", "head-1"]
    project.untouched()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["ab", "base"], "HEAD_REF"),
        (["ab", "base", "head"], "COMMAND"),
        (["ab", "base", "head", "--launches", "0", "--", "pytest"], "whole number from 1"),
        (["ab", "base", "head", "--again", "3", "--", "pytest"], "3"),
    ],
)
def test_bad_usage_is_exit_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the wrong argument."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_unusable_arguments_are_exit_2(project: _Project, capsys: pytest.CaptureFixture[str]) -> None:
    """They are an unknown commit, an unknown command and an option that each launch sets."""
    project.commit("base", seconds=STEADY)
    for refs, command, reason in (
        (("base", "nowhere"), ["x"], "no commit 'nowhere'"),
        (("base", "base"), ["no-such-command"], "'no-such-command' cannot be run: No such file"),
        (("base", "base"), ["pytest", "--llmgpu-json=x.json"], "--llmgpu-json: each launch sets its own"),
    ):
        assert _ab(refs=refs, command=command) == 2
        assert reason in capsys.readouterr().err
    project.untouched()


def test_calibrate_runs_the_launches(project: _Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The report of each launch is kept, and the noise is written for the gate."""
    from pytest_llmgpu.gate.timing import calibration_file

    project.commit("base", seconds={"1": [10.0, 10.1, 10.05], "2": [20.0, 20.2, 20.1]})
    assert main(["calibrate", "--launches", "3", "--", sys.executable, "measure.py"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[:3]] == ["launch-1", "launch-2", "launch-3"]
    (written,) = (line for line in printed.splitlines() if line.startswith("written: "))
    noise = calibration_file.load(Path(written.removeprefix("written: ")))[0].time.values()
    assert [(one.id, one.launches) for one in noise] == [("mp-bs1", 3), ("mp-bs2", 3)]
    assert all(0.004 < one.sd < 0.006 for one in noise)
    assert len(list(Path(".llmgpu/calibrate").glob("*/launches/*.json.gz"))) == 3


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--launches", "1", "--", "true"], "--launches=1: at least 2 launches are needed"),
        (["--launches", "2", "--", "true", "--llmgpu-json=x"], "each launch sets its own"),
        (["--launches", "2", "--", "true"], "launch-1: true ended without a report with status 0"),
        (["--launches", "2", "--", "no-such-program"], "'no-such-program' cannot be run"),
    ],
)
def test_calibrate_refuses_unusable_launches(
    project: _Project, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason is one line, and no calibration is written."""
    project.commit("base", seconds=STEADY)
    assert main(["calibrate", *arguments]) == 2
    assert reason in capsys.readouterr().err
    assert not list(project.root.rglob("calibration.json"))
