"""`llmgpu gate`: judge a report against a baseline, with an exit status for CI."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_llmgpu.cli.arguments import (
    REFERENCE,
    add_rules,
    add_switches,
    judged,
    policy_of,
    read_verdicts,
    source,
    today_of,
)
from pytest_llmgpu.cli.output import color, show, write_json
from pytest_llmgpu.gate import judge
from pytest_llmgpu.gate.policy import dump_policy, parse_policy
from pytest_llmgpu.render.terminal import verdicts as verdict_tables
from pytest_llmgpu.store import git

_OF_JUDGING = ("BASE", "HEAD", "--policy", "--today", "--in-turn", "--strict", "--allow-no-baseline", "--dump-policy")
"""The arguments that have no effect on verdicts that exist."""


def add_gate(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = (
        "exit status: 0 passed, 1 regressed, 2 bad usage or an unreadable file, 3 could not be judged: undecided, not "
        "comparable, or nothing compared"
    )
    # --dump-policy needs no report.
    parser.add_argument("base", metavar="BASE", nargs="?", help=f"the baseline: {REFERENCE}")
    parser.add_argument("head", metavar="HEAD", nargs="?", help="the candidate, named in the same ways")
    add_rules(parser)
    add_switches(parser)
    text = "show the verdicts of this file, a report that pytest compared or what --json wrote, and return their result"
    parser.add_argument("--verdicts", metavar="FILE", type=Path, help=text)
    parser.add_argument("--json", metavar="PATH", help="write the verdicts as JSON; - prints them instead of the table")
    parser.add_argument("--all", action="store_true", help="show all cases")
    parser.add_argument("--dump-policy", action="store_true", help="print the policy in force as TOML and exit")


def run_gate(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    line = ""
    if arguments.verdicts is not None:
        for word in _OF_JUDGING:
            if getattr(arguments, word.strip("-").replace("-", "_").lower()):
                raise ValueError(f"--verdicts: cannot be combined with {word}: nothing is judged again")
        verdicts = read_verdicts(arguments.verdicts)
        policy = parse_policy(verdicts)
    else:
        policy, in_words = policy_of(arguments)
        if arguments.dump_policy:
            show(dump_policy(policy).rstrip("\n"))
            return 0
        if arguments.base is None or arguments.head is None:
            raise ValueError("gate: BASE and HEAD are needed; see llmgpu gate --help")
        candidate = source(arguments.head, arguments).report()
        try:
            base, verdicts = judged(arguments, arguments.base, candidate, policy)
            line = in_words if base is not None else ""
        except git.AbsentError as error:
            verdicts, line = judge.judge(None, candidate, policy, today=today_of(arguments)), str(error)
    # Before the table is printed, because its reader may close the pipe early.
    if not write_json(verdicts, arguments.json):
        most = None if arguments.all else verdict_tables.MOST_CASES
        table = verdict_tables.table(verdicts, policy, color(), most)
        conclusion = verdict_tables.conclusion(verdicts, policy, color())
        show("\n".join(filter(None, (f"{conclusion}\n", table, line))))
    return judge.exit_status(verdicts, policy)
