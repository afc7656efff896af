"""`llmgpu bisect`: find the commit that made a metric worse, by git's own bisection and one launch a commit.

A commit is bad if its figure is nearer to that of the bad end than to that of the good end: of several slower commits
the one that crosses the middle is found, and a difference of little more than the threshold needs no more launches.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from pytest_llmgpu.analysis.merging import merge
from pytest_llmgpu.cli import launches
from pytest_llmgpu.cli.arguments import add_rules, storage_of, today
from pytest_llmgpu.cli.launches import LETTERS, Worktree
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.gate import ab, judge
from pytest_llmgpu.gate.ab import LOOKS, Both, is_open
from pytest_llmgpu.gate.policy import misspelt
from pytest_llmgpu.report import file
from pytest_llmgpu.report.metrics import JUDGED, is_own, spec_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.text import plural, signed_percent
from pytest_llmgpu.report.verdicts import SEVERITY, Row, Verdicts

_EPILOG = """\
git bisect chooses the commits. Its state and its commits are in temporary git worktrees under TMPDIR: your working
tree, its index, its HEAD and a bisection of your own are not changed. First GOOD and BAD are launched alternately. Then
each commit is launched until its row is decided: once for exact metrics and mostly for device time. Only the test of
the case is launched. Commits that cannot be built or measured are skipped. Reports and logs are kept in .llmgpu/bisect.
Exit status: 0 found, 2 bad usage or GOOD or BAD cannot be measured, 3 undecided, or BAD is not worse than GOOD."""

_FEWEST = 3
"""Fewest launches that are useful: one of each end and one of a commit."""
_INDENT = " " * 4
_SHOWN = 20
"""Most commits of a remaining range that are printed."""
_FIRST_BAD = re.compile(r"^# first bad commit: \[([0-9a-f]+)\]", re.MULTILINE)
_ONLY_SKIPPED = re.compile(r"^# only skipped commits left to test", re.MULTILINE)

Mark = Literal["good", "bad", "skip"]
"""The mark of a commit, as git's bisection names it."""
MeasureCommit = Callable[[str, int, Sequence[str]], Report]
"""Runs one launch. The arguments are the hash of the commit, the number of the launch and the node ids to deselect.
ValueError: the commit cannot be built or measured."""
JudgeTwo = Callable[[Report, Report], Verdicts]
"""Compares a candidate (second) with a baseline (first)."""


class Step(NamedTuple):
    """One commit of a bisection."""

    sha: str
    mark: Mark | None
    """The mark of the commit; None if the allowed launches did not decide."""
    reason: str = ""
    """The reason why the commit was skipped; else empty."""
    launches: int = 0
    row: Row | None = None
    """The comparison with the good end; None if there is none."""
    report: Report | None = None
    """The report with all launches of the commit; None if it could not be measured."""


