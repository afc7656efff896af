"""`llmgpu show`: print a report as pytest printed it at the end of the run."""

from __future__ import annotations

import argparse

from pytest_llmgpu.cli.arguments import REFERENCE, add_storage, source
from pytest_llmgpu.cli.output import color, show

HELP = "show the tables and findings of a report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("report", metavar="REPORT", help=REFERENCE)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show all cases, with work, communication and memory per GPU"
    )
    add_storage(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from pytest_llmgpu.render.terminal import report as terminal
    from pytest_llmgpu.store import listing, store

    found = source(arguments.report, arguments)
    report = found.report()
    parts = [found.name, store.hardware(report), report.created, f"commit {listing.commit(report.commit)}"]
    if not report.session.complete:
        parts.append("run not complete")
    show(f"{', '.join(parts)}\n\n{terminal.tables(report, color(), verbose=arguments.verbose) or 'no case'}")
    return 0
