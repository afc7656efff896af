"""The time of one case against its baseline's, batch against batch, and how many launches it takes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from pytest_llmgpu.gate.policy import TimeRule
from pytest_llmgpu.gate.stats.intervals import Change, assumed_sd, change, launch_levels, launches_needed
from pytest_llmgpu.gate.timing.comparable_launches import Refusal, comparable
from pytest_llmgpu.report.derived import inference_s
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.verdicts import Row

__all__ = ["FEWEST", "OWN_NOISE", "PROMISED", "SUM", "TYPICAL", "Timed", "launches_asked", "launches_for", "timed"]

OWN_NOISE = 3
"""Launches a side whose spread says how sure their sums are: calibrated is the noise of the typical batch."""

FEWEST = 5
"""Launches a side that are asked for at least, however quiet they are: they have outliers that no normal distribution
has. Of 30 on four H200 that differed by 0.9 % one was 9 % slow: three a side showed 10 % in 85 % of pairs, five in 99 %
(benchmarks/gate)."""

PROMISED = 0.02
"""How far above the margin a slowdown is that the launches asked for show: one equal to the margin is never shown."""

SUM = 0.1
"""Weight of a case's sum among the tests of a family. It is for what a few batches do, which is seldom little; the more
it had, the more launches the typical batch would take."""

_STALL_S = 0.03
"""What a single launch may have lost to the machine, unseen. Of 30 launches of 0.36 s on four H200, which differed by
0.9 %, one lost 0.035 s in its last batches: a false alarm, however quiet the others were."""

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
    """That count."""
    left_out: tuple[int, int]
    """That do not: disturbed, or held down where the other side's were not."""
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
    sides = comparable(base, head)
    if isinstance(sides, Refusal):
        if sides.verdict is None:
            return sides.reason
        return Row.of(head, "time", sides.verdict, sides.reason, gated=rule.gate)
    levels = launch_levels(*([launch.batches.latency_s for launch in side] for side in sides))
    base_s, head_s = (statistics.median(map(inference_s, side)) for side in sides)
    base_busy, head_busy = map(_busy, sides)
    sums = [[math.log(inference_s(launch)) for launch in side] for side in sides]
    stalls = math.log1p(_STALL_S / base_s), math.log1p(_STALL_S / head_s)
    assumed, assumed_of_sums = assumed_sd(*levels), assumed_sd(sums[0], sums[1])
    return Timed(
        head,
        rule,
        change(*levels, assumed if sd is None else sd, session_sd, stalls),
        change(sums[0], sums[1], assumed_of_sums if sd is None else sd, session_sd, stalls),
        max(rule.margin, rule.absolute_s / base_s),
        base_s,
        head_s,
        (len(sides[0]), len(sides[1])),
        (_timed(base) - len(sides[0]), _timed(head) - len(sides[1])),
        sd,
        assumed,
        session_sd,
        None if base_busy is None or head_busy is None else (base_busy, head_busy),
    )


def _timed(result: CaseResult) -> int:
    return sum(bool(launch.batches.latency_s) for launch in result.launches)


def launches_for(case: Timed, slowdown: float, confidence: float, cases: int, *, least: int = FEWEST) -> int | None:
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
    least: int = FEWEST,
) -> int | None:
    """Return how many launches a side show a slowdown of one of several cases; None above 1,000.

    The arguments are those of `statistics.launches_needed`, and `least`: never fewer are asked for. The case's sum is
    reckoned with as a test beside that of the typical batch, which it is from `OWN_NOISE` launches on.
    """
    needed = launches_needed(slowdown, margin, sd, confidence, cases / TYPICAL, session_sd)
    return None if needed is None else max(least, needed)


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


def _rounded_up(value: float) -> float:
    """Return a noise with two significant digits, not smaller."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit - 1e-9) * unit
