"""`llmgpu trend`: show the metrics of one machine over its stored reports."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llmgpu.cli.output import color, complain, save, show
from pytest_llmgpu.report.options import size_list
from pytest_llmgpu.report.text import plural

if TYPE_CHECKING:
    from pytest_llmgpu.store.store import Stored

_LAST = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    text = "store, or the folder of one machine in it (default: .llmgpu)"
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help=text)
    parser.add_argument("--machine", metavar="NAME", help="machine to show, if the store has several")
    parser.add_argument(
        "--last", metavar="N", type=int, default=_LAST, help=f"number of newest reports to show (default: {_LAST})"
    )
    text = "batch sizes in charts (default: the smallest and the largest of each strategy, and those that changed)"
    parser.add_argument("--batch-sizes", metavar="LIST", help=text)
    parser.add_argument("--html", metavar="PATH", type=Path, help="also write a page with charts and tables")
    parser.add_argument("--output", metavar="DIR", type=Path, help="also write the charts as images to this folder")
    parser.add_argument("--format", metavar="LIST", default="png", help="png, svg or both: png,svg (default: png)")
    parser.add_argument("--dark", action="store_true", help="draw images for a dark background")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from pytest_llmgpu.gate import trends
    from pytest_llmgpu.render.charts.images import formats, write
    from pytest_llmgpu.render.terminal import cases
    from pytest_llmgpu.render.terminal import trends as trend_tables
    from pytest_llmgpu.store import store

    chosen = formats(arguments.format)
    if arguments.last < 1:
        raise ValueError(f"--last {arguments.last}: a number of at least 1 is needed")
    sizes = None
    if arguments.batch_sizes is not None:
        try:
            sizes = size_list(arguments.batch_sizes)
        except ValueError as error:
            raise ValueError(f"--batch-sizes {arguments.batch_sizes}: {error}") from None
    broken: list[Stored] = []
    while True:
        try:
            kept = trends.chosen(arguments.folder or store.DEFAULT, arguments.machine, broken)
            found = trends.trends(kept, last=arguments.last)
            break
        except trends.UnreadableError as error:
            complain(str(error))
            broken.append(error.stored)
    machine, kept = kept[0].machine, kept[-arguments.last :]
    shown = trend_tables.tables(found, cases.painter(color())) if found else "no case has figures"
    show(f"{machine}, {plural(len(kept), 'report')}\n\n{shown}")
    if arguments.output is not None:
        from pytest_llmgpu.render.charts.trends import of_trends

        drawn = of_trends(found, sizes)
        for path in write(drawn.charts, arguments.output, chosen, dark=arguments.dark):
            show(str(path))
        for reason in drawn.omitted:
            show(f"left out: {reason}")
    if arguments.html is not None:
        from pytest_llmgpu.render.html import trend

        save(trend.render(found, machine, sizes), arguments.html)
        show(str(arguments.html))
    return 2 if broken else 0
