"""What an export is; a new format is a new file, and its line in `FORMATS`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pytest_llmgpu.report.report import Report

__all__ = ["Export"]


class Export(Protocol):
    """One format."""

    def render(self, report: Report) -> str:
        """Return the report and its verdicts, where it has some, as text that ends without a line break.

        Every case is in it, whatever its outcome, as far as the format can say it; where it cannot, the format says so
        in a place that its reader leaves alone. Text that users control is escaped for the format.

        Raises:
            ValueError: a figure is NaN or infinite, which the format cannot hold.
        """
