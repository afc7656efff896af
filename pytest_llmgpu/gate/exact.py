"""Whether what one run settles has changed: exact traffic, the links it took, and the peak of memory."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Literal

from pytest_llmgpu.analysis.traffic_path import FASTEST_FIRST, NAMES, describe_move, has_moved
from pytest_llmgpu.gate.policy import MemoryRule
from pytest_llmgpu.gate.timing.comparable_launches import other_execution
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.derived import peaks_bytes
from pytest_llmgpu.report.result import CaseResult, Path, Traffic
from pytest_llmgpu.report.verdicts import Row, Verdict

__all__ = ["memory_row", "path_row", "traffic_row"]

_USED_BYTES = 2**30
"""Growth of what NVML sees that is let pass: a library's new version may take so much."""

_NAMED = 3
"""Most changes that a reason names: it has two lines."""


def traffic_row(base: CaseResult, head: CaseResult, *, gated: bool) -> Row | str:
    """Judge the traffic: any change of calls, payload or wire bytes of any kind on any rank is a change.

    REGRESSED where any of them grew, IMPROVED where none did. A word on why there is nothing to compare otherwise.
    NOT_COMPARABLE where the forwards ran in another way, and so in batches that were padded otherwise.
    """
    if (missing := _missing(head, "traffic", base.traffic, head.traffic, gated=gated)) is not None:
        return missing
    assert base.traffic is not None
    assert head.traffic is not None
    same = base.traffic.ranks == head.traffic.ranks  # else the kinds may only be in another order
    now_sent = float(head.traffic.sent_bytes)
    sent = now_sent if same else float(base.traffic.sent_bytes)
    wire = {"base": sent, "head": now_sent, "ratio": now_sent / sent if sent else None, "margin": 0.0}
    before, after = (_by_rank(side) if not same else Counter() for side in (base.traffic, head.traffic))
    if before == after:
        return Row.of(head, "traffic", "OK", "sends exactly what the baseline sends.", gated=gated, **wire)
    cause = other_execution(base, head)
    if cause is not None and _plans(base) != _plans(head):
        reason = f"the batches differ (plan_sha256), and what is sent for them.\n{cause}"
        return Row.of(head, "traffic", "NOT_COMPARABLE", reason, gated=gated, **wire)
    places = before.keys() | after.keys()
    grew = any(after[place] > before[place] for place in places)
    shrank = any(after[place] < before[place] for place in places)
    then, now = _by_kind(before), _by_kind(after)
    changed = [
        f"{kind} {then[kind, figure]:,} -> {now[kind, figure]:,} {figure}"
        for kind, figure in sorted(then.keys() | now.keys())
        if then[kind, figure] != now[kind, figure]
    ]
    what = "; ".join(changed[:_NAMED]) or "the ranks share it out otherwise"
    more = f"; and {len(changed) - _NAMED} more figures" if len(changed) > _NAMED else ""
    word = ("other things" if shrank else "more") if grew else "less"
    return Row.of(
        head,
        "traffic",
        "REGRESSED" if grew else "IMPROVED",
        f"sends {word} than the baseline: {what}{more}.",
        gated=gated,
        **wire,
    )


def path_row(base: CaseResult, head: CaseResult, *, gated: bool) -> Row | str:
    """Judge which links carried the traffic: NVLink before a part on PCIe, PCIe, and PCIe by way of the host."""
    if head.traffic is not None and not any(head.traffic.ranks):
        return "nothing is sent"
    then, now = _path(base), _path(head)
    if (missing := _missing(head, "path", then, now, gated=gated)) is not None:
        return missing
    assert then is not None
    assert then.link is not None
    assert now is not None
    assert now.link is not None
    if not has_moved(then, now):
        return Row.of(head, "path", "OK", f"traffic goes over {NAMES[now.link]} as before.", gated=gated)
    slower = FASTEST_FIRST.index(now.link) > FASTEST_FIRST.index(then.link)
    return Row.of(
        head, "path", "REGRESSED" if slower else "IMPROVED", f"traffic {describe_move(then, now)}.", gated=gated
    )


