"""A/B comparison: launches of two versions alternate, and the comparison stops as soon as it is decided.

A drift of the machine then affects both versions equally. One launch of each version decides exact metrics and mostly
device time; wall time needs more. Each look at the launches can cause a false alarm, so that the probability that the
policy allows is split over all possible looks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

import msgspec

from pytest_llmgpu.analysis.merging import extend, merge
from pytest_llmgpu.gate.judge import ExitStatus, exit_status
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Row, Verdicts

Side = Literal["base", "head"]
SIDES: tuple[Side, Side] = ("base", "head")
LOOKS = (1, 3, 5, 8)
"""Numbers of launches of each version after which they are compared."""


class Both(NamedTuple):
    """The reports of both versions, each with all launches until now."""

    base: Report
    head: Report


Measure = Callable[[Side, int, Sequence[str]], Report]
"""Runs one launch. The arguments are the version, the number of the launch and the node ids to deselect."""


def looks(most: int) -> tuple[int, ...]:
    """Return the numbers of launches after which two versions are compared: `LOOKS` below `most`, and `most`."""
    return (*(number for number in LOOKS if number < most), most)


def split(policy: Policy, looks: int) -> Policy:
    """Return the policy for each of several looks, which together keep the allowed rate of false alarms."""
    return msgspec.structs.replace(policy, confidence=1 - (1 - policy.confidence) / looks)


def compare(
    measure: Measure, judge: Callable[[Both], Verdicts], again: Callable[[Verdicts], set[str]], at: Sequence[int]
) -> tuple[Both, Verdicts]:
    """Measure both versions until their comparison is decided, and return the reports and the last verdicts.

    `judge` has to allow for each of the looks (`split`), which come after `at` launches of each version. `again`
    returns the keys of the cases to be launched again; without any the comparison ends. ValueError: the launches of a
    version measured different cases.
    """
    both = _launched(measure, range(1, at[0] + 1), {side: [] for side in SIDES})
    verdicts = judge(both)
    for before, number in itertools.pairwise(at):
        if not (keys := again(verdicts)):
            break
        others = {side: left_out(report, keys) for side, report in zip(SIDES, both, strict=True)}
        if not all(set(keys) <= {one.key for one in report.cases if one.nodeid is not None} for report in both):
            # A case without a test that can be run alone.
            keys, others = {result.key for report in both for result in report.cases}, {side: [] for side in SIDES}
        more = _launched(measure, range(before + 1, number + 1), others, keys)
        both = Both(*(extend(report, new, keys) for report, new in zip(both, more, strict=True)))
        verdicts = judge(both)
    return both, verdicts


def undecided(verdicts: Verdicts, policy: Policy) -> set[str]:
    """Return the keys of the gated rows that more launches can decide; none once a regression is found.

    With `split` a regression at any look is one at the allowed rate of false alarms, which no launch changes.
    """
    if exit_status(verdicts, policy) is ExitStatus.REGRESSED:
        return set()
    return {row.key for row in verdicts.rows if row.gated and row.allowed is None and is_open(row)}


def is_open(row: Row) -> bool:
    """Return whether more launches can change the verdict of a row: those on exact metrics do not change."""
    return row.verdict == "UNDECIDED" and row.spec.rule == "time"


def left_out(report: Report, keys: Collection[str]) -> list[str]:
    """Return the node ids of the tests that measured none of these cases, for `--deselect`.

    pytest also deselects all node ids with the same beginning: one that is the beginning of a wanted one is left out.
    """
    wanted = {result.nodeid for result in report.cases if result.key in keys and result.nodeid is not None}
    others = dict.fromkeys(result.nodeid for result in report.cases if result.nodeid is not None)
    return [name for name in others if not any(other.startswith(name) for other in wanted)]


def _launched(
    measure: Measure, numbers: Sequence[int], deselected: dict[Side, list[str]], keys: Collection[str] | None = None
) -> Both:
    """Launch both versions in turn and return their reports, with all cases or only those with these keys."""
    found: dict[Side, list[Report]] = {side: [] for side in SIDES}
    for number in numbers:
        for side in SIDES:
            report = measure(side, number, deselected[side])
            cases = [result for result in report.cases if keys is None or result.key in keys]
            found[side].append(msgspec.structs.replace(report, cases=cases))
    return Both(*(merge(found[side], [f"{side}-{number}" for number in numbers]) for side in SIDES))
