"""The commands that read reports and write them in another form: show, html, export, plot, list, trend; and schema."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pytest_llmgpu.cli.arguments import REFERENCE, add_rules, add_storage, comparison, source, storage_of
from pytest_llmgpu.cli.output import color, complain, save, show, write_data
from pytest_llmgpu.report.options import LATEST
from pytest_llmgpu.report.text import listed, named, plural
from pytest_llmgpu.store import store
from pytest_llmgpu.store.store import public

_EMPTY = "the store {} is empty; pytest --llmgpu-save keeps the report of a run in it"


def add_show(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llmgpu show`."""
    parser.add_argument("report", metavar="REPORT", help=REFERENCE)
    text = "reports to compare with the first one, side by side if several"
    parser.add_argument("others", metavar="REPORT", nargs="*", help=text)
    text = "show all cases, with work, communication and memory per GPU"
    parser.add_argument("-v", "--verbose", action="store_true", help=text)
    text = "show the end of the log of a case that failed, with its traceback"
    parser.add_argument("--log", metavar="CASE", help=text)
    add_rules(parser)


def run_show(arguments: argparse.Namespace) -> int:
    """Print a report as pytest printed it at the end of the run, the log of a case, or what changed from the first."""
    from pytest_llmgpu.cli.commands.judging import side_by_side
    from pytest_llmgpu.render.terminal import report as terminal

    if arguments.others:
        show(side_by_side(arguments))
        return 0
    found = source(arguments.report, arguments)
    report = found.report()
    if (case := arguments.log) is not None:
        logs = {result.id: result.failure.log_tail for result in report.cases if result.failure is not None}
        if not logs.get(case):
            why = "the case has no log" if case in {result.id for result in report.cases} else "there is no such case"
            having = listed(name for name, log in logs.items() if log) or "none"
            raise ValueError(f"--log {case}: {why}: cases with a log: {having}")
        show(logs[case] or "")
        return 0
    parts = [found.name, store.hardware(report), report.created, f"commit {store.commit(report.commit)}"]
    tables = named(terminal.tables(report, color(), verbose=arguments.verbose), arguments.report)
    show(f"{', '.join(parts)}\n\n{tables or 'no case'}")
    return 0


