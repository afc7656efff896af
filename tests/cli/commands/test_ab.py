from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.measured_project import STEADY, Project
from support.report_factory import known
from support.verdict_factory import noise

from pytest_llmgpu.cli import main

Behaviour = dict[str, object]


@pytest.fixture
def quiet() -> Iterator[None]:
    """Little noise between launches."""
    with noise():
        yield


_AB = ("ab", "base", "head")
_MEASURE = (sys.executable, "measure.py", "-k", "x")


def test_equal_commits_pass(project: Project, llmgpu: Callable[..., str]) -> None:
    """One launch of each decides exact metrics; the merged reports are kept and the tree does not change."""
    project.commit("base", "[tool.llmgpu.gate.time]\ngate = false\n", seconds=STEADY, calls=64)
    project.commit("head", seconds=STEADY, calls=64)
    out = llmgpu(*_AB, "--", *_MEASURE)
    assert "PASSED" in out
    assert str(Path(".llmgpu") / "ab" / project.kept.name) in out
    assert "note: the worktrees have no .venv: all commits run in the current environment\n" in out
    assert "uncommitted" not in out
    assert project.launches() == ["base-1", "head-1"]
    base, head = project.reports()
    assert [len(result.launches) for result in (*base.cases, *head.cases)] == [1] * 4
    assert [base.commit.sha, head.commit.sha] == project.git("rev-parse", "base", "head").split()
    assert [base.commit.branch, head.commit.branch] == ["base", "head"]
    verdicts = known(head.verdicts)
    assert known(verdicts.baseline).name == "base"
    assert {row.verdict for row in verdicts.rows if row.gated} == {"OK"}
    project.untouched()


@pytest.mark.usefixtures("quiet")
def test_a_slower_commit_is_regressed(project: Project, llmgpu: Callable[..., str]) -> None:
    """A failed test has its outcome in the report; `llmgpu gate` gives the same verdicts for the kept reports."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds={"1": [11.0], "2": [None]}, ends=1)
    out = llmgpu(*_AB, "--launches", "2", "--", *_MEASURE, ends=1)
    assert "Time +10.0 %" in out
    project.untouched()
    policy, *reports = (str(project.kept / name) for name in ("policy.toml", "base.json.gz", "head.json.gz"))
    again, _, _ = llmgpu("gate", *reports, "--policy", policy, "--in-turn", ends=1).partition("\npolicy: ")
    assert again.startswith("REGRESSED: ")
    assert again in out


def test_undecided_cases_are_launched_again(project: Project, llmgpu: Callable[..., str]) -> None:
    """Launches alternate; later ones measure only these cases, and the error rate is divided by the number of looks."""
    behaviour: Behaviour = {"seconds": {"1": [10.0], "2": [None]}, "ends": 1}
    project.commit("base", "[tool.llmgpu.gate]\nconfidence = 0.96\n", **behaviour)
    project.commit("head", None, **behaviour)
    llmgpu(*_AB, "--launches", "3", "--strict", "--", *_MEASURE, ends=3)
    assert project.launches() == [f"{side}-{number}" for number in (1, 2, 3) for side in ("base", "head")]
    base, head = project.reports()
    assert [len(result.launches) for result in (*base.cases, *head.cases)] == [3, 1, 3, 1]
    logs = [(project.kept / "launches" / f"head-{number}.log").read_text() for number in (1, 2, 3)]
    assert ["--deselect=b.py::t[mp-bs2]" in log for log in logs] == [False, True, True]
    assert "confidence = 0.98\n" in (project.kept / "policy.toml").read_text()


@pytest.mark.usefixtures("quiet")
def test_a_change_cannot_edit_its_own_thresholds(project: Project, llmgpu: Callable[..., str]) -> None:
    """The policy is that of the base commit unless --policy names a file."""
    project.commit("base", "[tool.llmgpu.gate.time]\nthreshold = 0.03\n", seconds=STEADY, calls=64)
    slower = {"1": [11.0], "2": [22.0]}
    project.commit("head", "[tool.llmgpu.gate.time]\ngate = false\n", seconds=slower, calls=64)
    for _ in range(2):  # each in a folder of its own
        llmgpu(*_AB, "--launches", "1", "--", *_MEASURE, ends=1)
    llmgpu(*_AB, "--launches", "1", "--policy", "pyproject.toml", "--", *_MEASURE)


@pytest.mark.usefixtures("quiet")
def test_each_worktree_gets_its_own_environment(project: Project, llmgpu: Callable[..., str]) -> None:
    """The environment that --setup creates is first in PATH; uncommitted changes are in none, which is noted."""
    project.commit("base", seconds=STEADY)
    project.commit("head", seconds=STEADY)
    (project.root / "behaviour.json").write_text("{}")
    setup = (
        f'mkdir -p .venv/bin && printf \'#!/bin/sh\\necho "in $VIRTUAL_ENV"\\nexec {sys.executable} measure.py "$@"\' '
        "> .venv/bin/measure && chmod +x .venv/bin/measure && echo made"
    )
    out = llmgpu(*_AB, "--launches", "1", "--setup", setup, "--", "measure")
    assert "note: your uncommitted changes are not measured\n" in out
    assert "all commits run in the current environment" not in out
    first = [(project.kept / "launches" / f"{side}-1.log").read_text().splitlines()[0] for side in ("base", "head")]
    assert first[0] != first[1]
    assert all(line.startswith("in ") and line.endswith(".venv") for line in first)
    assert (project.kept / "base-setup.log").read_text() == "made\n"


@pytest.mark.parametrize(
    ("head", "given", "reason"),
    [
        ({"status": 4}, [], "head-1: "),
        ({"status": 0}, [], "ended without a report with status 0: last line"),
        ({"seconds": STEADY, "ends": 2}, [], "ended with status 2"),
        ({}, ["--setup", "echo broken; exit 9"], "base: --setup ended with status 9: broken"),
        ({}, ["--policy", "nowhere.toml"], "policy nowhere.toml: cannot be read"),
        ({}, ["--", "no-such-command"], "'no-such-command' cannot be run: No such file"),
        ({}, ["--", "pytest", "--llmgpu-json=x.json"], "--llmgpu-json: each launch sets its own"),
        (None, [], "no commit 'head'"),
        (
            {"seconds": STEADY, "imported_from": {"engine": "~/engine/src/engine/__init__.py"}},
            [],
            "but module engine was imported from ~/engine/src/engine/__init__.py: give each commit an environment of",
        ),
    ],
)
def test_a_launch_without_a_complete_report_is_exit_2(
    project: Project, head: Behaviour | None, given: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the last output; only the logs remain."""
    project.commit("base", seconds=STEADY)
    if head is not None:
        project.commit("head", None, **head)
    assert main([*_AB, "--launches", "1", *given, *([] if "--" in given else ["--", *_MEASURE])]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    project.untouched()


def test_ctrl_c_leaves_nothing(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The current launch is ended and the worktrees are removed; the exit status is 130, and kept reports are named."""
    project.commit("base", seconds=STEADY)
    project.commit("head", interrupt=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert main([*_AB, "--launches", "1", "--", *_MEASURE]) == 130
    assert capsys.readouterr().err == f"llmgpu: interrupted: 1 report kept in {project.kept.resolve() / 'launches'}\n"
    assert project.launches() == ["base-1", "head-1"]
    project.untouched()
