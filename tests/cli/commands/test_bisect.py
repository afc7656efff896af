from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist, fmean
from typing import Any

import msgspec
import pytest
from support.measured_project import STEADY, Project
from support.report_factory import known, make_failed, make_report
from support.verdict_factory import make_verdicts, with_launches

from pytest_llmgpu.cli import main
from pytest_llmgpu.cli.commands.bisect import Mark, Step, begun, find, mark_of, measure_ends, worst
from pytest_llmgpu.gate.ab import Both
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import Declared
from pytest_llmgpu.report.verdicts import Decided, Row, Verdict, Verdicts

_EXACT = "[tool.llmgpu.gate.time]\ngate = false\n"
"""A policy under which one launch decides."""
_SD = 0.001
"""Noise between launches in the fake gate."""
_OWN = Declared(better="larger")


def _report(seconds: float) -> Report:
    cases = [with_launches([seconds]), with_launches([1.0], batch_size=2)]
    for result in cases:
        result.nodeid = f"b.py::t[{result.id}]"
    return make_report(cases)


def _row(metric: str, verdict: Decided = "REGRESSED", size: int = 1, **figures: Any) -> Row:
    result = with_launches([1.0], batch_size=size)
    result.nodeid = f"b.py::t[{result.id}]"
    return Row.of(result, metric, verdict, "", **figures)


def _judge(metric: str) -> Callable[[Report, Report], Verdicts]:
    """Return a gate of one case: a normal test for times, and exact figures for other metrics."""

    def judge(base: Report, head: Report) -> Verdicts:
        if head.cases[0].outcome != "completed":
            return make_verdicts(Row.of(head.cases[0], "outcome", "REGRESSED", "The case crashed."))
        times = [[one.batches.latency_s[0] for one in report.cases[0].launches] for report in (base, head)]
        ratio = fmean(times[1]) / fmean(times[0])
        error = _SD * math.sqrt(sum(1 / len(launches) for launches in times))
        decided = metric != "time" or abs(ratio - 1.005) > 2 * error
        verdict: Verdict = "UNDECIDED" if not decided else "REGRESSED" if ratio > 1.005 else "OK"
        p = NormalDist().cdf(-abs(ratio - 1) / error)
        return make_verdicts(Row.of(head.cases[0], metric, verdict, "", ratio=ratio, p=p, n=1))

    return judge


def _found(
    project: Project, seconds: Sequence[float | None], metric: str = "time", launches: int = 100
) -> tuple[str | None, list[str], list[Step], list[str]]:
    """Bisect commits with these times or None; return the first bad one, the remaining ones, steps and launches."""
    shas: list[str] = []
    tree = project.git("hash-object", "-w", "-t", "tree", os.devnull)
    for number in range(len(seconds)):
        shas.append(project.git("commit-tree", tree, *(f"-p{parent}" for parent in shas[-1:]), "-m", f"c{number}"))
    ran = []

    def measure(sha: str, number: int, deselected: Sequence[str]) -> Report:
        ran.append(f"{shas.index(sha)}-{number}")
        assert deselected == ["b.py::t[mp-bs2]"]
        value = seconds[shas.index(sha)]
        if value is None:
            raise ValueError("it cannot be built")
        return _report(value)

    ends = Both(*(_report(value) for value in (seconds[0], seconds[-1]) if value is not None))
    judge = _judge(metric)
    end = known(worst(judge(*ends)))
    with begun(shas[0], shas[-1]) as history:
        steps = [*find(history, measure, judge, ends, end, launches=launches)]
        first, remaining = history.first_bad(), [str(shas.index(sha)) for sha in history.remaining()]
    assert list((project.root.parent / "tmp").iterdir()) == []
    return None if first is None else str(shas.index(first)), remaining, steps, ran


@pytest.mark.parametrize(
    ("seconds", "metric", "found"),
    [
        ([1.0, 1.1], "time", "1"),
        ([1.0] * 5 + [1.1] * 9, "time", "5"),
        ([1.0] * 13 + [1.1] * 3, "memory", "13"),
        # A smaller change before it is nearer to the good end, although it is significant.
        ([1.0, 1.03, 1.03, 1.1, 1.11], "time", "3"),
        ([1.0, 1.03, 1.03, 1.1, 1.11], "memory", "3"),
    ],
)
def test_the_first_slower_commit_is_found(project: Project, seconds: list[float], metric: str, found: str) -> None:
    """A clear change takes one launch a commit; only the test of the case is launched."""
    first, _, steps, ran = _found(project, seconds, metric)
    assert first == found
    assert len(ran) == len(steps) <= math.ceil(math.log2(len(seconds))) + 1


