"""Exact metrics of a case: traffic, the links that carried it, and the peak of memory."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pytest_llmgpu.analysis.traffic_path import FASTEST_FIRST, NAMES, describe_move, has_moved
from pytest_llmgpu.gate.execution import other_execution
from pytest_llmgpu.gate.policy import AmountRule, MemoryRule
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.result import CaseResult, Launch, Path, Traffic
from pytest_llmgpu.report.text import gib, percent, signed_percent
from pytest_llmgpu.report.verdicts import NEITHER, ONLY_CANDIDATE, WORST_FIRST, Decided, Row

_USED_BYTES = 2**30
"""Growth of memory outside live tensors that is always allowed: a new version of a library can take as much."""

_NAMED = 3
"""Most changes that a reason names, since it has two lines."""


def traffic_row(base: CaseResult, head: CaseResult, rule: AmountRule) -> Row | str:
    """Judge the traffic of each rank: its calls, payload bytes and wire bytes over all collectives.

    A shift between collectives that leaves these sums within the threshold is OK, and the reason lists it.

    Returns:
        REGRESSED where a sum grew by more than the threshold, IMPROVED where sums only fell, NOT_COMPARABLE where the
        forwards ran in a new execution and so in batches with another padding; or the reason why there is nothing to
        compare.
    """
    if (missing := _missing(head, "traffic", base.traffic, head.traffic, gated=rule.gate)) is not None:
        return missing
    assert base.traffic is not None
    assert head.traffic is not None
    sent, now_sent = float(base.traffic.sent_bytes), float(head.traffic.sent_bytes)
    figures = {"base": sent, "head": now_sent, "ratio": now_sent / sent if sent else None, "threshold": rule.margin}
    # Unequal records can hold equal figures: the collectives may be in another order.
    same = base.traffic.ranks == head.traffic.ranks
    if same or (before := _by_rank(base.traffic)) == (after := _by_rank(head.traffic)):
        return Row.of(head, "traffic", "OK", "Traffic is equal.", gated=rule.gate, **figures)
    cause = other_execution(base, head)
    if cause is not None and _plans(base) != _plans(head):
        reason = f"The batches differ (plan_sha256), and so does their traffic.\n{cause}"
        return Row.of(head, "traffic", "NOT_COMPARABLE", reason, gated=rule.gate, **figures)
    then, now = _sums(before, over=1), _sums(after, over=1)
    places = then.keys() | now.keys()
    verdict: Decided
    if any(now[place] - then[place] > rule.margin * then[place] for place in places):
        verdict = "REGRESSED"
    else:
        verdict = "IMPROVED" if any(then[place] - now[place] > rule.margin * then[place] for place in places) else "OK"
    reason = _traffic_change(before, after, within=rule.margin if verdict == "OK" else None)
    return Row.of(head, "traffic", verdict, reason, gated=rule.gate, **figures)


_Sent = Counter[tuple[int, str, str]]
"""Rank, collective and name of a figure to its value."""


def _traffic_change(before: _Sent, after: _Sent, *, within: float | None) -> str:
    """Describe a change of the traffic; `within` is the threshold that it does not exceed."""
    places = before.keys() | after.keys()
    grew, shrank = (any(sign * (after[place] - before[place]) > 0 for place in places) for sign in (1, -1))
    then, now = _sums(before, over=0), _sums(after, over=0)
    changed = [
        f"{collective} {then[collective, figure]:,} -> {now[collective, figure]:,} {figure}"
        for collective, figure in sorted(then.keys() | now.keys())
        if then[collective, figure] != now[collective, figure]
    ]
    what = "; ".join(changed[:_NAMED]) or "the ranks split it differently"
    more = f"; and {len(changed) - _NAMED} more figures" if len(changed) > _NAMED else ""
    word = ("changed" if shrank else "grew") if grew else "fell"
    limit = "" if within is None else f" within the threshold of {percent(within)}"
    return f"Traffic {word}{limit}: {what}{more}."


def path_row(base: CaseResult, head: CaseResult, *, gated: bool) -> Row | str:
    """Judge the links that carried the traffic. NVLink is faster than PCIe, and PCIe faster than PCIe over the host."""
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
        return Row.of(head, "path", "OK", f"Traffic goes over {NAMES[now.link]} as before.", gated=gated)
    slower = FASTEST_FIRST.index(now.link) > FASTEST_FIRST.index(then.link)
    return Row.of(
        head, "path", "REGRESSED" if slower else "IMPROVED", f"Traffic {describe_move(then, now)}.", gated=gated
    )


def memory_row(base: CaseResult, head: CaseResult, rule: MemoryRule) -> Row | str:
    """Judge the peak of live tensors and of the workspace outside torch's allocator, on each device.

    The fullest device decides what fits. Another device that grew counts as well where the fullest one did not fall:
    memory that only moved to emptier devices is no regression. Equal runs have equal peaks except for the allocator's
    rounding, which the threshold covers. Several launches give a range of the ratio, which has to lie wholly above the
    threshold for REGRESSED. What torch reserved and what NVML reports in use, which is sampled, have a threshold of
    their own: memory outside live tensors takes the space of the next batch as well. Recorded graphs hold memory of
    their own: a change between forwards of another execution is NOT_COMPARABLE.
    """
    tensors = _sides(base, head, _tensors_bytes)
    then, now = ([max(filter(None, launch)) for launch in side] for side in tensors)
    if (missing := _missing(head, "memory", then, now, gated=rule.gate)) is not None:
        return missing
    peak = _Peak("the fullest device", then, now)
    verdict = peak.verdict(rule)
    if verdict in {"OK", "UNDECIDED"}:
        for other in _changed(head, tensors):
            found = other.verdict(rule)
            if WORST_FIRST.index(found) < WORST_FIRST.index(verdict):
                peak, verdict = other, found
    more = "The launches differ by more than the threshold." if verdict == "UNDECIDED" else None
    noun, threshold = "Memory", peak.threshold(rule)
    if verdict != "REGRESSED" and (outside := _outside_tensors(base, head, rule)) is not None:
        tensors_now, tensors_then = gib(peak.after), gib(peak.before)
        noun, peak, grew = outside
        verdict, threshold = "REGRESSED", peak.used_threshold(rule)
        more = f"{grew} grew. Live tensors: {tensors_now}, was {tensors_then}."
    if verdict != "OK" and (cause := other_execution(base, head)) is not None:
        verdict, more = "NOT_COMPARABLE", cause
    before, after = peak.before, peak.after
    change = f"{noun} is equal" if after == before else f"{noun} {signed_percent(after / before - 1)}"
    return Row.of(
        head,
        "memory",
        verdict,
        f"{change}, threshold {percent(threshold)}: {gib(after)} on {peak.where}, was {gib(before)}."
        + (f"\n{more}" if more else ""),
        gated=rule.gate,
        base=before,
        head=after,
        ratio=after / before,
        low=peak.low,
        high=peak.high,
        threshold=threshold,
        n=min(len(peak.then), len(peak.now)),
    )


class _Peak(NamedTuple):
    """The peak of one device in the launches of both reports, in bytes."""

    where: str
    then: list[int]
    now: list[int]

    @property
    def before(self) -> float:
        return statistics.median(self.then)

    @property
    def after(self) -> float:
        return statistics.median(self.now)

    @property
    def low(self) -> float:
        return min(self.now) / max(self.then)

    @property
    def high(self) -> float:
        return max(self.now) / min(self.then)

    def threshold(self, rule: MemoryRule) -> float:
        """Return the threshold of live tensors as a fraction."""
        return max(rule.margin, rule.absolute_bytes / self.before)

    def verdict(self, rule: MemoryRule) -> Decided:
        """Return the verdict on live tensors."""
        threshold = self.threshold(rule)
        if self.low > 1 + threshold:
            return "REGRESSED"
        if self.high < 1 - threshold:
            return "IMPROVED"
        return "OK" if self.high <= 1 + threshold else "UNDECIDED"

    def used_threshold(self, rule: MemoryRule) -> float:
        """Return the threshold of memory outside live tensors as a fraction."""
        return max(rule.used_margin, _USED_BYTES / max(self.then))


_Figures = list[int | None]
"""A figure of each device of a launch; devices correspond by their order."""


def _sides(base: CaseResult, head: CaseResult, figures: Callable[[Launch], _Figures]) -> list[list[_Figures]]:
    """Return the figures of the launches of both results that have any."""
    return [[found for launch in result.launches if any(found := figures(launch))] for result in (base, head)]


def _changed(head: CaseResult, sides: Sequence[Sequence[_Figures]]) -> list[_Peak]:
    """Return the figure of each device that every launch of both reports has, where the launches differ."""
    launches = [*sides[0], *sides[1]]
    if not all(sides) or all(launch == launches[0] for launch in launches) or len(set(map(len, launches))) > 1:
        return []
    return [
        _Peak(
            f"device {head.launches[-1].memory[place].index}",
            *([launch[place] or 0 for launch in side] for side in sides),
        )
        for place, of_launches in enumerate(zip(*launches, strict=True))
        if all(of_launches) and len(set(of_launches)) > 1
    ]


def _outside_tensors(base: CaseResult, head: CaseResult, rule: MemoryRule) -> tuple[str, _Peak, str] | None:
    """Return memory that outgrew its threshold outside live tensors: its name, its peak, and what can have grown."""
    for figure, noun, grew in (
        (_reserved_bytes, "Memory reserved by torch", "The allocator's cache or its fragmentation"),
        (_used_bytes, "Memory in use (NVML)", "Caches, CUDA contexts or NCCL's buffers"),
    ):
        changed = _changed(head, _sides(base, head, figure))
        if grown := [peak for peak in changed if peak.low > 1 + peak.used_threshold(rule)]:
            return noun, max(grown, key=lambda one: one.after - one.before), grew
    return None


def _tensors_bytes(launch: Launch) -> _Figures:
    return [device.peak_bytes for device in launch.memory]


def _reserved_bytes(launch: Launch) -> _Figures:
    return [
        device.peak_reserved_bytes + (device.workspace_bytes or 0) if device.peak_reserved_bytes else None
        for device in launch.memory
    ]


def _used_bytes(launch: Launch) -> _Figures:
    """Return the most that NVML reported in use on each device; empty where other programs disturbed the launch."""
    disturbed = launch.profile is not None and disturbances.disturbed(launch.profile) is not None
    return [] if disturbed else [device.nvml_used_max_bytes for device in launch.memory]


def _missing(head: CaseResult, metric: MetricName, before: object, after: object, *, gated: bool) -> Row | str | None:
    """Return a row or a reason where a report lacks the figure; a figure that the candidate lost is MISSING."""
    if before and after:
        return None
    if before:
        path = head.traffic.path if metric == "path" and head.traffic is not None else None
        why = (path.text if path else None) or head.why.get(metric, "the report has no reason")
        return Row.of(head, metric, "MISSING", f"Only the baseline has {metric}: {why.rstrip('.')}.", gated=gated)
    return ONLY_CANDIDATE if after else NEITHER


def _plans(result: CaseResult) -> set[str | None]:
    return {launch.plan_sha256 for launch in result.launches}


def _path(result: CaseResult) -> Path | None:
    """Return the path where its link is known."""
    path = result.traffic.path if result.traffic is not None else None
    return path if path is not None and path.link is not None else None


def _sums(figures: _Sent, *, over: int) -> Counter[tuple[int | str, ...]]:
    """Return the sums over one part of the key: 0, the ranks; 1, the collectives."""
    sums: Counter[tuple[int | str, ...]] = Counter()
    for key, value in figures.items():
        sums[key[:over] + key[over + 1 :]] += value
    return sums


def _by_rank(traffic: Traffic) -> _Sent:
    figures: _Sent = Counter()
    for number, rank in enumerate(traffic.ranks):
        for entry in rank:
            figures[number, entry.collective, "calls"] += entry.calls
            figures[number, entry.collective, "payload bytes"] += entry.payload_bytes
            figures[number, entry.collective, "wire bytes"] += entry.wire_bytes
    return figures
