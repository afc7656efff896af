"""`llmgpu trend`: show the metrics of one machine over its stored reports."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_llmgpu.cli.output import color, complain, save, show
from pytest_llmgpu.report.text import plural

_LAST = 8


def add_trend(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = "store, or the folder of one machine in it (default: .llmgpu)"
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help=text)
    parser.add_argument("--machine", metavar="NAME", help="machine to show, if the store has several")
    parser.add_argument(
        "--last", metavar="N", type=int, default=_LAST, help=f"number of newest reports to show (default: {_LAST})"
    )
    parser.add_argument("--html", metavar="PATH", type=Path, help="also write a page with charts and tables")


def run_trend(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from pytest_llmgpu.gate import trends
    from pytest_llmgpu.render import trend
    from pytest_llmgpu.render.terminal.report import painter
    from pytest_llmgpu.report import file
    from pytest_llmgpu.store import store

    if arguments.last < 1:
        raise ValueError(f"--last {arguments.last}: a number of at least 1 is needed")
    stored = trends.chosen(arguments.folder or store.DEFAULT, arguments.machine)
    kept = []
    for one in stored:
        try:
            kept.append((one, file.load(one.path)))
        except ValueError as error:
            complain(str(error))
    found = trends.trends(kept, last=arguments.last)
    shown = trend.tables(found, painter(color())) if found else "no case has figures"
    show(f"{stored[0].machine}, {plural(min(len(kept), arguments.last), 'report')}\n\n{shown}")
    if arguments.html is not None:
        save(trend.page(found, stored[0].machine), arguments.html)
        show(str(arguments.html))
    return 2 if len(kept) < len(stored) else 0
