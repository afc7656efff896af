"""The peak memory of each device: live tensors and workspace, what torch reserved, and what NVML reports in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pytest_llmgpu.gate.exact import Amounts, absent, other_execution
from pytest_llmgpu.gate.policy import MemoryRule
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.text import gib, percent, signed_percent
from pytest_llmgpu.report.verdicts import WORST_FIRST, Decided, Row

_USED_BYTES = 2**30
"""Growth of memory outside live tensors that is always allowed: a new version of a library can take as much."""


class _Peak(NamedTuple):
    """The peak of one device in the launches of both reports, in bytes."""

    where: str
    bytes_: Amounts


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
    tensors = _of_launches(base, head, lambda launch: [device.peak_bytes for device in launch.memory])
    then, now = ([max(filter(None, launch)) for launch in side] for side in tensors)
    if (missing := absent(head, "memory", then, now, gated=rule.gate)) is not None:
        return missing

    def allowed(peak: _Peak) -> float:
        return max(rule.threshold, rule.absolute_bytes / peak.bytes_.before)

    def result_of(peak: _Peak) -> Decided:
        return peak.bytes_.result(allowed(peak))

    peak = _Peak("the fullest device", Amounts(then, now))
    if result_of(peak) in {"OK", "UNDECIDED"}:
        peak = min([peak, *_changed_peaks(head, tensors)], key=lambda one: WORST_FIRST.index(result_of(one)))
    noun, threshold, result = "Memory", allowed(peak), result_of(peak)
    more = "The launches differ by more than the threshold." if result == "UNDECIDED" else None
    if result != "REGRESSED":
        for figures, name, grew in _OUTSIDE_TENSORS:
            outside = _changed_peaks(head, _of_launches(base, head, figures))
            limits = [max(rule.used_threshold, _USED_BYTES / max(one.bytes_.then)) for one in outside]
            grown = [
                (one, limit)
                for one, limit in zip(outside, limits, strict=True)
                if one.bytes_.result(limit) == "REGRESSED"
            ]
            if grown:
                more = f"{grew} grew. Live tensors: {gib(peak.bytes_.after)}, was {gib(peak.bytes_.before)}."
                peak, threshold = max(grown, key=lambda one: one[0].bytes_.after - one[0].bytes_.before)
                noun, result = name, "REGRESSED"
                break
    if result != "OK" and (other := other_execution(base, head)) is not None:
        result, more = "NOT_COMPARABLE", other
    amounts = peak.bytes_
    change = f"{noun} {signed_percent(amounts.growth)}" if amounts.growth else f"{noun} is equal"
    return Row.of(
        head,
        "memory",
        result,
        f"{change}, threshold {percent(threshold)}: {gib(amounts.after)} on {peak.where}, was {gib(amounts.before)}."
        + (f"\n{more}" if more else ""),
        gated=rule.gate,
        base=amounts.before,
        head=amounts.after,
        ratio=amounts.after / amounts.before,
        low=min(amounts.now) / max(amounts.then),
        high=max(amounts.now) / min(amounts.then),
        threshold=threshold,
        n=min(map(len, amounts)),
    )


def _of_launches(
    base: CaseResult, head: CaseResult, figures: Callable[[Launch], _Figures]
) -> tuple[list[_Figures], list[_Figures]]:
    """Return the figures of the launches of both results that have any."""
    then, now = ([found for one in result.launches if any(found := figures(one))] for result in (base, head))
    return then, now


def _changed_peaks(head: CaseResult, sides: tuple[list[_Figures], list[_Figures]]) -> list[_Peak]:
    """Return the figure of each device that every launch of both reports has, where the launches differ."""
    if not all(sides) or len(set(map(len, [*sides[0], *sides[1]]))) > 1:
        return []
    return [
        _Peak(
            f"device {head.launches[-1].memory[place].index}",
            Amounts(*([launch[place] or 0 for launch in side] for side in sides)),
        )
        for place, of_launches in enumerate(zip(*sides[0], *sides[1], strict=True))
        if all(of_launches) and len(set(of_launches)) > 1
    ]


def _reserved_bytes(launch: Launch) -> _Figures:
    return [
        device.peak_reserved_bytes + (device.workspace_bytes or 0) if device.peak_reserved_bytes else None
        for device in launch.memory
    ]


def _used_bytes(launch: Launch) -> _Figures:
    """Return the most that NVML reported in use on each device; empty where other programs disturbed the launch."""
    disturbed = launch.profile is not None and disturbances.disturbed(launch.profile) is not None
    return [] if disturbed else [device.nvml_used_max_bytes for device in launch.memory]


_OUTSIDE_TENSORS = (
    (_reserved_bytes, "Memory reserved by torch", "The allocator's cache or its fragmentation"),
    (_used_bytes, "Memory in use (NVML)", "Caches, CUDA contexts or NCCL's buffers"),
)
"""Figures of memory outside live tensors, their names, and what can have grown."""
