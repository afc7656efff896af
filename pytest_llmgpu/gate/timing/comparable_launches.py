"""Which launches of two results compare in time: of the same batches, undisturbed, held alike by power and heat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.verdicts import Verdict

__all__ = ["Refusal", "Sides", "comparable", "other_execution"]

_HARDLY = 0.01
"""A clock that is lower by no more than this can change a time by no more, half of the usual margin."""

Sides = tuple[list[Launch], list[Launch]]
"""Launches of the baseline and of the candidate, at least one of each."""


class Refusal(NamedTuple):
    """Why there are none."""

    verdict: Verdict | None
    """None: there is nothing to compare with."""
    reason: str


def comparable(base: CaseResult, head: CaseResult) -> Sides | Refusal:
    """Return the launches of two completed results of one case whose times compare, or why none do."""
    sides = []
    for name, result in (("baseline", base), ("candidate", head)):
        measured = [launch for launch in result.launches if launch.batches.latency_s]
        valid = [launch for launch in measured if disturbances.untimed(launch) is None]
        if not measured and result is head:
            return Refusal("MISSING", "no batch was timed.")
        if not measured:
            return Refusal(None, "no batch of the baseline was timed")
        if not valid:
            against = disturbances.untimed(measured[0])
            return Refusal("INVALID", f"the {name}'s time does not speak for the case: {against}.")
        sides.append(valid)
    alike = _held_alike(*sides)
    if isinstance(alike, str):
        return Refusal("INVALID", alike)
    if (reason := _unpaired([*alike[0], *alike[1]])) is not None:
        cause = other_execution(base, head)
        return Refusal("NOT_COMPARABLE", reason if cause is None else f"{reason}\n{cause}")
    return alike


def other_execution(base: CaseResult, head: CaseResult) -> str | None:
    """Return in a sentence that the forwards of two results were run in another way, and what to do; None if alike.

    Where the run chooses (`--llmgpu-cuda-graphs=auto`), it may choose otherwise the next time.
    """
    was, now = base.case.execution, head.case.execution
    if was == now:
        return None
    names = {"cuda_graphs": "as CUDA graphs", "eager": "eagerly"}
    return (
        f"The forwards ran {names.get(now, now)}, the baseline's {names.get(was, was)}: measure both with "
        "--llmgpu-cuda-graphs=on or off."
    )


def _held_alike(base: list[Launch], head: list[Launch]) -> Sides | str:
    """Return the launches of both sides that compare: all, or those that were free; or in a sentence why none do.

    All where power or heat held down as large a share of one side as of the other: that is how this machine runs. Else
    what was held down by no more than `_HARDLY` counts as free: a batch that hardly keeps its GPU busy meets its limit
    in some launches and in others not, at much the same clock. Launches of which nobody knows how long they were held
    down count where the others are alike, and are left out where they are not; a side that has no other counts as free,
    unless all of the other side was held down.
    """
    if not any(_held_down(launch, None) for side in (base, head) for launch in side):
        return base, head
    told = [_telling(side) or side for side in (base, head)]
    clocks = [_clock_mhz(launch) for side in told for launch in side]
    known = [mhz for mhz in clocks if mhz is not None]
    free: Sides = ([], [])
    for slower_than_mhz in (None, max(known) * (1 - _HARDLY) if len(known) == len(clocks) else None):
        of_base, of_head = ([launch for launch in side if not _held_down(launch, slower_than_mhz)] for side in told)
        if len(of_base) * len(told[1]) == len(of_head) * len(told[0]):
            return base, head
        free = of_base, of_head
    if all(free):
        return free
    (one, other), rest, side = (
        (("baseline", "candidate"), free[1], told[1]) if not free[0] else (("candidate", "baseline"), free[0], told[0])
    )
    if not _telling(side):
        return f"power or heat held down the {one}, and of the {other} nobody knows (`profile.devices`)."
    if len(rest) == len(side):
        return f"only the {one} was held down by power or heat (`profile.invalid`)."
    counted = f"{len(side) - len(rest)} of {len(side)}"
    return f"power or heat held down every launch of the {one}, and {counted} of the {other}'s (`profile.invalid`)."


def _telling(side: list[Launch]) -> list[Launch]:
    """Return the launches of which it is known for how long power or heat held them down."""

    def tells(launch: Launch) -> bool:
        devices = [] if launch.profile is None else launch.profile.devices
        read = [device.throttled_s is not None or "throttled_s" not in device.why for device in devices]
        return (bool(read) and all(read)) or _held_down(launch, None)

    return [launch for launch in side if tells(launch)]


def _held_down(launch: Launch, slower_than_mhz: float | None) -> bool:
    """Return whether power or heat held a launch down; with a clock, to less than that."""
    if launch.profile is None or not any(map(disturbances.is_power, launch.profile.invalid)):
        return False
    mhz = _clock_mhz(launch)
    return mhz is None or slower_than_mhz is None or mhz < slower_than_mhz


def _clock_mhz(launch: Launch) -> float | None:
    return None if launch.profile is None else disturbances.slowest_mhz(launch.profile)


def _unpaired(launches: Sequence[Launch]) -> str | None:
    """Return why the launches' batches cannot be compared one by one; None where they can."""
    plans = {launch.plan_sha256 for launch in launches}
    counts = {len(launch.batches.latency_s) for launch in launches}
    if None in plans:
        return "a launch does not say which batches it ran, so that they cannot be paired."
    if len(plans) > 1:
        return "the batches differ (plan_sha256), so that they cannot be paired."
    if len(counts) > 1:
        return f"a launch has {min(counts)} batches and another {max(counts)} of one plan."
    return None
