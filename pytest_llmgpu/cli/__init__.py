"""The command `llmgpu`: what can be done with reports without running pytest."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from pytest_llmgpu.cli.commands import commands
from pytest_llmgpu.cli.output import show

__all__ = ["main", "parser"]

_INTERRUPTED = 130
_DEBUG = "LLMGPU_DEBUG"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command; its `run` is what the command does with the arguments."""
    made = _Parser(
        prog="llmgpu",
        description="Work with the reports that pytest-llmgpu writes.",
        epilog=f"{_DEBUG}=1 in the environment shows where in the code an error was raised.",
    )
    made.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = made.add_subparsers(metavar="COMMAND")
    for command in commands():
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The command's exit status; 2 for bad usage, for what cannot be read and for output that cannot be written, each
        with one line on stderr. With LLMGPU_DEBUG=1 a traceback stands before it, which tells a bug from bad usage.
    """
    reads = parser()
    chosen = reads.parse_args(argv)
    if not chosen.version and "run" not in chosen:
        reads.error(f"a command is needed: {', '.join(command.name for command in commands())}")
    try:
        status: int = _version() if chosen.version else chosen.run(chosen)
    except (ValueError, ArithmeticError) as error:
        if os.environ.get(_DEBUG, "0") not in {"", "0"}:
            traceback.print_exc()
        # A report may hold figures that nobody can reckon with; that is no regression, which a status of 1 would say.
        what = "a figure is beyond what can be reckoned with: " * isinstance(error, ArithmeticError)
        print(f"llmgpu: {what}{' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status


def _version() -> int:
    from pytest_llmgpu.profiling.machine import installed_version

    show(f"llmgpu {installed_version('pytest-llmgpu') or '(not installed)'}")
    return 0
