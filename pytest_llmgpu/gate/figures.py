"""Figures of the user's own: judged as they declare, by a threshold and bounds that the policy can tighten.

The declaration is that of the candidate, or of the baseline where the candidate has none; of two thresholds the smaller
one counts. A figure that is not declared has no row.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator

import msgspec

from pytest_llmgpu.gate.exact import Amounts
from pytest_llmgpu.gate.policy import FigureRule, Policy, TimeRule
from pytest_llmgpu.gate.times import Timed, wall_times
from pytest_llmgpu.report.metrics import is_own, own, recorded
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import capital, percent
from pytest_llmgpu.report.verdicts import NEITHER, ONLY_CANDIDATE, Row


def out_of_bounds(head: CaseResult, policy: Policy) -> dict[str, Row]:
    """Return a row for each figure of a case that violates a bound of the policy; no baseline is needed."""
    found = {}
    for name, rule in policy.figures.items():
        declared = head.declared.get(name)
        if (spec := own(name, declared)).rule is None or (figure := spec.of(head)) is None:
            continue
        value, text = figure.value, ""
        if rule.at_least is not None and value < rule.at_least:
            text = f"{spec.written(value)} is below at_least = {rule.at_least:g} of the policy."
        if rule.at_most is not None and value > rule.at_most:
            text = f"{spec.written(value)} is above at_most = {rule.at_most:g} of the policy."
        if text:
            step = "Read `figures` of its launches in the report, and the bound in the policy."
            found[name] = Row.of(head, name, "REGRESSED", text, declared=declared, head=value, next_step=step)
    return found


def rows(
    base: CaseResult, head: CaseResult, policy: Policy, *, same_gpus: bool
) -> Iterator[tuple[str, Row | Timed | str]]:
    """Yield the verdict on each declared figure of two completed results, or the reason for none."""
    violated = out_of_bounds(head, policy)
    for name in {**base.declared, **head.declared}:
        if name in violated:
            yield name, violated[name]
        elif is_own(name):
            yield name, _compared(base, head, name, policy, same_gpus=same_gpus)


def _compared(base: CaseResult, head: CaseResult, name: str, policy: Policy, *, same_gpus: bool) -> Row | Timed | str:
    both = [one.declared[name] for one in (head, base) if name in one.declared]
    limits = [one.threshold for one in both]
    limit = policy.figures.get(name, FigureRule()).threshold
    declared = msgspec.structs.replace(both[0], threshold=min(limits if limit is None else [*limits, limit]))
    then, now = recorded(base, name), recorded(head, name)
    row = functools.partial(Row.of, head, name, declared=declared)
    if not now:
        return row("MISSING", "Only the baseline has it: the test did not record it.") if then else NEITHER
    if not then:
        return ONLY_CANDIDATE
    if any(msgspec.structs.replace(one, threshold=declared.threshold) != declared for one in both):
        return row("NOT_COMPARABLE", f"The baseline declares another figure: {both[-1]}, now {both[0]}.")
    if declared.rule == "exact":
        sign, before, after = -1 if declared.better == "larger" else 1, statistics.median(then), statistics.median(now)
        result = Amounts(*([sign * one for one in side] for side in (then, now))).result(declared.threshold)
        written = own(name, declared).written
        ends = [" to ".join(dict.fromkeys(map(written, (min(side), max(side))))) for side in (now, then)]
        reason = f"{capital(name.replace('_', ' '))} {ends[0]}, was {ends[1]}, threshold {percent(declared.threshold)}."
        step = "Declare it with the rule time, whose launches may differ." if result == "UNDECIDED" else ""
        ratio = after / before if before > 0 else None
        numbers = {"base": before, "head": after, "ratio": ratio, "threshold": declared.threshold}
        return row(result, reason, next_step=step, n=min(len(then), len(now)), **numbers)
    if min(*then, *now) <= 0:
        return row("UNDECIDED", "A figure with the rule time has to be above 0.")
    rule = TimeRule(threshold=declared.threshold)
    return wall_times(base, head, rule, metric=name, in_turn=False, same_gpus=same_gpus, declared=declared)
