"""Reports in the formats of other tools and pages: one file per format, with the name that `llmgpu export` takes."""

from __future__ import annotations

import importlib
from typing import cast

from pytest_llmgpu.render.exports.protocol import Export

FORMATS = {
    "bencher": "bencher:EXPORT",
    "csv": "csv_table:EXPORT",
    "github-action-benchmark-bigger": "github_action_benchmark:BIGGER",
    "github-action-benchmark-smaller": "github_action_benchmark:SMALLER",
    "github-annotations": "github_annotations:EXPORT",
    "github-summary": "github_summary:EXPORT",
    "markdown": "markdown_table:EXPORT",
    "pytest-benchmark": "pytest_benchmark:EXPORT",
}
"""Name of a format to its module and attribute; a module is imported when its format is used."""


def export(name: str) -> Export:
    """Return a format by its name; ValueError names the known formats."""
    if name not in FORMATS:
        raise ValueError(f"export format {name!r}: allowed are {', '.join(FORMATS)}")
    module, _, attribute = FORMATS[name].partition(":")
    return cast("Export", getattr(importlib.import_module(f"{__name__}.{module}"), attribute))
