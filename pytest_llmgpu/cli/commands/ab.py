"""`llmgpu ab`: measure two commits alternately on this machine and judge the second."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

from pytest_llmgpu.cli import launches, subprocesses, worktrees
from pytest_llmgpu.cli.arguments import add_rules, add_switches, today_of
from pytest_llmgpu.cli.launches import LETTERS, Version, add_command, policy_at, prepare
from pytest_llmgpu.cli.output import color, show
from pytest_llmgpu.cli.worktrees import Worktree
from pytest_llmgpu.gate import ab, judge
from pytest_llmgpu.gate.ab import Both, Side
from pytest_llmgpu.gate.judge import exit_status
from pytest_llmgpu.gate.policy import dump_policy
from pytest_llmgpu.render.terminal import verdicts as verdict_tables
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Baseline, Verdicts

_EPILOG = """\
Each commit is checked out into a git worktree under TMPDIR; your working tree is not changed. Launches alternate: base,
head, base, head. Both commits are compared after 1, 3, 5 and 8 launches of each, until every gated row is decided or a
regression is found; later launches measure only the cases that are not decided. The policy is that of the base commit,
or the file of --policy; its error rate is divided by the number of comparisons. The merged reports are kept in
.llmgpu/ab. Exit status, as for llmgpu gate: 0 passed, 1 regressed, 2 bad usage or a launch without a report, 3 could
not be judged. llmgpu bisect finds the commit between them."""

_KEPT = Path(".llmgpu") / "ab"


def add_ab(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = _EPILOG
    parser.add_argument("base_ref", metavar="BASE_REF", help="commit to compare with: a branch, a tag, a hash")
    parser.add_argument("head_ref", metavar="HEAD_REF", help="commit to judge; uncommitted changes are not measured")
    add_command(parser)
    parser.add_argument(
        "--launches",
        metavar="N",
        type=launches.count,
        default=8,
        help="largest number of launches of each commit (default: 8)",
    )
    add_rules(parser)
    add_switches(parser, baseline=False)
    parser.set_defaults(in_turn=True)


def run_ab(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    launches.check(arguments.command)
    references = arguments.base_ref, arguments.head_ref
    with subprocesses.interruptible(), worktrees.checked_out(references) as trees:
        job = _Job(arguments, trees)
        prepare(job.versions, arguments.setup)
        verdicts = job.measured()
        conclusion = verdict_tables.conclusion(verdicts, job.policy, color())
        table = verdict_tables.table(verdicts, job.policy, color())
        show(f"\n{conclusion}\n\n{table}\n{job.policy_in_words}")
        show(f"reports, policy and logs: {_KEPT / job.kept.name}")
    return exit_status(verdicts, job.policy)


class _Job:
    """The measurement of two commits in their worktrees."""

    def __init__(self, arguments: argparse.Namespace, trees: Sequence[Worktree]) -> None:
        self._arguments = arguments
        self._looks = ab.looks(arguments.launches)
        policy, self.policy_in_words = policy_at(trees[0], arguments)
        self.policy = ab.split(policy, len(self._looks))
        self.kept = launches.kept(_KEPT, "_".join(tree.sha[:LETTERS] for tree in trees))
        self.versions = [Version(side, tree, self.kept) for side, tree in zip(ab.SIDES, trees, strict=True)]
        """The commits in the order of `ab.SIDES`."""

    def measured(self) -> Verdicts:
        """Measure both commits and return the last verdicts; the head's report has them too."""
        (self.kept / "policy.toml").write_text(dump_policy(self.policy), encoding="utf-8")
        _, verdicts = ab.compare(
            self._measure, self._judge, lambda found: ab.undecided(found, self.policy), self._looks
        )
        return verdicts

    def _measure(self, side: Side, number: int, deselected: Sequence[str]) -> Report:
        return self.versions[ab.SIDES.index(side)].launch(self._arguments.command, number, deselected)

    def _judge(self, both: Both) -> Verdicts:
        data = file.encode(both.base, compressed=True)
        file.dump(both.base, self.kept / "base.json.gz")
        tree = self.versions[0].tree
        both.head.verdicts = judge.judge(
            both.base,
            both.head,
            self.policy,
            today=today_of(self._arguments),
            baseline=Baseline(name=tree.reference, sha256=hashlib.sha256(data).hexdigest(), commit=tree.sha),
            in_turn=True,
        )
        file.dump(both.head, self.kept / "head.json.gz")
        return both.head.verdicts
