"""The verdicts for the page: parts by their effect on the gate, groups by metric and verdict, lines by reason."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_llmgpu.gate.classify import RowClass, classify
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.render.reasons import by_cause
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.verdicts import ALSO_CHANGED, DIFFERS, Row, Verdict, Verdicts, worst_first

_MARKS = {RowClass.FAILS: "failure", RowClass.BETTER: "ok", RowClass.UNCHANGED: "ok"}


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Rows with the same cause."""

    ids: list[str]
    """The ids of the cases, the one with the worst change first."""
    reason: str
    """The reason of the first verdict, with the change and its interval if there are any."""
    known: str | None
    """The reason of the policy's `known` entry that accepts the rows; None if there is none."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Rows with the same metric and verdict."""

    metric: MetricName
    """The metric of the rows."""
    verdict: Verdict
    """The verdict of the rows."""
    lines: list[Line]
    """The rows by reason."""

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(len(line.ids) for line in self.lines)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one class."""

    title: str
    """The title of the part."""
    mark: str
    """The colour of its verdicts: `failure`, `warning` or `ok`."""
    groups: list[Group]
    """The rows by metric and verdict, the worst first; empty if the class has no row."""

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(group.count for group in self.groups)


def grouped(verdicts: Verdicts, policy: Policy) -> list[Part]:
    """Return the rows by class; the class that fails the gate comes first."""
    listed_above = any(warning.startswith(DIFFERS) for warning in verdicts.warnings)
    classes: dict[RowClass, dict[tuple[MetricName, Verdict], list[Row]]] = {one: {} for one in RowClass}
    for row in worst_first(verdicts.rows):
        classes[classify(row, policy)].setdefault((row.metric, row.verdict), []).append(row)
    return [
        Part(
            title=one.value.capitalize(),
            mark=_MARKS.get(one, "warning"),
            groups=[_group(rows, listed_above=listed_above) for rows in found.values()],
        )
        for one, found in classes.items()
    ]


def _group(rows: Sequence[Row], *, listed_above: bool) -> Group:
    """Return a group; differences that the page lists above the rows are removed from the reasons."""
    lines = []
    for group in by_cause(rows):
        worst = group[0]
        kept = [line for line in worst.reason.splitlines() if not (listed_above and line.startswith(ALSO_CHANGED))]
        lines.append(Line(ids=[row.id for row in group], reason="\n".join(kept), known=worst.known))
    return Group(
        metric=rows[0].metric,
        verdict=rows[0].verdict,
        lines=lines,
    )
