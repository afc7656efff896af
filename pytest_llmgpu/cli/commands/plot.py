"""`llmgpu plot`: draw the charts of a report as images, for a README or a pull request."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_llmgpu.cli.arguments import REFERENCE, source
from pytest_llmgpu.cli.baseline_arguments import add_baseline, comparison
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.render import charts
from pytest_llmgpu.render.charts import Chart, timelines
from pytest_llmgpu.render.charts.images import formats, write
from pytest_llmgpu.report.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("report", metavar="REPORT", help=REFERENCE)
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder of the images")
    parser.add_argument("--format", metavar="LIST", default="png", help="png, svg or both: png,svg (default: png)")
    parser.add_argument("--dark", action="store_true", help="draw for a dark background; file names end in -dark")
    parser.add_argument("--case", metavar="ID", help="also draw the time lines of this case, such as tp-bs8")
    add_baseline(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    chosen = formats(arguments.format)
    report = source(arguments.report, arguments).report()
    compared = comparison(arguments, report)
    report.verdicts = compared.verdicts or report.verdicts
    drawn = charts.of_report(report, compared.base)
    timelines = [] if arguments.case is None else _timelines(report, arguments.case)
    for path in write([*drawn.charts, *timelines], arguments.output, chosen, dark=arguments.dark):
        show(str(path))
    for reason in drawn.omitted:
        show(f"left out: {reason}")
    return 0


def _timelines(report: Report, name: str) -> list[Chart]:
    result = next((result for result in report.cases if result.id == name), None)
    if result is None:
        known = ", ".join(result.id for result in report.cases) or "none"
        raise ValueError(f"--case {name!r}: the report has no such case; its cases are {known}")
    return list(timelines.charts(result, report.environment))
