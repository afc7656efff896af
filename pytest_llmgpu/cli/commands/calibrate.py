"""`llmgpu calibrate`: measure how much times differ between launches on a runner, for use by the gate."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tabulate import tabulate

from pytest_llmgpu.analysis import findings, merging
from pytest_llmgpu.cli import launches, subprocesses
from pytest_llmgpu.cli.arguments import REFERENCE, add_storage, source, storage_of
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.gate import calibration
from pytest_llmgpu.gate.calibration import Measured
from pytest_llmgpu.gate.times import Deviation
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.text import plural

_EPILOG = """\
Use launches of one commit on an idle machine: their differences are noise. The gate reads the result from the store for
reports of the same machine and adds these launches to its built-in priors. Reports of one day are one session; only
differences within a session count."""

_KEPT = "calibrate"


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.usage = "%(prog)s [options] REPORT [REPORT ...]\n       %(prog)s --launches N [options] -- COMMAND"
    parser.epilog = _EPILOG
    parser.add_argument(
        "words",
        metavar="REPORT | COMMAND",
        nargs="+",
        help=f"one report with several launches per case, or several reports of the same cases: {REFERENCE}. With "
        "--launches: the measuring command after --, such as pytest benchmarks",
    )
    parser.add_argument("--launches", metavar="N", type=launches.count, help="run COMMAND N times and keep its reports")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="file to write (default: in the folder of the machine's reports)",
    )
    add_storage(parser)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    found = _named(arguments) if arguments.launches is None else _launched(arguments)
    report = merging.merge([one for _, one in found], [name for name, _ in found])
    # With --launches all launches are one session, even if they run past midnight.
    days = _by_day([one for _, one in found]) if arguments.launches is None else []
    sessions = [merging.merge(reports) for reports in days] if len(days) > 1 else [report]
    measured = calibration.measure(*sessions, reports=[one for _, one in found])
    path = arguments.output or calibration.default_path(storage_of(arguments), measured.machine)
    try:
        previous = _copied(path)
        calibration.dump(measured, path)
    except OSError as error:
        raise ValueError(f"calibration {path}: cannot be written: {error.strerror or error}") from None
    show("\n".join(_text(measured, report, path, previous)))
    return 0


def _text(measured: Measured, report: Report, path: Path, previous: Path | None) -> Iterator[str]:
    """Yield the lines on a calibration: its table, its file, and how it could be better."""
    noises = measured.cases.values()
    rows = [[noise.id, noise.launches, _pct(noise.device_time), _pct(noise.time)] for noise in noises]
    yield tabulate(rows, ["case", "launches", "device time", "time"], disable_numparse=True)
    yield ""
    yield f"written: {path}{f' (previous: {previous})' if previous else ''}"
    if far_apart := findings.far_apart(report.cases):
        yield far_apart
    if few := sum(noise.launches < calibration.ENOUGH for noise in noises):
        yield f"{plural(few, 'case')} with fewer than {calibration.ENOUGH} launches: add launches for a better estimate"
    if left := sum(result.key not in measured.cases for result in report.cases):
        cases = plural(left, "case")
        yield f"left out: {cases} with fewer than {calibration.LEAST} undisturbed launches of the same batches"


def _copied(path: Path) -> Path | None:
    """Copy an existing calibration, whose launches may have taken hours, and return the path of the copy."""
    if not path.exists():
        return None
    copy = path.with_name(f"{path.stem}-before{path.suffix}")
    shutil.copyfile(path, copy)
    return copy


def _by_day(reports: Sequence[Report]) -> list[list[Report]]:
    """Return the reports of each day, which are one session."""
    days: dict[str, list[Report]] = {}
    for report in reports:
        days.setdefault(report.created[: len("2026-01-31")], []).append(report)
    return list(days.values())


def _pct(deviation: Deviation | None) -> str:
    return "" if deviation is None else f"{100 * deviation.sd:.2g} %"


def _named(arguments: argparse.Namespace) -> list[tuple[str, Report]]:
    sources = [source(reference, arguments) for reference in arguments.words]
    return [(one.name, one.report()) for one in sources]


def _launched(arguments: argparse.Namespace) -> list[tuple[str, Report]]:
    """Run the command as often as --launches says; return each launch's name and report."""
    if arguments.launches < calibration.LEAST:
        raise ValueError(f"--launches={arguments.launches}: at least {calibration.LEAST} launches are needed")
    launches.check(arguments.words)
    into = launches.kept(storage_of(arguments) / _KEPT)
    with subprocesses.interruptible():
        names = [f"launch-{number}" for number in range(1, arguments.launches + 1)]
        found = [
            (name, launches.launch(arguments.words, name, Path(), environ=os.environ, into=into)) for name in names
        ]
    show(f"reports and logs: {into}\n")
    return found
