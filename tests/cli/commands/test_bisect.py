from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.measured_project import STEADY, Project, make_project

from pytest_llmgpu.cli import main
from pytest_llmgpu.report import file

_EXACT = "[tool.llmgpu.gate.time]\ngate = false\n"
"""A policy under which one launch decides."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty project in the working directory."""
    return make_project(tmp_path, monkeypatch)


def _commits(project: Project, first_bad: int, last: int, **others: dict[str, object]) -> None:
    """Commit c0 to c{last}, of which those from `first_bad` on send more; `others` has other behaviour by name."""
    for number in range(last + 1):
        name = f"c{number}"
        behaviour = others.get(name, {"seconds": STEADY, "calls": 64 if number < first_bad else 80})
        project.commit(name, _EXACT, **behaviour)


def _bisect(*options: str, refs: Sequence[str] = ("c0", "HEAD"), command: Sequence[str] = ()) -> int:
    return main(["bisect", *refs, *options, "--", *(command or (sys.executable, "measure.py"))])


def _state(project: Project) -> dict[str, str]:
    """Return what the user has: files, index, references, HEAD, and the state of his own bisection.

    `packed-refs` is left out: git may write it at any time, and `for-each-ref` has its contents.
    """
    found = {name: project.git(*name.split()) for name in ("status --porcelain", "for-each-ref", "worktree list")}
    for path in sorted((project.root / ".git").iterdir()):
        if path.is_file() and path.name != "packed-refs":
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    found |= {path.name: path.read_text() for path in project.root.iterdir() if path.is_file()}
    return found


