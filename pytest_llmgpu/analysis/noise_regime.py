"""The noise regime of a time: what it waits for, on which its differences between launches depend, and their size.

Device time at a fixed clock hardly varies (`gate.fixed_clock`). The regimes here are for device time whose clock is not
known, and for wall time.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, get_args

import msgspec

from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.result import Batches, CaseResult, Launch

NoiseRegime = Literal["fixed_clock", "device", "replayed", "eager_device", "eager_host", "cpu"]
"""fixed_clock, device: the time of the kernels where the SM clock is known, and where it is not. replayed,
eager_device, eager_host: wall time of replayed CUDA graphs, and of eager forwards that the GPU or the host limits. cpu:
wall time on a CPU."""

REGIMES: tuple[NoiseRegime, ...] = get_args(NoiseRegime)
"""Every regime; of device time and of wall time the quieter ones come first."""

_BUSY = 0.8
"""Part of the time that batches which the GPU limits have, or kernels of a pass, where the GPU limits a case."""

_AHEAD = 0.9
"""Part of the time of a batch in which the host launches it, below which the GPU limits it. A full queue of about 1,000
launches would hide that from some 10,000 kernels a forward; LLaMA-7B has 1,400."""

_LEAST_REPLAY_S = 0.005
"""Time of a forward from which replays in a row are those of the GPU. The host launches one of LLaMA-7B in at most 1 ms
(`benchmarks/overhead/graph_gaps.py`); forwards of less than 8 ms were not recorded."""

_HOST_S, _HOST_DF = 100e-6, 4.0
"""Standard deviation between launches of the seconds that the host adds to each replayed batch, where all batches take
one second, and its degrees of freedom: few, since hosts differ. A host drifts within seconds, so that long launches
differ less. LLaMA-7B on two quiet hosts: 50 us, 36 us after 2 s, 20 us after 8 s; beside another job up to 150 us."""

_LARGEST_HOST = 0.05
"""Largest part of the host, for batches of less than a millisecond, which nobody has recorded."""

HOST_SLOPE_SD = 0.05
"""Standard deviation of the slope of the log time in which the host launches eager forwards over that of the reference,
which is 1: LLaMA-7B had 1.08 and 1.03 at batch size 2, and 0.99 and 0.97 at 8, on two hosts."""

_LAUNCHED_SD, _LEAST_LAUNCHED_SD, _LAUNCHED_DF = 0.09, 0.015, 10.0
"""Standard deviation of the log time of one such batch, least one of a launch, and their degrees of freedom. Medians of
30 to 480 batches differed between launches by 1.1 to 2.3 %, however many they are, and times by 9 to 23 %."""

_FIRST_SYNCS = 2
"""Synchronizations of a forward before its layers, where transformers looks for a mask. Later ones wait for kernels."""

_Pair = tuple[CaseResult, CaseResult]


class Prior(msgspec.Struct, frozen=True, kw_only=True):
    """The noise between launches that is expected before a comparison."""

    s0: float
    """Standard deviation of the logarithm of the time between launches."""
    df0: float
    """Degrees of freedom of `s0`: the number of launches of one's own that have the same weight."""

    def updated(self, groups: Iterable[Sequence[float]]) -> Prior:
        """Return the prior with launches added to it: logarithms of times in groups with means of their own.

        The variance is a mean that is weighted by degrees of freedom: the number of launches minus that of the groups.
        """
        squares, degrees = self.df0 * self.s0**2, self.df0
        for group in groups:
            mean = statistics.fmean(group)
            squares += math.fsum((value - mean) ** 2 for value in group)
            degrees += len(group) - 1
        return Prior(s0=math.sqrt(squares / degrees), df0=degrees)


PRIORS: Mapping[NoiseRegime, Prior] = MappingProxyType(
    {
        # LLaMA-7B at batch sizes 1 to 64: 24 launches on an H200 and 8 pairs on two others, and 88 on four H200.
        "fixed_clock": Prior(s0=0.001, df0=20.0),
        "device": Prior(s0=0.0044, df0=6.0),
        # At batch sizes 32 and 64: 48 launches on two H200 and 12 on a third, and 55 on five.
        "replayed": Prior(s0=0.003, df0=20.0),
        "eager_device": Prior(s0=0.01, df0=6.0),
        "eager_host": Prior(s0=0.1, df0=2.0),  # at batch sizes 2 and 8: 55 launches on six H200
        "cpu": Prior(s0=0.15, df0=4.0),  # the bundled model: 40 launches on two cores of a virtual machine
    }
)
"""The prior of each noise regime, from these measurements."""


def of_time(result: CaseResult) -> NoiseRegime:
    """Return the regime of the wall time of a case. Without work passes the host is assumed to limit eager forwards."""
    if result.case.device == "cpu":
        return "cpu"
    if result.case.execution == "cuda_graphs":
        return "replayed"
    if (numbers := of_gpu(result)) is not None:
        return "eager_device" if min(_parts(numbers, result)) >= _BUSY else "eager_host"
    ranks = [rank for launch in result.launches for rank in launch.ranks]
    busy = bool(ranks) and all(rank.busy is not None and rank.busy >= _BUSY for rank in ranks)
    return "eager_device" if busy else "eager_host"


