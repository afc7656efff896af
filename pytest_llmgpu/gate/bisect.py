"""Find the commit that made a metric worse: choose the metric, and decide on each commit that git's bisection proposes.

A commit is bad if its figure is nearer to that of the bad end than to that of the good end. The middle between both
ends is a better limit than the threshold of the gate: of several slower commits the bisection then finds the one that
crosses the middle, and a difference of little more than the threshold needs no more launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from pytest_llmgpu.analysis.launch_merging import merge
from pytest_llmgpu.gate import ab
from pytest_llmgpu.gate.ab import LOOKS, Both, Side, is_open, left_out
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.metrics import spec_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import BETTER, SEVERITY, WORSE, Row, Verdicts

Mark = Literal["good", "bad", "skip"]
"""The mark of a commit, as git's bisection names it."""

MeasureCommit = Callable[[str, int, Sequence[str]], Report]
"""Runs one launch. The arguments are the hash of the commit, the number of the launch and the node ids to deselect.
ValueError: the commit cannot be measured."""

JudgeTwo = Callable[[Report, Report, Policy], Verdicts]
"""Compares a candidate (second) with a baseline (first) under a policy."""

_ENDS = 4
"""The ends take at most two times the allowed launches divided by this number."""

_ENDS_LOOKS = (1, 2, 4, 8)
"""Numbers of launches of each end after which they are compared. A second launch shows most of the differences that one
does not show, and saves launches of the commits, which are all compared with the ends."""

_SEVERAL = 2
"""Least number of launches from which a report has every row: one over all cases needs two."""

_KINDS = ("exact", "quiet", "noisy")
"""Kinds of metrics, the one that needs the fewest launches first."""


class NotBuiltError(ValueError):
    """A commit could not be checked out or built, so that no launch was made."""


class History(Protocol):
    """A bisection that chooses the commits; git's own in production (`cli.bisection`)."""

    def candidate(self) -> str | None:
        """Return the hash of the commit to measure next; None if no commit is left."""

    def mark(self, sha: str, mark: Mark) -> None:
        """Mark a commit."""

    def first_bad(self) -> str | None:
        """Return the hash of the first bad commit; None if it is not known."""

    def remaining(self) -> list[str]:
        """Return the hashes of the commits of which one is the first bad commit, the newest first."""


class Ends(NamedTuple):
    """The measured ends of a bisection."""

    both: Both
    """The reports of the good end (`base`) and of the bad end (`head`)."""
    verdicts: Verdicts
    """The comparison of the bad end with the good end."""
    launches: int
    """The number of launches of both ends."""


class Step(NamedTuple):
    """One commit of a bisection."""

    sha: str
    """The hash of the commit."""
    mark: Mark | None
    """The mark of the commit; None if the allowed launches did not decide."""
    launches: int
    """The number of launches of the commit."""
    row: Row | None
    """The comparison with the good end; None if there is none."""
    reason: str
    """The reason why the commit has no mark or was skipped; else empty."""
    report: Report | None
    """The report with all launches of the commit; None if it could not be measured."""


class Found(NamedTuple):
    """The end of a bisection."""

    first_bad: str | None
    """The hash of the first bad commit; None if it is not known."""
    remaining: list[str]
    """The hashes of the commits of which one is the first bad commit, the newest first."""
    steps: list[Step]
    """The commits in the order in which they were measured."""
    launches: int
    """The number of launches of all these commits."""


