"""`llmgpu html`: write a report as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_llmgpu.cli.arguments import REFERENCE, source
from pytest_llmgpu.cli.baseline_arguments import add_baseline, comparison
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.render.html import report as html_report
from pytest_llmgpu.store.references import public


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("report", metavar="REPORT", help=REFERENCE)
    parser.add_argument(
        "--output",
        metavar="PATH",
        type=Path,
        help="file to write (default: the report's name with .html in the current folder)",
    )
    add_baseline(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    found = source(arguments.report, arguments)
    output: Path = arguments.output or Path(page_name(found.name))
    html_report.check(output)
    report = found.report()
    base, verdicts, policy = comparison(arguments, report)
    page = html_report.render(report, base, name=public(found.name), verdicts=verdicts, policy=policy)
    html_report.write(page, output)
    show(f"{output}")
    return 0


def page_name(name: str) -> str:
    """Return the file name of a page without folders and git reference: `0001_3b1f09ac.html`."""
    stem = Path(name.rpartition(":")[2]).name
    return f"{stem.removesuffix('.gz').removesuffix('.json') or 'report'}.html"
