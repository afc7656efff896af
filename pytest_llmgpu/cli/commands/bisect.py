"""`llmgpu bisect`: find the commit that made a metric worse."""

from __future__ import annotations

import argparse
import contextlib
import enum
import math
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_llmgpu.cli import bisection, launches, subprocesses, worktrees
from pytest_llmgpu.cli.bisection import Bisection
from pytest_llmgpu.cli.gate_arguments import add_rules, rules_of
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.cli.versions import LETTERS, Version, add_command, policy_at, prepare
from pytest_llmgpu.gate import ab, bisect, judge, policy_file
from pytest_llmgpu.gate.ab import Side
from pytest_llmgpu.gate.bisect import Ends, Found, NotBuiltError, Step
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report import file
from pytest_llmgpu.report.metrics import JUDGED, spec_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.text import plural, signed_percent
from pytest_llmgpu.report.verdicts import WORSE, Row, Verdicts

_EPILOG = """\
git bisect chooses the commits. Its state and each commit are in temporary git worktrees under TMPDIR: your working
tree, its index, its HEAD and a bisection of your own are not changed. First GOOD and BAD are launched alternately. Then
each commit is launched once for an exact metric, and for a time until its mark is certain: nearer to one end, and
significantly different from the other. Only the test of the case is launched. Commits that cannot be built or measured
are skipped. Reports and logs are kept in .llmgpu/bisect. Exit status: 0 found, 2 bad usage or GOOD or BAD cannot be
measured, 3 undecided: the range that remains is printed, 4 BAD is not worse than GOOD."""

_KEPT = Path(".llmgpu") / "bisect"

_FEWEST = 3
"""Fewest launches that are useful: one of each end and one of a commit."""

_INDENT = " " * 4

_SHOWN = 20
"""Most commits of a remaining range that are printed."""


