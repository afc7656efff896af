"""The noise regime of a case: what its times wait for, on which their differences between launches depend."""

from __future__ import annotations

from typing import Literal, get_args

from pytest_llmgpu.report.result import CaseResult

NoiseRegime = Literal["device_memory", "device_compute", "replayed", "eager_device", "eager_host", "cpu"]
"""device_memory, device_compute: the time of the kernels, limited by memory or by computation. replayed, eager_device,
eager_host: wall time of replayed CUDA graphs, and of eager forwards that the GPU or the host limits. cpu: wall time on
a CPU."""

REGIMES: tuple[NoiseRegime, ...] = get_args(NoiseRegime)
"""Every regime; of device time and of wall time the quieter ones come first."""

_BUSY = 0.8
"""Fraction of a pass during which kernels run from which the GPU limits an eager forward."""

_UNKNOWN_IDLE = 0.2
"""Idle fraction of a replayed pass without work passes. It was 0.02 to 0.15 for LLaMA-7B on an H200."""

_SPREAD = 2.0
_HOST_SPREAD = 3.0
"""The host's launches have a standard deviation of up to 26 %: one run of ten launches in a hundred spreads by 2.8."""


def of_device_time(result: CaseResult) -> NoiseRegime:
    """Return the regime of the device time of a case."""
    memory = result.bound is not None and result.bound.limited_by == "memory"
    return "device_memory" if memory else "device_compute"


def of_time(result: CaseResult) -> NoiseRegime:
    """Return the regime of the wall time of a case. Without work passes the host is assumed to limit eager forwards."""
    if result.case.device == "cpu":
        return "cpu"
    if result.case.execution == "cuda_graphs":
        return "replayed"
    ranks = [rank for launch in result.launches for rank in launch.ranks]
    busy = bool(ranks) and all(rank.busy is not None and rank.busy >= _BUSY for rank in ranks)
    return "eager_device" if busy else "eager_host"


def noisiest(metric: Literal["device_time", "time"], *results: CaseResult) -> NoiseRegime:
    """Return the noisiest regime of a time of one case in several reports."""
    return max(map(of_device_time if metric == "device_time" else of_time, results), key=REGIMES.index)


def forwards(regime: NoiseRegime, *results: CaseResult) -> int | None:
    """Return the fewest forwards whose time a launch of the results measures; None where the noise is not theirs.

    At its power limit a GPU has a random clock, so that the time of each forward varies by itself.
    """
    launches = [launch for result in results for launch in result.launches]
    if regime == "device_compute":
        counts = [work.passes * len(work.batches) for launch in launches if (work := launch.work) is not None]
    elif regime == "replayed":
        counts = [len(launch.batches.latency_s) for launch in launches]
    else:
        return None
    return min(filter(None, counts), default=None)


def idle_share(*results: CaseResult) -> float:
    """Return the largest fraction of a pass in which a rank's GPUs wait for the host; 0.2 where it is not known."""
    # Not `derived.device_busy`, the share of the timed forwards: it has no margin for small batches, and is too low for
    # large ones, since clocks of timed forwards and of work passes differ. With it 6 % of equal programs of a shared
    # host are REGRESSED in place of none, and 3 % at batch size 32 is found in none of the trials in place of all
    # (`benchmarks/gate/reach.py`, two launches of replayed graphs in turn).
    shares = []
    for result in results:
        ranks = [rank for launch in result.launches for rank in launch.ranks]
        busy = [rank.busy for rank in ranks if rank.busy is not None]
        shares.append(1 - min(busy) if busy else _UNKNOWN_IDLE)
    return max(shares)


def largest_spread(regime: NoiseRegime) -> float:
    """Return the ratio of the slowest to the fastest launch of one report that chance can explain."""
    return _HOST_SPREAD if regime in {"eager_host", "cpu"} else _SPREAD
