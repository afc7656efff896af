"""Arguments that several commands take, and what is meant by them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llmgpu.report.report import Report
    from pytest_llmgpu.store.references import Source

__all__ = ["REFERENCE", "add_storage", "source", "storage_of"]

REFERENCE = (
    "a path, a number of the store, latest, a name, the beginning of a commit, MACHINE/ before any of these, or "
    "git:REV:PATH"
)
"""How a report can be named, for a command's help."""


def add_storage(parser: argparse.ArgumentParser) -> None:
    """Declare `--storage DIR`."""
    parser.add_argument("--storage", metavar="DIR", type=Path, help="folder of the store (default: .llmgpu)")


def storage_of(arguments: argparse.Namespace) -> Path:
    """Return the folder of the store."""
    from pytest_llmgpu.store import store

    given: Path | None = arguments.storage
    return store.DEFAULT if given is None else given


def source(reference: str, arguments: argparse.Namespace, *, beside: Report | None = None) -> Source:
    """Return the report that `reference` means; ValueError in one line without exactly one.

    Args:
        reference: as `REFERENCE` says.
        arguments: of `add_storage`.
        beside: a report whose machine is meant where several have one of that name.
    """
    from pytest_llmgpu.store import references, store

    machine = None if beside is None else store.hardware(beside)
    return references.resolve(reference, storage_of(arguments), machine=machine)
