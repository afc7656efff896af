"""Times at a fixed clock: those of both reports as they would be at the mean clock of the candidate.

The logarithm of a time falls with that of the SM clock along a straight line, whose slope is the share of the time that
the clock limits: 0 for kernels that wait for memory, -1 for those that compute. It belongs to the program, not to the
launch: LLaMA-7B at batch size 32 on an H200 had -0.80 in two processes. There the time of passes scattered by 2.4 %,
and by 0.07 % around the line. So a GPU at its power limit explains itself.

One line is fitted to the passes of both reports, with a level for each launch (analysis of covariance). Where the clock
hardly varies, the slope is that of a prior. The clock of a pass is not quite that of its
kernels: see `of_passes`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from pytest_llmgpu.report.work import RankWork

_PASS_SD, _PASS_DEGREES = 0.001, 4.0
"""Standard deviation of the log time of a pass around the line that is expected, and its degrees of freedom."""
_SLOPE, _SLOPE_SD = -0.5, 0.25
"""Slope that is expected before a comparison, and its standard deviation: seven cases had -0.2 to -0.8."""
_CLOCK_SD_S, _LARGEST_CLOCK_SD = 85e-6, 0.1
"""Deviation of the log clock of the kernels of a pass from that of the pass, times its length in seconds, since a pass
begins at a higher clock than it ends: 0.6 % in 15 ms. And the largest one, for passes of less than a millisecond."""
_IDLE_SD, KERNEL_IDLE_SD = 0.05, 0.02
"""Deviation of the log time of a pass in which the GPU always idles from one in which it never does: the clock of the
gaps is not that of the kernels, and kernels take longer after a gap. Eager launches differed by -3 to 8 %. And that of
one kernel relative to the others."""


class Pass(NamedTuple):
    """One work pass of one rank."""

    log_s: float
    """The logarithm of a time in seconds."""
    log_ghz: float
    """The logarithm of the SM clock in GHz; the mean over the GPUs of the rank."""


class Samples(NamedTuple):
    """The launches of one rank, or of a case whose time is one for all ranks."""

    base: Sequence[float]
    """The logarithm of the time of each launch of the baseline."""
    head: Sequence[float]
    """The logarithm of the time of each launch of the candidate."""

    @property
    def change(self) -> float:
        """The change of the mean of the launches, as a logarithm."""
        return statistics.fmean(self.head) - statistics.fmean(self.base)


class Fitted(NamedTuple):
    """The passes of both reports at the mean clock of the candidate."""

    samples: Samples
    slope: float
    """The change of the log time with the log clock, from -1 to 0."""
    sd: float
    """Standard deviation of these times, from the errors of their passes and of the slope alone."""
    base_ghz: float
    """The mean clock of the baseline, and of the candidate."""
    head_ghz: float
    idle_sd: float = 0.0
    """Standard deviation of their change that no number of launches makes smaller: see `of_passes`."""


def log_clocks(ghz: Sequence[Sequence[float]] | None) -> list[float]:
    """Return the mean log clock of each pass from clocks [GPUs][passes]; empty if one is missing."""
    clocks_ghz = list(zip(*(ghz or ()), strict=False))  # a report can have columns of any length
    is_known = bool(clocks_ghz) and min(map(min, clocks_ghz)) > 0
    return [sum(map(math.log, of_gpus)) / len(of_gpus) for of_gpus in clocks_ghz] if is_known else []


def passes(clocks: Sequence[float], times_s: Sequence[float] | None) -> list[Pass]:
    """Return passes with given log clocks and times; none where one has no clock, or a time is 0."""
    if not times_s or len(clocks) != len(times_s) or min(times_s) <= 0:
        return []
    return [Pass(math.log(time_s), clock) for time_s, clock in zip(times_s, clocks, strict=True)]


def mean_pass(log_s: float, ghz: Sequence[Sequence[float]] | None) -> list[Pass]:
    """Return one time at the mean of clocks [GPUs][batches]; none where one is not known."""
    clocks = [one for of_gpu in ghz or () for one in of_gpu]
    return [Pass(log_s, statistics.fmean(map(math.log, clocks)))] if clocks and min(clocks) > 0 else []


def fit(base: Sequence[Sequence[Pass]], head: Sequence[Sequence[Pass]], alike: Sequence[Sequence[Pass]] = ()) -> Fitted:
    """Return the passes [launches][passes] of both reports, at least one each, at the mean clock of the candidate.

    Those of `alike`, of the same program, have the same slope, and levels of their own.
    """
    launches, timed = [*base, *head, *alike], len(base) + len(head)
    means = [Pass(*(sum(column) / len(launch) for column in zip(*launch, strict=True))) for launch in launches]
    away = [
        (one.log_s - mean.log_s, one.log_ghz - mean.log_ghz)
        for launch, mean in zip(launches, means, strict=True)
        for one in launch
    ]
    squares, products = sum(ghz * ghz for _, ghz in away), sum(s * ghz for s, ghz in away)
    expected = (_PASS_SD / _SLOPE_SD) ** 2
    slope = min(0.0, max(-1.0, (products + expected * _SLOPE) / (squares + expected)))
    degrees = _PASS_DEGREES + max(0, len(away) - len(launches) - 1)
    pass_sd = math.sqrt((_PASS_DEGREES * _PASS_SD**2 + sum((s - slope * ghz) ** 2 for s, ghz in away)) / degrees)
    sides = means[: len(base)], means[len(base) : timed]
    clocks = [sum(mean.log_ghz for mean in side) / len(side) for side in sides]
    times = [mean.log_s - slope * (mean.log_ghz - clocks[1]) for mean in means[:timed]]
    # The error of the slope times the difference of the clocks is an error of the difference of both means.
    slope_sd = 1 / math.sqrt(1 / _SLOPE_SD**2 + squares / pass_sd**2)
    of_slope = slope_sd * abs(clocks[1] - clocks[0]) / math.sqrt(1 / len(base) + 1 / len(head))
    return Fitted(
        samples=Samples(times[: len(base)], times[len(base) :]),
        slope=slope,
        sd=math.hypot(pass_sd / math.sqrt(min(map(len, launches[:timed]))), of_slope),
        base_ghz=math.exp(clocks[0]),
        head_ghz=math.exp(clocks[1]),
    )


def busy(rank: RankWork) -> float | None:
    """Return the part of the passes of a rank that its GPU computes, as the clock and the times of kernels see it."""
    return 1.0 if rank.launched_ahead else rank.busy


def of_passes(fitted: Fitted, base: Sequence[RankWork], head: Sequence[RankWork]) -> Fitted:
    """Return the time of all kernels of a rank with the errors of the clocks of its passes [launches].

    Those of short passes, and of a GPU that idles for another part of the passes, where this part is known.
    """
    ranks = [*base, *head]
    length_s = min(min(one.device_time_s or [0.0]) / (busy(one) or 1.0) for one in ranks)
    clock_sd = _CLOCK_SD_S / max(length_s, _CLOCK_SD_S / _LARGEST_CLOCK_SD)
    then, now = ([part for part in map(busy, side) if part is not None] for side in (base, head))
    known = len(then) + len(now) == len(ranks)
    idle_sd = _IDLE_SD * abs(statistics.fmean(now) - statistics.fmean(then)) if known else 0.0
    return fitted._replace(sd=math.hypot(fitted.sd, fitted.slope * clock_sd), idle_sd=idle_sd)
