"""Reports in the formats of other tools: `FORMATS` maps each name that `llmgpu export` takes to its function."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llmgpu.report.report import Report

FORMATS = {
    "bencher": "tools:render_bencher",
    "csv": "tables:render_csv",
    "github-action-benchmark-bigger": "tools:render_bigger",
    "github-action-benchmark-smaller": "tools:render_smaller",
    "github-annotations": "github:render_annotations",
    "github-comment": "github:render_comment",
    "github-summary": "github:render_summary",
    "markdown": "tables:render_markdown",
}
"""Name of a format to the module and the function that returns a report with its verdicts, if it has any, as text.

The text has every case, whatever its outcome. A format without a place for an outcome puts it in a field that the
reading tool ignores. Text that users control is escaped for the format.
"""


def export(name: str, report: Report) -> str:
    """Return a report in a format; ValueError if it is unknown, or a figure that it cannot have is NaN or infinite."""
    if name not in FORMATS:
        raise ValueError(f"export format {name!r}: allowed are {', '.join(FORMATS)}")
    module, _, function = FORMATS[name].partition(":")
    text: str = getattr(importlib.import_module(f"{__name__}.{module}"), function)(report)
    return text