def add_bisect(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = _EPILOG
    parser.add_argument("good_ref", metavar="GOOD", help="commit before the regression: a branch, a tag, a hash")
    parser.add_argument("bad_ref", metavar="BAD", help="commit with the regression, a descendant of GOOD")
    launches.add_command(parser)
    text = "metric of the regression, such as device_time, gated or not (default: of the worst gated regression)"
    parser.add_argument("--metric", metavar="M", help=text)
    text = "case of the regression, such as tp-bs8 (default: of the worst regression)"
    parser.add_argument("--case", metavar="C", help=text)
    text = "largest number of launches, those of GOOD and BAD included (default: 16)"
    parser.add_argument("--max-launches", metavar="N", type=launches.count, default=16, help=text)
    add_rules(parser)
    parser.set_defaults(in_turn=True)


def run_bisect(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    metric = arguments.metric  # a figure of the user's own is known once it is measured
    if metric is not None and metric not in JUDGED and (not is_own(metric) or misspelt(metric)):
        raise ValueError(f"--metric={metric}: is no metric of the gate{misspelt(metric)}: allowed: {', '.join(JUDGED)}")
    if (most := arguments.max_launches) < _FEWEST:
        raise ValueError(f"--max-launches={most}: at least {_FEWEST} are needed: GOOD, BAD and one commit")
    references = {"good": arguments.good_ref, "bad": arguments.bad_ref}
    good, bad = (launches.sha_of(name) for name in references.values())
    looks = ab.looks(max(1, most // 4))  # the ends take at most half of the launches
    with launches.interruptible(), begun(good, bad) as history:
        with launches.checked_out(references) as trees:
            kept, policy, in_words, measure = launches.begin(arguments, trees, looks, storage_of(arguments) / "bisect")
            show(in_words)

            def judge_two(base: Report, head: Report) -> Verdicts:
                return judge.judge(base, head, policy, today=today(), in_turn=True)

            ends, verdicts = measure_ends(measure, judge_two, looks, arguments.metric, arguments.case)
        if (end := worst(verdicts, arguments.metric, arguments.case)) is None:
            lines = _no_difference(arguments, verdicts)
        else:
            lines = _searched(arguments, history, judge_two, ends, end, kept)
        show("\n".join([*lines, f"reports, policy and logs: {kept}"]))
    return 0 if (kept / "first-bad.json.gz").exists() else 3


def _searched(
    arguments: argparse.Namespace, history: Bisection, judge_two: JudgeTwo, ends: Both, end: Row, kept: Path
) -> list[str]:
    """Search the first bad commit, keep its report and that of the commit before it, and return the closing lines."""
    commits = len(history.remaining())
    show(f"{end.metric} of {end.id}  {end.word}\n{textwrap.indent(end.reason, _INDENT)}")
    show(f"{plural(commits, 'commit')} to search, about {plural(math.ceil(math.log2(commits)), 'step')}")

    def measure(sha: str, number: int, deselected: Sequence[str]) -> Report:
        tree = history.tree(sha)
        if number == 1:
            tree.build(arguments.setup, kept)
        return tree.launch(arguments.command, number, deselected, kept)

    used = len([*(kept / "launches").glob("*.json.gz")])
    steps: list[Step] = []
    for step in find(history, measure, judge_two, ends, end, launches=arguments.max_launches - used):
        change = "" if step.row is None or step.row.ratio is None else signed_percent(step.row.ratio - 1)
        parts = step.sha[:LETTERS], step.mark or "undecided", change, history.text(step.sha, "%s"), step.reason
        show("  ".join(filter(None, parts)))
        steps.append(step)
    between = sum(step.launches for step in steps)
    show(f"\n{plural(used + between, 'launch')}: {used} of GOOD and BAD, {between} of the commits between them")
    if (sha := history.first_bad()) is None:
        return _undecided(arguments, history, steps)
    measured = {history.good: ends.base, history.bad: ends.head}
    measured |= {step.sha: step.report for step in steps if step.report is not None}
    before = next((one for one in history.text(sha, "%P").split() if one in measured), history.good)
    report = measured[sha]
    report.verdicts = judge_two(measured[before], report)
    for name, one in (("before", measured[before]), ("first-bad", report)):
        file.dump(one, kept / f"{name}.json.gz")
    lines = [f"FOUND: {sha} is the first bad commit: {history.text(sha, f'%s%n{_INDENT}%an, %aI')}"]
    if (row := _row_of(report.verdicts, end)) is not None:
        reason = textwrap.indent(row.reason, _INDENT)
        lines.append(f"{_INDENT}{end.metric} of {end.id}, compared with {before[:LETTERS]}:\n{reason}")
    return [*lines, f"next: git show {sha[:LETTERS]}; llmgpu gate {kept}/before.json.gz {kept}/first-bad.json.gz"]


def _no_difference(arguments: argparse.Namespace, verdicts: Verdicts) -> list[str]:
    metric, case = arguments.metric, arguments.case
    rows = _selected(verdicts, metric, case)
    known = sorted({row.id for row in verdicts.rows})
    # An exact metric that is only shown has a row only where it changed.
    exact = metric in JUDGED and spec_of(metric).rule != "time"
    if not rows and not (exact and case in {None, *known}):
        wanted = " of ".join(filter(None, (metric or "a gated metric", case)))
        raise ValueError(f"the reports of GOOD and BAD have no row of {wanted}; rows are of {', '.join(known)}")
    unknown = [row for row in rows if is_open(row)]
    shown = rows if metric is not None or case is not None else unknown
    lines = [f"{row.metric} of {row.id}  {row.word}\n{textwrap.indent(row.reason, _INDENT)}" for row in shown]
    if unknown:
        lines.append(f"UNDECIDED: BAD and GOOD do not differ significantly in {plural(len(unknown), 'row')}")
    else:
        lines.append("NO DIFFERENCE: BAD is not worse than GOOD")
    again = f"llmgpu ab {arguments.good_ref} {arguments.bad_ref} --launches 20 -- {shlex.join(arguments.command)}"
    if not any(row.spec.rule == "time" for row in rows):
        again = "other commits, or another --metric: exact figures do not vary"
    return [*lines, f"next: {again}"]


def _undecided(arguments: argparse.Namespace, history: Bisection, steps: Sequence[Step]) -> list[str]:
    remaining = history.remaining()
    lines = [f"UNDECIDED: the first bad commit is one of {plural(len(remaining), 'commit')}:"]
    lines += [f"{_INDENT}{sha[:LETTERS]}  {history.text(sha, '%s')}" for sha in remaining[:_SHOWN]]
    if len(remaining) > _SHOWN:
        lines.append(f"{_INDENT}and {len(remaining) - _SHOWN:,} more")
    marked = {step.mark: step.sha[:LETTERS] for step in steps}
    again = f"llmgpu bisect {marked.get('good', arguments.good_ref)} {marked.get('bad', arguments.bad_ref)}"
    if None in marked:
        more = f"--max-launches {2 * arguments.max_launches} -- {shlex.join(arguments.command)}"
        return [*lines, f"next: {again} {more}"]
    return [*lines, f"next: make the skipped commits measurable (--setup), then {again}"]


class Bisection:
    """A bisection under way. git chooses each commit and checks it out; its state is in the worktree."""

    def __init__(self, root: Path, good: str, bad: str) -> None:
        self._root, self.good, self.bad = root, good, bad

    def candidate(self) -> str | None:
        """Return the hash of the commit to measure next; None if no commit is left."""
        log = self._git("bisect", "log")
        return None if _FIRST_BAD.search(log) or _ONLY_SKIPPED.search(log) else self._git("rev-parse", "HEAD").strip()

    def tree(self, sha: str) -> Worktree:
        """Return the worktree with this commit."""
        inside, repository = launches.place()
        return Worktree(sha[:LETTERS], sha, sha, self._root, self._root / inside, repository)

    def mark(self, mark: Mark) -> None:
        """Mark the candidate, and check out the next one without the files that the launches left.

        ValueError in one line: git cannot continue, for example because a merge base is bad.
        """
        self._git("reset", "--hard", "--quiet")
        self._git("clean", "-ffdxq")
        try:
            self._git("bisect", mark)
        except ValueError:
            if not _ONLY_SKIPPED.search(self._git("bisect", "log")):
                raise

    def first_bad(self) -> str | None:
        """Return the hash of the first bad commit; None if it is not known."""
        found = _FIRST_BAD.search(self._git("bisect", "log"))
        return None if found is None else found[1]

    def remaining(self) -> list[str]:
        """Return the hashes of the commits of which one is the first bad commit, the newest first."""
        return self._git("rev-list", "refs/bisect/bad", "--not", "--glob=refs/bisect/good-*").split()

    def text(self, sha: str, form: str) -> str:
        """Return the text of a commit in a format of `git show`."""
        return self._git("show", "--no-patch", "--no-show-signature", f"--format={form}", sha).rstrip("\n")

    def _git(self, *arguments: str) -> str:
        return launches.git_output(self._root, *arguments)


@contextmanager
def begun(good: str, bad: str) -> Iterator[Bisection]:
    """Begin a bisection in a temporary worktree, and remove it at the end; ValueError if git cannot bisect."""
    if good == bad:
        raise ValueError(f"GOOD and BAD are the same commit, {good}: there is nothing to search")
    try:
        fork = launches.git_output(Path(), "merge-base", good, bad).strip()
    except ValueError:
        raise ValueError(f"GOOD {good} and BAD {bad} have no common ancestor here: fetch the history") from None
    if fork == bad:
        raise ValueError(f"GOOD {good} is a descendant of BAD {bad}: exchange them")
    if fork != good:
        raise ValueError(f"GOOD {good} is not an ancestor of BAD {bad}: give their merge base {fork} as GOOD")
    with launches.temporary() as add:
        root = add("bisection", bad)
        launches.git_output(root, "bisect", "start", bad, good)
        yield Bisection(root, good, bad)


def measure_ends(
    measure: ab.Measure, judge_two: JudgeTwo, looks: Sequence[int], metric: str | None = None, case: str | None = None
) -> tuple[Both, Verdicts]:
    """Launch both ends in turn until a regression is found or no row can show one; the good end is `base`."""

    def again(verdicts: Verdicts) -> set[str]:
        if worst(verdicts, metric, case) is not None:
            return set()
        times = [row for row in _selected(verdicts, metric, case) if row.spec.rule == "time"]
        # A row that is OK is launched again: the user saw a regression, and chance hides some.
        return {row.key for row in times if is_open(row) or row.verdict == "OK"}

    return ab.compare(measure, lambda both: judge_two(*both), again, looks)


def worst(verdicts: Verdicts, metric: str | None = None, case: str | None = None) -> Row | None:
    """Return the regression to bisect; None if there is none.

    The worst verdict comes first. Among equal verdicts exact metrics come first and noisy ones last, because they need
    the fewest launches; then the row with the smallest p, which is the least hidden by noise, and then the one with the
    largest change. A row over several cases, which needs launches of all, comes last. A named metric need not be gated.
    """

    def order(row: Row) -> tuple[bool, int, int, float, float]:
        kind = 0 if row.spec.rule != "time" else 1 if row.metric == "device_time" else 2
        return row.nodeid is None, SEVERITY.index(row.verdict), kind, row.p or 0.0, -abs(math.log(row.ratio or 1.0))

    return min((row for row in _selected(verdicts, metric, case) if row.worse), key=order, default=None)


def _selected(verdicts: Verdicts, metric: str | None, case: str | None) -> list[Row]:
    """Return the rows in which `worst` looks for a regression."""
    of_case = [row for row in verdicts.rows if case in {None, row.id}]
    return [row for row in of_case if (row.gated and row.allowed is None if metric is None else row.metric == metric)]


def _row_of(verdicts: Verdicts, end: Row) -> Row | None:
    """Return the row of the same metric and case as that of the ends; None if there is none."""
    return next((row for row in verdicts.rows if (row.key, row.metric) == (end.key, end.metric)), None)


def find(
    history: Bisection, measure: MeasureCommit, judge_two: JudgeTwo, ends: Both, end: Row, *, launches: int
) -> Iterator[Step]:
    """Measure the commits that the bisection proposes until one is left, and yield them in that order.

    A commit is launched again while its row is undecided, up to eight times. One that cannot be measured is skipped.
    Only the test of the case is launched; all commits have at most `launches` launches; `end` is the row to explain.
    """
    deselected = ab.left_out(ends.base, {end.key}) if end.nodeid is not None else []
    while (sha := history.candidate()) is not None:
        reports: list[Report] = []
        step = Step(sha, None, "the allowed launches are used up")
        while step.mark is None and launches and len(reports) < LOOKS[-1]:
            try:
                reports.append(measure(sha, len(reports) + 1, deselected))
                report = merge(reports)
            except ValueError as error:
                step = step._replace(mark="skip", reason=str(error))
                break
            launches -= 1
            verdicts = judge_two(ends.base, report)
            mark, reason = mark_of(end, verdicts, report, ends.head)
            step = Step(sha, mark, reason or step.reason * (mark is None), len(reports), _row_of(verdicts, end), report)
        if step.mark is None and len(reports) == LOOKS[-1]:
            step = step._replace(mark="skip", reason=f"{LOOKS[-1]} launches do not decide")
        yield step
        if step.mark is None:
            break
        history.mark(step.mark)


def mark_of(end: Row, verdicts: Verdicts, report: Report, bad: Report) -> tuple[Mark | None, str]:
    """Return the mark of a commit and why it is skipped; None if more launches are needed to decide.

    `end` is a row of the comparison of the bad end with the good end, `verdicts` that of the commit with the good end.
    """
    row = _row_of(verdicts, end)
    outcomes = [{result.outcome for result in one.cases if result.key == end.key} for one in (report, bad)]
    if row is None:
        outcome = next((one for one in verdicts.rows if (one.key, one.metric) == (end.key, "outcome")), None)
        measured = end.key in {result.key for result in report.cases}
        if measured and outcome is None and end.spec.rule != "time":
            return "good", ""  # the metric has a row only where it changed
        return "skip", f"it has no {end.metric} of {end.id}" if outcome is None else outcome.reason
    if is_open(row):
        return None, ""
    if row.ratio is not None and end.ratio is not None and end.ratio != 1:
        return "bad" if (row.ratio - 1) / (end.ratio - 1) > 1 / 2 else "good", ""
    if row.verdict == end.verdict and (end.metric != "outcome" or outcomes[0] == outcomes[1]):
        return "bad", ""
    return ("good", "") if row.verdict == "OK" or row.improved else ("skip", row.reason)
