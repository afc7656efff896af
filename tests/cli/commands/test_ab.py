from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.measured_project import STEADY, Project, make_project
from support.verdict_factory import noise

from pytest_llmgpu.cli import main

Behaviour = dict[str, object]


@pytest.fixture
def quiet() -> Iterator[None]:
    """Little noise between launches."""
    with noise():
        yield


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty project in the working directory."""
    return make_project(tmp_path, monkeypatch)


def _ab(*options: str, refs: Sequence[str] = ("base", "head"), command: Sequence[str] = ()) -> int:
    return main(["ab", *refs, *options, "--", *(command or (sys.executable, "measure.py", "-k", "x"))])


def test_equal_commits_pass(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """One launch of each decides exact metrics; the merged reports are kept and the tree does not change."""
    project.commit("base", "[tool.llmgpu.gate.time]\ngate = false\n", seconds=STEADY, calls=64)
    project.commit("head", seconds=STEADY, calls=64)
    assert _ab() == 0
    assert project.launches() == ["base-1", "head-1"]
    base, head = project.reports()
    assert [len(result.launches) for result in (*base.cases, *head.cases)] == [1] * 4
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


@pytest.mark.usefixtures("quiet")
def test_a_slower_commit_is_regressed(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """A test that failed in a launch has its outcome in the report."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds={"1": [11.0], "2": [None]}, ends=1)
    assert _ab("--launches", "2") == 1
    out = capsys.readouterr().out
    assert "REGRESSED" in out
    assert "Time +10.0 %" in out
    project.untouched()


@pytest.mark.usefixtures("quiet")
def test_the_verdicts_can_be_reproduced(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """`llmgpu gate` with the kept reports and policy gives the same verdicts and exit status."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds={"1": [10.0], "2": [23.0]})
    assert _ab("--launches", "2") == 1
    out = capsys.readouterr().out
    kept = project.kept
    policy = f"--policy={kept / 'policy.toml'}"
    assert main(["gate", str(kept / "base.json.gz"), str(kept / "head.json.gz"), policy, "--in-turn"]) == 1
    again = capsys.readouterr().out.splitlines()
    assert again[0].startswith("REGRESSED: ")
    assert "\n".join(again[: next(n for n, line in enumerate(again) if line.startswith("policy: "))]) in out


def test_undecided_cases_are_launched_again(project: Project) -> None:
    """Launches alternate; later ones measure only these cases, and the error rate is divided by the number of looks."""
    behaviour: Behaviour = {"seconds": {"1": [10.0], "2": [None]}, "ends": 1}
    project.commit("base", "[tool.llmgpu.gate]\nconfidence = 0.96\n", **behaviour)
    project.commit("head", None, **behaviour)
    assert _ab("--launches", "3", "--strict") == 3
    assert project.launches() == [f"{side}-{number}" for number in (1, 2, 3) for side in ("base", "head")]
    base, head = project.reports()
    assert [len(result.launches) for result in (*base.cases, *head.cases)] == [3, 1, 3, 1]
    logs = [(project.kept / "launches" / f"head-{number}.log").read_text() for number in (1, 2, 3)]
    assert ["--deselect=b.py::t[mp-bs2]" in log for log in logs] == [False, True, True]
    assert "confidence = 0.98\n" in (project.kept / "policy.toml").read_text()


@pytest.mark.usefixtures("quiet")
def test_a_change_cannot_edit_its_own_thresholds(project: Project) -> None:
    """The policy is that of the base commit unless --policy names a file."""
    project.commit("base", "[tool.llmgpu.gate.time]\nthreshold = 0.03\n", seconds=STEADY, calls=64)
    slower = {"1": [11.0], "2": [22.0]}
    project.commit("head", "[tool.llmgpu.gate.time]\ngate = false\n", seconds=slower, calls=64)
    assert _ab("--launches", "1") == 1
    assert _ab("--launches", "1") == 1, "in a folder of its own"
    assert _ab("--launches", "1", "--policy", "pyproject.toml") == 0


@pytest.mark.usefixtures("quiet")
def test_each_worktree_gets_its_own_environment(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The environment that --setup creates is first in PATH."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds=STEADY)
    setup = (
        f'mkdir -p .venv/bin && printf \'#!/bin/sh\\necho "in $VIRTUAL_ENV"\\nexec {sys.executable} measure.py "$@"\' '
        "> .venv/bin/measure && chmod +x .venv/bin/measure && echo made"
    )
    assert _ab("--launches", "1", "--setup", setup, command=["measure"]) == 0
    first = [(project.kept / "launches" / f"{side}-1.log").read_text().splitlines()[0] for side in ("base", "head")]
    assert first[0] != first[1]
    assert all(line.startswith("in ") and line.endswith(".venv") for line in first)
    assert (project.kept / "base-setup.log").read_text() == "made\n"
    assert "no .venv" not in capsys.readouterr().out


@pytest.mark.usefixtures("quiet")
def test_uncommitted_changes_and_a_shared_environment_are_noted(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are notes on stdout."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds=STEADY)
    (project.root / "behaviour.json").write_text("{}")
    assert _ab("--launches", "1") == 0
    out = capsys.readouterr().out
    assert "note: your uncommitted changes are not measured\n" in out
    assert "all commits run in the current environment" in out


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
    project: Project, behaviour: Behaviour, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the last output; only the logs remain."""
    project.commit("base", seconds=STEADY)
    project.commit("head", None, **behaviour)
    assert _ab("--launches", "1", *options) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    project.untouched()


def test_ctrl_c_leaves_nothing(project: Project) -> None:
    """The current launch is ended and the worktrees are removed; the exit status is 130."""
    project.commit("base", seconds=STEADY)
    project.commit("head", interrupt=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert _ab("--launches", "1") == 130
    assert project.launches() == ["base-1", "head-1"]
    project.untouched()


def test_unusable_arguments_are_exit_2(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_calibrate_runs_the_launches(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The report of each launch is kept, and the scatter is printed."""
    project.commit("base", seconds={"1": [10.0, 10.1, 10.05], "2": [20.0, 20.2, 20.1]})
    assert main(["calibrate", "--launches", "3", "--", sys.executable, "measure.py"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[:3]] == ["launch-1", "launch-2", "launch-3"]
    assert lines[-2:] == [["mp-bs1", "3", "0.5", "%"], ["mp-bs2", "3", "0.5", "%"]]
    assert len(list(Path(".llmgpu/calibrate").glob("*/launches/*.json.gz"))) == 3