def test_an_undecided_commit_is_launched_again(project: Project) -> None:
    """More launches decide; after eight without a decision it is skipped."""
    first, _, steps, ran = _found(project, [1.0, 1.0075, 1.02])
    assert (first, len(steps), len(ran) > 1) == ("2", 1, True)
    assert ran == [f"1-{number}" for number in range(1, len(ran) + 1)]
    first, remaining, steps, ran = _found(project, [1.0, 1.005, 1.02])
    assert (first, remaining, len(ran)) == (None, ["2", "1"], 8)
    assert [(step.mark, step.launches) for step in steps] == [("skip", 8)]


def test_commits_that_cannot_be_measured_hide_no_other(project: Project) -> None:
    """The first bad commit is among the remaining ones; the skipped ones take no launch."""
    first, remaining, steps, _ = _found(project, [1.0, 1.0, None, 1.1, 1.1])
    assert (first, remaining) == (None, ["3", "2"])
    assert [(step.launches, step.reason) for step in steps if step.mark == "skip"] == [(0, "it cannot be built")]
    first, remaining, steps, _ = _found(project, [1.0] * 14 + [1.1] * 18, launches=2)
    assert (first, len(remaining), steps[-1].mark) == (None, 8, None)
    assert "14" in remaining


@pytest.mark.parametrize(
    ("end", "own", "mark"),
    [
        (_row("traffic"), _row("traffic"), "bad"),
        (_row("traffic"), _row("traffic", "OK"), "good"),
        (_row("traffic"), _row("traffic", "IMPROVED"), "good"),
        (_row("traffic"), _row("traffic", "NOT_COMPARABLE"), "skip"),
        (_row("program", ratio=1.035), _row("program", "CHANGED"), "skip"),
        (_row("program", ratio=1.035), _row("program", "CHANGED", ratio=1.0), "good"),
        (_row("outcome"), None, "good"),
        (_row("execution"), None, "good"),
        (_row("time", ratio=1.1), None, "skip"),
        (_row("time", ratio=1.1), _row("outcome"), "skip"),
        (_row("time", ratio=1.1), _row("time", "UNDECIDED"), None),
        (_row("time", ratio=1.1), _row("time", "NOT_COMPARABLE"), "skip"),
        (_row("time", ratio=1.1), _row("time", "OK", ratio=1.04), "good"),
        (_row("time", ratio=1.1), _row("time", "OK", ratio=1.06), "bad"),
        (_row("hit_rate", ratio=0.9, declared=_OWN), _row("hit_rate", "OK", ratio=0.94, declared=_OWN), "bad"),
    ],
)
def test_a_commit_is_marked_by_its_row(end: Row, own: Row | None, mark: Mark | None) -> None:
    """The nearer end decides, without figures the verdict; an undecided row is launched again."""
    verdicts, report = make_verdicts() if own is None else make_verdicts(own), make_report([with_launches([1.0])])
    assert mark_of(end, verdicts, report, report)[0] == mark


def test_another_outcome_than_that_of_the_bad_end_is_skipped() -> None:
    """A commit that crashes shows nothing about one that runs out of memory."""
    row, crashed, oom = _row("outcome"), make_report([make_failed("crashed")]), make_report([make_failed("oom")])
    row = msgspec.structs.replace(row, key=crashed.cases[0].key)
    assert mark_of(row, make_verdicts(row), crashed, crashed)[0] == "bad"
    assert mark_of(row, make_verdicts(row), crashed, oom)[0] == "skip"


def test_the_worst_gated_regression_is_bisected() -> None:
    """Exact metrics come before times, and among times the most significant one."""
    shown, accepted = _row("memory", gated=False), _row("flops", allowed="accepted")
    small, large = _row("time", ratio=1.1, p=1e-9), _row("time", size=2, ratio=1.2, p=1e-3)
    rows = [shown, accepted, large, small, _row("accuracy", "OK")]
    assert worst(make_verdicts(*rows)) == small
    assert worst(make_verdicts(*rows, exact := _row("traffic", size=4))) == exact
    assert worst(make_verdicts(*rows[:2])) is None
    assert worst(make_verdicts(*rows), metric="memory") == shown
    assert worst(make_verdicts(*rows), case="mp-bs2") == large
    assert worst(make_verdicts(*rows), metric="accuracy") is None


