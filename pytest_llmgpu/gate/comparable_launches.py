"""The launches of two results whose times can be compared: same batches, undisturbed, equally throttled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from pytest_llmgpu.gate.exact import other_execution
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.verdicts import Verdict

_IGNORED_CLOCK = 0.01
"""A relative difference of clocks up to this is ignored: it changes a time by at most half of the default threshold."""

Sides = tuple[list[Launch], list[Launch]]
"""The launches of the baseline and of the candidate, at least one of each."""


class Refusal(NamedTuple):
    """The reason why no launches can be compared."""

    verdict: Verdict
    """The verdict of the case."""
    reason: str
    next_step: str = ""
    """The next step for the reader, if it depends on the reason."""


def comparable(base: CaseResult, head: CaseResult) -> Sides | Refusal:
    """Return the launches of two completed results of one case that can be compared, or the reason why none can."""
    sides = []
    for name, result in (("baseline", base), ("candidate", head)):
        measured = distinct(result.launches)
        valid = [launch for launch in measured if disturbances.untimed(launch) is None]
        if not measured and result is head:
            return Refusal("MISSING", "No batch was timed.")
        if not measured:
            return Refusal("UNDECIDED", "No batch of the baseline was timed.", _again(name))
        if not valid:
            disturbance = disturbances.untimed(measured[0]) or ""
            reason = f"The launches of the {name} were disturbed: {disturbance}."
            return Refusal("UNDECIDED", reason, _again(name, disturbances.remedy(disturbance)))
        sides.append(valid)
    alike = _equally_throttled(*sides)
    if isinstance(alike, str):
        return Refusal("UNDECIDED", alike, _again("throttled report", disturbances.COOLER))
    changed = _other_threads(*alike) if head.case.device == "cpu" else None
    if (unpaired := changed or _unpaired([*alike[0], *alike[1]])) is not None:
        other = other_execution(base, head)
        return Refusal("NOT_COMPARABLE", unpaired if other is None else f"{unpaired}\n{other}")
    return alike


def distinct(launches: Sequence[Launch]) -> list[Launch]:
    """Return the launches with timed batches, a launch and its copies once."""
    timed = [launch for launch in launches if launch.batches.latency_s]
    if len(timed) < 2:  # noqa: PLR2004 - one has no copy
        return timed
    found: dict[tuple[float | None, ...], list[Launch]] = {}
    for launch in timed:
        same = found.setdefault(_times(launch), [])
        if launch not in same:
            same.append(launch)
    return list(itertools.chain(*found.values()))


def is_copy(base: CaseResult, head: CaseResult) -> bool:
    """Return whether all timed launches of the candidate are launches of the baseline, too."""
    if not {launch.load_s for launch in head.launches} <= {launch.load_s for launch in base.launches}:
        return False  # The most frequent case is decided first: reports can have many thousand cases.
    return {_times(launch) for launch in distinct(head.launches)} <= {_times(launch) for launch in base.launches}


def _times(launch: Launch) -> tuple[float | None, ...]:
    """Return times that two launches of a machine hardly share: clocks have a resolution of nanoseconds."""
    return launch.load_s, *launch.batches.latency_s


def _other_threads(base: list[Launch], head: list[Launch]) -> str | None:
    """Return a sentence if ranks on a CPU computed with other numbers of threads; None if not, or if not known."""
    then, now = ({tuple(launch.host.threads) for launch in side if launch.host} for side in (base, head))
    if not then or not now or then == now:
        return None
    words = [" or ".join(", ".join(map(str, threads)) for threads in sorted(found)) for found in (then, now)]
    return (
        f"The number of threads of each rank changed: {words[0]} in the baseline, {words[1]} in the candidate. Set "
        "OMP_NUM_THREADS to the same value in both runs."
    )


def _equally_throttled(base: list[Launch], head: list[Launch]) -> Sides | str:
    """Return the launches of both results that can be compared, or a sentence if there are none.

    All launches are returned if power or heat throttled an equal share of both results, because that is the normal
    state of the machine. Otherwise the unthrottled launches are returned. A launch whose clock is lower by at most
    `_IGNORED_CLOCK` counts as unthrottled: a GPU at the edge of its limit is throttled in some launches, at almost the
    same clock. Launches whose throttling is not known are used if the other launches are equally throttled. A result
    with only such launches counts as unthrottled, unless all launches of the other result were throttled.
    """
    if not any(_throttled(launch, None) for side in (base, head) for launch in side):
        return base, head
    sides = [_with_known_throttling(side) or side for side in (base, head)]
    clocks = [_clock_mhz(launch) for side in sides for launch in side]
    known = [mhz for mhz in clocks if mhz is not None]
    free: Sides = ([], [])
    for slower_than_mhz in (None, max(known) * (1 - _IGNORED_CLOCK) if len(known) == len(clocks) else None):
        of_base, of_head = ([launch for launch in side if not _throttled(launch, slower_than_mhz)] for side in sides)
        if len(of_base) * len(sides[1]) == len(of_head) * len(sides[0]):
            return base, head
        free = of_base, of_head
    if all(free):
        return free
    (one, other), rest, side = (
        (("baseline", "candidate"), free[1], sides[1])
        if not free[0]
        else (("candidate", "baseline"), free[0], sides[0])
    )
    if not _with_known_throttling(side):
        return f"Power or heat throttled the {one}; for the {other} it is not known (`profile.devices`)."
    if len(rest) == len(side):
        return f"Power or heat throttled only the {one} (`profile.invalid`)."
    counted = f"{len(side) - len(rest)} of {len(side)}"
    return f"Power or heat throttled all launches of the {one} and {counted} of the {other} (`profile.invalid`)."


def _again(name: str, remedy: str = "") -> str:
    """Return the step that measures a report again, after the remedy of what disturbed it."""
    return f"{remedy} Then measure the {name} again." if remedy else f"Measure the {name} again."


def _with_known_throttling(side: list[Launch]) -> list[Launch]:
    """Return the launches whose throttling by power or heat is known."""

    def is_known(launch: Launch) -> bool:
        devices = [] if launch.profile is None else launch.profile.devices
        read = [device.throttled_s is not None or "throttled_s" not in device.why for device in devices]
        return (bool(read) and all(read)) or _throttled(launch, None)

    return [launch for launch in side if is_known(launch)]


def _throttled(launch: Launch, slower_than_mhz: float | None) -> bool:
    """Return whether power or heat throttled a launch, and to less than a clock if one is given."""
    if launch.profile is None or not any(map(disturbances.is_power, launch.profile.invalid)):
        return False
    mhz = _clock_mhz(launch)
    return mhz is None or slower_than_mhz is None or mhz < slower_than_mhz


def _clock_mhz(launch: Launch) -> float | None:
    return None if launch.profile is None else disturbances.slowest_mhz(launch.profile)


def _unpaired(launches: Sequence[Launch]) -> str | None:
    """Return the reason why batches cannot be compared one by one; None if they can."""
    plans = {launch.plan_sha256 for launch in launches}
    counts = {len(launch.batches.latency_s) for launch in launches}
    if None in plans:
        return "The batches cannot be paired: a launch does not record them (plan_sha256)."
    if len(plans) > 1:
        return "The batches cannot be paired: they differ (plan_sha256)."
    if len(counts) > 1:
        return f"The batches cannot be paired: one launch has {min(counts)}, another {max(counts)}."
    return None
