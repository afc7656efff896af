"""`llmgpu export`: write a report in the format of another tool or page."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_llmgpu.cli.arguments import REFERENCE, source
from pytest_llmgpu.cli.baseline_arguments import read_verdicts, refuse_rules
from pytest_llmgpu.cli.gate_arguments import add_rules, judged, policy_of
from pytest_llmgpu.cli.output import save, write_data
from pytest_llmgpu.render.exports import FORMATS, export

_STDOUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("format", metavar="FORMAT", choices=FORMATS, help=", ".join(FORMATS))
    parser.add_argument("head", metavar="REPORT", help=REFERENCE)
    parser.add_argument("--output", metavar="PATH", default=_STDOUT, help="file to write (default: -, stdout)")
    judges = parser.add_mutually_exclusive_group()
    judges.add_argument(
        "--baseline", dest="base", metavar="REF", help="judge the report against this one and export the verdicts"
    )
    judges.add_argument(
        "--verdicts",
        metavar="PATH",
        type=Path,
        help="export the verdicts in this file, which llmgpu gate --json wrote",
    )
    add_rules(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    report = source(arguments.head, arguments).report()
    if arguments.base is not None:
        policy = policy_of(arguments)
        report.verdicts = judged(arguments, policy, may_lack_base=policy.allow_no_baseline).verdicts
    else:
        refuse_rules(arguments, "--baseline")
        if arguments.verdicts is not None:
            report.verdicts = read_verdicts(arguments.verdicts, report)
    text = export(arguments.format, report)
    if arguments.output != _STDOUT:
        save(f"{text}\n" if text else "", Path(arguments.output))
    elif text:
        write_data(text)
    return 0
