"""What the sampler reads of each GPU, and which of several ways there it takes.

A metric comes from the first of its sources that the device answers, chosen once: one of `sources`, which lose
nothing, or a call of `calls`. A new metric is a new entry of `METRICS` and of one of these.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pytest_llmgpu.profiling.nvml import NvmlMissingError, session
from pytest_llmgpu.profiling.nvml_query import Ask, lasting
from pytest_llmgpu.profiling.sampler.calls import CALLS, OLDER, POLLED, Call
from pytest_llmgpu.profiling.sampler.counters import ByteCounters, NvLink
from pytest_llmgpu.profiling.sampler.cumulative import Cumulative
from pytest_llmgpu.profiling.sampler.sources import GPM_APART_S, Gpm, SampleRing, Source, Spoken

__all__ = ["METRICS", "Device", "Method", "check_period", "choose", "open_devices"]

Method = Literal["auto", "polling"]
"""`auto`: the best source of each metric on each device. `polling`: the calls of Shin et al. 2024, in their order."""

_GB_PER_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}
"""PCIe generation to what one lane carries in one direction, encoding taken off."""

_LINK_MARGIN = 1.1
"""A reading this many times above what the link can carry is in another unit (seen of one driver branch)."""

_NOT_POLLED = "the method polling does not read it"

_ROUNDS = 3
"""Rounds that are timed; the shortest counts, since the first is slow and any may be interrupted."""
_ROUNDS_A_PERIOD = 5
"""A round may take this part of a period: beyond that a core is busy with little else and deadlines are missed."""

METRICS = (*CALLS, *NvLink.IDS, "sm_active_pct", "tensor_active_pct", "dram_active_pct")
"""The sampler's columns, in order."""


