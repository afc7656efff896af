"""`llmgpu calibrate`: measures how much a runner's times differ from launch to launch, for the gate to reckon with."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_llmgpu.cli.arguments import REFERENCE, add_storage, source, storage_of
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.cli.protocol import Command

__all__ = ["COMMAND"]


class _Calibrate:
    name = "calibrate"
    help = "keep a runner's noise between launches of the same thing, which the gate reads by itself"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "reports",
            metavar="REPORT",
            nargs="+",
            help=f"one report with several launches a case, or several of the same cases: {REFERENCE}",
        )
        parser.add_argument(
            "--output", metavar="FILE", type=Path, help="where to write (default: beside the machine's reports)"
        )
        add_storage(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from tabulate import tabulate

        from pytest_llmgpu import calibration, launch_merging

        sources = [source(reference, arguments) for reference in arguments.reports]
        names = [one.name for one in sources]
        report = launch_merging.merge([one.report() for one in sources], names)
        measured = calibration.measure(report)
        path = arguments.output or calibration.default_path(storage_of(arguments), measured.machine)
        try:
            calibration.dump(measured, path)
        except OSError as error:
            raise ValueError(f"calibration {path}: cannot be written: {error.strerror or error}") from None
        kept = measured.time.values()
        rows = [
            (noise.id, noise.launches, f"{100 * noise.sd:.2g} %", f"{100 * noise.cautious:.2g} %") for noise in kept
        ]
        lines = [tabulate(rows, ("case", "launches", "noise", "counts as"), disable_numparse=True), ""]
        lines.append(f"written: {path}")
        enough, least = calibration.ENOUGH, calibration.LEAST
        if few := sum(noise.launches < enough for noise in kept):
            lines.append(f"{few:,} of them have fewer than {enough} launches: more tell the noise better")
        if left := sum(result.key not in measured.time for result in report.cases):
            lines.append(f"left out: {left:,} without {least} undisturbed launches of the same batches")
        show("\n".join(lines))
        return 0


COMMAND: Command = _Calibrate()
