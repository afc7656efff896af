"""The row on the program of a case: a change is stated, and fails by its price or where the time is not measured."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_llmgpu.gate import cause as causes
from pytest_llmgpu.gate import program
from pytest_llmgpu.gate.exact import absent, other_execution
from pytest_llmgpu.gate.policy import ProgramRule
from pytest_llmgpu.gate.program import Pair
from pytest_llmgpu.report.cause import Cause
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import percent, plural, signed_percent
from pytest_llmgpu.report.verdicts import WORST_FIRST, Decided, Row

SLOWER_KERNEL = 0.003
"""Growth of one unchanged kernel beyond the factor common to all, as a fraction of device time, that is a regression:
in 4,134 healthy pairs the largest was 0.29 %. A kernel that grows by half a percent of device time is found."""
KERNEL_SEEN = 0.005
"""Growth of one kernel, as a fraction of device time, that the gate promises to find."""
_ERRORS = 4.0
"""Standard errors that such a growth has to exceed: one of 40 kernels of 21 cases seldom does by chance."""


def program_row(
    base: CaseResult,
    head: CaseResult,
    pairs: Sequence[Pair],
    rule: ProgramRule,
    *,
    gain: float,
    better: bool,
) -> Row | str | None:
    """Return the verdict on what a case calls, by the rank whose change costs most; a reason where nothing is known.

    `gain` is the fraction by which device time became shorter at a fixed clock. `better`: device time or wall time
    became better by more than its threshold.
    """
    if not pairs:
        then, now = (any(map(program.is_known, result.launches)) for result in (base, head))
        missing = absent(head, "program", then, now, gated=rule.gate)
        return missing or other_execution(base, head) or "the forwards ran other batches (plan_sha256)"
    found = [_of_rank(head, pair, rule, gain=gain, better=better) for pair in pairs]
    worst = min(found, key=lambda row: (WORST_FIRST.index(row.result), -(row.ratio or 0.0)))
    changed = causes.of_calls(pairs)
    if changed is None:
        return worst
    ran, runs = ([rank.implementations for rank in result.launches[-1].ranks] or [{}] for result in (base, head))
    switched = [f"{kind}: {was} -> {new}. " for kind, was in ran[0].items() if (new := runs[0].get(kind, was)) != was]
    worst = msgspec.structs.replace(worst, reason="".join(switched) + worst.reason)
    if worst.cause is not None and changed.rank is None:
        changed = worst.cause
    return causes.stated(worst, changed)


def _of_rank(head: CaseResult, pair: Pair, rule: ProgramRule, *, gain: float, better: bool) -> Row:
    """Return the verdict on one rank."""
    changed = program.changes(pair)
    if changed is None:
        return Row.of(head, "program", "OK", "The program is equal.", gated=rule.gate)
    result, reason, ratio = _judged(pair, changed, rule, gain=gain, better=better)
    total_s = pair.before.device_s if changed.price is not None else None
    return Row.of(
        head,
        "program",
        result,
        reason,
        gated=rule.gate,
        base=total_s,
        head=None if total_s is None or ratio is None else total_s * ratio,
        ratio=ratio,
        threshold=rule.threshold,
        cause=changed,
    )


def _judged(
    pair: Pair, changed: Cause, rule: ProgramRule, *, gain: float, better: bool
) -> tuple[Decided, str, float | None]:
    """Return the verdict on a changed program, its reason, and the ratio that it is about."""
    priced, error = changed.price, changed.price_error or 0.0
    limit = max(rule.threshold, error)
    syncs = (pair.after.host_syncs or 0) - (pair.before.host_syncs or 0)
    if syncs > 0 and None not in (pair.before.host_syncs, pair.after.host_syncs) and not better:
        more = f"{plural(syncs, 'host synchronization')} more in a forward, threshold 0."
        return "REGRESSED", more, None if priced is None else 1 + priced
    if priced is not None:
        text = f"The program changed by {signed_percent(priced, 2)} of device time, threshold {percent(limit, 2)}"
        if priced > limit and gain > limit:
            return "CHANGED", f"{text}; device time became {percent(gain, 2)} shorter.", 1 + priced
        return "REGRESSED" if priced > limit else "CHANGED", f"{text}.", 1 + priced
    before, after = pair.before.flops, pair.after.flops
    if before and after and after != before and not (pair.is_priced or (pair.before.device_s and better)):
        growth = after / before - 1
        text = f"FLOPs {signed_percent(growth, 2)}, threshold {percent(rule.flops)}."
        return "REGRESSED" if growth > rule.flops else "CHANGED", text, 1 + growth
    return "CHANGED", "The program changed; its kernels are the same, or their time is not known.", None


def with_slower_kernels(row: Row, pairs: Sequence[Pair]) -> Row:
    """Return a row on device time that is REGRESSED if an unchanged kernel became slower than the others."""
    if row.base is None or row.cause is not None:
        return row
    slower = [(found[0], number) for number, pair in enumerate(pairs) if (found := program.slower_kernels(pair))]
    worst, number = max(slower, key=lambda one: one[0].excess, default=(None, 0))
    if worst is None or worst.excess <= max(SLOWER_KERNEL, _ERRORS * worst.error):
        return row
    cause = Cause(place="kernel", rank=number if len(pairs) > 1 else None, kernel=worst)
    if row.result == "REGRESSED":
        return causes.stated(row, cause)
    reason = (
        f"One kernel takes {percent(worst.growth)} longer, relative to the others: {signed_percent(worst.excess, 2)} "
        f"of device time, threshold {percent(SLOWER_KERNEL, 2)}. {row.reason.splitlines()[0]}"
    )
    verdict = "REGRESSED" if row.gated else "CHANGED"
    return causes.stated(
        msgspec.structs.replace(row, verdict=verdict, improved=False, reason=reason, next_step=""), cause
    )