def of_gpu(result: CaseResult) -> set[int] | None:
    """Return the numbers of the batches that the GPU limits in every launch; None where it is not known.

    The passes of a quiet launch show a busy GPU then: else it may have work after the last launch alone.
    """
    if not has_speed(result):
        return None
    parts = zip(*(map(operator.truediv, one.launch_s, one.latency_s) for one in _launched(result)), strict=False)
    numbers = {number for number, of_launches in enumerate(parts) if max(of_launches) < _AHEAD}
    if max(rank.busy or 0.0 for launch in result.launches for rank in launch.ranks) >= _BUSY:
        return numbers
    return None if max(_parts(numbers, result)) > 1 - _BUSY else set()


def _launched(*results: CaseResult) -> list[Batches]:
    launches = (launch for result in results for launch in result.launches if disturbances.untimed(launch) is None)
    return [launch.batches for launch in launches if launch.batches.launch_s]


def _parts(numbers: Iterable[int], *results: CaseResult) -> list[float]:
    """Return the part of the time of each launch that some batches have."""
    times_s = [of.latency_s for of in _launched(*results)]
    return [math.fsum(of[number] for number in numbers if number < len(of)) / math.fsum(of) for of in times_s]


def by_limit(base: CaseResult, head: CaseResult) -> tuple[_Pair | None, _Pair | None]:
    """Return results with the batches that the GPU limits in every launch, None where few are, and with the others.

    These are None where many batches have another limit in one of the results: not only launching them takes time. Both
    are where the limit is not known.
    """
    then, now = map(of_gpu, (base, head))
    if then is None or now is None:
        return None, None
    apart = then & now if max(_parts(then & now, base, head)) > 1 - _BUSY else set()

    def limited(result: CaseResult, *, by_gpu: bool) -> CaseResult:
        def kept(values: Sequence[float]) -> list[float]:
            return [value for number, value in enumerate(values) if (number in apart) == by_gpu]

        def of(batches: Batches) -> Batches:
            times = {name: kept(getattr(batches, name)) for name in ("latency_s", "launch_s", "reference_s")}
            clock_ghz = batches.clock_ghz and list(map(kept, batches.clock_ghz))
            return msgspec.structs.replace(batches, clock_ghz=clock_ghz, **times)

        launches = [msgspec.structs.replace(launch, batches=of(launch.batches)) for launch in result.launches]
        return msgspec.structs.replace(result, launches=launches)

    moved = max(_parts(then ^ now, base, head)) > 1 - _BUSY
    of_host = None if moved else (limited(base, by_gpu=False), limited(head, by_gpu=False))
    return (limited(base, by_gpu=True), limited(head, by_gpu=True)) if apart else None, of_host


def has_replays(launch: Launch) -> bool:
    """Return whether CUDA graphs of one rank ran in a row, each long enough that the host launched them faster."""
    rows_s = [statistics.fmean(rank.replays_s) for rank in launch.ranks if rank.replays_s]
    batches = 0 if launch.work is None else len(launch.work.batches)
    return len(rows_s) == len(launch.ranks) == 1 and rows_s[0] >= _LEAST_REPLAY_S * batches


def noisiest(*results: CaseResult) -> NoiseRegime:
    """Return the noisiest regime of the wall time of one case in several reports."""
    return max(map(of_time, results), key=REGIMES.index)


def has_speed(result: CaseResult) -> bool | None:
    """Return whether launching takes time of a host of known speed alone; None: its speed is not known."""
    waits = [rank.host_syncs for launch in result.launches for rank in launch.ranks if rank.host_syncs is not None]
    return max(waits, default=math.inf) <= _FIRST_SYNCS if _launched(result) else None


def at_equal_speed(sides: Sequence[Sequence[Launch]]) -> tuple[list[list[float]], float, Prior]:
    """Return the log times [reports][launches] in which hosts launched all batches, at the speed in the second report.

    That of a launch is a median over its batches: a pause within the reference counts as one within a batch. With them
    the log of the ratio of both speeds, and their prior.
    """
    speeds = [[statistics.median(map(math.log, one.batches.reference_s)) for one in side] for side in sides]
    then, now = map(statistics.fmean, speeds)

    def log_s(of: Batches) -> float:
        ratios = (math.log(s) - math.log(speed) for s, speed in zip(of.launch_s, of.reference_s, strict=True))
        return now + statistics.median(ratios) + math.log(len(of.launch_s))

    sd = max(_LAUNCHED_SD / math.sqrt(len(sides[0][0].batches.launch_s)), _LEAST_LAUNCHED_SD)
    logs = [[log_s(launch.batches) for launch in side] for side in sides]
    return logs, now - then, Prior(s0=sd, df0=_LAUNCHED_DF)


def prior_of_time(regime: NoiseRegime, *, seconds: float, batches: int) -> Prior:
    """Return the prior of the wall time of a regime.

    A launch takes `seconds` for all its `batches`. Before each replayed one the GPU waits for the host.
    """
    prior = PRIORS[regime]
    if regime != "replayed":
        return prior
    host = min(_HOST_S / seconds * batches / math.sqrt(seconds), _LARGEST_HOST)
    # Degrees of freedom of a sum of two variances: Satterthwaite (1946).
    df0 = (prior.s0**2 + host**2) ** 2 / (prior.s0**4 / prior.df0 + host**4 / _HOST_DF)
    return Prior(s0=math.hypot(prior.s0, host), df0=df0)
