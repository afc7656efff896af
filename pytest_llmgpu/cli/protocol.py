"""The protocol of a command of `llmgpu`; a new command is a new file in `commands`."""

from __future__ import annotations

import argparse
from typing import Protocol


class Command(Protocol):
    """One command. Every `llmgpu` imports its file; heavy modules are therefore imported in `run`."""

    @property
    def name(self) -> str:
        """Return the word on the command line."""

    @property
    def help(self) -> str:
        """Return the line in `llmgpu --help`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of the command; `cli.arguments` has those of several commands."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return the exit status. All output goes through `output.show`.

        Raises:
            ValueError: one line; `llmgpu` prints it and exits with 2.
        """