def measure_ends(
    measure: ab.Measure,
    judge: JudgeTwo,
    policy: Policy,
    *,
    launches: int,
    metric: str | None = None,
    case: str | None = None,
) -> Ends:
    """Launch both ends in turn until a regression is found or no row can show one, and compare them as `gate.ab` does.

    Args:
        measure: The function that runs one launch of an end; the good end is `base`.
        judge: The function that compares two reports.
        policy: The policy; its rate of false alarms is split over the looks.
        launches: The allowed launches of the whole bisection, of which the ends take at most half.
        metric: See `worst`.
        case: See `worst`.
    """
    ran: list[Side] = []

    def counted(side: Side, number: int, deselected: Sequence[str]) -> Report:
        ran.append(side)
        return measure(side, number, deselected)

    at = ab.looks(max(1, launches // _ENDS), _ENDS_LOOKS)
    stricter = ab.split(policy, len(at))
    both, verdicts = ab.compare(
        counted,
        lambda both: judge(both.base, both.head, stricter),
        lambda verdicts: undecided(verdicts, metric, case),
        at,
    )
    return Ends(both, verdicts, len(ran))


def worst(verdicts: Verdicts, metric: str | None = None, case: str | None = None) -> Row | None:
    """Return the regression to bisect; None if there is none.

    The worst verdict comes first. Among equal verdicts exact metrics come first and noisy ones last, because they need
    the fewest launches; among rows of one kind the one with the smallest p, which is the least hidden by noise, and
    then the one with the largest change. A row over several cases, which needs launches of all of them, comes last.

    Args:
        verdicts: The comparison of the bad end with the good end.
        metric: The metric to bisect, which need not be gated; None: any gated metric.
        case: The id of the case, as in the rows of verdicts; None: any.
    """
    rows = [row for row in selected(verdicts, metric, case) if row.verdict in WORSE]
    return min(rows, key=_order, default=None)


def selected(verdicts: Verdicts, metric: str | None = None, case: str | None = None) -> list[Row]:
    """Return the rows in which `worst` looks for a regression."""
    return [
        row
        for row in verdicts.rows
        if (row.metric == metric if metric is not None else row.gated and row.known is None)
        and case in {None, row.id, *(row.cases or ())}
    ]


def undecided(verdicts: Verdicts, metric: str | None = None, case: str | None = None) -> set[str]:
    """Return the keys of these rows in which more launches can show a regression; none once there is one.

    A row that is OK is one of them, because the user saw a regression: one of `time.PROMISED` above the threshold is OK
    by chance in 5 % of comparisons.
    """
    if worst(verdicts, metric, case) is not None:
        return set()
    rows = [row for row in selected(verdicts, metric, case) if spec_of(row.metric).kind != "exact"]
    return {row.key for row in rows if is_open(row) or row.verdict == "OK"}


def _order(row: Row) -> tuple[bool, int, int, float, float]:
    kind = _KINDS.index(spec_of(row.metric).kind)
    return row.nodeid is None, SEVERITY.index(row.verdict), kind, row.p or 0.0, -abs(math.log(row.ratio or 1.0))


def row_of(verdicts: Verdicts, end: Row) -> Row | None:
    """Return the row of the same metric and case as that of the ends; None if there is none."""
    return next((row for row in verdicts.rows if (row.key, row.metric) == (end.key, end.metric)), None)


def mark_of(end: Row, from_good: Row, to_bad: Row | None, alpha: float) -> Mark | None:
    """Return the mark of a commit; None if more launches are needed to decide.

    Args:
        end: The comparison of the bad end with the good end.
        from_good: The comparison of the commit with the good end.
        to_bad: The comparison of the bad end with the commit.
        alpha: The largest probability by which chance may put a commit that is like one end nearer to the other.
    """
    if spec_of(end.metric).kind == "exact":
        return _exact_mark(end, from_good)
    if from_good.verdict == "INVALID":
        return None
    if not from_good.ratio or to_bad is None or not to_bad.ratio:
        return "skip"
    grown, missing = math.log(from_good.ratio), math.log(to_bad.ratio)
    mark: Mark = "bad" if grown > missing else "good"
    decisive, change = (from_good, grown) if mark == "bad" else (to_bad, missing)
    # The commit is nearer to one end; it also has to differ significantly from the other one.
    return mark if change > 0 and decisive.p is not None and decisive.p <= alpha else None


def _exact_mark(end: Row, row: Row) -> Mark:
    amounts = end.base, end.head, row.head
    # A row without a ratio has no amount, or is about other cases of its series in each comparison.
    if end.ratio is not None and row.ratio is not None and None not in amounts and end.base != end.head:
        good, bad, own = (float(amount) for amount in amounts if amount is not None)
        return "bad" if abs(own - bad) < abs(own - good) else "good"
    if row.verdict == end.verdict:
        return "bad"
    return "good" if row.verdict in {"OK", *BETTER} else "skip"


def find(
    history: History,
    measure: MeasureCommit,
    judge: JudgeTwo,
    policy: Policy,
    ends: Both,
    end: Row,
    *,
    launches: int,
    on_step: Callable[[Step], None] = lambda _: None,
) -> Found:
    """Measure the commits that the bisection proposes until one is left.

    A commit is launched until its mark is known, up to eight times. A commit that cannot be measured is skipped.

    Args:
        history: The bisection.
        measure: The function that runs one launch. Only the test of the case is selected.
        judge: The function that compares two reports.
        policy: The policy; at each launch of a commit, chance marks it wrongly with at most 1 minus its confidence.
        ends: The reports of the good and of the bad end.
        end: The row of `judge` on the ends that is to be explained.
        launches: The largest number of launches of all commits together.
        on_step: Called after each commit.
    """
    commits = _Commits(measure, judge, policy, ends, end)
    steps: list[Step] = []
    left = launches
    while (sha := history.candidate()) is not None:
        step = commits.step(sha, left)
        left -= step.launches
        steps.append(step)
        on_step(step)
        if step.mark is None:
            break
        history.mark(sha, step.mark)
    return Found(history.first_bad(), history.remaining(), steps, launches - left)


class _Commits:
    """Measures one commit after the other, and decides on each."""

    def __init__(self, measure: MeasureCommit, judge: JudgeTwo, policy: Policy, ends: Both, end: Row) -> None:
        self._measure, self._judge, self._policy, self._ends, self._end = measure, judge, policy, ends, end
        self._deselected = left_out(ends.base, {end.key}) if end.nodeid is not None else []

    def step(self, sha: str, most: int) -> Step:
        """Measure a commit until its mark is known, with at most this number of launches."""
        reports: list[Report] = []
        step = Step(sha, None, 0, None, "", None)
        for number in range(1, LOOKS[-1] + 1):
            if number > most:
                return step._replace(reason="the allowed launches are used up")
            try:
                reports.append(self._measure(sha, number, self._deselected))
                report = merge(reports, [f"launch {one}" for one in range(1, number + 1)])
            except NotBuiltError as error:
                return step._replace(mark="skip", reason=str(error))
            except ValueError as error:
                return step._replace(mark="skip", launches=number, reason=str(error))
            step = self._judged(sha, number, report)
            if step.mark is not None:
                return step
        return step._replace(mark="skip", reason=f"{LOOKS[-1]} launches do not decide")

    def _judged(self, sha: str, launches: int, report: Report) -> Step:
        end, from_good = self._end, self._judge(self._ends.base, report, self._policy)
        row, to_bad = row_of(from_good, end), row_of(self._judge(report, self._ends.head, self._policy), end)
        if row is not None:
            mark = mark_of(end, row, to_bad, 1 - self._policy.confidence)
            return Step(sha, mark, launches, row, row.reason if mark == "skip" else "", report)
        if to_bad is not None and to_bad.verdict == end.verdict and spec_of(end.metric).kind == "exact":
            return Step(sha, "good", launches, None, "", report)  # a metric with a row only where it changed
        outcomes = [other for other in from_good.rows if other.key == end.key and other.metric == "outcome"]
        if not outcomes and launches < _SEVERAL:
            return Step(sha, None, launches, None, "", report)
        reason = outcomes[0].reason if outcomes else f"it has no {end.metric} of {end.id}"
        return Step(sha, "skip", launches, None, reason, report)
