"""The arguments that several commands take."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_llmgpu.report.report import Report
from pytest_llmgpu.store import references, store
from pytest_llmgpu.store.references import Source

REFERENCE = (
    "a path; a number or a name in the store; latest; the first digits of a commit; MACHINE/ followed by any of these; "
    "or git:REV:PATH"
)
"""The ways to name a report, for a command's help."""


def add_storage(parser: argparse.ArgumentParser) -> None:
    """Declare `--storage DIR`."""
    parser.add_argument("--storage", metavar="DIR", type=Path, help="folder of the store (default: .llmgpu)")


def storage_of(arguments: argparse.Namespace) -> Path:
    """Return the folder of the store."""
    given: Path | None = arguments.storage
    return store.DEFAULT if given is None else given


def source(reference: str, arguments: argparse.Namespace, *, same_machine_as: Report | None = None) -> Source:
    """Return the report that a reference names.

    Args:
        reference: one of the forms of `REFERENCE`.
        arguments: the parsed arguments of `add_storage`.
        same_machine_as: a report; the reference means its machine if several machines have a report of that name.

    Raises:
        ValueError: one line: no report or several reports have that name.
    """
    machine = None if same_machine_as is None else store.hardware(same_machine_as)
    return references.resolve(reference, storage_of(arguments), machine=machine)
