"""`llmgpu schema`: print the JSON Schema of a report."""

from __future__ import annotations

import argparse

from pytest_llmgpu.cli.output import show
from pytest_llmgpu.cli.protocol import Command


class _Schema:
    name = "schema"
    help = "print the JSON Schema of a report"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, arguments: argparse.Namespace) -> int:  # noqa: ARG002 - the protocol of commands
        import json

        from pytest_llmgpu.report.schema import schema

        show(json.dumps(schema(), indent=2))
        return 0


COMMAND: Command = _Schema()
