"""`llmgpu show`: print a report as pytest printed it at the end of the run."""

from __future__ import annotations

import argparse

from pytest_llmgpu.cli.arguments import REFERENCE, add_storage, source
from pytest_llmgpu.cli.output import color, show
from pytest_llmgpu.render.terminal import report as terminal
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.text import listed
from pytest_llmgpu.store import store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("report", metavar="REPORT", help=REFERENCE)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show all cases, with work, communication and memory per GPU"
    )
    parser.add_argument(
        "--log", metavar="CASE", help="show the end of the log of a case that failed, with its traceback"
    )
    add_storage(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    found = source(arguments.report, arguments)
    report = found.report()
    if arguments.log is not None:
        show(_log(report, arguments.log))
        return 0
    parts = [found.name, store.hardware(report), report.created, f"commit {store.commit(report.commit)}"]
    if not report.session.complete:
        parts.append("run not complete")
    show(f"{', '.join(parts)}\n\n{terminal.tables(report, color(), verbose=arguments.verbose) or 'no case'}")
    return 0


def _log(report: Report, case_id: str) -> str:
    """Return the end of the log of a case.

    Raises:
        ValueError: The report has no such case, or the case has no log.
    """
    logs = {case.id: case.failure.log_tail for case in report.cases if case.failure is not None}
    if not logs.get(case_id):
        why = "the case has no log" if case_id in {case.id for case in report.cases} else "there is no such case"
        having = listed(name for name, log in logs.items() if log) or "none"
        raise ValueError(f"--log {case_id}: {why}: cases with a log: {having}")
    return logs[case_id] or ""
