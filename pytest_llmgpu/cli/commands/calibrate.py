"""`llmgpu calibrate`: measures how much a runner's times differ from launch to launch, for the gate to reckon with."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llmgpu.cli import launches
from pytest_llmgpu.cli.arguments import REFERENCE, add_storage, source, storage_of
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.cli.protocol import Command

if TYPE_CHECKING:
    from pytest_llmgpu.report.report import Report

__all__ = ["COMMAND"]

_EPILOG = """\
Launches of the same commit on an otherwise idle machine: what differs between them is noise. The gate takes it from the
store by itself, for reports of the same machine. Reports of one day are one session; those of several days tell by how
much more two sides differ that are not measured in one."""

_KEPT = "calibrate"


class _Calibrate:
    name = "calibrate"
    help = "keep a runner's noise between launches of the same thing, which the gate reads by itself"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = "%(prog)s [options] REPORT [REPORT ...]\n       %(prog)s --launches N [options] -- COMMAND"
        parser.epilog = _EPILOG
        parser.add_argument(
            "words",
            metavar="REPORT | COMMAND",
            nargs="+",
            help=f"one report with several launches a case, or several of the same cases: {REFERENCE}. With "
            "--launches what measures, after --: such as pytest benchmarks",
        )
        parser.add_argument(
            "--launches", metavar="N", type=launches.count, help="run COMMAND so many times, and keep its reports"
        )
        parser.add_argument(
            "--output", metavar="FILE", type=Path, help="where to write (default: beside the machine's reports)"
        )
        add_storage(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from tabulate import tabulate

        from pytest_llmgpu.analysis import launch_findings, launch_merging
        from pytest_llmgpu.gate.timing import calibration, calibration_file

        found = _named(arguments) if arguments.launches is None else _launched(arguments)
        report = launch_merging.merge([one for _, one in found], [name for name, _ in found])
        # What runs the launches itself is one session, though it may see midnight.
        days = _by_day([one for _, one in found]) if arguments.launches is None else []
        sessions = [launch_merging.merge(reports) for reports in days] if len(days) > 1 else [report]
        measured = calibration.measure(*sessions)
        path = arguments.output or calibration_file.default_path(storage_of(arguments), measured.machine)
        try:
            replaced = _put_aside(path)
            calibration_file.dump(measured, path)
        except OSError as error:
            raise ValueError(f"calibration {path}: cannot be written: {error.strerror or error}") from None
        kept = measured.time.values()
        rows = [
            (noise.id, noise.launches, _pct(noise.sd), _pct(noise.cautious), noise.sessions)
            + ((_pct(noise.session_sd), _pct(noise.cautious_session)) if len(sessions) > 1 else ())
            for noise in kept
        ]
        columns = ("case", "launches", "noise", "counts as", "sessions", "between them", "counts as")
        lines = [tabulate(rows, columns[: len(rows[0])], disable_numparse=True), ""]
        lines.append(f"written: {path}{f' (the one before is {replaced})' if replaced else ''}")
        if far_apart := launch_findings.far_apart(report.cases):
            lines.append(far_apart)
        if len(sessions) == 1:
            lines.append(calibration_file.ONE_SESSION)
        enough, least = calibration.ENOUGH, calibration.LEAST
        if few := sum(noise.launches < enough for noise in kept):
            lines.append(f"{few:,} of them have fewer than {enough} launches: more tell the noise better")
        if left := sum(result.key not in measured.time for result in report.cases):
            lines.append(f"left out: {left:,} without {least} undisturbed launches of the same batches")
        show("\n".join(lines))
        return 0


def _put_aside(path: Path) -> Path | None:
    """Keep a calibration that is there under another name: its launches may have taken hours. Return that name."""
    if not path.exists():
        return None
    kept = path.with_name(f"{path.stem}-before{path.suffix}")
    shutil.copyfile(path, kept)
    return kept


def _by_day(reports: Sequence[Report]) -> list[list[Report]]:
    """Return the reports of each day: a machine is another from day to day, and seldom within one."""
    days: dict[str, list[Report]] = {}
    for report in reports:
        days.setdefault(report.created[: len("2026-01-31")], []).append(report)
    return list(days.values())


def _pct(deviation: float | None) -> str:
    return "" if deviation is None else f"{100 * deviation:.2g} %"


def _named(arguments: argparse.Namespace) -> list[tuple[str, Report]]:
    sources = [source(reference, arguments) for reference in arguments.words]
    return [(one.name, one.report()) for one in sources]


def _launched(arguments: argparse.Namespace) -> list[tuple[str, Report]]:
    """Run the command as often as asked for; return each launch's name and report."""
    from pytest_llmgpu.cli import subprocesses
    from pytest_llmgpu.gate.timing import calibration

    if arguments.launches < calibration.LEAST:
        raise ValueError(f"--launches={arguments.launches}: at least {calibration.LEAST} are needed to differ")
    launches.check(arguments.words)
    into = launches.kept(storage_of(arguments) / _KEPT)
    with subprocesses.interruptible():
        names = [f"launch-{number}" for number in range(1, arguments.launches + 1)]
        found = [
            (name, launches.launch(arguments.words, name, Path(), environ=os.environ, into=into)) for name in names
        ]
    show(f"reports and logs: {into}\n")
    return found


COMMAND: Command = _Calibrate()
