"""`llmgpu compare`: the gate's verdicts on two reports, without its exit status."""

from __future__ import annotations

import argparse

from pytest_llmgpu.cli.gate_arguments import add_reports, add_rules, judged, policy_of
from pytest_llmgpu.cli.output import color, show

HELP = "show what changed between two reports, worst first; the exit status is 0 also for a regression"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_reports(parser)
    add_rules(parser)
    parser.add_argument("--all", action="store_true", help="show all cases")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from pytest_llmgpu.render.terminal import verdicts as verdict_tables

    policy = policy_of(arguments)
    verdicts, judged_by = judged(arguments, policy)
    conclusion = verdict_tables.conclusion(verdicts, policy, color())
    table = verdict_tables.table(verdicts, policy, color(), None if arguments.all else verdict_tables.MOST_CASES)
    show("\n".join(filter(None, (f"{conclusion}\n", table, judged_by))))
    return 0