class Device:
    """One GPU: how each metric of it is read, its readings, and why one could not be had."""

    def __init__(self, nvml: Any, handle: Any, index: int, uuid: str, method: Method = "auto") -> None:
        self.index = index
        self.uuid = uuid
        self.method = method
        self.why: dict[str, str] = {}
        """Metric to the reason of its latest refusal."""
        self.sources: list[Source] = []
        """In the order of preference; nothing before `choose`."""
        self.chosen: dict[str, Source | Call] = {}
        """Metric to where it comes from; without those that nothing gives."""
        self.lacking: set[str] = set()
        """Metrics whose call this device or driver does not have: asking again is in vain."""
        self._nvml = nvml
        self._handle = handle
        self._pcie_limit = _pcie_limit(nvml, handle)
        self._cumulative = Cumulative(nvml, handle)

    def open(self) -> bool:
        """Open every source the device has; return whether some time must pass before one can be judged."""
        if self.method == "polling":
            self.why = dict.fromkeys(METRICS[len(POLLED) :], _NOT_POLLED)
            return False
        self._cumulative.open()
        nvml, handle, limit, clock = self._nvml, self._handle, self._pcie_limit, time.monotonic
        openings: list[tuple[Callable[[], Source], Sequence[str], str]] = [
            (lambda: Gpm(nvml, handle, clock), list(Gpm.IDS), Gpm.method),
            (lambda: ByteCounters(nvml, handle, limit, clock), list(ByteCounters.IDS), ByteCounters.method),
            (lambda: NvLink(nvml, handle, clock), list(NvLink.IDS), NvLink.method),
            (lambda: SampleRing(nvml, handle, clock), SampleRing.metrics, SampleRing.method),
        ]
        for opening, metrics, name in openings:
            source = self._opened(opening)
            if isinstance(source, str):
                self.why.update(dict.fromkeys(metrics, f"{name}: {source}"))
            else:
                self.sources.append(source)
        return any(isinstance(source, Gpm) for source in self.sources)

    def choose(self) -> None:
        """Choose for each metric the first source that gives it, and drop sources that are not needed."""
        for source in self.sources:
            given = source.metrics
            if isinstance(source, Gpm):  # which of its metrics a model has shows in an answer only
                spoken = self._hear(source, time.monotonic(), hurry=False)
                given = list(spoken.values) if spoken is not None else []
            for metric in given:
                self.chosen.setdefault(metric, source)
        for metric in POLLED if self.method == "polling" else CALLS:
            self.chosen.setdefault(metric, CALLS[metric])
        self.sources = [source for source in self.sources if source in self.chosen.values()]
        self.forget()

    def forget(self) -> None:
        """Drop the reasons of metrics that are read on: what was refused while sources were tried is past."""
        read = self.chosen.keys() - self.lacking
        self.why = {metric: reason for metric, reason in self.why.items() if metric not in read}

    @property
    def smallest_period_s(self) -> float:
        """Shortest sampling period that leaves every source of this device its time, beside what a round takes."""
        if self.method == "polling":
            return 0.0  # its waits shrink to nothing instead
        return max(source.smallest_period_s for source in self.chosen.values())

    @property
    def polled(self) -> bool:
        """Whether it has counters that are to be looked at between ticks."""
        return any(isinstance(source, ByteCounters) for source in self.sources)

    def read(self, metric: str) -> float | None:
        """Return what the metric's call says now; None, with its reason, where it cannot be had or believed."""
        chosen = self.chosen.get(metric)
        call = chosen if isinstance(chosen, Call) else CALLS[metric]
        try:
            value = call.read(self._nvml, self._handle)
        except self._nvml.NVMLError as error:
            if lasting(self._nvml, error):
                if metric in OLDER and call is not OLDER[metric]:
                    self.chosen[metric] = OLDER[metric]
                    return self.read(metric)
                self.lacking.add(metric)
            self.why[metric] = f"{call.method}: {error}"
            return None
        return self._believed(metric, value, call.method)

    def hear(self, now_s: float, *, hurry: bool = False) -> dict[str, tuple[float, float]]:
        """Return per metric its value and the seconds it speaks for; without those that have nothing to say now."""
        heard: dict[str, tuple[float, float]] = {}
        for source in self.sources:
            spoken = self._hear(source, now_s, hurry=hurry)
            if spoken is None:
                continue
            for metric, value in spoken.values.items():
                if self.chosen.get(metric) is source and self._believed(metric, value, source.method) is not None:
                    heard[metric] = (value, spoken.seconds)
        return heard

    def poll(self, now_s: float) -> float | None:
        """Look at the byte counters if it is time; return when it is next, None where there are none."""
        next_s = None
        for source in self.sources:
            if isinstance(source, ByteCounters):
                if now_s >= source.due_s:
                    try:
                        source.poll()
                    except self._nvml.NVMLError as error:  # told by the next reading, if it lasts
                        mine = [metric for metric in source.metrics if self.chosen.get(metric) is source]
                        self.why.update(dict.fromkeys(mine, f"{source.method}: {error}"))
                next_s = source.due_s
        return next_s

    def cumulative(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return what the device has counted so far, bytes over NVLink included, and why a count is missing."""
        if self.method == "polling":
            return {}, dict.fromkeys(Cumulative.NAMES, _NOT_POLLED)
        counters: dict[str, float] = {}
        why: dict[str, str] = {}
        for source in self.sources:
            if isinstance(source, NvLink):
                refused: dict[str, str] = {}
                counters.update(Ask(self._nvml, refused)("", source.totals) or {})
                names = [metric.removesuffix("_per_s") for metric in source.metrics]
                for reason in refused.values():
                    why.update(dict.fromkeys(names, f"{source.method}{reason.removeprefix('totals')}"))
        counters.update(self._cumulative.read(why))
        return counters, why

    def _opened(self, opening: Callable[[], Source]) -> Source | str:
        """Return a source, or why the device has none; a refusal that need not last is not believed at once."""
        try:
            return opening()
        except self._nvml.NVMLError as error:
            if lasting(self._nvml, error):
                return str(error)
        try:
            return opening()
        except self._nvml.NVMLError as error:
            return str(error)

    def _hear(self, source: Source, now_s: float, *, hurry: bool) -> Spoken | None:
        try:
            spoken = source.read(now_s, hurry=hurry)
        except self._nvml.NVMLError as error:
            mine = [metric for metric in source.metrics if self.chosen.get(metric, source) is source]
            self.why.update(dict.fromkeys(mine, f"{source.method}: {error}"))
            return None
        if spoken is not None:
            for metric, reason in spoken.why.items():
                if self.chosen.get(metric, source) is source:
                    self.why[metric] = reason
        return spoken

    def _believed(self, metric: str, value: float, method: str) -> float | None:
        if metric.startswith("pcie_") and self._pcie_limit is not None and value > self._pcie_limit:
            self.why[metric] = f"{method}: {value:.4g} bytes/s is more than the link can carry"
            return None
        return value


def open_devices(
    nvml: Any, uuids: Sequence[str] | None, method: Method = "auto"
) -> tuple[list[Device], dict[str, str]]:
    """Find the GPUs to sample.

    Args:
        nvml: pynvml, initialised.
        uuids: Which GPUs, in which order; None for all, in NVML's order.
        method: How they are to be read.

    Returns:
        The devices, and `gpu 3` to the reason it did not answer.

    Raises:
        NvmlMissingError: NVML shows no GPU, or not one of those asked for.
    """
    found: dict[str, Device] = {}
    why: dict[str, str] = {}
    ask = Ask(nvml, why)
    for index in range(ask("gpus", nvml.nvmlDeviceGetCount) or 0):
        handle = ask(f"gpu {index}", nvml.nvmlDeviceGetHandleByIndex, index)
        uuid = None if handle is None else ask(f"gpu {index}", nvml.nvmlDeviceGetUUID, handle)
        if uuid is not None:
            found[uuid] = Device(nvml, handle, index, uuid, method)
    wanted = list(found) if uuids is None else uuids
    absent = [uuid for uuid in wanted if uuid not in found]
    if absent or not wanted:
        refused = "".join(f"; {gpu}: {reason}" for gpu, reason in why.items())
        raise NvmlMissingError(f"NVML shows no GPU{' ' if absent else ''}{', '.join(absent)}{refused}")
    return [found[uuid] for uuid in wanted], why


def choose(devices: Sequence[Device], period_s: float) -> None:
    """Open the sources of the devices and choose among them.

    Raises:
        ValueError: The period is shorter than what they allow.
    """
    soon = [device.open() for device in devices]
    if any(soon):
        time.sleep(GPM_APART_S)
    for device in devices:
        device.choose()
    smallest_s = max(*(device.smallest_period_s for device in devices), _ROUNDS_A_PERIOD * _round_s(devices))
    for device in devices:
        device.forget()
    if period_s < smallest_s:
        smallest_s = math.ceil(1e4 * smallest_s) / 1e4
        raise ValueError(
            f"sampling period is {period_s:g} s; allowed are {smallest_s:g} s and more: "
            "the sources of these GPUs need so long for a reading"
        )


def _round_s(devices: Sequence[Device]) -> float:
    """Return how long a round of all that does not block takes; 0 under the method polling, whose rounds may overrun.

    What is read once a second only is not in it.
    """
    rounds = []
    for _ in range(_ROUNDS):
        begun_s = time.monotonic()
        for device in devices:
            if device.method == "polling":
                return 0.0
            for metric, source in list(device.chosen.items()):
                if isinstance(source, Call) and source.window_s is None and metric not in device.lacking:
                    device.read(metric)
            device.hear(begun_s)
        rounds.append(time.monotonic() - begun_s)
    return min(rounds)


def check_period(period_s: float, uuids: Sequence[str] | None = None, method: Method = "auto") -> None:
    """Refuse a sampling period that the GPUs cannot keep; without NVML any is as good as another.

    It takes a tenth of a second where there is GPM.

    Args:
        period_s: Seconds between readings.
        uuids: Which GPUs; None for all.
        method: How they are to be read.

    Raises:
        ValueError: It is shorter than the smallest allowed, which the message names.
    """
    try:
        with session() as nvml:
            choose(open_devices(nvml, uuids, method)[0], period_s)
    except NvmlMissingError:
        return


def _pcie_limit(nvml: Any, handle: Any) -> float | None:
    """Return the bytes per second above which a PCIe reading cannot be right; None where the link is not told."""
    ask = Ask(nvml, {})
    lane = _GB_PER_S_PER_LANE.get(ask("generation", nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle))
    lanes = ask("width", nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    return None if lane is None or lanes is None else lane * 1e9 * lanes * _LINK_MARGIN
