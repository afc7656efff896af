"""The peak memory of each device: live tensors and workspace, what torch reserved, and what NVML reports in use."""

from __future__ import annotations

from collections.abc import Callable

from pytest_llmgpu.gate.exact import Amounts, absent, other_execution
from pytest_llmgpu.gate.policy import MemoryRule
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.text import gib, percent, signed_percent
from pytest_llmgpu.report.verdicts import WORST_FIRST, Row

_USED_BYTES = 2**30
"""Growth of memory outside live tensors that is always allowed: a new version of a library can take as much."""


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

    def allowed(amounts: Amounts) -> float:
        return max(rule.threshold, rule.absolute_bytes / amounts.before)

    where, amounts = "the fullest device", Amounts(then, now)
    if amounts.result(allowed(amounts)) in {"OK", "UNDECIDED"}:
        peaks = [(where, amounts), *_changed_peaks(head, tensors)]
        where, amounts = min(peaks, key=lambda one: WORST_FIRST.index(one[1].result(allowed(one[1]))))
    noun, threshold = "Memory", allowed(amounts)
    result = amounts.result(threshold)
    more = "The launches differ by more than the threshold." if result == "UNDECIDED" else None
    if result != "REGRESSED":
        for figures, name, grew in _OUTSIDE_TENSORS:
            grown = [
                (place, one, limit)
                for place, one in _changed_peaks(head, _of_launches(base, head, figures))
                if one.result(limit := max(rule.used_threshold, _USED_BYTES / max(one.then))) == "REGRESSED"
            ]
            if grown:
                more = f"{grew} grew. Live tensors: {gib(amounts.after)}, was {gib(amounts.before)}."
                where, amounts, threshold = max(grown, key=lambda one: one[1].after - one[1].before)
                noun, result = name, "REGRESSED"
                break
    if result != "OK" and (other := other_execution(base, head)) is not None:
        result, more = "NOT_COMPARABLE", other
    change = f"{noun} {signed_percent(amounts.growth)}" if amounts.growth else f"{noun} is equal"
    return Row.of(
        head,
        "memory",
        result,
        f"{change}, threshold {percent(threshold)}: {gib(amounts.after)} on {where}, was {gib(amounts.before)}."
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


def _changed_peaks(head: CaseResult, sides: tuple[list[_Figures], list[_Figures]]) -> list[tuple[str, Amounts]]:
    """Return name and figure of each device that every launch of both reports has, where the launches differ."""
    if not all(sides) or len(set(map(len, [*sides[0], *sides[1]]))) > 1:
        return []
    return [
        (
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
