"""The class of a verdict's row under a policy, and the exit status of all rows."""

from __future__ import annotations

import enum

from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.verdicts import BETTER, UNCLEAR, WORSE, Row, Verdicts

__all__ = ["ExitStatus", "RowClass", "classify", "exit_status", "fails"]


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
    """Exit status of `llmgpu gate` and of every command that judges."""

    PASSED = 0
    REGRESSED = 1
    """A metric regressed, a case failed, or one is missing."""
    USAGE = 2
    """The arguments are wrong, or a file cannot be read."""
    NOT_ENOUGH_DATA = 3
    """Too little was measured to decide, and the policy fails on it."""
    NOT_COMPARABLE = 4
    """Something that is gated was measured under other conditions."""
    NOTHING_COMPARED = 5
    """Nothing that is gated was compared, or not all of it where the policy requires that."""


def classify(row: Row, policy: Policy) -> RowClass:
    """Return the class of a row under a policy."""
    if fails(row, policy):
        return RowClass.FAILS
    if row.verdict in WORSE:
        return RowClass.ALLOWED
    if row.verdict in BETTER:
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
    if row.metric == "outcome" and row.verdict == "INVALID":
        return True  # the case was interrupted, which is no matter of noise
    if row.verdict in {"NOT_ENOUGH_DATA", "INVALID"}:
        return policy.on_inconclusive == "fail"
    return row.verdict in WORSE or row.verdict == "NOT_COMPARABLE"


def exit_status(verdicts: Verdicts, policy: Policy) -> ExitStatus:
    """Return the exit status that all verdicts come to."""
    failing = {row.verdict for row in verdicts.rows if fails(row, policy)}
    if failing & {*WORSE, "MISSING"}:
        return ExitStatus.REGRESSED
    if "NOT_COMPARABLE" in failing:
        return ExitStatus.NOT_COMPARABLE
    if verdicts.baseline is None:
        return ExitStatus.PASSED if policy.allow_no_baseline else ExitStatus.NOTHING_COMPARED
    if not verdicts.armed.gated or (policy.require_armed and verdicts.armed.gated_unarmed):
        return ExitStatus.NOTHING_COMPARED
    return ExitStatus.NOT_ENOUGH_DATA if failing else ExitStatus.PASSED
