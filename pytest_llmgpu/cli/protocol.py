"""What a command of `llmgpu` is; a new one is a new file in `commands`."""

from __future__ import annotations

import argparse
from typing import Protocol

__all__ = ["Command"]


class Command(Protocol):
    """One command. Its file is imported for every `llmgpu`, so what is heavy is imported in `run`."""

    @property
    def name(self) -> str:
        """The word on the command line."""

    @property
    def help(self) -> str:
        """One line for `llmgpu --help`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare what may follow the command; see `arguments` for what several commands take."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it and return the exit status. What it prints goes through `output.show`.

        Raises:
            ValueError: one line, with which `llmgpu` exits with 2.
        """
