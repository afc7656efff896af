"""`llmgpu schema`: print the JSON Schema of a report."""

from __future__ import annotations

import argparse
import json

from pytest_llmgpu.cli.output import show
from pytest_llmgpu.report.schema import schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no argument."""


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001 - the contract of commands
    """Run the command and return its exit status."""
    show(json.dumps(schema(), indent=2))
    return 0