def add_html(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llmgpu html`."""
    parser.add_argument("report", metavar="REPORT", help=REFERENCE)
    text = "file to write (default: the report's name with .html in the current folder)"
    parser.add_argument("--output", metavar="PATH", type=Path, help=text)
    parser.add_argument("baseline", metavar="BASELINE", nargs="?", help="report to judge it against")
    add_rules(parser)


def run_html(arguments: argparse.Namespace) -> int:
    """Write a report as one HTML page."""
    from pytest_llmgpu.render.html import report as html_report

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


def add_export(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llmgpu export`."""
    from pytest_llmgpu.render.exports import FORMATS

    parser.add_argument("format", metavar="FORMAT", choices=FORMATS, help=", ".join(FORMATS))
    parser.add_argument("head", metavar="REPORT", help=REFERENCE)
    parser.add_argument("--output", metavar="PATH", default="-", help="file to write (default: -, stdout)")
    parser.add_argument("--baseline", metavar="REF", help="judge the report against this one and export the verdicts")
    add_rules(parser)


def run_export(arguments: argparse.Namespace) -> int:
    """Write a report in the format of another tool or page."""
    from pytest_llmgpu.render.exports import export

    report = source(arguments.head, arguments).report()
    report.verdicts = comparison(arguments, report)[1] or report.verdicts
    text = export(arguments.format, report)
    if arguments.output != "-":
        save(f"{text}\n" if text else "", Path(arguments.output))
    elif text:
        write_data(text)
    return 0


def add_plot(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llmgpu plot`."""
    parser.add_argument("report", metavar="REPORT", help=REFERENCE)
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder of the images")
    text = "given twice, it draws both (default: png)"
    parser.add_argument("--format", choices=("png", "svg"), action="append", help=text)
    parser.add_argument("--dark", action="store_true", help="draw for a dark background; file names end in -dark")
    parser.add_argument("--case", metavar="ID", help="also draw the time lines of this case, such as tp-bs8")
    add_storage(parser)


def run_plot(arguments: argparse.Namespace) -> int:
    """Draw the charts of a report as images, for a README or a pull request."""
    from pytest_llmgpu.render import charts
    from pytest_llmgpu.render.charts import images, timelines

    report = source(arguments.report, arguments).report()
    drawn, omitted = charts.of_report(report)
    if arguments.case is not None:
        by_id = {result.id: result for result in report.cases}
        if arguments.case not in by_id:
            known = ", ".join(by_id) or "none"
            raise ValueError(f"--case {arguments.case!r}: the report has no such case; its cases are {known}")
        lines = list(timelines.charts(by_id[arguments.case], report.environment))
        drawn += lines
        omitted += [] if lines else [f"time lines of {arguments.case}: the case has no samples of a GPU"]
    formats = list(dict.fromkeys(arguments.format or ["png"]))
    for path in images.write(drawn, arguments.output, formats, dark=arguments.dark):
        show(str(path))
    for reason in omitted:
        show(f"left out: {reason}")
    return 0


def add_list(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llmgpu list`."""
    add_storage(parser)


def run_list(arguments: argparse.Namespace) -> int:
    """List the reports of the store."""
    folder = storage_of(arguments)
    if arguments.storage is not None and not folder.is_dir():
        raise ValueError(f"storage {folder}: is not a folder")
    kept = store.stored(folder)
    table, broken = store.table(kept)
    if table or not kept:
        show(table or _EMPTY.format(folder))
    for line in broken:
        complain(line)
    return 2 if broken else 0


def add_rm(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llmgpu rm`."""
    parser.add_argument("report", metavar="REPORT", nargs="+", help="a number, a name or a commit in the store")
    add_storage(parser)


def run_rm(arguments: argparse.Namespace) -> int:
    """Remove reports of the store; none if one of them is not there."""
    found = [source(name, arguments) for name in arguments.report]
    for name, one in zip(arguments.report, found, strict=True):
        if one.stored is None or name.rpartition("/")[2] == LATEST:  # which of them that is depends on the last run
            raise ValueError(f"{name}: names no report of {storage_of(arguments)}: give a number, a name or a commit")
    for one in found:
        Path(one.name).unlink()
        show(f"removed: {one.name}")
    return 0


def add_trend(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `llmgpu trend`."""
    text = "store, or the folder of one machine in it (default: the nearest .llmgpu)"
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help=text)
    parser.add_argument("--machine", metavar="NAME", help="machine to show, if the store has several")
    text = "number of newest reports to show (default: 8)"
    parser.add_argument("--last", metavar="N", type=int, default=8, help=text)
    parser.add_argument("--html", metavar="PATH", type=Path, help="also write a page with charts and tables")


def run_trend(arguments: argparse.Namespace) -> int:
    """Show the metrics of one machine over its stored reports."""
    from pytest_llmgpu.gate import trends
    from pytest_llmgpu.render import trend
    from pytest_llmgpu.render.terminal.report import painter
    from pytest_llmgpu.report import file

    if arguments.last < 1:
        raise ValueError(f"--last {arguments.last}: a number of at least 1 is needed")
    if arguments.folder is None and not store.stored(store.find()):
        raise ValueError(_EMPTY.format(store.find()))
    stored = trends.chosen(arguments.folder or store.find(), arguments.machine)
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


def add_schema(parser: argparse.ArgumentParser) -> None:
    """Declare no argument."""


def run_schema(arguments: argparse.Namespace) -> int:  # noqa: ARG001 - the contract of commands
    """Print the JSON Schema of a report."""
    from pytest_llmgpu.report.schema import schema

    show(json.dumps(schema(), indent=2))
    return 0
