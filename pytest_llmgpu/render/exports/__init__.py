"""Reports in the formats of other tools: `FORMATS` maps each name that `llmgpu export` takes to its function.

`junit` is for pytest's own file, `escaping`, `figures` and `notices` are shared.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_llmgpu.report.report import Report

FORMATS = {
    "bencher": "bencher:render",
    "csv": "csv_table:render",
    "github-action-benchmark-bigger": "github_action_benchmark:render_bigger",
    "github-action-benchmark-smaller": "github_action_benchmark:render_smaller",
    "github-annotations": "github_annotations:render",
    "github-comment": "github_summary:render_comment",
    "github-summary": "github_summary:render",
    "markdown": "markdown_table:render",
}
"""Name of a format to the module and the function that returns a report with its verdicts, if it has any, as text.

The text has every case, whatever its outcome. A format without a place for an outcome puts it in a field that the
reading tool ignores. Text that users control is escaped for the format.
"""


def export(name: str, report: Report) -> str:
    """Return a report in a format, without a line break at the end.

    Raises:
        ValueError: The format is unknown, or a figure is NaN or infinite and the format has no such value.
    """
    if name not in FORMATS:
        raise ValueError(f"export format {name!r}: allowed are {', '.join(FORMATS)}")
    module, _, function = FORMATS[name].partition(":")
    text: str = getattr(importlib.import_module(f"{__name__}.{module}"), function)(report)
    return text