@pytest.mark.parametrize(
    ("verdict", "asked", "launches"),
    [
        ("UNDECIDED", {}, 3),
        ("OK", {}, 3),
        ("UNDECIDED", {"metric": "memory"}, 1),
        ("UNDECIDED", {"case": "mp-bs2"}, 1),
        ("REGRESSED", {}, 1),
    ],
)
def test_the_ends_are_launched_until_the_row_is_decided(verdict: Verdict, asked: dict[str, str], launches: int) -> None:
    """The user saw a regression, so that an OK is launched again; other rows need no further launch."""
    both, _ = measure_ends(
        lambda *_: _report(1.0), lambda *_: make_verdicts(_row("time", verdict)), looks=(1, 3), **asked
    )
    assert [len(report.cases[0].launches) for report in both] == [launches] * 2


def _commits(project: Project, first_bad: int, last: int, **others: dict[str, object]) -> None:
    """Commit c0 to c{last}, of which those from `first_bad` on send more; `others` has other behaviour by name."""
    for number in range(last + 1):
        name = f"c{number}"
        behaviour = others.get(name, {"seconds": STEADY, "calls": 64 if number < first_bad else 80})
        project.commit(name, _EXACT, **behaviour)


_BISECT = ("bisect", "c0", "HEAD")
_MEASURE = ("--", sys.executable, "measure.py")


def _state(project: Project) -> Iterator[str]:
    """Yield what the user has: files, index, references, HEAD, and the state of his own bisection."""
    # git may write `packed-refs` at any time, and `for-each-ref` has its contents.
    yield from (project.git(*name.split()) for name in ("status --porcelain", "for-each-ref", "worktree list"))
    for path in sorted([*(project.root / ".git").iterdir(), *project.root.iterdir()]):
        if path.is_file() and path.name != "packed-refs":
            yield f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.mark.slow
def test_a_commit_of_a_repository_is_found(project: Project, llmgpu: Callable[..., str]) -> None:
    """Device time takes a launch a commit, and both neighbours are kept; what cannot be built or run is skipped."""
    behaviours: list[dict[str, object]] = [{"device_s": 0.5 if number < 6 else 0.53} for number in range(9)]
    behaviours[3], behaviours[4] = {"status": 7}, {"broken": True}
    for number, behaviour in enumerate(behaviours):
        project.commit(f"c{number}", None, seconds=STEADY, **behaviour)
    setup = '! grep -q broken behaviour.json || { echo "does not compile"; exit 1; }'
    out = llmgpu(*_BISECT, "--setup", setup, *_MEASURE)
    sha = project.git("rev-parse", "c6").strip()
    assert f"FOUND: {sha} is the first bad commit: c6\n    a, " in out
    assert "skip  c4" in out
    assert "--setup ended with status 1: does not compile" in out
    names = project.launches()
    assert names[:2] == ["good-1", "bad-1"]
    launches = [name for name in names if (project.kept / "launches" / f"{name}.json.gz").exists()]
    assert len(launches) <= 6
    assert f"\n{len(launches)} launches: 2 of GOOD and BAD, {len(launches) - 2} of the commits between them\n" in out
    logs = [(project.kept / "launches" / f"{name}.log").read_text() for name in names]
    assert ["--deselect=b.py::t[mp-bs2]" in log for log in logs] == [False, False] + [True] * (len(names) - 2)
    before, first = (file.load(project.kept / f"{name}.json.gz") for name in ("before", "first-bad"))
    assert [before.commit.sha, first.commit.sha] == project.git("rev-parse", "c5", "c6").split()
    (row,) = (row for row in known(first.verdicts).rows if (row.metric, row.id) == ("device_time", "mp-bs1"))
    assert row.ratio == pytest.approx(1.06, rel=1e-3)
    project.untouched()


@pytest.mark.slow
def test_the_users_tree_and_his_own_bisection_stay_as_they_are(project: Project, llmgpu: Callable[..., str]) -> None:
    """He has staged and unstaged changes, and is bisecting something else himself."""
    _commits(project, first_bad=3, last=6)
    project.commit("last", seconds=STEADY, calls=80)
    project.git("bisect", "start", "c6", "c1")
    project.git("bisect", "good", "c2")
    (project.root / "staged").write_text("staged")
    project.git("add", "staged")
    (project.root / "measure.py").write_text("changed")
    (project.root / "untracked").write_text("untracked")
    before = [*_state(project)]
    command = ["--", "/bin/sh", "-c", f'exec {sys.executable} measure.py "$@"', "sh"]
    out = llmgpu("bisect", "c0", "c6", *command)
    assert "is the first bad commit: c3\n" in out
    assert "note: your uncommitted changes are not measured\n" in out
    llmgpu("bisect", "c6", "last", *command, ends=3)
    assert [*_state(project)] == before
    assert list((project.root.parent / "tmp").iterdir()) == []


