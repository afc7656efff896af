"""The gate's rows for a page: in parts by what they ask of people, in each by metric, and equal ones as one line."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_llmgpu.gate.classify import RowClass, classify
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.verdicts import Row, Verdict, Verdicts, worst_first

__all__ = ["Group", "Line", "grouped"]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Rows with the same reason."""

    ids: list[str]
    """Of the cases."""
    reason: str
    """With the change and its interval, where there are some."""
    known: str | None
    """Why the policy lets it pass."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one metric with the same verdict."""

    metric: MetricName
    verdict: Verdict
    fails: bool
    """Whether it makes its tests fail."""
    lines: list[Line]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return sum(len(line.ids) for line in self.lines)


_TITLES = {
    RowClass.FAILS: "Fails",
    RowClass.ALLOWED: "Worse, but allowed",
    RowClass.BETTER: "Better",
    RowClass.UNCLEAR: "Not told",
    RowClass.NEW: "Not told",
    RowClass.UNCHANGED: "Without a change",
}
_ALSO = "Also changed: "


def grouped(verdicts: Verdicts, policy: Policy) -> list[tuple[str, list[Group]]]:
    """Return the rows under the titles of their parts, what fails first; in each part by severity."""
    # What differs from the baseline stands above the rows, once.
    above = any(warning.startswith("differs from the baseline: ") for warning in verdicts.warnings)
    parts: dict[str, dict[tuple[MetricName, Verdict], list[Row]]] = {title: {} for title in _TITLES.values()}
    for row in worst_first(verdicts.rows):
        parts[_TITLES[classify(row, policy)]].setdefault((row.metric, row.verdict), []).append(row)
    return [
        (title, [_group(rows, fails=title == "Fails", above=above) for rows in found.values()])
        for title, found in parts.items()
    ]


def _group(rows: Sequence[Row], *, fails: bool, above: bool) -> Group:
    lines: dict[tuple[str, str | None], list[str]] = {}
    for row in rows:
        told = [line for line in row.reason.splitlines() if not (above and line.startswith(_ALSO))]
        lines.setdefault(("\n".join(told), row.known), []).append(row.id)
    return Group(
        metric=rows[0].metric,
        verdict=rows[0].verdict,
        fails=fails,
        lines=[Line(ids=ids, reason=reason, known=known) for (reason, known), ids in lines.items()],
    )
