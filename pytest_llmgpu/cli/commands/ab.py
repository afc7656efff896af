"""`llmgpu ab`: measure two commits alternately on this machine and judge the second."""

from __future__ import annotations

import argparse
import hashlib

from pytest_llmgpu.cli import launches
from pytest_llmgpu.cli.arguments import add_rules, add_switches, storage_of, today_of
from pytest_llmgpu.cli.output import color, show
from pytest_llmgpu.gate import ab, judge
from pytest_llmgpu.gate.ab import Both
from pytest_llmgpu.gate.judge import exit_status
from pytest_llmgpu.render.terminal import verdicts as verdict_tables
from pytest_llmgpu.report import file
from pytest_llmgpu.report.verdicts import Baseline, Verdicts

_EPILOG = """\
Each commit is checked out into a git worktree under TMPDIR; your working tree is not changed. Launches alternate: base,
head, base, head. Both commits are compared after 1, 3, 5 and 8 launches of each, until every gated row is decided or a
regression is found; later launches measure only the cases that are not decided. The policy is that of the base commit,
or the file of --policy; its error rate is divided by the number of comparisons. The merged reports are kept in
.llmgpu/ab. Exit status, as for llmgpu gate: 0 passed, 1 regressed, 2 bad usage or a launch without a report, 3 could
not be judged. llmgpu bisect finds the commit between them."""


def add_ab(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = _EPILOG
    parser.add_argument("base_ref", metavar="BASE_REF", help="commit to compare with: a branch, a tag, a hash")
    parser.add_argument("head_ref", metavar="HEAD_REF", help="commit to judge; uncommitted changes are not measured")
    launches.add_command(parser)
    text = "largest number of launches of each commit (default: 8)"
    parser.add_argument("--launches", metavar="N", type=launches.count, default=8, help=text)
    add_rules(parser)
    add_switches(parser, baseline=False)
    parser.set_defaults(in_turn=True)


def run_ab(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    references = dict(zip(ab.SIDES, (arguments.base_ref, arguments.head_ref), strict=True))
    with launches.interruptible(), launches.checked_out(references) as trees:
        looks = ab.looks(arguments.launches)
        kept, policy, in_words, measure = launches.begin(arguments, trees, looks, storage_of(arguments) / "ab")

        def judge_both(both: Both) -> Verdicts:
            file.dump(both.base, kept / "base.json.gz")
            sha256 = hashlib.sha256(file.encode(both.base, compressed=True)).hexdigest()
            baseline = Baseline(name=trees[0].reference, sha256=sha256, commit=trees[0].sha)
            today = today_of(arguments)
            verdicts = judge.judge(both.base, both.head, policy, today=today, baseline=baseline, in_turn=True)
            both.head.verdicts = verdicts
            file.dump(both.head, kept / "head.json.gz")
            return verdicts

        _, verdicts = ab.compare(measure, judge_both, lambda found: ab.undecided(found, policy), looks)
        conclusion = verdict_tables.conclusion(verdicts, policy, color())
        show(f"\n{conclusion}\n\n{verdict_tables.table(verdicts, policy, color())}\n{in_words}")
        show(f"reports, policy and logs: {kept}")
    return exit_status(verdicts, policy)
