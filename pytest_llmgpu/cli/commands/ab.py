"""`llmgpu ab`: measure two commits alternately on this machine and judge the second."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llmgpu.cli import launches
from pytest_llmgpu.cli.gate_arguments import add_rules, describe_noise, rules_of
from pytest_llmgpu.cli.output import color, show
from pytest_llmgpu.cli.protocol import Command

if TYPE_CHECKING:
    from pytest_llmgpu.cli.worktrees import Worktree
    from pytest_llmgpu.gate.ab import Both, Side
    from pytest_llmgpu.gate.policy import Policy
    from pytest_llmgpu.report.report import Report
    from pytest_llmgpu.report.verdicts import Verdicts

__all__ = ["COMMAND"]

_EPILOG = """\
Each commit is checked out into a git worktree under TMPDIR; your working tree is not changed. Launches alternate: base,
head, base, head. Cases with not enough data on time are measured again. The policy is that of the base commit, or the
file of --policy; its error rate is divided by the number of comparisons. The merged reports are kept in .llmgpu/ab.
Exit status, as for llmgpu gate: 0 passed, 1 regressed, 2 bad usage or a launch without a report, 3 not enough data and
the policy fails on it, 4 not comparable, 5 nothing compared."""

_KEPT = Path(".llmgpu") / "ab"
_LETTERS = 8
"""Digits of a commit in the output."""


class _Ab:
    name = "ab"
    help = "measure two commits alternately and judge the second"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EPILOG
        parser.add_argument("base_ref", metavar="BASE_REF", help="commit to compare with: a branch, a tag, a hash")
        parser.add_argument(
            "head_ref", metavar="HEAD_REF", help="commit to judge; uncommitted changes are not measured"
        )
        parser.add_argument(
            "command",
            metavar="COMMAND",
            nargs="+",
            help="after --: the measuring command, such as pytest benchmarks; --llmgpu-json and --deselect are added",
        )
        parser.add_argument(
            "--setup",
            metavar="CMD",
            help="shell command that creates the environment of each worktree, such as 'python -m venv .venv && "
            ".venv/bin/pip install .'; .venv/bin then comes first in PATH",
        )
        parser.add_argument(
            "--launches", metavar="N", type=launches.count, default=5, help="launches of each commit (default: 5)"
        )
        parser.add_argument(
            "--again",
            metavar="N",
            type=int,
            choices=(0, 1, 2),
            default=2,
            help="how often cases with not enough data on time are measured again: 0, 1 or 2 (default: 2)",
        )
        parser.add_argument(
            "--on-inconclusive", choices=("pass", "fail"), help="result of rows with not enough data (default: pass)"
        )
        add_rules(parser)
        parser.set_defaults(in_turn=True)

    def run(self, arguments: argparse.Namespace) -> int:
        from pytest_llmgpu.cli import subprocesses, worktrees
        from pytest_llmgpu.gate.classify import exit_status
        from pytest_llmgpu.render.terminal import verdicts as verdict_tables

        launches.check(arguments.command)
        references = arguments.base_ref, arguments.head_ref
        with subprocesses.interruptible(), worktrees.checked_out(references) as trees:
            job = _Job(arguments, trees)
            job.prepare()
            verdicts = job.measured()
            conclusion = verdict_tables.conclusion(verdicts, job.policy, color())
            show(f"\n{verdict_tables.table(verdicts, color())}\n{job.judged_by}\n{conclusion}")
            show(f"reports, policy and logs: {_KEPT / job.kept.name}")
        return exit_status(verdicts, job.policy)


class _Job:
    """The measurement of two commits in their worktrees."""

    def __init__(self, arguments: argparse.Namespace, trees: Sequence[Worktree]) -> None:
        from pytest_llmgpu.cli import worktrees
        from pytest_llmgpu.gate.ab import SIDES

        self._arguments = arguments
        self._trees: dict[Side, Worktree] = dict(zip(SIDES, trees, strict=True))
        self._environments = {side: worktrees.environment(tree) for side, tree in self._trees.items()}
        self.policy, self._policy_in_words = _policy(arguments, self._trees["base"])
        self.kept = launches.kept(_KEPT, "_".join(tree.sha[:_LETTERS] for tree in trees))
        self.judged_by = ""
        """The lines that name the noise estimate and the policy of the verdicts."""

    def prepare(self) -> None:
        """Print the commits and create the environment of each worktree."""
        from pytest_llmgpu.cli import subprocesses, worktrees

        for side, tree in self._trees.items():
            show(f"{side}  {tree.reference}  {tree.sha[:_LETTERS]}")
        if worktrees.changed(Path()):
            show("note: your uncommitted changes are not measured")
        setup = self._arguments.setup
        if setup is not None:
            for side, tree in self._trees.items():
                began, log = time.monotonic(), self.kept / f"{side}-setup.log"
                status = subprocesses.run(("/bin/sh", "-c", setup), tree.folder, self._environments[side], log)
                show(f"{side}-setup  {time.monotonic() - began:.1f} s")
                if status:
                    raise ValueError(f"{side}: --setup ended with {launches.describe_ending(status, log)}")
                self._environments[side] = worktrees.environment(tree)
        if all("VIRTUAL_ENV" not in one or not _inside(one, tree) for one, tree in self._sides()):
            show("note: the worktrees have no .venv: both commits run in the current environment")

    def measured(self) -> Verdicts:
        """Measure both commits and return the last verdicts; the head's report has them too."""
        from pytest_llmgpu.gate import ab, policy_file

        (self.kept / "policy.toml").write_text(policy_file.dump(self.policy), encoding="utf-8")
        _, verdicts = ab.compare(
            self._measure, self._judge, launches=self._arguments.launches, again=self._arguments.again
        )
        return verdicts

    def _measure(self, side: Side, name: str, deselected: Sequence[str]) -> Report:
        return launches.launch(
            self._arguments.command,
            name,
            self._trees[side].folder,
            environ=self._environments[side],
            into=self.kept,
            deselected=deselected,
        )

    def _judge(self, both: Both) -> Verdicts:
        import hashlib

        from pytest_llmgpu.gate import judge
        from pytest_llmgpu.report import file
        from pytest_llmgpu.report.verdicts import Baseline

        data = file.encode(both.base, compressed=True)
        file.dump(both.base, self.kept / "base.json.gz")
        tree = self._trees["base"]
        today, noise = rules_of(self._arguments, both.head)
        self.judged_by = f"{describe_noise(self._arguments, both.head)}\n{self._policy_in_words}"
        both.head.verdicts = judge.judge(
            both.base,
            both.head,
            self.policy,
            today=today,
            calibration=noise,
            baseline=Baseline(name=tree.reference, sha256=hashlib.sha256(data).hexdigest(), commit=tree.sha),
        )
        file.dump(both.head, self.kept / "head.json.gz")
        return both.head.verdicts

    def _sides(self) -> list[tuple[dict[str, str], Worktree]]:
        return [(self._environments[side], tree) for side, tree in self._trees.items()]


def _policy(arguments: argparse.Namespace, base: Worktree) -> tuple[Policy, str]:
    """Return the policy for one comparison and the line that names it.

    It is the file of --policy or the base commit's: a change must not edit the thresholds that it is judged by.
    """
    from pytest_llmgpu.gate import policy_file
    from pytest_llmgpu.gate.ab import split
    from pytest_llmgpu.gate.policy import switched

    path = policy_file.find(base.folder) if arguments.policy is None else arguments.policy
    policy = switched(policy_file.load(path), arguments)
    return split(policy, arguments.again), policy_file.in_words(path)


def _inside(environ: dict[str, str], tree: Worktree) -> bool:
    return Path(environ["VIRTUAL_ENV"]).is_relative_to(tree.root)


COMMAND: Command = _Ab()
