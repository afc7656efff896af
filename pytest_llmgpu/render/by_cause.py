"""Rows of verdicts in groups: by cause, and by their reason."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from pytest_llmgpu.gate import cause
from pytest_llmgpu.gate.exact import NAMED
from pytest_llmgpu.gate.headline import SAME_ENVIRONMENT, differences, row_in_words, step_of
from pytest_llmgpu.gate.judge import fails, level
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.text import listed, without_numbers
from pytest_llmgpu.report.verdicts import DIFFERS, Row, Verdicts, worst_first


class Group(NamedTuple):
    """Rows with one cause.

    Rows that are worse have one cause if the work passes name the same module for them; the other worse rows of these
    cases belong to it. Without a module they have one cause if the environment differs from the baseline and they were
    compared with it, else if their reasons differ in their numbers alone.
    """

    rows: list[Row]
    """The rows, the worst first."""
    fails: bool
    differences: Sequence[str]
    """The differences of the environment that may be the cause; empty if another cause is known, or none."""

    @property
    def next_step(self) -> str:
        """The next step for the reader of the cause."""
        return SAME_ENVIRONMENT if self.differences else step_of(*self.rows)

    @property
    def lines(self) -> list[str]:
        """The cause, the cases by metric and verdict, and the lines of the reason of the worst row."""
        worst = self.rows[0]
        named, reason = row_in_words(worst), worst.reason.splitlines()
        text = [line for line in reason if line.removeprefix(cause.PREFIX).rstrip(".") not in named]
        parts: dict[str, list[str]] = {}
        for row in self.rows:
            parts.setdefault(f"{row.metric.replace('_', ' ')} {row.verdict}", []).append(row.id)
        if self.differences:
            text.insert(0, f"{DIFFERS.capitalize()}{'; '.join(self.differences)}.")
        if worst.allowed is not None:
            text.append(f"Allowed: {worst.allowed}")
        if len(self.rows) > 1:
            text += [f"{name}: {listed(ids, NAMED)}." for name, ids in parts.items()]
        return text


def group(verdicts: Verdicts, policy: Policy) -> list[Group]:
    """Return the rows that are worse or unclear by cause; the causes that fail the gate come first."""
    differing = tuple(differences(verdicts))
    rows = [row for row in worst_first(verdicts.rows) if level(row, policy) != "info"]
    new = {row.id for row in verdicts.rows if row.verdict == "NEW"}
    found: dict[Hashable, list[Row]] = {}
    of_case: dict[str, Hashable] = {}  # the cause of the first worse row of each case
    with_module = [(row, None if row.cause is None else cause.module_of(row.cause)) for row in rows]
    for row, module in sorted(with_module, key=lambda one: one[1] is None):
        name = _reason(row)
        if row.worse and row.allowed is None:
            environment = () if row.id in new else differing
            name = of_case.setdefault(row.id, module or environment or name)
            name = module or name
        elif row.verdict == "NOT_COMPARABLE":  # what made the case worse also prevents the comparison
            name = of_case.get(row.id, name)
        found.setdefault(name, []).append(row)
    groups = [
        Group(
            rows=worst_first(of_cause),
            fails=any(fails(row, policy) for row in of_cause),
            differences=differing if name == differing else (),
        )
        for name, of_cause in found.items()
    ]
    return sorted(groups, key=lambda one: not one.fails)


def by_reason(rows: Iterable[Row]) -> list[list[Row]]:
    """Return rows in groups with one metric, verdict and reason but for its numbers; the worst come first."""
    found: dict[Hashable, list[Row]] = {}
    for row in worst_first(rows):
        found.setdefault(_reason(row), []).append(row)
    return list(found.values())


def _reason(row: Row) -> Hashable:
    return row.verdict, row.metric, without_numbers(row.reason.replace(f"Calls of {row.id}:", "")), row.allowed
