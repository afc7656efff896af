"""`llmgpu compare`: the gate's verdicts on reports, without its exit status."""

from __future__ import annotations

import argparse

from pytest_llmgpu.cli.gate_arguments import add_reports, add_rules, judged, policy_of
from pytest_llmgpu.cli.output import color, show
from pytest_llmgpu.render.terminal import verdicts as verdict_tables


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_reports(parser, several=True)
    add_rules(parser)
    parser.add_argument("--all", action="store_true", help="show all cases")


def run_compare(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    policy = policy_of(arguments)
    names: list[str] = arguments.head
    found = [judged(argparse.Namespace(**{**vars(arguments), "head": name}), policy) for name in names]
    conclusions = [verdict_tables.conclusion(one.verdicts, policy, color()) for one in found]
    most = None if arguments.all else verdict_tables.MOST_CASES
    if len(found) == 1:
        table = verdict_tables.table(found[0].verdicts, policy, color(), most)
    else:
        table = verdict_tables.side_by_side([one.verdicts for one in found], color(), most)
        named = enumerate(zip(names, conclusions, strict=True), 1)
        conclusions = [f"{number}  {name}: {text}" for number, (name, text) in named]
    lines = "\n".join(conclusions)
    show("\n".join(filter(None, (f"{lines}\n", table, found[0].judged_by))))
    return 0
