"""The command `llmgpu`, which works with reports without running pytest."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Collection, Sequence
from typing import NoReturn

from pytest_llmgpu.cli.commands import COMMANDS
from pytest_llmgpu.cli.output import complain, show

_INTERRUPTED = 130
_DEBUG = "LLMGPU_DEBUG"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        # It has arguments, and a shell's * makes arguments of the names of any files.
        complain(f"{message}; see {self.prog} --help", self.prog)
        self.exit(2)


def parser(named: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser. Named commands have their arguments, and their function as `run`; others have a help only."""
    made = _Parser(
        prog="llmgpu",
        description="Work with the reports that pytest-llmgpu writes.",
        epilog=f"With {_DEBUG}=1 in the environment, an error is shown with its traceback.",
    )
    made.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = made.add_subparsers(metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, description=text)
        if name in named:
            command = importlib.import_module(f"{__name__}.commands.{module}")
            getattr(command, f"add_{name}")(subparser)
            subparser.set_defaults(run=getattr(command, f"run_{name}"))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The command's exit status; 2 for bad usage, for input that cannot be read and for output that cannot be written,
        each with one line on stderr. With LLMGPU_DEBUG=1 a traceback comes before that line.
    """
    words = sys.argv[1:] if argv is None else argv
    if sys.stdout is None:
        complain("the output cannot be written: stdout is closed")
        return 2
    try:
        parsing = parser(words)
        chosen = parsing.parse_args(words)
        if not chosen.version and "run" not in chosen:
            parsing.error(f"a command is needed: {', '.join(COMMANDS)}")
        if chosen.version:
            from pytest_llmgpu.profiling.machine import installed_version

            show(f"llmgpu {installed_version('pytest-llmgpu') or '(not installed)'}")
            return 0
        return int(chosen.run(chosen))
    except (ValueError, ArithmeticError, OSError) as error:
        if os.environ.get(_DEBUG, "0") not in {"", "0"}:
            traceback.print_exc()
        # A report may have figures that overflow. Python's own exit status would be 1, which means a regression.
        prefix = "a figure is too large to compute with: " if isinstance(error, ArithmeticError) else ""
        complain(f"{prefix}{error}")
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