@pytest.mark.slow
def test_the_first_bad_commit_is_found(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """One launch a commit, of the case alone; the reports of both neighbours are kept."""
    _commits(project, first_bad=5, last=8)
    sha = project.git("rev-parse", "c5").strip()
    assert _bisect() == 0
    out = capsys.readouterr().out
    assert f"FOUND: {sha} is the first bad commit: c5\n    a, " in out
    launches = project.launches()
    assert launches[:2] == ["good-1", "bad-1"]
    assert len(launches) == 5
    assert f"\n{len(launches)} launches: 2 of GOOD and BAD, 3 of the commits between them\n" in out
    logs = [(project.kept / "launches" / f"{name}.log").read_text() for name in launches]
    assert ["--deselect=b.py::t[mp-bs2]" in log for log in logs] == [False, False, True, True, True]
    before, first = (file.load(project.kept / f"{name}.json.gz") for name in ("before", "first-bad"))
    assert [before.commit.sha, first.commit.sha] == project.git("rev-parse", "c4", "c5").split()
    assert first.verdicts is not None
    assert ("traffic", "REGRESSED") in {(row.metric, row.verdict) for row in first.verdicts.rows}
    project.untouched()


def test_an_earlier_commit_with_a_part_of_the_change_is_named(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commit that crosses the middle between both ends is found; the one before it is worse than the good end."""
    part = {"seconds": STEADY, "calls": 68}
    _commits(project, first_bad=2, last=2, c1=part)
    sha = project.git("rev-parse", "c1").strip()[:8]
    assert _bisect() == 0
    out = capsys.readouterr().out
    assert "is the first bad commit: c2\n" in out
    assert f"{sha} is worse than GOOD as well (+6.2 %): llmgpu bisect c0 {sha} finds the reason\n" in out


def test_neighbours_need_no_further_launch(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The only commit between the ends is the bad end itself."""
    _commits(project, first_bad=1, last=1)
    assert _bisect() == 0
    assert "is the first bad commit: c1\n" in capsys.readouterr().out
    assert project.launches() == ["good-1", "bad-1"]


@pytest.mark.slow
def test_the_users_tree_and_his_own_bisection_stay_as_they_are(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """He has staged and unstaged changes, and is bisecting something else himself."""
    _commits(project, first_bad=3, last=6)
    project.git("bisect", "start", "c6", "c1")
    project.git("bisect", "good", "c2")
    (project.root / "staged").write_text("staged")
    project.git("add", "staged")
    (project.root / "measure.py").write_text("changed")
    (project.root / "untracked").write_text("untracked")
    before = _state(project)
    assert "BISECT_LOG" in before
    command = ["/bin/sh", "-c", f'exec {sys.executable} measure.py "$@"', "sh"]
    assert _bisect(refs=("c0", "c6"), command=command) == 0
    out = capsys.readouterr().out
    assert "is the first bad commit: c3\n" in out
    assert "note: your uncommitted changes are not measured\n" in out
    assert _state(project) == before
    assert list((project.root.parent / "tmp").iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(project: Project) -> None:
    """The current launch is ended, and worktrees and bisection are removed; the exit status is 130."""
    _commits(project, first_bad=3, last=4, c2={"interrupt": True})
    before = _state(project)
    assert _bisect() == 130
    assert _state(project) == before
    project.untouched()


@pytest.mark.slow
def test_commits_that_cannot_be_built_or_run_are_skipped(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is printed. The commit is found if none of them is next to it."""
    setup = '! grep -q broken behaviour.json || { echo "does not compile"; exit 1; }'
    broken = {"seconds": STEADY, "broken": True}
    _commits(project, first_bad=6, last=8, c4=broken, c3={"status": 7})
    assert _bisect("--setup", setup) == 0
    out = capsys.readouterr().out
    assert "is the first bad commit: c6\n" in out
    assert "skip  c4" in out
    assert "--setup ended with status 1: does not compile" in out
    project.untouched()


@pytest.mark.slow
def test_device_time_is_bisected_with_one_launch_a_commit(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The change of 3 % is between the first bad commit and the one before it, and its cause is named."""
    for number in range(9):
        project.commit(f"c{number}", seconds=STEADY, device_s=0.5 if number < 3 else 0.515)
    assert _bisect() == 0
    assert project.launches()[:2] == ["good-1", "bad-1"]
    assert len(project.launches()) <= 6
    out = capsys.readouterr().out
    assert "is the first bad commit: c3\n" in out
    before, first = (file.load(project.kept / f"{name}.json.gz") for name in ("before", "first-bad"))
    assert [before.commit.sha, first.commit.sha] == project.git("rev-parse", "c2", "c3").split()
    assert first.verdicts is not None
    (row,) = (row for row in first.verdicts.rows if row.metric == "device_time" and row.id == "mp-bs1")
    assert row.ratio == pytest.approx(1.03)
    assert row.cause is not None
    assert row.cause.place == "device"


@pytest.mark.slow
def test_skipped_commits_in_the_way_are_undecided(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The range that remains is printed, and the exit status is 3."""
    _commits(project, first_bad=2, last=4, c2={"status": 7}, c3={"status": 7})
    assert _bisect() == 3
    out = capsys.readouterr().out
    assert "UNDECIDED: the first bad commit is one of 3 commits:\n" in out
    listed = out.partition("UNDECIDED")[2].splitlines()[1:4]
    assert [line.split()[1:] for line in listed] == [["c4"], ["c3"], ["c2"]]
    project.untouched()


@pytest.mark.slow
def test_the_allowed_launches_end_it_undecided(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The next command continues with the smaller range."""
    _commits(project, first_bad=3, last=8)
    assert _bisect("--max-launches", "3") == 3
    assert len(project.launches()) == 3
    out = capsys.readouterr().out
    assert "UNDECIDED: the first bad commit is one of 4 commits:\n" in out
    assert f"next: llmgpu bisect c0 {project.git('rev-parse', 'c4')[:8]} --max-launches 6 -- " in out
    project.untouched()


def test_ends_that_do_not_differ_are_exit_4(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """No commit between them is launched; an improvement is no regression."""
    _commits(project, first_bad=9, last=2)
    assert _bisect() == 4
    out = capsys.readouterr().out
    assert "NO DIFFERENCE: BAD is not worse than GOOD in " in out
    assert "next: other commits" in out  # more launches do not change exact figures
    assert project.launches() == ["good-1", "bad-1"]
    project.untouched()


@pytest.mark.slow
def test_ends_with_too_few_launches_are_undecided(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The ends take at most half of the launches; a row that they do not decide is exit status 3."""
    project.commit("c0", seconds=STEADY)
    project.commit("c1", seconds=STEADY)
    project.commit("c2", seconds=STEADY)
    assert _bisect("--metric", "time", "--case", "mp-bs2", "--max-launches", "8") == 3
    assert len(project.launches()) == 4
    out = capsys.readouterr().out
    assert "UNDECIDED: BAD and GOOD do not differ significantly in 1 row\n" in out
    assert "next: llmgpu ab c0 HEAD --launches 20 -- " in out


@pytest.mark.slow
def test_a_metric_that_is_not_gated_can_be_bisected(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """By default there is nothing to find; with its name the metric is bisected."""
    policy = f"{_EXACT}[tool.llmgpu.gate.traffic]\ngate = false\n"
    for number, calls in enumerate((64, 64, 80, 80)):
        project.commit(f"c{number}", policy, seconds=STEADY, calls=calls)
    assert _bisect() == 2
    assert _bisect("--metric", "traffic", "--case", "mp-bs2") == 0
    assert "is the first bad commit: c2\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("refs", "options", "reason"),
    [
        (("nowhere", "c2"), [], "there is no commit 'nowhere'"),
        (("c1", "c1"), [], "are the same commit"),
        (("c2", "c0"), [], "is a descendant of BAD"),
        (("c0", "c2"), ["--metric", "speed"], "--metric=speed: is no metric of the gate: allowed are outcome, "),
        (("c0", "c2"), ["--max-launches", "2"], "--max-launches=2: at least 3 are needed"),
        (("c0", "c2"), ["--case", "tp-bs8"], "no row of a gated metric of tp-bs8; rows are of mp-bs1, mp-bs2"),
        (("c0", "c2"), ["--setup", "exit 9"], "good: --setup ended with status 9"),
        (("c0", "c3"), [], "bad-1: "),
        (("c0", "c2"), ["--policy", "nowhere.toml"], "policy nowhere.toml: cannot be read"),
    ],
)
def test_bad_usage_is_exit_2(
    project: Project, refs: tuple[str, str], options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the value and what is allowed."""
    _commits(project, first_bad=9, last=3, c3={"status": 4})
    assert _bisect(*options, refs=refs) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    project.untouched()


def test_a_history_that_is_not_there_is_exit_2(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """A shallow clone lacks the common ancestor."""
    _commits(project, first_bad=9, last=0)
    project.git("checkout", "--quiet", "--orphan", "other")
    project.commit("alone", seconds=STEADY)
    assert _bisect(refs=("c0", "alone")) == 2
    assert "have no common ancestor in this clone: fetch its history" in capsys.readouterr().err


@pytest.mark.slow
def test_a_commit_without_the_users_folder_is_skipped(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command runs in the user's folder of each commit."""
    (project.root / "sub").mkdir()
    (project.root / "sub" / "file").write_text("x")
    _commits(project, first_bad=3, last=1)
    project.git("rm", "--quiet", "-r", "sub")
    project.commit("without", seconds=STEADY, calls=64)
    (project.root / "sub").mkdir()
    (project.root / "sub" / "file").write_text("x")
    for number in (3, 4, 5):
        project.commit(f"c{number}", seconds=STEADY, calls=64 if number < 4 else 80)
    monkeypatch.chdir(project.root / "sub")
    command = ["/bin/sh", "-c", f'cd .. && exec {sys.executable} measure.py "$@"', "sh"]
    assert _bisect(refs=("c0", "c5"), command=command) == 0
    out = capsys.readouterr().out
    assert "is the first bad commit: c4\n" in out