class ExitStatus(enum.IntEnum):
    """Exit status of `llmgpu bisect`; 2 is bad usage, as for every command."""

    FOUND = 0
    UNDECIDED = 3
    """Skipped commits are in the way, or the allowed launches are used up."""
    NO_DIFFERENCE = 4
    """The bad end is not worse than the good end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = _EPILOG
    parser.add_argument("good_ref", metavar="GOOD", help="commit before the regression: a branch, a tag, a hash")
    parser.add_argument("bad_ref", metavar="BAD", help="commit with the regression, a descendant of GOOD")
    add_command(parser)
    parser.add_argument(
        "--metric",
        metavar="M",
        help="metric of the regression, such as device_time, gated or not (default: of the worst gated regression)",
    )
    parser.add_argument(
        "--case", metavar="C", help="case of the regression, such as tp-bs8 (default: of the worst regression)"
    )
    parser.add_argument(
        "--max-launches",
        metavar="N",
        type=launches.count,
        default=16,
        help="largest number of launches, those of GOOD and BAD included (default: 16)",
    )
    add_rules(parser)
    parser.set_defaults(in_turn=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    _check(arguments)
    good, bad = (worktrees.sha_of(name) for name in (arguments.good_ref, arguments.bad_ref))
    with subprocesses.interruptible(), bisection.begun(good, bad) as history:
        return _Job(arguments, history, good, bad).run()


def _check(arguments: argparse.Namespace) -> None:
    launches.check(arguments.command)
    if arguments.metric is not None and arguments.metric not in JUDGED:
        raise ValueError(f"--metric={arguments.metric}: is no metric of the gate: allowed are {', '.join(JUDGED)}")
    if arguments.max_launches < _FEWEST:
        raise ValueError(
            f"--max-launches={arguments.max_launches}: at least {_FEWEST} are needed: GOOD, BAD and one commit"
        )


class _Job:
    """One bisection."""

    def __init__(self, arguments: argparse.Namespace, history: Bisection, good: str, bad: str) -> None:
        self._arguments, self._history = arguments, history
        self._references = {"good": arguments.good_ref, "bad": arguments.bad_ref}
        self._shas = {"good": good, "bad": bad}
        self._kept = launches.kept(_KEPT, "_".join(sha[:LETTERS] for sha in (good, bad)))
        self._policy: Policy

    def run(self) -> int:
        """Measure the ends, find the commit, print it and return the exit status."""
        ends = self._measured_ends()
        end = bisect.worst(ends.verdicts, self._arguments.metric, self._arguments.case)
        if end is None:
            return self._no_difference(ends.verdicts)
        commits = len(self._history.remaining())
        show(
            f"{end.metric} of {end.id}  {end.verdict}\n{textwrap.indent(end.reason, _INDENT)}\n"
            f"{plural(commits, 'commit')} to search, about {plural(math.ceil(math.log2(commits)), 'step')}"
        )
        with contextlib.closing(_Candidates(self._arguments, self._kept)) as candidates:
            found = bisect.find(
                self._history,
                candidates.measure,
                self._judge,
                self._policy,
                ends.both,
                end,
                launches=self._arguments.max_launches - ends.launches,
                on_step=self._show,
            )
        used = plural(ends.launches + found.launches, "launch")
        show(f"\n{used}: {ends.launches} of GOOD and BAD, {found.launches} of the commits between them")
        lines = self._undecided(found) if found.first_bad is None else self._found(found.first_bad, found, ends, end)
        show("\n".join(lines))
        show(f"reports, policy and logs: {_KEPT / self._kept.name}")
        return ExitStatus.UNDECIDED if found.first_bad is None else ExitStatus.FOUND

    def _measured_ends(self) -> Ends:
        with worktrees.checked_out([*self._references.values()]) as trees:
            self._policy, in_words = policy_at(trees[0], self._arguments)
            (self._kept / "policy.toml").write_text(policy_file.dump(self._policy), encoding="utf-8")
            versions = [Version(name, tree, self._kept) for name, tree in zip(self._shas, trees, strict=True)]
            prepare(versions, self._arguments.setup)
            show(in_words)

            def measure(side: Side, number: int, deselected: Sequence[str]) -> Report:
                return versions[ab.SIDES.index(side)].launch(self._arguments.command, number, deselected)

            return bisect.measure_ends(
                measure,
                self._judge,
                self._policy,
                launches=self._arguments.max_launches,
                metric=self._arguments.metric,
                case=self._arguments.case,
            )

    def _judge(self, base: Report, head: Report, policy: Policy) -> Verdicts:
        today, noise = rules_of(self._arguments, head)
        return judge.judge(base, head, policy, today=today, calibration=noise, in_turn=True)

    def _show(self, step: Step) -> None:
        text = self._history.text(step.sha)
        change = "" if step.row is None or step.row.ratio is None else f"  {signed_percent(step.row.ratio - 1)}"
        reason = f"  {step.reason}" if step.reason else ""
        show(f"{step.sha[:LETTERS]}  {step.mark or 'undecided'}{change}  {text.subject}{reason}")

    def _no_difference(self, verdicts: Verdicts) -> int:
        metric, case = self._arguments.metric, self._arguments.case
        rows = bisect.selected(verdicts, metric, case)
        if not rows:
            wanted = " of ".join(filter(None, (metric or "a gated metric", case)))
            there = sorted({row.id for row in verdicts.rows if metric in {None, row.metric}})
            raise ValueError(f"the reports of GOOD and BAD have no row of {wanted}; rows are of {', '.join(there)}")
        unknown = [row for row in rows if ab.is_open(row)]
        for row in rows if metric is not None or case is not None else unknown:
            show(f"{row.metric} of {row.id}  {row.verdict}\n{textwrap.indent(row.reason, _INDENT)}")
        names = " ".join(self._references.values())
        if unknown:
            show(f"UNDECIDED: BAD and GOOD do not differ significantly in {plural(len(unknown), 'row')}")
        else:
            show(f"NO DIFFERENCE: BAD is not worse than GOOD in {plural(len(rows), 'row')}")
        exact = all(spec_of(row.metric).kind == "exact" for row in rows)
        ab_of_both = f"llmgpu ab {names} --launches 20 -- {shlex.join(self._arguments.command)}"
        show(f"next: {'other commits, or another --metric: exact figures do not vary' if exact else ab_of_both}")
        return ExitStatus.UNDECIDED if unknown else ExitStatus.NO_DIFFERENCE

    def _found(self, sha: str, found: Found, ends: Ends, end: Row) -> Iterator[str]:
        """Yield the lines on the first bad commit, and keep its report and that of the commit before it."""
        measured = {step.sha: step.report for step in found.steps if step.report is not None}
        measured |= {self._shas["good"]: ends.both.base, self._shas["bad"]: ends.both.head}
        before = next((one for one in self._history.parents(sha) if one in measured), self._shas["good"])
        report = measured[sha]
        report.verdicts = self._judge(measured[before], report, self._policy)
        row = bisect.row_of(report.verdicts, end)
        paths = [_KEPT / self._kept.name / name for name in ("before.json.gz", "first-bad.json.gz")]
        for path, one in zip(paths, (measured[before], report), strict=True):
            file.dump(one, path)
        text = self._history.text(sha)
        yield f"FOUND: {sha} is the first bad commit: {text.subject}"
        yield f"{_INDENT}{text.author}, {text.date}"
        if row is not None:
            yield f"{_INDENT}{end.metric} of {end.id}, compared with {before[:LETTERS]}:"
            yield textwrap.indent(row.reason, _INDENT)
        earlier = next((step.row for step in found.steps if step.sha == before), None)
        if earlier is not None and earlier.ratio is not None and earlier.verdict in WORSE:
            yield (
                f"{_INDENT}{before[:LETTERS]} is worse than GOOD as well ({signed_percent(earlier.ratio - 1)}): "
                f"llmgpu bisect {self._references['good']} {before[:LETTERS]} finds the reason"
            )
        yield f"next: git show {sha[:LETTERS]}; llmgpu compare {' '.join(map(str, paths))}"

    def _undecided(self, found: Found) -> Iterator[str]:
        yield f"UNDECIDED: the first bad commit is one of {plural(len(found.remaining), 'commit')}:"
        for sha in found.remaining[:_SHOWN]:
            yield f"{_INDENT}{sha[:LETTERS]}  {self._history.text(sha).subject}"
        if len(found.remaining) > _SHOWN:
            yield f"{_INDENT}and {len(found.remaining) - _SHOWN:,} more"
        good, bad = (
            next((step.sha[:LETTERS] for step in reversed(found.steps) if step.mark == mark), self._references[mark])
            for mark in ("good", "bad")
        )
        if any(step.mark is None for step in found.steps):
            more = 2 * self._arguments.max_launches
            yield f"next: llmgpu bisect {good} {bad} --max-launches {more} -- {shlex.join(self._arguments.command)}"
        else:
            yield f"next: make the skipped commits measurable (--setup), then llmgpu bisect {good} {bad}"


class _Candidates:
    """The commits between the ends, of which one at a time has a worktree."""

    def __init__(self, arguments: argparse.Namespace, kept: Path) -> None:
        self._arguments, self._kept = arguments, kept
        self._open = contextlib.ExitStack()
        self._version: Version | None = None

    def measure(self, sha: str, number: int, deselected: Sequence[str]) -> Report:
        """Run one launch of a commit; see `gate.bisect.MeasureCommit`."""
        if self._version is None or self._version.tree.sha != sha:
            self.close()
            self._version = self._built(sha)
        return self._version.launch(self._arguments.command, number, deselected)

    def close(self) -> None:
        """Remove the worktree."""
        self._version = None
        self._open.close()

    def _built(self, sha: str) -> Version:
        try:
            (tree,) = self._open.enter_context(worktrees.checked_out([sha]))
            version = Version(sha[:LETTERS], tree, self._kept)
            version.build(self._arguments.setup)
        except ValueError as error:
            raise NotBuiltError(str(error)) from None
        return version
