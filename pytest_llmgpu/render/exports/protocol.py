"""The protocol of an export format; a new format is a new file and a line in `FORMATS`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pytest_llmgpu.report.report import Report


class Export(Protocol):
    """One format."""

    def render(self, report: Report) -> str:
        """Return the report with its verdicts, if it has any, as text without a line break at the end.

        It has every case, whatever its outcome. A format without a place for an outcome puts it in a field that the
        reading tool ignores. Text that users control is escaped for the format.

        Raises:
            ValueError: a figure is NaN or infinite and the format has no such value.
        """
