"""The command `llmgpu`: what can be done with reports without running pytest."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 for bad usage and for output that cannot be written."""
    parser = _Parser(prog="llmgpu", description="Work with the reports that pytest-llmgpu writes.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("schema", help="print the JSON Schema of a report")
    chosen = parser.parse_args(argv)
    if not chosen.version and chosen.command is None:
        parser.error("a command is needed: schema")
    try:
        print(_version() if chosen.version else _schema(), flush=True)
    except BrokenPipeError:
        # The reader, `head` say, has seen enough; without this Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"llmgpu: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _version() -> str:
    from pytest_llmgpu.environment import installed_version

    return f"llmgpu {installed_version('pytest-llmgpu') or '(not installed)'}"


def _schema() -> str:
    import json

    from pytest_llmgpu.report import schema

    return json.dumps(schema(), indent=2)


if __name__ == "__main__":
    sys.exit(main())
