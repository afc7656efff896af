"""A/B comparison: launches of two versions alternate, and undecided cases are measured again.

A drift of the machine then affects both versions equally. Each comparison can cause a false alarm, so that the
probability that the policy allows is split over all possible comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

import msgspec

from pytest_llmgpu.analysis.launch_merging import extend, merge
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Verdicts

__all__ = ["MOST_AGAIN", "SIDES", "Both", "Judge", "Measure", "Side", "compare", "left_out", "split", "undecided"]

Side = Literal["base", "head"]
"""The two versions: the baseline and the candidate."""

SIDES: tuple[Side, Side] = ("base", "head")
"""Both versions in the order of their launches."""

MOST_AGAIN = 2
"""How often undecided cases are measured again at most."""

_REPEATED = frozenset(("NOT_ENOUGH_DATA", "INVALID"))
"""Verdicts on time that more launches can change. Verdicts on exact metrics do not change."""


class Both(NamedTuple):
    """The reports of both versions, each with all launches until now."""

    base: Report
    """The report of the baseline."""
    head: Report
    """The report of the candidate."""


Measure = Callable[[Side, str, Sequence[str]], Report]
"""Runs one launch. The arguments are the version, the name of the launch and the node ids to deselect."""

Judge = Callable[[Both], Verdicts]
"""Compares the reports of both versions."""


def compare(measure: Measure, judge: Judge, *, launches: int, again: int) -> tuple[Both, Verdicts]:
    """Measure both versions, compare them, and measure cases whose time is undecided again.

    Args:
        measure: The function that runs one launch.
        judge: The function that compares all launches until now. It must allow for `again` + 1 comparisons (`split`).
        launches: The number of launches of each version in a round.
        again: How often undecided cases are measured again at most.

    Raises:
        ValueError: The launches of a version measured different cases.
    """
    both = _round(measure, launches, "", {side: [] for side in SIDES})
    verdicts = judge(both)
    for number in range(1, again + 1):
        keys = undecided(verdicts)
        if not all(_reachable(report, keys) for report in both):
            break
        others = {side: left_out(report, keys) for side, report in zip(SIDES, both, strict=True)}
        more = _round(measure, launches, f"again{number}-", others, keys)
        both = Both(*(extend(report, new, keys) for report, new in zip(both, more, strict=True)))
        verdicts = judge(both)
    return both, verdicts


def split(policy: Policy, again: int) -> Policy:
    """Return the policy for each of `again` + 1 comparisons, which together keep the allowed rate of false alarms."""
    return msgspec.structs.replace(policy, confidence=1 - (1 - policy.confidence) / (again + 1))


def undecided(verdicts: Verdicts) -> set[str]:
    """Return the keys of the cases whose gated time has not enough data or is invalid."""
    return {
        row.key
        for row in verdicts.rows
        if row.metric == "time" and row.verdict in _REPEATED and row.gated and row.known is None
    }


def left_out(report: Report, keys: Collection[str]) -> list[str]:
    """Return the node ids of the tests that measured none of these cases, for `--deselect`.

    pytest also deselects all node ids with the same beginning. A node id that is the beginning of a wanted one is
    therefore not returned.
    """
    wanted = {result.nodeid for result in report.cases if result.key in keys and result.nodeid is not None}
    others = dict.fromkeys(result.nodeid for result in report.cases if result.nodeid is not None)
    return [name for name in others if not any(other.startswith(name) for other in wanted)]


def _reachable(report: Report, keys: Collection[str]) -> bool:
    """Return whether any of the cases has a test that can be run alone."""
    return any(result.key in keys and result.nodeid is not None for result in report.cases)


def _round(
    measure: Measure,
    launches: int,
    prefix: str,
    deselected: dict[Side, list[str]],
    keys: Collection[str] | None = None,
) -> Both:
    """Measure one round and return its reports, with all cases or only those with these keys."""
    found: dict[Side, list[Report]] = {side: [] for side in SIDES}
    names = [f"{prefix}{launch}" for launch in range(1, launches + 1)]
    for name in names:
        for side in SIDES:
            report = measure(side, f"{side}-{name}", deselected[side])
            cases = [result for result in report.cases if keys is None or result.key in keys]
            found[side].append(msgspec.structs.replace(report, cases=cases))
    return Both(*(merge(found[side], [f"{side}-{name}" for name in names]) for side in SIDES))
