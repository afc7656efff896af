"""Metrics that do not vary by chance: traffic, its path, memory and the execution.

Their amounts are equal in every launch of an equal program, so that one launch suffices. They are compared rank by
rank, because the slowest rank decides the time of a case.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from pytest_llmgpu.analysis.traffic_path import FASTEST_FIRST, NAMES, describe_move
from pytest_llmgpu.gate.policy import AmountRule, MemoryRule
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.derived import peaks_bytes
from pytest_llmgpu.report.metrics import BY_NAME, MetricName, spec_of
from pytest_llmgpu.report.result import CaseResult, Launch, Traffic
from pytest_llmgpu.report.text import capital, gib, percent, signed_percent
from pytest_llmgpu.report.verdicts import NEITHER, ONLY_CANDIDATE, WORST_FIRST, Decided, Part, Row
from pytest_llmgpu.report.work import WORK_OFF, WORK_ON

NAMED = 3
"""Most names, changes or differences that a reason has."""

_ROUNDING = 1 + 1e-9
"""Factor that keeps a change of exactly the threshold within it."""

_EXECUTIONS = {"cuda_graphs": "as CUDA graphs", "eager": "eagerly", "compile": "compiled"}

_USED_BYTES = 2**30
"""Growth of memory outside live tensors that is always allowed: a new version of a library can take as much."""


class Amounts(NamedTuple):
    """One amount in the launches of both reports; less is better."""

    then: Sequence[float]
    now: Sequence[float]

    @property
    def before(self) -> float:
        """The amount of a launch in the middle of the baseline."""
        return statistics.median_low(self.then)

    @property
    def after(self) -> float:
        """The amount of a launch in the middle of the candidate."""
        return statistics.median_low(self.now)

    def result(self, threshold: float) -> Decided:
        """Return the verdict. Where launches differ, their whole range has to lie beyond the threshold."""
        least, most, threshold = min(self.then), max(self.then), threshold * _ROUNDING
        if min(self.now) - most > threshold * abs(most):
            return "REGRESSED"
        if least - max(self.now) > threshold * abs(least):
            return "IMPROVED"
        return "UNDECIDED" if max(self.now) - least > threshold * abs(least) else "OK"


def worse(first: Row | None, second: Row, part: Part = "prefill", *, in_turn: bool = False) -> Row:
    """Return the worse of two rows on one metric, of two regressions the larger one, else the first one.

    `part` names the second one. The smallest slowdown that is seen is that of both. At equal speed of the host the
    second one counts alone; where the first regressed, what slowed the host is not known but for launches in turn.
    """
    if part == "host at equal speed" and first is not None and not (in_turn and first.worse):
        if first.worse and not second.worse:
            text = f" Wall time {signed_percent((first.ratio or 1.0) - 1)}: other programs can cause it."
            more = {"reason": second.reason + text, "next_step": "Measure both in turn: `llmgpu ab`."}
            second = msgspec.structs.replace(second, verdict="UNDECIDED", improved=False, **more)
        first = None

    def badness(row: Row) -> tuple[int, float]:
        return WORST_FIRST.index(row.result), -(row.ratio or 0.0) if row.worse else 0.0

    row = first
    if row is None or badness(second) < badness(row):
        row = msgspec.structs.replace(second, part=part, reason=f"{capital(part)}: {second.reason}")
    if first is None or first.smallest_seen is None or second.smallest_seen is None:
        return row
    return msgspec.structs.replace(row, smallest_seen=max(first.smallest_seen, second.smallest_seen))


def absent(head: CaseResult, metric: MetricName, before: object, after: object, **fields: Any) -> Row | str | None:
    """Return a row or a reason where a report lacks a figure; one that only the candidate lacks is MISSING.

    `fields` are those of the row.
    """
    if before and after:
        return None
    if not before:
        return ONLY_CANDIDATE if after else NEITHER
    reasons = [launch.why.get(metric) for launch in head.launches]
    if metric == "path" and head.traffic is not None and head.traffic.path is not None:
        reasons = [head.traffic.path.text]
    if metric in BY_NAME and spec_of(metric).of_passes:
        reasons += [launch.why.get("work") for launch in head.launches if launch.work is None]
        ranks = [rank for launch in head.launches for rank in launch.ranks]
        reasons += [rank.why.get(metric) or rank.why.get(f"{metric}_s") for rank in ranks]
    why = next(filter(None, [*reasons, head.why.get(metric)]), "the report has no reason")
    reason = f"Only the baseline has {metric.replace('_', ' ')}: {why.rstrip('.')}."
    return Row.of(head, metric, "MISSING", reason, next_step=WORK_ON if why == WORK_OFF else "", **fields)


def traffic_row(base: CaseResult, head: CaseResult, rule: AmountRule) -> Row | str | None:
    """Compare the traffic of each rank: its calls, payload bytes and wire bytes over all collectives.

    A shift between collectives that leaves these sums within the threshold is OK, and the reason lists it. Forwards in
    a new execution, and so in batches with another padding, are NOT_COMPARABLE.
    """
    if base.traffic is None or head.traffic is None:
        return absent(head, "traffic", base.traffic, head.traffic, gated=rule.gate)
    then, now = _sent(base.traffic), _sent(head.traffic)
    plans = [{launch.plan_sha256 for launch in one.launches} for one in (base, head)]
    result: Decided = "OK"
    if then == now:  # Records can differ all the same: the collectives can be in another order.
        reason = "Traffic is equal."
    elif (other := other_execution(base, head)) and plans[0] != plans[1]:
        result, reason = "NOT_COMPARABLE", f"The batches differ (plan_sha256), and so does their traffic.\n{other}"
    else:
        ranks = [Amounts([then[place]], [now[place]]) for place in {**then, **now} if isinstance(place[0], int)]
        result = min((rank.result(rule.threshold) for rank in ranks), key=WORST_FIRST.index)
        changed = sorted((place for place in {**then, **now} if then[place] != now[place]), key=str)
        named = [
            f"{collective} {then[collective, figure]:,} -> {now[collective, figure]:,} {figure}"
            for collective, figure in changed
            if isinstance(collective, str)
        ]
        signs = {now[place] > then[place] for place in changed}
        word = "changed" if len(signs) > 1 else "grew" if True in signs else "fell"
        limit = f" within the threshold of {percent(rule.threshold)}" if result == "OK" else ""
        more = f"; and {len(named) - NAMED} more figures" if len(named) > NAMED else ""
        what = "; ".join(named[:NAMED]) or "the ranks split it differently"
        reason = f"Traffic {word}{limit}: {what}{more}."
    sent, now_sent = float(base.traffic.sent_bytes), float(head.traffic.sent_bytes)
    figures = {"base": sent, "head": now_sent, "ratio": now_sent / sent if sent else None, "threshold": rule.threshold}
    return Row.of(head, "traffic", result, reason, gated=rule.gate, **figures)


def _sent(traffic: Traffic) -> Counter[tuple[int | str, str]]:
    """Return the sums of calls and bytes of each rank over all collectives, and of each collective over all ranks."""
    sums: Counter[tuple[int | str, str]] = Counter()
    for number, rank in enumerate(traffic.ranks):
        for entry in rank:
            for place in (number, entry.collective):
                sums[place, "calls"] += entry.calls
                sums[place, "payload bytes"] += entry.payload_bytes
                sums[place, "wire bytes"] += entry.wire_bytes
    return sums


def path_row(base: CaseResult, head: CaseResult, *, gated: bool) -> Row | str | None:
    """Compare the links that carried the traffic: NVLink is faster than PCIe, and PCIe faster than over the host."""
    if base.traffic is None or head.traffic is None:
        return None
    if not any(head.traffic.ranks):
        return "nothing is sent"
    then, now = base.traffic.path, head.traffic.path
    before, after = (None if path is None else path.link for path in (then, now))
    if then is None or now is None or before is None or after is None:
        return absent(head, "path", before, after, gated=gated)
    if before == after:
        return Row.of(head, "path", "OK", f"Traffic goes over {NAMES[after]} as before.", gated=gated)
    result: Decided = "REGRESSED" if FASTEST_FIRST.index(after) > FASTEST_FIRST.index(before) else "IMPROVED"
    return Row.of(head, "path", result, f"Traffic {describe_move(then, now)}.", gated=gated)


_Figures = list[int | None]
"""A figure of each device of a launch; devices correspond by their order."""


def memory_row(base: CaseResult, head: CaseResult, rule: MemoryRule) -> Row | str:
    """Compare the peak of live tensors and of the workspace outside torch's allocator, on each device.

    The fullest device decides what fits. Another device that grew counts as well where the fullest one did not fall:
    memory that only moved to emptier devices is no regression. Equal runs have equal peaks except for the allocator's
    rounding, which the threshold covers. What torch reserved and what NVML reports in use, which is sampled, have a
    threshold of their own: memory outside live tensors takes the space of the next batch as well. Recorded graphs hold
    memory of their own: a change between forwards of another execution is NOT_COMPARABLE.
    """
    then, now = peaks_bytes(base), peaks_bytes(head)
    if (missing := absent(head, "memory", then, now, gated=rule.gate)) is not None:
        return missing

    def allowed(amounts: Amounts) -> float:
        return max(rule.threshold, rule.absolute_bytes / amounts.before)

    peaks = [("the fullest device", Amounts(then, now))]
    if peaks[0][1].result(allowed(peaks[0][1])) != "IMPROVED":
        peaks += _peaks(base, head, lambda one: [device.peak_bytes for device in one.memory])
    where, amounts = min(peaks, key=lambda one: WORST_FIRST.index(one[1].result(allowed(one[1]))))
    noun, threshold = "Memory", allowed(amounts)
    result = amounts.result(threshold)
    more = "The launches differ by more than the threshold." if result == "UNDECIDED" else None
    tensors = f"Live tensors: {gib(amounts.after)}, was {gib(amounts.before)}."
    for figures, name, grew in _OUTSIDE_TENSORS:
        devices = _peaks(base, head, figures)
        limits = [(max(rule.used_threshold, _USED_BYTES / max(one.then)), place, one) for place, one in devices]
        grown = [found for found in limits if found[2].result(found[0]) == "REGRESSED"]
        if result != "REGRESSED" and grown:
            noun, result, more = name, "REGRESSED", f"{grew} grew. {tensors}"
            threshold, where, amounts = max(grown, key=lambda one: one[2].after - one[2].before)
    if result != "OK" and (other := other_execution(base, head)) is not None:
        result, more = "NOT_COMPARABLE", other
    ratio = amounts.after / amounts.before
    change = f"{noun} {signed_percent(ratio - 1)}" if ratio != 1 else f"{noun} is equal"
    reason = f"{change}, threshold {percent(threshold)}: {gib(amounts.after)} on {where}, was {gib(amounts.before)}."
    reason += f"\n{more}" if more else ""
    numbers = {"base": amounts.before, "head": amounts.after, "ratio": ratio, "threshold": threshold}
    low, high = min(amounts.now) / max(amounts.then), max(amounts.now) / min(amounts.then)
    n = min(map(len, amounts))
    return Row.of(head, "memory", result, reason, gated=rule.gate, low=low, high=high, n=n, **numbers)


def _peaks(base: CaseResult, head: CaseResult, figures: Callable[[Launch], _Figures]) -> list[tuple[str, Amounts]]:
    """Return name and figure of each device that every launch of both reports has."""
    sides = [[found for one in result.launches if any(found := figures(one))] for result in (base, head)]
    if not all(sides) or len(set(map(len, [*sides[0], *sides[1]]))) > 1:
        return []
    devices = zip(head.launches[-1].memory, *(zip(*side, strict=True) for side in sides), strict=False)
    return [(f"device {device.index}", Amounts(then, now)) for device, then, now in devices if all((*then, *now))]


def _reserved_bytes(launch: Launch) -> _Figures:
    return [one.peak_reserved_bytes and one.peak_reserved_bytes + (one.workspace_bytes or 0) for one in launch.memory]


def _used_bytes(launch: Launch) -> _Figures:
    """Return the most that NVML reported in use on each device; empty where other programs disturbed the launch."""
    return [] if disturbances.disturbed(launch) else [device.nvml_used_max_bytes for device in launch.memory]


_OUTSIDE_TENSORS = (
    (_reserved_bytes, "Memory reserved by torch", "The allocator's cache or its fragmentation"),
    (_used_bytes, "Memory in use (NVML)", "Caches, CUDA contexts or NCCL's buffers"),
)
"""Figures of memory outside live tensors, their names, and what can have grown."""


def execution_row(base: CaseResult, head: CaseResult, *, gated: bool) -> Row | None:
    """Compare the execution: eager forwards are slower than recorded ones.

    There is no row where the execution did not change to or from eager, or where the users asked for different ones.
    """
    was, now = base.case.execution, head.case.execution
    if was == now or "eager" not in {was, now} or base.case.cuda_graphs != head.case.cuda_graphs:
        return None
    choice = next((f"\n{launch.execution_choice}" for launch in head.launches if launch.execution_choice), "")
    result: Decided = "REGRESSED" if now == "eager" else "IMPROVED"
    return Row.of(head, "execution", result, f"{_executions(base, head)}.{choice}", gated=gated)


def other_execution(base: CaseResult, head: CaseResult) -> str | None:
    """Return a sentence if one result ran its forwards as CUDA graphs and the other eagerly; else None."""
    if base.case.execution == head.case.execution:
        return None
    return f"{_executions(base, head)}: measure both with --llmgpu-cuda-graphs=on or off."


def _executions(base: CaseResult, head: CaseResult) -> str:
    now, was = (_EXECUTIONS.get(one.case.execution, one.case.execution) for one in (head, base))
    return f"The forwards ran {now}, the baseline's {was}"