def memory_row(base: CaseResult, head: CaseResult, rule: MemoryRule) -> Row | str:
    """Judge the peak of the fullest device: live tensors, and workspace outside torch's allocator.

    Equal runs have equal peaks, but for the allocator's rounding, which the margin covers. Several launches give the
    range of the ratio: it has to lie wholly above the margin to be REGRESSED. What NVML sees in use is sampled, and has
    a bar of its own: memory outside live tensors takes the room of the next batch as well. Recorded graphs hold memory
    of their own: a change of forwards that ran in another way is NOT_COMPARABLE.
    """
    then, now = peaks_bytes(base), peaks_bytes(head)
    if (missing := _missing(head, "memory", then, now, gated=rule.gate)) is not None:
        return missing
    before, after = statistics.median(then), statistics.median(now)
    margin = max(rule.margin, rule.absolute_bytes / before)
    low, high = min(now) / max(then), max(now) / min(then)
    if low > 1 + margin:
        verdict: Verdict = "REGRESSED"
    elif high < 1 - margin:
        verdict = "IMPROVED"
    elif high <= 1 + margin:
        verdict = "OK"
    else:
        verdict = "INCONCLUSIVE"
    if (outside := _outside(base, head, rule)) is not None:
        verdict = "REGRESSED"
    if (cause := other_execution(base, head) if verdict != "OK" else None) is not None:
        verdict = "NOT_COMPARABLE"
    changed = (
        "" if after == before else f" ({(after - before) / 2**20:+,.0f} MiB, margin {margin * before / 2**20:,.0f} MiB)"
    )
    apart = "The launches differ by more than the margin." if verdict == "INCONCLUSIVE" else None
    more = cause or outside or apart
    return Row.of(
        head,
        "memory",
        verdict,
        f"peak of the fullest device is {after / 2**30:.2f} GiB, was {before / 2**30:.2f} GiB{changed}."
        + (f"\n{more}" if more else ""),
        gated=rule.gate,
        base=before,
        head=after,
        ratio=after / before,
        low=low,
        high=high,
        margin=margin,
        n=min(len(then), len(now)),
    )


def _outside(base: CaseResult, head: CaseResult, rule: MemoryRule) -> str | None:
    """Return in a sentence that much more is in use than before, of which live tensors say nothing; None elsewhere."""
    then, now = _used_bytes(base), _used_bytes(head)
    if not then or not now or min(now) - max(then) <= max(rule.used_margin * max(then), _USED_BYTES):
        return None
    before, after = statistics.median(then) / 2**30, statistics.median(now) / 2**30
    return f"NVML saw {after:.2f} GiB in use, was {before:.2f}: caches, CUDA contexts or buffers of NCCL have grown."


def _used_bytes(result: CaseResult) -> list[int]:
    """Return what NVML saw in use on the fullest device at most, for each undisturbed launch that knows it."""
    used = []
    for launch in result.launches:
        sizes = [device.nvml_used_max_bytes for device in launch.memory if device.nvml_used_max_bytes]
        if sizes and (launch.profile is None or disturbances.disturbed(launch.profile) is None):
            used.append(max(sizes))
    return used


def _missing(
    head: CaseResult, metric: Literal["traffic", "path", "memory"], before: object, after: object, *, gated: bool
) -> Row | str | None:
    """Return a row or a few words where a side lacks the figure: one that was there and is gone is no silence."""
    if before and after:
        return None
    if before:
        told = head.traffic.path.text if metric == "path" and head.traffic is not None and head.traffic.path else None
        why = (told or head.why.get(metric, "the report does not say why")).rstrip(".")
        return Row.of(head, metric, "MISSING", f"{metric} is known for the baseline only: {why}.", gated=gated)
    return f"{metric} is new" if after else f"{metric} was not measured"


def _plans(result: CaseResult) -> set[str | None]:
    return {launch.plan_sha256 for launch in result.launches}


def _path(result: CaseResult) -> Path | None:
    """Return the path where its link is known."""
    path = result.traffic.path if result.traffic is not None else None
    return path if path is not None and path.link is not None else None


def _by_kind(figures: Counter[tuple[int, str, str]]) -> Counter[tuple[str, str]]:
    sums: Counter[tuple[str, str]] = Counter()
    for (_, kind, figure), value in figures.items():
        sums[kind, figure] += value
    return sums


def _by_rank(traffic: Traffic) -> Counter[tuple[int, str, str]]:
    figures: Counter[tuple[int, str, str]] = Counter()
    for number, rank in enumerate(traffic.ranks):
        for entry in rank:
            figures[number, entry.collective, "calls"] += entry.calls
            figures[number, entry.collective, "payload bytes"] += entry.payload_bytes
            figures[number, entry.collective, "wire bytes"] += entry.wire_bytes
    return figures
