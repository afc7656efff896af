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
    ran, runs = _implementations(base), _implementations(head)
    switched = [f"{name}: {was} -> {runs[name]}. " for name, was in ran.items() if runs.get(name, was) != was]
    worst = msgspec.structs.replace(worst, reason="".join(switched) + worst.reason)
    if worst.cause is not None and changed.rank is None:
        changed = worst.cause
    return causes.stated(worst, changed)


def _implementations(result: CaseResult) -> dict[str, str]:
    """Return the implementations of the latest launch by kind of layer, with their kernels where they were counted."""
    launch = result.launches[-1]
    counted = next((rank.implementations for rank in launch.ranks if rank.implementations), {})
    named = {*counted, *(("attention", "experts") if counted else ())}
    return {kind: name for kind, name in launch.implementations.items() if kind not in named} | counted


def _of_rank(head: CaseResult, pair: Pair, rule: ProgramRule, *, gain: float, better: bool) -> Row:
    """Return the verdict on one rank."""
    changed = program.changes(pair)
    if changed is None:
        return Row.of(head, "program", "OK", "The program is equal.", gated=rule.gate)
    limit, before, after = max(rule.threshold, changed.price_error or 0.0), pair.before, pair.after
    ratio = None if changed.price is None else 1 + changed.price
    result: Decided = "CHANGED"
    reason = "The program changed; its kernels are the same, or their time is not known."
    syncs = (after.host_syncs or 0) - (before.host_syncs or 0)
    if syncs > 0 and None not in (before.host_syncs, after.host_syncs) and not better:
        result, reason = "REGRESSED", f"{plural(syncs, 'host synchronization')} more in a forward, threshold 0."
    elif changed.price is not None:
        reason = (
            f"The program changed by {signed_percent(changed.price, 2)} of device time, threshold {percent(limit, 2)}"
        )
        won = changed.price > limit and gain > limit
        reason += f"; device time became {percent(gain, 2)} shorter." if won else "."
        result = "REGRESSED" if changed.price > limit and not won else "CHANGED"
    elif (
        before.flops
        and after.flops not in (None, 0, before.flops)
        and not (pair.is_priced or (before.device_s and better))
    ):
        ratio = (after.flops or 0) / before.flops
        reason = f"FLOPs {signed_percent(ratio - 1, 2)}, threshold {percent(rule.flops)}."
        result = "REGRESSED" if ratio - 1 > rule.flops else "CHANGED"
    total_s = before.device_s if changed.price is not None else None
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
