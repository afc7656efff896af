"""The gate's rows for a page: in parts by what they ask of people, and equal ones of several cases as one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_llmgpu import gate
from pytest_llmgpu.policy import Policy
from pytest_llmgpu.verdicts import MetricName, Row, Verdict, worst_first

__all__ = ["Group", "grouped"]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one metric with the same verdict for the same reason."""

    metric: MetricName
    verdict: Verdict
    fails: bool
    """Whether it makes its tests fail."""
    ids: list[str]
    """Of the cases."""
    change: str
    """`-38.8 % (-46.7 to -29.7 %)`: the ratio and its interval; empty where there is none."""
    reason: str
    known: str | None
    """Why the policy lets it pass."""


_BETTER = frozenset(("IMPROVED", "CAPACITY_IMPROVED"))
_SAME = frozenset(("OK",))
_WORSE = frozenset(("FAILED", "REGRESSED", "CAPACITY_REGRESSED"))


def grouped(rows: Sequence[Row], policy: Policy) -> list[tuple[str, list[Group]]]:
    """Return the rows under the titles of their parts, what fails first; in each part by severity."""
    parts: dict[str, dict[tuple[object, ...], list[Row]]] = {
        title: {} for title in ("Fails", "Worse, but allowed", "Better", "Not told", "Without a change")
    }
    for row in worst_first(rows):
        same = (row.metric, row.verdict, _change(row), row.reason, row.known)
        parts[_part(row, policy)].setdefault(same, []).append(row)
    return [(title, [_group(same, policy) for same in found.values()]) for title, found in parts.items()]


def _part(row: Row, policy: Policy) -> str:
    if gate.fails(row, policy):
        return "Fails"
    if row.verdict in _WORSE:
        return "Worse, but allowed"
    if row.verdict in _BETTER:
        return "Better"
    return "Without a change" if row.verdict in _SAME else "Not told"


def _group(same: Sequence[Row], policy: Policy) -> Group:
    first = same[0]
    return Group(
        metric=first.metric,
        verdict=first.verdict,
        fails=gate.fails(first, policy),
        ids=[row.id for row in same],
        change=_change(first),
        reason=first.reason,
        known=first.known,
    )


def _change(row: Row) -> str:
    if row.ratio is None:
        return ""
    text = f"{100 * (row.ratio - 1):+.1f} %"
    if row.low is not None and row.high is not None and row.low < row.high:
        text += f" ({100 * (row.low - 1):+.1f} to {100 * (row.high - 1):+.1f} %)"
    return text
