"""`llmgpu gate`: judge a report against a baseline, with an exit status for CI."""

from __future__ import annotations

import argparse

from pytest_llmgpu.cli.gate_arguments import add_reports, add_rules, judged, policy_of
from pytest_llmgpu.cli.output import color, show, write_json
from pytest_llmgpu.gate import policy_file
from pytest_llmgpu.gate.classify import exit_status
from pytest_llmgpu.render.terminal import verdicts as verdict_tables
from pytest_llmgpu.report import options

_STATUSES = (
    "exit status: 0 passed, 1 regressed, 2 bad usage or an unreadable file, 3 could not be judged: undecided, not "
    "comparable, or nothing compared"
)


def add_gate(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.epilog = _STATUSES
    add_reports(parser)
    add_rules(parser)
    parser.add_argument(
        "--on-inconclusive", choices=("pass", "fail"), help="result of rows with not enough data (default: pass)"
    )
    parser.add_argument(
        "--largest-unseen-slowdown",
        metavar="FRACTION",
        type=_positive,
        help="fail if a slowdown of a case by this fraction would not have been seen (default: 0.5)",
    )
    for flag, text in (
        ("--allow-missing", "let cases and figures pass that only the baseline has"),
        ("--allow-no-baseline", "pass if the baseline does not exist; a broken baseline is always an error"),
        ("--require-armed", "fail if anything gated could not be compared, except deselected tests"),
    ):
        parser.add_argument(flag, action="store_true", default=None, help=text)
    parser.add_argument("--json", metavar="PATH", help="write the verdicts as JSON; - prints them instead of the table")
    parser.add_argument("--all", action="store_true", help="show all cases")
    parser.add_argument("--dump-policy", action="store_true", help="print the policy in force as TOML and exit")


def run_gate(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    in_force = policy_of(arguments)
    if arguments.dump_policy:
        show(policy_file.dump(in_force).rstrip("\n"))
        return 0
    if arguments.base is None or arguments.head is None:
        raise ValueError("gate: BASE and HEAD are needed; see llmgpu gate --help")
    verdicts, judged_by = judged(arguments, in_force, may_lack_base=in_force.allow_no_baseline)
    # Before the table is printed, because its reader may close the pipe early.
    if not write_json(verdicts, arguments.json):
        most = None if arguments.all else verdict_tables.MOST_CASES
        table = verdict_tables.table(verdicts, in_force, color(), most)
        conclusion = verdict_tables.conclusion(verdicts, in_force, color())
        show("\n".join(filter(None, (f"{conclusion}\n", table, judged_by))))
    return exit_status(verdicts, in_force)


def _positive(text: str) -> float:
    try:
        return options.positive(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
