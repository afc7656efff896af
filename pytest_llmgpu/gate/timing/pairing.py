"""Comparison of the times of one case, batch by batch, and the minimum number of launches."""

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
"""Launches in each report from which the noise of the sum of all batches is estimated. A calibration has only the noise
of the typical batch."""

FEWEST = 5
"""Least number of launches in each report that is recommended, because launches have outliers that no normal
distribution has. One of 30 launches on four H200, which differed by 0.9 %, was 9 % slow: three launches in each report
detected 10 % in 85 % of the pairs, five in 99 % (benchmarks/gate)."""

PROMISED = 0.02
"""Distance above the threshold of the slowdown that the recommended launches detect. No number of launches detects a
slowdown equal to the threshold."""

SUM = 0.1
"""Weight of the sum of a case among the tests of a family. The sum detects large changes of a few batches. A larger
weight would require more launches for the typical batch."""

_STALL_S = 0.03
"""Time that a single launch can lose in an undetected stall. One of 30 launches of 0.36 s on four H200, which differed
by 0.9 %, lost 0.035 s in its last batches."""

_READINGS = 20
"""Least number of readings of the GPU utilisation: with fewer, many are at the edges of the window."""

_IDLER = 0.2
"""Least change of the logarithm of the utilisation: equal launches differ by less."""

TYPICAL = 1 - SUM
"""Weight of the typical batch of a case among the tests of a family."""


class Timed(NamedTuple):
    """The compared times of one case. The verdict needs all cases."""

    result: CaseResult
    rule: TimeRule
    change: Change
    """The change of the typical batch."""
    total: Change
    """The change of the sum of all batches. A few slow batches change the sum, but not the typical batch."""
    margin: float
    """The threshold as a fraction: the larger of the relative and the absolute one."""
    base_s: float
    head_s: float
    launches: tuple[int, int]
    """Number of used launches of the baseline and of the candidate."""
    left_out: tuple[int, int]
    """Number of launches that are not used: disturbed, or throttled unlike the other report."""
    sd: float | None
    """Calibrated noise between launches; None if it is not calibrated."""
    assumed: float
    """Noise between launches that is assumed without a calibration."""
    session_sd: float
    """Calibrated noise between sessions; 0 if it is not calibrated."""
    busy: tuple[float, float] | None = None
    """Mean utilisation of the GPUs as a fraction, of the baseline and of the candidate; None if one is not known."""

    @property
    def waited(self) -> bool:
        """True if the time changed mostly by waiting of the GPUs, not by their work."""
        if self.busy is None or not all(self.busy):
            return False
        slower, busier = math.log(self.head_s / self.base_s), math.log(self.busy[1] / self.busy[0])
        return abs(busier) > _IDLER and abs(slower + busier) < abs(slower) / 2

    @property
    def known(self) -> float:
        """The calibrated noise between launches, or else the assumed one."""
        return self.assumed if self.sd is None else self.sd

    @property
    def noise(self) -> float:
        """The noise of one launch: the larger of the known noise and the spread of these launches."""
        # Two groups differ by sqrt(1/n + 1/m) times the noise of one launch.
        return max(self.known, (self.change.observed_error or 0.0) / math.sqrt(sum(1 / n for n in self.launches)))

    @property
    def sums_decide(self) -> bool:
        """True if there are enough launches to estimate the noise of the sum."""
        return min(self.launches) >= OWN_NOISE


def timed(
    base: CaseResult, head: CaseResult, rule: TimeRule, sd: float | None, session_sd: float = 0.0
) -> Timed | Row | str:
    """Compare the times of two completed results of one case.

    Args:
        base: The result of the baseline.
        head: The result of the candidate.
        rule: The threshold.
        sd: Calibrated noise between launches; None if it is not calibrated.
        session_sd: Calibrated noise between sessions; 0 if it is not calibrated or the launches of both alternated.

    Returns:
        The input of `verdicts.rows`; a row if the times cannot be compared; or a phrase if there is nothing to compare.
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
    """Return how many launches in each report detect a slowdown of a case at its noise; None above 1,000.

    Args:
        case: The compared times.
        slowdown: The true slowdown as a fraction.
        confidence: The confidence of each end of an interval.
        cases: The number of cases in the family, with this one.
        least: The smallest number to return.
    """
    # Rounded, because cases of similar noise then share one cached computation.
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
    """Return how many launches in each report detect a slowdown of one of several cases; None above 1,000.

    The arguments are those of `intervals.launches_needed`; `least` is the smallest number to return. The family also
    has the test of the sum, which exists from `OWN_NOISE` launches on.
    """
    needed = launches_needed(slowdown, margin, sd, confidence, cases / TYPICAL, session_sd)
    return None if needed is None else max(least, needed)


def _busy(launches: Sequence[Launch]) -> float | None:
    """Return the utilisation of the median launch as a fraction, the mean over its GPUs; None if it is not known."""
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
    """Return a noise rounded up to two significant digits."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit - 1e-9) * unit
