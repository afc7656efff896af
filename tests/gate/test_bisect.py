from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.report_factory import make_failed, make_report
from support.verdict_factory import with_launches

from pytest_llmgpu.gate.ab import Both
from pytest_llmgpu.gate.bisect import Found, Mark, NotBuiltError, find, mark_of, selected, undecided, worst
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Armed, Row, Verdict, Verdicts

POLICY = Policy(confidence=0.99)
SD = 0.0025
"""Noise between launches in the fake gate."""


class _Line:
    """Bisects a line of commits, named by their numbers; the first is good and the last bad."""

    def __init__(self, commits: int) -> None:
        self._good, self._bad = 0, commits
        self._skipped: set[int] = set()

    def _open(self) -> list[int]:
        return [number for number in range(self._good + 1, self._bad) if number not in self._skipped]

    def candidate(self) -> str | None:
        found = self._open()
        return str(found[len(found) // 2]) if found else None

    def mark(self, sha: str, mark: Mark) -> None:
        if mark == "good":
            self._good = int(sha)
        elif mark == "bad":
            self._bad = int(sha)
        else:
            self._skipped.add(int(sha))

    def first_bad(self) -> str | None:
        return str(self._bad) if self._bad == self._good + 1 else None

    def remaining(self) -> list[str]:
        return [str(number) for number in range(self._bad, self._good, -1)]


def _report(seconds: float) -> Report:
    result = with_launches([seconds])
    result.nodeid = "b.py::t[mp-bs1]"
    other = with_launches([1.0], batch_size=2)
    other.nodeid = "b.py::t[mp-bs2]"
    return make_report([result, other])


def _verdicts(rows: Sequence[Row]) -> Verdicts:
    return Verdicts(policy="", policy_sha256="", armed=Armed(), rows=list(rows))


def _judge(metric: str) -> Callable[[Report, Report, Policy], Verdicts]:
    """Return a gate of one case: a normal test for times, and exact figures for other metrics."""

    def judge(base: Report, head: Report, _: Policy) -> Verdicts:
        pair = base.cases[0], head.cases[0]
        if pair[1].outcome != "completed":
            return _verdicts([Row.of(pair[1], "outcome", "FAILED", "The case crashed.")])
        if pair[0].outcome != "completed":
            return _verdicts([])
        times = [[launch.batches.latency_s[0] for launch in result.launches] for result in pair]
        before, after = map(fmean, times)
        change = math.log(after / before)
        error = SD * math.sqrt(sum(1 / len(launches) for launches in times))
        p = NormalDist().cdf(-abs(change) / error) if metric == "time" else None
        verdict: Verdict = "REGRESSED" if change > 0.01 else "OK"
        return _verdicts(
            [Row.of(pair[1], metric, verdict, "", base=before, head=after, ratio=after / before, p=p, n=1)]
        )

    return judge


def _found(
    seconds: Sequence[float | Exception], *, metric: str = "time", launches: int = 100
) -> tuple[Found, list[tuple[str, int, list[str]]]]:
    """Bisect commits with these times, of which the first and the last are the ends; return all launches too."""
    ran = []

    def measure(sha: str, number: int, deselected: Sequence[str]) -> Report:
        ran.append((sha, number, list(deselected)))
        value = seconds[int(sha)]
        if isinstance(value, Exception):
            raise value
        return _report(value)

    first, last = seconds[0], seconds[-1]
    assert isinstance(first, float)
    assert isinstance(last, float)
    ends, judge = Both(_report(first), _report(last)), _judge(metric)
    end = worst(judge(*ends, POLICY))
    assert end is not None
    line = _Line(len(seconds) - 1)
    return find(line, measure, judge, POLICY, ends, end, launches=launches), ran


@given(before=st.integers(1, 80), after=st.integers(1, 80), metric=st.sampled_from(["time", "memory"]))
def test_the_first_slower_commit_is_found(before: int, after: int, metric: str) -> None:
    """A clear change takes one launch a commit; only the test of the case is launched."""
    found, ran = _found([1.0] * before + [1.1] * after, metric=metric)
    assert found.first_bad == str(before)
    assert found.launches == len(ran) <= math.ceil(math.log2(before + after)) + 1
    assert {(number, *deselected) for _, number, deselected in ran} <= {(1, "b.py::t[mp-bs2]")}


def test_of_several_changes_the_one_that_crosses_the_middle_is_found() -> None:
    """A smaller change before it is nearer to the good end, although it is significant."""
    assert _found([1.0, 1.03, 1.03, 1.1, 1.11])[0].first_bad == "3"
    assert _found([1.0, 1.03, 1.03, 1.1, 1.11], metric="memory")[0].first_bad == "3"


def test_a_commit_in_the_middle_is_launched_again() -> None:
    """It differs significantly from the far end after more launches; after eight without a decision it is skipped."""
    found, ran = _found([1.0, 1.0066, 1.0125])
    assert [number for _, number, _ in ran] == [*range(1, len(ran) + 1)]
    assert 1 < len(ran) < 8
    assert found.first_bad == "1"
    found, ran = _found([1.0, 1.005, 1.0105], launches=8)
    assert (found.first_bad, found.remaining, len(ran)) == (None, ["2", "1"], 8)
    assert [(step.mark, step.launches) for step in found.steps] == [("skip", 8)]


@pytest.mark.parametrize(
    ("error", "launches"), [(NotBuiltError("--setup ended with 1"), 0), (ValueError("ended without a report"), 1)]
)
def test_a_commit_that_cannot_be_measured_is_skipped(error: Exception, launches: int) -> None:
    """The reason is kept; a commit that was not built took no launch."""
    found, _ = _found([1.0, 1.0, error, 1.1, 1.1])
    assert (found.first_bad, found.remaining) == (None, ["3", "2"])
    skipped = next(step for step in found.steps if step.mark == "skip")
    assert (skipped.launches, skipped.reason) == (launches, str(error))
    assert found.launches == sum(step.launches for step in found.steps)


@given(skipped=st.sets(st.integers(1, 30)), position=st.integers(1, 31))
def test_the_first_bad_commit_is_among_the_remaining(skipped: set[int], position: int) -> None:
    """Skipped commits can hide it, but not lose it."""
    seconds: list[float | Exception] = [1.0 if number < position else 1.1 for number in range(32)]
    for number in skipped:
        seconds[number] = NotBuiltError("no")
    found, _ = _found(seconds)
    assert str(position) in found.remaining
    assert found.first_bad in {None, str(position)}
    assert (found.first_bad is None) == (bool(skipped & {position, position - 1} - {31}) and len(found.remaining) > 1)


def test_the_allowed_launches_end_the_bisection() -> None:
    """The range that remains has the first bad commit."""
    found, ran = _found([1.0] * 30 + [1.1] * 34, launches=3)
    assert found.first_bad is None
    assert len(ran) == found.launches == 3
    assert "30" in found.remaining
    assert len(found.remaining) == 8
    assert found.steps[-1].mark is None


def test_a_case_that_fails_is_skipped() -> None:
    """Its figures are missing, and the reason is that of its outcome."""
    ends = Both(_report(1.0), _report(1.1))
    judge = _judge("time")
    end = worst(judge(*ends, POLICY))
    assert end is not None
    failed = make_report([make_failed("crashed")])
    found = find(_Line(2), lambda *_: failed, judge, POLICY, ends, end, launches=9)
    assert [(step.mark, step.reason) for step in found.steps] == [("skip", "The case crashed.")]


def test_a_crash_is_bisected() -> None:
    """A commit at which the case completed has no row of its outcome."""
    reports = [_report(1.0)] * 5 + [make_report([make_failed("crashed")])] * 3
    ends, judge = Both(reports[0], reports[-1]), _judge("time")
    end = worst(judge(*ends, POLICY))
    assert end is not None
    assert end.metric == "outcome"
    found = find(_Line(7), lambda sha, *_: reports[int(sha)], judge, POLICY, ends, end, launches=9)
    assert found.first_bad == "5"


def test_a_metric_with_a_row_only_where_it_changed_is_bisected() -> None:
    """A commit without the row is good if the bad end differs from it as from the good end."""

    def judge(base: Report, head: Report, _: Policy) -> Verdicts:
        before, after = (report.cases[0].launches[0].batches.latency_s[0] for report in (base, head))
        row = Row.of(head.cases[0], "execution", "REGRESSED", "The forwards ran eagerly.")
        return _verdicts([row] if after > before else [])

    reports = [_report(1.0)] * 5 + [_report(1.1)] * 3
    ends = Both(reports[0], reports[-1])
    end = worst(judge(*ends, POLICY))
    assert end is not None
    found = find(_Line(7), lambda sha, *_: reports[int(sha)], judge, POLICY, ends, end, launches=9)
    assert found.first_bad == "5"
    assert {step.launches for step in found.steps} == {1}


def _row(metric: str, verdict: Verdict = "REGRESSED", size: int = 1, **figures: Any) -> Row:
    result = with_launches([1.0], batch_size=size)
    result.nodeid = f"b.py::t[{result.id}]"
    return Row.of(result, metric, verdict, "", **figures)


@pytest.mark.parametrize(
    ("end", "own", "mark"),
    [
        ("CAPACITY_REGRESSED", "CAPACITY_REGRESSED", "bad"),
        ("CAPACITY_REGRESSED", "OK", "good"),
        ("CAPACITY_REGRESSED", "CAPACITY_IMPROVED", "good"),
        ("CAPACITY_REGRESSED", "FAILED", "skip"),
        ("FAILED", "FAILED", "bad"),
        ("FAILED", "NOT_COMPARABLE", "skip"),
    ],
)
def test_without_figures_the_verdict_decides(end: Verdict, own: Verdict, mark: Mark) -> None:
    """A commit is bad if it has the verdict of the bad end, and skipped if it has another trouble."""
    row = _row("outcome", own)
    assert mark_of(_row("outcome", end), row, row, 0.01) == mark


def test_a_disturbed_time_is_measured_again() -> None:
    """A launch that NVML reports as disturbed decides nothing; times that cannot be compared skip the commit."""
    end = _row("time", ratio=1.1, p=0.001)
    invalid, other = _row("time", "INVALID"), _row("time", "NOT_COMPARABLE")
    assert mark_of(end, invalid, invalid, 0.01) is None
    assert mark_of(end, other, other, 0.01) == "skip"


def test_the_worst_gated_regression_is_bisected() -> None:
    """Exact metrics come before times, and among times the most significant one; rows over all cases come last."""
    all_cases = Row(key="all cases", id="all cases", metric="time", verdict="REGRESSED", reason="", ratio=2.0, p=0.0)
    shown = _row("memory", gated=False)
    accepted = _row("memory", known="accepted")
    small, large = _row("time", ratio=1.1, p=1e-9), _row("time", size=2, ratio=1.2, p=1e-3)
    rows = [all_cases, shown, accepted, large, small, _row("accuracy", "OK")]
    assert worst(_verdicts(rows)) == small
    assert worst(_verdicts([*rows, exact := _row("traffic", size=4)])) == exact
    assert worst(_verdicts(rows[:3])) == all_cases
    assert worst(_verdicts(rows), metric="memory") == shown
    assert worst(_verdicts(rows), case="mp-bs2") == large
    assert worst(_verdicts(rows), metric="accuracy") is None
    assert selected(_verdicts(rows), metric="accuracy") == rows[-1:]


def test_a_time_that_is_ok_is_launched_again() -> None:
    """The user saw a regression, and one launch hides a small one by chance; exact metrics do not change."""
    assert undecided(_verdicts([_row("time", "OK"), _row("memory", "OK", size=2)])) == {_row("time", "OK").key}


def test_the_ends_are_launched_until_the_row_is_decided() -> None:
    """Rows that were not asked for need no further launch, nor does any once there is a regression."""
    unclear, slower = _row("time", "NOT_ENOUGH_DATA"), _row("time", size=2, ratio=1.1, p=1e-9)
    assert undecided(_verdicts([unclear])) == {unclear.key}
    assert undecided(_verdicts([unclear]), metric="memory") == set()
    assert undecided(_verdicts([unclear]), case="mp-bs2") == set()
    assert undecided(_verdicts([unclear, slower])) == set()
    assert undecided(_verdicts([unclear, slower]), case="mp-bs1") == {unclear.key}