@pytest.mark.slow
def test_a_branch_that_moves_meanwhile_does_not_matter(project: Project, llmgpu: Callable[..., str]) -> None:
    """GOOD and BAD are the commits that they were at the start: the user may commit while it runs."""
    _commits(project, first_bad=1, last=1)
    bad = project.git("rev-parse", "HEAD").strip()
    work = f"git -C {project.root} -c user.name=a -c user.email=a@b.c commit --quiet --allow-empty -m later"
    out = llmgpu(*_BISECT, "--", "/bin/sh", "-c", f'{work} && exec {sys.executable} measure.py "$@"', "sh")
    assert f"FOUND: {bad} is the first bad commit: c1\n" in out
    assert "compared with " in out


@pytest.mark.slow
def test_an_undecided_bisection_prints_the_range(project: Project, llmgpu: Callable[..., str]) -> None:
    """Skipped commits or the allowed launches end it with status 3 and the next command."""
    _commits(project, first_bad=2, last=4, c2={"status": 7}, c3={"status": 7})
    out = llmgpu(*_BISECT, *_MEASURE, ends=3)
    assert "UNDECIDED: the first bad commit is one of 3 commits:\n" in out
    listed = out.partition("UNDECIDED")[2].splitlines()[1:4]
    assert [line.split()[1:] for line in listed] == [["c4"], ["c3"], ["c2"]]
    assert "next: " in llmgpu("bisect", "c0", "c4", "--max-launches", "3", *_MEASURE, ends=3)


@pytest.mark.slow
def test_ends_that_do_not_differ_end_it(project: Project, llmgpu: Callable[..., str]) -> None:
    """No commit between them is launched; a metric that is not gated is bisected if it is named."""
    policy = f"{_EXACT}[tool.llmgpu.gate.traffic]\ngate = false\n"
    for number, calls in enumerate((64, 64, 80, 80)):
        project.commit(f"c{number}", policy, seconds=STEADY, calls=calls)
    case = ("--case", "mp-bs2")
    out = llmgpu(*_BISECT, "--metric", "time", *case, "--max-launches", "8", *_MEASURE, ends=3)
    assert "UNDECIDED: BAD and GOOD do not differ significantly in 1 row\n" in out
    assert "next: llmgpu ab c0 HEAD --launches 20 -- " in out
    assert "is the first bad commit: c2\n" in llmgpu(*_BISECT, "--metric", "traffic", *case, *_MEASURE)
    out = llmgpu("bisect", "c0", "c1", "--metric", "traffic", *_MEASURE, ends=3)
    assert "NO DIFFERENCE: BAD is not worse than GOOD\n" in out
    assert "next: other commits" in out  # more launches do not change exact figures


@pytest.mark.slow
def test_bad_usage_is_exit_2(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the value and what is allowed."""
    _commits(project, first_bad=9, last=2)
    project.git("checkout", "--quiet", "--orphan", "other")
    project.commit("alone", seconds=STEADY)
    for refs, options, reason in (
        (("nowhere", "c2"), [], "there is no commit 'nowhere'"),
        (("c1", "c1"), [], "are the same commit"),
        (("c2", "c0"), [], "is a descendant of BAD"),
        (("c0", "alone"), [], "have no common ancestor here: fetch the history"),
        (("c0", "c2"), ["--metric", "tme"], "--metric=tme: is no metric of the gate (did you mean time?): allowed"),
        (("c0", "c2"), ["--max-launches", "2"], "--max-launches=2: at least 3 are needed"),
        (("c0", "c2"), ["--case", "tp-bs8"], "no row of a gated metric of tp-bs8; rows are of mp-bs1, mp-bs2"),
        (("c0", "c2"), ["--setup", "exit 9"], "good: --setup ended with status 9"),
        (("c0", "c2"), ["--policy", "nowhere.toml"], "policy nowhere.toml: cannot be read: No such file"),
    ):
        assert main(["bisect", *refs, *options, *_MEASURE]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("\n") == 1
    assert list((project.root.parent / "tmp").iterdir()) == []
