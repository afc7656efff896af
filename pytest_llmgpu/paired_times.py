"""The time of one case against its baseline's: which launches count, batch against batch, and how many it takes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from pytest_llmgpu import evidence
from pytest_llmgpu.metrics import inference_s
from pytest_llmgpu.policy import TimeRule
from pytest_llmgpu.result import CaseResult, Launch
from pytest_llmgpu.statistics import Change, assumed_sd, change, launch_levels, launches_needed
from pytest_llmgpu.verdicts import Row, Verdict

__all__ = ["OWN_NOISE", "PROMISED", "SUM", "TYPICAL", "Timed", "launches_asked", "launches_for", "timed"]

OWN_NOISE = 3
"""Launches a side whose spread says how sure their sums are: calibrated is the noise of the typical batch."""

PROMISED = 0.02
"""How far above the margin a slowdown is that the launches asked for show: one equal to the margin is never shown."""

SUM = 0.1
"""Weight of a case's sum among the tests of a family. It is for what a few batches do, which is seldom little; the more
it had, the more launches the typical batch would take."""

_HARDLY = 0.01
"""A clock that is lower by no more than this can change a time by no more, half of the usual margin."""

_READINGS = 20
"""Readings of the GPUs' utilisation without which nothing is said of it: of a few, many are of a window's edges."""

_IDLER = 0.2
"""By how much, as a logarithm, the busy part of the time has to change: less is what equal launches differ by."""

TYPICAL = 1 - SUM
"""Weight of its typical batch."""


class Timed(NamedTuple):
    """The time of one case against its baseline's, not yet judged: that takes all cases."""

    result: CaseResult
    rule: TimeRule
    change: Change
    """Of the typical batch."""
    total: Change
    """Of the sum of all batches, which a few that are much slower move and the typical one does not."""
    margin: float
    """The bar as a fraction, the absolute one included."""
    base_s: float
    head_s: float
    launches: tuple[int, int]
    sd: float | None
    """Calibrated noise; None: nobody measured it."""
    assumed: float
    """What counts then."""
    session_sd: float
    """Calibrated noise between sessions; 0 where nobody measured it."""
    busy: tuple[float, float] | None = None
    """Fraction of the time for which the GPUs were at work, in the mean over them: the baseline's and the candidate's.
    None where one is not known."""

    @property
    def waited(self) -> bool:
        """Whether a change of time is mostly one of how long the GPUs had nothing to do, and not of their work."""
        if self.busy is None or not all(self.busy):
            return False
        slower, busier = math.log(self.head_s / self.base_s), math.log(self.busy[1] / self.busy[0])
        return abs(busier) > _IDLER and abs(slower + busier) < abs(slower) / 2

    @property
    def known(self) -> float:
        """The noise between launches that is calibrated, or assumed."""
        return self.assumed if self.sd is None else self.sd

    @property
    def noise(self) -> float:
        """The noise of one launch as it counts: the known one, or what these launches show where that is more."""
        # Two groups differ by sqrt(1/n + 1/m) times the noise of one launch.
        return max(self.known, (self.change.observed_error or 0.0) / math.sqrt(sum(1 / n for n in self.launches)))

    @property
    def sums_decide(self) -> bool:
        """Whether there are launches enough to know the noise of their sums."""
        return min(self.launches) >= OWN_NOISE


def timed(
    base: CaseResult, head: CaseResult, rule: TimeRule, sd: float | None, session_sd: float = 0.0
) -> Timed | Row | str:
    """Compare the times of two completed results of one case.

    Args:
        base: the baseline's.
        head: the candidate's.
        rule: the bar.
        sd: calibrated noise between launches, None where it is not known.
        session_sd: calibrated noise between sessions, 0 where it is not known or the sides were launched in turn.

    Returns:
        What `time_verdicts` judges; a row where comparing is impossible; or, in a few words, why there is nothing to
        compare.
    """

    def refused(verdict: Verdict, reason: str) -> Row:
        return Row.of(head, "time", verdict, reason, gated=rule.gate)

    sides = []
    for name, result in (("baseline", base), ("candidate", head)):
        measured = [launch for launch in result.launches if launch.batches.latency_s]
        valid = [launch for launch in measured if evidence.untimed(launch) is None]
        if not measured and result is head:
            return refused("MISSING", "no batch was timed.")
        if not measured:
            return "no batch of the baseline was timed"
        if not valid:
            return refused(
                "INVALID", f"the {name}'s time does not speak for the case: {evidence.untimed(measured[0])}."
            )
        sides.append(valid)
    if isinstance(alike := _held_alike(sides[0], sides[1]), str):
        return refused("INVALID", alike)
    sides = alike
    if (reason := _unpaired([*sides[0], *sides[1]])) is not None:
        return refused("NOT_COMPARABLE", reason)
    levels = launch_levels(*([launch.batches.latency_s for launch in side] for side in sides))
    base_s, head_s = (statistics.median(map(inference_s, side)) for side in sides)
    base_busy, head_busy = map(_busy, sides)
    sums = [[math.log(inference_s(launch)) for launch in side] for side in sides]
    assumed, assumed_of_sums = assumed_sd(*levels), assumed_sd(sums[0], sums[1])
    return Timed(
        head,
        rule,
        change(*levels, assumed if sd is None else sd, session_sd),
        change(sums[0], sums[1], assumed_of_sums if sd is None else sd, session_sd),
        max(rule.margin, rule.absolute_s / base_s),
        base_s,
        head_s,
        (len(sides[0]), len(sides[1])),
        sd,
        assumed,
        session_sd,
        None if base_busy is None or head_busy is None else (base_busy, head_busy),
    )


