"""The verdicts of a comparison by cause: `group` returns the data, `title`, `lines` and `next_step` word them.

Rows that are worse have one cause if the work passes name the same module for them, else if the environment differs
from the baseline and they were compared with it. Without either, rows of the same cases have one cause, and rows whose
reasons differ in their numbers alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from pytest_llmgpu.gate import cause
from pytest_llmgpu.gate.headline import SAME_ENVIRONMENT, differences, is_slower, row_in_words, step_of
from pytest_llmgpu.gate.judge import RowClass, classify
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.text import listed, without_numbers
from pytest_llmgpu.report.verdicts import ALSO_CHANGED, DIFFERS, Row, Verdicts, worst_first

_MOST_NAMES = 4
_ENVIRONMENT = ("environment",)


class Group(NamedTuple):
    """Rows with one cause."""

    rows: list[Row]
    """The rows, the worst first; those without a comparison last."""
    fails: bool
    """True if one of them fails the gate."""
    differences: list[str]
    """The differences of the environment that may be the cause; empty if another cause is known, or none."""

    @property
    def largest(self) -> Row:
        """The row of the largest slowdown with the worst verdict; the worst row if none of these is slower."""
        slower = [row for row in self.rows if is_slower(row) and row.verdict == self.rows[0].verdict]
        return max(slower, key=lambda row: round(row.ratio or 0.0, 9), default=self.rows[0])

    @property
    def allowed(self) -> str | None:
        """The reason of the policy's `allow` entry that accepts the rows; None if there is none."""
        return self.rows[0].allowed


def group(verdicts: Verdicts, policy: Policy) -> list[Group]:
    """Return the rows that are worse or unclear by cause; the causes that fail the gate come first."""
    differing = differences(verdicts)
    shown = {RowClass.FAILS, RowClass.ALLOWED, RowClass.UNCLEAR}
    rows = [row for row in worst_first(verdicts.rows) if classify(row, policy) in shown]
    found: dict[Hashable, list[Row]] = {}
    names: dict[tuple[str, str], Hashable] = {}  # the cause of the first worse row of each case
    alone = {(row.key, row.id) for row in verdicts.rows if row.verdict == "NEW"}
    for row in rows:
        name = _reason(row)
        if row.allowed is None and (row.worse or is_slower(row)):
            module = None if row.cause is None else cause.module_of(row.cause)
            explained = differing and (row.key, row.id) not in alone
            # The environment differs from the baseline's, and the growth is since an earlier one.
            name = module or (_ENVIRONMENT if explained and row.metric != "creep" else name)
        if row.worse and row.allowed is None:
            names.setdefault((row.key, row.id), name)
        if row.verdict == "NOT_COMPARABLE":
            name = names.get((row.key, row.id), name)  # what made the case worse also prevents the comparison
        found.setdefault(name, []).append(row)
    groups = [
        Group(
            rows=of_cause,
            fails=any(classify(row, policy) is RowClass.FAILS for row in of_cause),
            differences=differing if name == _ENVIRONMENT else [],
        )
        for name, of_cause in _merged(found).items()
    ]
    return sorted(groups, key=lambda one: not one.fails)


def by_reason(rows: Iterable[Row]) -> list[list[Row]]:
    """Return rows in groups with one metric, verdict and reason but for its numbers; the worst come first."""
    found: dict[Hashable, list[Row]] = {}
    for row in worst_first(rows):
        found.setdefault(_reason(row), []).append(row)
    return list(found.values())


def title(found: Group) -> str:
    """Return a cause in a few words, with its largest change: `iok-bs64 wall time +207.9 % (1.473 s, was 0.4652 s)`."""
    return row_in_words(found.largest)


def lines(found: Group) -> list[str]:
    """Return the cause, the cases by metric and verdict, and the lines of the reason of the largest change."""
    named, reason = title(found), found.largest.reason.splitlines()
    reason = [line for line in reason if line.removeprefix(cause.PREFIX).rstrip(".") not in named]
    text = [line for line in reason if not (found.differences and line.startswith(ALSO_CHANGED))]
    parts: dict[str, list[str]] = {}
    for row in found.rows:
        parts.setdefault(f"{row.metric.replace('_', ' ')} {row.verdict}", []).append(row.id)
    if found.differences:
        text.insert(0, f"{DIFFERS.capitalize()}{'; '.join(found.differences)}.")
    if found.allowed is not None:
        text.append(f"Allowed: {found.allowed}")
    if len(found.rows) > 1:
        text += [f"{name}: {listed(ids, _MOST_NAMES)}." for name, ids in parts.items()]
    return text


def next_step(found: Group) -> str:
    """Return the next step for the reader of the cause."""
    if found.differences:
        return SAME_ENVIRONMENT
    return step_of(*found.rows)


def _reason(row: Row) -> Hashable:
    return row.verdict, row.metric, without_numbers(row.reason), row.allowed


def _merged(found: dict[Hashable, list[Row]]) -> dict[Hashable, list[Row]]:
    """Return the causes; worse rows without a module belong to the first cause of which all their cases are worse."""
    merged: dict[Hashable, list[Row]] = {}
    for name, rows in found.items():
        alike = name
        if all(row.worse and row.allowed is None for row in rows) and isinstance(name, tuple):
            worse = {other: others for other, others in merged.items() if others[0].worse and others[0].allowed is None}
            alike = next(
                (other for other, others in worse.items() if {row.id for row in rows} <= {row.id for row in others}),
                name,
            )
        merged.setdefault(alike, []).extend(rows)
    return merged
