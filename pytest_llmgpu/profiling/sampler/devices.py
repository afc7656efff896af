"""The GPUs that the sampler reads, and the source of each metric on each of them.

A metric comes from the first of `SOURCES` that the device has, or else from a call of `CALLS`. The choice is made
once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from pytest_llmgpu.profiling.nvml import NvmlMissingError, Query, is_permanent
from pytest_llmgpu.profiling.sampler.sources import CALLS, POLLED, SOURCES, Average, Call, Cumulative, NvLink, Source

Method = Literal["auto", "polling"]
"""`auto`: the best source of each metric on each device. `polling`: the calls of Shin et al. 2024, in their order."""

METRICS = (*CALLS, *NvLink.IDS, "sm_active_pct", "tensor_active_pct", "dram_active_pct")
"""The sampler's columns, in order."""

_GB_PER_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}
"""PCIe generation to the data rate of one lane in one direction, without the encoding."""
_LINK_TOLERANCE = 1.1
"""A reading above this multiple of the link's data rate is in another unit (seen with one driver branch)."""
_NOT_POLLED = "the method polling does not read it"


class Device:
    """One GPU: the source of each metric, its readings, and the reasons of readings that failed."""

    def __init__(self, nvml: Any, handle: Any, index: int, uuid: str, method: Method = "auto") -> None:
        self.index = index
        self.uuid = uuid
        self.method = method
        self.why: dict[str, str] = {}
        """Metric to the reason of its latest failure."""
        self.sources: list[Source] = []
        """The opened sources in the order of preference."""
        self.chosen: dict[str, Source | Call] = {}
        """Metric to its source; metrics without a source are left out."""
        self.lacking: set[str] = set()
        """Metrics whose call this device or driver does not have. They are not read again."""
        self._nvml = nvml
        self._handle = handle
        query = Query(nvml)
        lane = _GB_PER_S_PER_LANE.get(query("generation", nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle))
        lanes = query("width", nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
        # No PCIe reading above it can be right. None: the link is not known.
        limit = None if lane is None or lanes is None else lane * 1e9 * lanes * _LINK_TOLERANCE
        self._pcie_limit_bytes_per_s: float | None = limit
        self._cumulative = Cumulative(nvml, handle)

    def open(self) -> float:
        """Open every source that the device has; return after how many seconds `choose` can be called."""
        if self.method == "polling":
            self.why = dict.fromkeys(METRICS[len(POLLED) :], _NOT_POLLED)
            return 0.0
        self._cumulative.open()
        arguments = (self._nvml, self._handle, time.monotonic, self._pcie_limit_bytes_per_s)
        for kind in SOURCES:
            try:
                try:
                    source = kind(*arguments)
                except self._nvml.NVMLError as error:
                    if is_permanent(self._nvml, error):
                        raise
                    source = kind(*arguments)
            except self._nvml.NVMLError as error:
                self.why.update(dict.fromkeys(kind.IDS, f"{kind.method}: {error}"))
            else:
                self.sources.append(source)
        return max((source.trial_s for source in self.sources), default=0.0)

    def choose(self) -> None:
        """Choose for each metric the first source that gives it, and drop the sources that are not needed."""
        for source in self.sources:
            given = source.metrics
            if source.trial_s:
                average = self._average(source, time.monotonic())
                given = [] if average is None else list(average.values)
            for metric in given:
                self.chosen.setdefault(metric, source)
        for metric in POLLED if self.method == "polling" else CALLS:
            self.chosen.setdefault(metric, CALLS[metric])
        self.sources = [source for source in self.sources if source in self.chosen.values()]
        self.why = {metric: reason for metric, reason in self.why.items() if metric not in self.chosen}

    def read(self, metric: str) -> float | None:
        """Return the value of the metric's call now; None, with the reason, if it fails or is not plausible."""
        call = CALLS[metric]
        try:
            value = call.read(self._nvml, self._handle)
        except self._nvml.NVMLError as error:
            if is_permanent(self._nvml, error):
                self.lacking.add(metric)
            self.why[metric] = f"{call.method}: {error}"
            return None
        return value if self._plausible(metric, value, call.method) else None

    def averages(self, now_s: float, *, window_ended: bool = False) -> dict[str, tuple[float, float]]:
        """Return for each metric the average of its source and the seconds that it covers, if it has one now."""
        found: dict[str, tuple[float, float]] = {}
        for source in self.sources:
            average = self._average(source, now_s, window_ended=window_ended)
            if average is None:
                continue
            for metric, value in average.values.items():
                if self.chosen.get(metric) is source and self._plausible(metric, value, source.method):
                    found[metric] = (value, average.seconds)
        return found

    def poll(self, now_s: float) -> float | None:
        """Poll the sources that are due; return when the next poll is due, None if no source needs it."""
        for source in self.sources:
            if source.poll_due_s is not None and now_s >= source.poll_due_s:
                try:
                    source.poll()
                except self._nvml.NVMLError as error:
                    self._failed(source, error)
        return min((source.poll_due_s for source in self.sources if source.poll_due_s is not None), default=None)

    def cumulative(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return the cumulative counts by name, and the reasons of those that are missing."""
        if self.method == "polling":
            return {}, dict.fromkeys(Cumulative.NAMES, _NOT_POLLED)
        counts: dict[str, float] = {}
        why: dict[str, str] = {}
        for source in self.sources:
            try:
                counts.update(source.totals())
            except self._nvml.NVMLError as error:
                names = [metric.removesuffix("_per_s") for metric in source.metrics]
                why.update(dict.fromkeys(names, f"{source.method}: {error}"))
        counts.update(self._cumulative.read(why))
        return counts, why

    def _average(self, source: Source, now_s: float, *, window_ended: bool = False) -> Average | None:
        try:
            average = source.read(now_s, window_ended=window_ended)
        except self._nvml.NVMLError as error:
            self._failed(source, error)
            return None
        for metric, reason in average.why.items() if average is not None else ():
            if self.chosen.get(metric, source) is source:
                self.why[metric] = reason
        return average

    def _failed(self, source: Source, error: Exception) -> None:
        metrics = [metric for metric in source.metrics if self.chosen.get(metric, source) is source]
        self.why.update(dict.fromkeys(metrics, f"{source.method}: {error}"))

    def _plausible(self, metric: str, value: float, method: str) -> bool:
        limit_bytes_per_s = self._pcie_limit_bytes_per_s
        if not metric.startswith("pcie_") or limit_bytes_per_s is None or value <= limit_bytes_per_s:
            return True
        self.why[metric] = f"{method}: {value:.4g} bytes/s is more than the link can carry"
        return False


def open_devices(
    nvml: Any, uuids: Sequence[str] | None, method: Method = "auto"
) -> tuple[list[Device], dict[str, str]]:
    """Return the GPUs to sample, None for all in NVML's order, and `gpu 3` to the reason why it did not answer.

    Raises:
        NvmlMissingError: NVML lists no GPU, or one of the requested GPUs is missing.
    """
    found: dict[str, Device] = {}
    why: dict[str, str] = {}
    query = Query(nvml, why)
    for index in range(query("gpus", nvml.nvmlDeviceGetCount) or 0):
        handle = query(f"gpu {index}", nvml.nvmlDeviceGetHandleByIndex, index)
        uuid = None if handle is None else query(f"gpu {index}", nvml.nvmlDeviceGetUUID, handle)
        if uuid is not None:
            found[uuid] = Device(nvml, handle, index, uuid, method)
    wanted = list(found) if uuids is None else uuids
    absent = [uuid for uuid in wanted if uuid not in found]
    if absent or not wanted:
        refused = "".join(f"; {gpu}: {reason}" for gpu, reason in why.items())
        raise NvmlMissingError(f"NVML lists no GPU{' ' if absent else ''}{', '.join(absent)}{refused}")
    return [found[uuid] for uuid in wanted], why


def choose(devices: Sequence[Device]) -> None:
    """Open the sources of the devices and choose one for each metric."""
    time.sleep(max(device.open() for device in devices))
    for device in devices:
        device.choose()