def launches_for(case: Timed, slowdown: float, confidence: float, cases: int, *, least: int = OWN_NOISE) -> int | None:
    """Return how many launches a side show a slowdown of a case at its noise; None above 1,000.

    Args:
        case: as it was measured.
        slowdown: the true one, as a fraction.
        confidence: of each end of an interval.
        cases: that are judged with it as a family, itself too.
        least: as of `launches_asked`.
    """
    # Rounded, so that cases of much the same noise share one calculation.
    sd, session_sd = _rounded_up(case.noise), _rounded_up(case.session_sd)
    return launches_asked(slowdown, case.margin, sd, confidence, cases, session_sd, least=least)


def launches_asked(
    slowdown: float,
    margin: float,
    sd: float,
    confidence: float,
    cases: int,
    session_sd: float = 0.0,
    *,
    least: int = OWN_NOISE,
) -> int | None:
    """Return how many launches a side show a slowdown of one of several cases; None above 1,000.

    The arguments are those of `statistics.launches_needed`, and `least`: never fewer are asked for, however quiet
    launches are. Of 30 on an H200 that differed by 0.9 % one was 9 % slow in its last batches: alone it was a false
    alarm and hid a slowdown of 10 %. Each case's sum is tested too.
    """
    needed = launches_needed(slowdown, margin, sd, confidence, cases / TYPICAL, session_sd)
    return None if needed is None else max(least, needed)


def _held_alike(base: list[Launch], head: list[Launch]) -> list[list[Launch]] | str:
    """Return the launches of both sides that compare: all, or those that were free; or in a sentence why none do.

    All where power or heat held down as large a share of one side as of the other: that is how this machine runs. Else
    what was held down by no more than `_HARDLY` counts as free: a batch that hardly keeps its GPU busy meets its limit
    in some launches and in others not, at much the same clock.
    """
    clocks = [_clock_mhz(launch) for launch in (*base, *head)]
    known = [mhz for mhz in clocks if mhz is not None]
    free: list[list[Launch]] = []
    for slower_than_mhz in (None, max(known) * (1 - _HARDLY) if len(known) == len(clocks) else None):
        free = [[launch for launch in side if not _held_down(launch, slower_than_mhz)] for side in (base, head)]
        if len(free[0]) * len(head) == len(free[1]) * len(base):
            return [base, head]
    if all(free):
        return free
    (one, other), rest, side = (
        (("baseline", "candidate"), free[1], head) if not free[0] else (("candidate", "baseline"), free[0], base)
    )
    if len(rest) == len(side):
        return f"only the {one} was held down by power or heat (`profile.invalid`)."
    counted = f"{len(side) - len(rest)} of {len(side)}"
    return f"power or heat held down every launch of the {one}, and {counted} of the {other}'s (`profile.invalid`)."


def _held_down(launch: Launch, slower_than_mhz: float | None) -> bool:
    """Return whether power or heat held a launch down; with a clock, to less than that."""
    if launch.profile is None or not any(map(evidence.is_power, launch.profile.invalid)):
        return False
    mhz = _clock_mhz(launch)
    return mhz is None or slower_than_mhz is None or mhz < slower_than_mhz


def _busy(launches: Sequence[Launch]) -> float | None:
    """Return the median launch's mean utilisation over its GPUs, as a fraction; None where it is not known."""
    found = []
    for launch in launches:
        devices = [] if launch.profile is None or launch.profile.samples < _READINGS else launch.profile.devices
        means = [device.metrics["utilization_pct"].mean for device in devices if "utilization_pct" in device.metrics]
        known = [mean for mean in means if mean is not None]
        if not devices or len(known) < len(devices):
            return None
        found.append(statistics.fmean(known) / 100)
    return statistics.median(found)


def _clock_mhz(launch: Launch) -> float | None:
    return None if launch.profile is None else evidence.slowest_mhz(launch.profile)


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


def _rounded_up(value: float) -> float:
    """Return a noise with two significant digits, not smaller."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit - 1e-9) * unit
