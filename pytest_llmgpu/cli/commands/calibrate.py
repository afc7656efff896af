"""`llmgpu calibrate`: print how much times differ between launches of one commit on a machine."""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from pytest_llmgpu.analysis.merging import merge
from pytest_llmgpu.analysis.noise_regime import deviation
from pytest_llmgpu.cli import launches, subprocesses
from pytest_llmgpu.cli.arguments import REFERENCE, add_storage, source, storage_of
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.derived import device_times_s
from pytest_llmgpu.report.result import CaseResult, Launch

_LEAST = 2
"""Least number of launches of a case to estimate its scatter."""


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.usage = "%(prog)s [options] REPORT [REPORT ...]\n       %(prog)s --launches N [options] -- COMMAND"
    parser.epilog = (
        "The standard deviation of the times between launches of one commit is noise. The gate needs no calibration: "
        "it estimates the noise from the launches of both reports."
    )
    parser.add_argument(
        "words",
        metavar="REPORT | COMMAND",
        nargs="+",
        help=f"one report with several launches per case, or several reports of the same cases: {REFERENCE}. With "
        "--launches: the measuring command after --, such as pytest benchmarks",
    )
    parser.add_argument("--launches", metavar="N", type=launches.count, help="run COMMAND N times and keep its reports")
    add_storage(parser)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if arguments.launches is None:
        sources = [source(reference, arguments) for reference in arguments.words]
        reports, names = [one.report() for one in sources], [one.name for one in sources]
    else:
        launches.check(arguments.words)
        names = [f"launch-{number}" for number in range(1, arguments.launches + 1)]
        into = launches.kept(storage_of(arguments) / "calibrate")
        with subprocesses.interruptible():
            reports = [launches.launch(arguments.words, name, Path(), environ=os.environ, into=into) for name in names]
        show(f"reports and logs: {into}\n")
    merged = merge(reports, names)
    rows = [row for result in merged.cases if (row := _row(result)) is not None]
    if not rows:
        raise ValueError(f"no case has {_LEAST} undisturbed launches of the same batches: measure more launches")
    show(tabulate(rows, ["case", "launches", "device time", "wall time"], disable_numparse=True))
    return 0


def _row(result: CaseResult) -> list[str] | None:
    """Return the scatter of a case between undisturbed launches of the same batches; None with too few of them."""
    valid = [one for one in result.launches if one.batches.latency_s and disturbances.untimed(one) is None]
    alike = [one for one in valid if _batches(one) == _batches(valid[0])]
    if len(alike) < _LEAST:
        return None
    wall = [statistics.fmean(map(math.log, one.batches.latency_s)) for one in alike]
    # The slowest rank is the one that the others wait for.
    device = [math.log(max(times)) for one in alike if (times := device_times_s(one))]
    return [result.id, str(len(alike)), _percent(device), _percent(wall)]


def _batches(launch: Launch) -> tuple[str | None, int]:
    return launch.plan_sha256, len(launch.batches.latency_s)


def _percent(log_times: Sequence[float]) -> str:
    return f"{100 * deviation([log_times]).sd:.2g} %" if len(log_times) >= _LEAST else ""
