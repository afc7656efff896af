"""Two sides measured in turn until a gate can tell them apart: launches A B A B, then again what is inconclusive.

What drifts on a machine drifts for both sides alike. Every look at the figures is a chance of a false alarm, so that
the chance a policy allows is split over as many looks as there may be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

import msgspec

from pytest_llmgpu.analysis.launch_merging import extend, merge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Verdicts

__all__ = ["MOST_AGAIN", "SIDES", "Both", "Judge", "Measure", "Side", "compare", "inconclusive", "left_out", "split"]

Side = Literal["base", "head"]

SIDES: tuple[Side, Side] = ("base", "head")
"""In the order in which they are launched."""

MOST_AGAIN = 2
"""Most times that inconclusive cases are measured again."""

_UNTOLD = frozenset(("INCONCLUSIVE", "INVALID"))
"""Verdicts on time that more launches may settle. What one launch settles, more do not."""


class Both(NamedTuple):
    """The reports of both sides so far, each with all launches."""

    base: Report
    head: Report


Measure = Callable[[Side, str, Sequence[str]], Report]
"""Runs one launch of a side: which, its name, the node ids that are not to run."""

Judge = Callable[[Both], Verdicts]


def compare(measure: Measure, judge: Judge, *, launches: int, again: int) -> tuple[Both, Verdicts]:
    """Measure both sides, judge them, and measure cases whose time is inconclusive again.

    Args:
        measure: runs one launch.
        judge: what the gate says of all launches so far; it has to allow for `again` + 1 looks (see `split`).
        launches: a side and round.
        again: how often inconclusive cases are measured again.

    Raises:
        ValueError: launches of a side measured other cases; one line.
    """
    both = _round(measure, launches, "", {side: [] for side in SIDES})
    verdicts = judge(both)
    for number in range(1, again + 1):
        keys = inconclusive(verdicts)
        if not all(_reachable(report, keys) for report in both):
            break
        others = {side: left_out(report, keys) for side, report in zip(SIDES, both, strict=True)}
        more = _round(measure, launches, f"again{number}-", others, keys)
        both = Both(*(extend(report, new, keys) for report, new in zip(both, more, strict=True)))
        verdicts = judge(both)
    return both, verdicts


def split(policy: Policy, again: int) -> Policy:
    """Return the policy for one of `again` + 1 looks: together they have the chance of a false alarm that it allows."""
    return msgspec.structs.replace(policy, confidence=1 - (1 - policy.confidence) / (again + 1))


def inconclusive(verdicts: Verdicts) -> set[str]:
    """Return the keys of the cases whose time is gated and not told."""
    return {
        row.key
        for row in verdicts.rows
        if row.metric == "time" and row.verdict in _UNTOLD and row.gated and row.known is None
    }


def left_out(report: Report, keys: Collection[str]) -> list[str]:
    """Return the node ids of the tests that measured none of these cases.

    pytest takes a node id out together with all that begin like it, so one that a wanted one begins with is not named.
    """
    wanted = {result.nodeid for result in report.cases if result.key in keys and result.nodeid is not None}
    others = dict.fromkeys(result.nodeid for result in report.cases if result.nodeid is not None)
    return [name for name in others if not any(other.startswith(name) for other in wanted)]


def _reachable(report: Report, keys: Collection[str]) -> bool:
    """Return whether any of the cases has a test that can be run by itself."""
    return any(result.key in keys and result.nodeid is not None for result in report.cases)


def _round(
    measure: Measure,
    launches: int,
    prefix: str,
    deselected: dict[Side, list[str]],
    keys: Collection[str] | None = None,
) -> Both:
    """Return the launches of one round, of all cases or of some only."""
    found: dict[Side, list[Report]] = {side: [] for side in SIDES}
    names = [f"{prefix}{launch}" for launch in range(1, launches + 1)]
    for name in names:
        for side in SIDES:
            report = measure(side, f"{side}-{name}", deselected[side])
            cases = [result for result in report.cases if keys is None or result.key in keys]
            found[side].append(msgspec.structs.replace(report, cases=cases))
    return Both(*(merge(found[side], [f"{side}-{name}" for name in names]) for side in SIDES))
