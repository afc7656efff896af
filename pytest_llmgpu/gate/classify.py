"""The class of a verdict's row under a policy, and the exit status of all rows."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.verdicts import UNCLEAR, Row, Verdicts

TIMES = ("device_time", "time", "first_token", "token_time")
"""The metrics that show a slowdown, the best first."""


class RowClass(enum.Enum):
    """The class of a row under a policy. The values are in the order in which they are shown."""

    FAILS = "fails"
    """The row fails the gate."""
    ALLOWED = "worse, but allowed"
    """The candidate is worse, and the policy lets it pass: the metric is not gated, or the regression is known."""
    BETTER = "better"
    """The candidate is better."""
    UNCLEAR = "unclear"
    """Nothing could be compared, or not enough was measured to decide; the policy lets it pass."""
    UNCHANGED = "unchanged"
    """The candidate is as the baseline is."""
    NEW = "new"
    """The baseline has nothing to compare with."""


class ExitStatus(enum.IntEnum):
    """Exit status of every command."""

    PASSED = 0
    REGRESSED = 1
    """A metric regressed, a case failed, or one is missing."""
    USAGE = 2
    """The arguments are wrong, or a file cannot be read."""
    NOT_JUDGED = 3
    """The candidate could not be judged: it is undecided, not comparable, or nothing that is gated was compared."""


def classify(row: Row, policy: Policy) -> RowClass:
    """Return the class of a row under a policy."""
    if fails(row, policy):
        return RowClass.FAILS
    if row.worse:
        return RowClass.ALLOWED
    if row.improved:
        return RowClass.BETTER
    if row.verdict in UNCLEAR:
        return RowClass.UNCLEAR
    return RowClass.UNCHANGED if row.verdict == "OK" else RowClass.NEW


def fails(row: Row, policy: Policy) -> bool:
    """Return whether a row alone makes the gate fail."""
    if not row.gated or row.known is not None:
        return False
    if row.verdict == "MISSING":
        return not policy.allow_missing
    if row.metric == "outcome" and row.verdict == "UNDECIDED":
        return True  # the case was interrupted, which is no matter of noise
    if row.unseen:
        return True
    if row.verdict == "UNDECIDED":
        return policy.on_inconclusive == "fail"
    return row.verdict in {"REGRESSED", "NOT_COMPARABLE"}


def with_unseen(rows: Sequence[Row], policy: Policy) -> list[Row]:
    """Mark the row of each case whose launches would not have shown a slowdown of `largest_unseen_slowdown`.

    The best gated time of a case decides. A row that is OK by chance, with so much noise, has not enough data.
    """
    best: dict[tuple[str, str], int] = {}
    for number, row in enumerate(rows):
        if row.metric in TIMES and row.gated:
            before = best.get((row.key, row.id))
            if before is None or _order(row) < _order(rows[before]):
                best[row.key, row.id] = number
    marked = list(rows)
    for number in best.values():
        row = rows[number]
        seen = float("inf") if row.smallest_seen is None else row.smallest_seen
        if (
            row.known is None
            and (row.unchanged or row.verdict == "UNDECIDED")
            and seen > policy.largest_unseen_slowdown
        ):
            marked[number] = msgspec.structs.replace(row, verdict="UNDECIDED", unseen=True)
    return marked


def exit_status(verdicts: Verdicts, policy: Policy) -> ExitStatus:
    """Return the exit status that all verdicts come to."""
    failing = {row.verdict for row in verdicts.rows if fails(row, policy)}
    if failing & {"REGRESSED", "MISSING"}:
        return ExitStatus.REGRESSED
    if "NOT_COMPARABLE" in failing:
        return ExitStatus.NOT_JUDGED
    if verdicts.baseline is None:
        return ExitStatus.PASSED if policy.allow_no_baseline else ExitStatus.NOT_JUDGED
    if not verdicts.armed.gated or (policy.require_armed and verdicts.armed.gated_unarmed):
        return ExitStatus.NOT_JUDGED
    return ExitStatus.NOT_JUDGED if failing else ExitStatus.PASSED


def _order(row: Row) -> tuple[bool, int]:
    """Return the sort key of the times of a case: those that were compared first, then the better metric."""
    return row.smallest_seen is None, TIMES.index(row.metric)
