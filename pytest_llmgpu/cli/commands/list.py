"""`llmgpu list`: list the reports of the store."""

from __future__ import annotations

import argparse

from pytest_llmgpu.cli.arguments import add_storage, storage_of
from pytest_llmgpu.cli.output import complain, show
from pytest_llmgpu.store import store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_storage(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    folder = storage_of(arguments)
    if arguments.storage is not None and not folder.is_dir():
        raise ValueError(f"storage {folder}: is not a folder")
    kept = store.stored(folder)
    table, broken = store.table(kept)
    if table or not kept:
        show(table or f"the store {folder} is empty; pytest --llmgpu-save keeps the report of a run in it")
    for line in broken:
        complain(line)
    return 2 if broken else 0
