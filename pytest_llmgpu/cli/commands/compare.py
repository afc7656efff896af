"""`llmgpu compare`: what a gate would say of two reports, for people."""

from __future__ import annotations

import argparse

from pytest_llmgpu.cli.gate_arguments import add_rules, add_sides, judged, policy_of
from pytest_llmgpu.cli.output import color, show
from pytest_llmgpu.cli.protocol import Command
from pytest_llmgpu.report.file import paused

__all__ = ["COMMAND"]


class _Compare:
    name = "compare"
    help = "show what changed between two reports, worst first; exits with 0 whatever it finds"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_sides(parser)
        add_rules(parser)
        parser.add_argument("--all", action="store_true", help="show every case, however many there are")

    def run(self, arguments: argparse.Namespace) -> int:
        from pytest_llmgpu.render.terminal import verdicts as verdict_tables

        with paused():
            verdicts, judged_by = judged(arguments, policy_of(arguments))
            table = verdict_tables.table(verdicts, color(), None if arguments.all else verdict_tables.MOST_CASES)
            show("\n".join(filter(None, (table, judged_by))))
        return 0


COMMAND: Command = _Compare()
