"""The GPUs that the sampler reads, and the source of each metric on each of them.

A metric comes from the first of `SOURCES` that the device has: an average without gaps from GPM, byte counters of PCIe
and NVLink, or the driver's utilisation samples. Without such a source it comes from a call of `CALLS`, for one moment.
The choice is made once. The cumulative counters are read when a window begins and when it ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pytest_llmgpu.profiling.nvml import NvmlMissingError, Query, is_permanent, memory_v2

SMALLEST_PERIOD_S = 0.1
"""The minimum time between two GPM samples: closer ones give no reliable average (NVIDIA's NVML reference)."""
_POLL_S = 0.040
"""The maximum time between two readings of the PCIe byte counters, which wrap every 0.08 s at Gen5 x16."""
_WRAP_BYTES = 1 << 32
_FASTEST_LINK_BYTES_PER_S = 70e9
"""Assumed where the limit of the PCIe link is not known: above Gen5 x16."""
_SECOND_S = 0.95
"""The period of the expensive readings: 1.2 ms for NVLink's counters, 2.4 ms for the ring, which holds many seconds."""
_RING_SAMPLE_S = 1.0
"""The longest period of the driver's utilisation samples. Without a sample for this long, the GPU was idle."""
_KIB, _MIB = 1 << 10, 1 << 20
_ALL_LINKS = 0xFFFFFFFF

_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""nvmlValueType_t to the member of the union."""

Clock = Callable[[], float]


class Average(NamedTuple):
    """One reading of a source: averages over the time since the reading before."""

    values: dict[str, float]
    """Metric to its average, in the unit of the metric's name."""
    seconds: float
    """The length of the time that the averages cover, up to the reading."""
    why: Mapping[str, str] = MappingProxyType({})
    """Metric to the reason why it has no value."""


class Source:
    """One way to read several metrics of one device. The constructor raises NVMLError if the device does not have it.

    Two threads must not call one source at the same time: some drivers are not thread-safe there.
    """

    method: str
    """The NVML call, as the report names it."""
    IDS: Mapping[str, int]
    """Metric to its number in NVML, for every metric that such a source can have."""
    trial_s = 0.0
    """The time after which a first reading shows which metrics the device has; 0 if the constructor shows it."""
    poll_due_s: float | None = None
    """CLOCK_MONOTONIC before which `poll` must be called; None if it need not be called."""

    def __init__(self, nvml: Any, handle: Any, clock: Clock, link_bytes_per_s: float | None = None) -> None:
        """Start from now, by CLOCK_MONOTONIC. The limit of the PCIe link is None if it is not known."""
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self._link_bytes_per_s = link_bytes_per_s
        self.metrics: Sequence[str] = list(self.IDS)
        self._open()

    def _open(self) -> None:
        raise NotImplementedError

    def read(self, now_s: float, *, window_ended: bool = False) -> Average | None:
        """Return the averages from the last reading to the tick at `now_s`; None if it is too early for a reading.

        If a window has ended since the last tick, the reading is made now if that is possible at all. NVMLError if the
        device refuses: where a counter continues, the next reading covers this time too.
        """
        raise NotImplementedError

    def poll(self) -> None:
        """Read counters that may wrap before the next tick."""

    def totals(self) -> dict[str, int]:
        """Return counts since the driver was loaded, by name."""
        return {}


class Gpm(Source):
    """GPU performance monitoring (Hopper and newer): averages over approximately the time between two samples.

    The device averages over a period of its own near that time. Bytes computed from such a rate are a few percent off
    for a burst of 2 s and up to a quarter for one of 0.35 s (`benchmarks/overhead/agreement.py`).
    """

    method = "nvmlGpmMetricsGet"
    trial_s = SMALLEST_PERIOD_S
    IDS: Mapping[str, int] = {
        "pcie_tx_bytes_per_s": 20,
        "pcie_rx_bytes_per_s": 21,
        "sm_active_pct": 2,
        "tensor_active_pct": 5,
        "dram_active_pct": 10,
    }

    def _open(self) -> None:
        nvml = self._nvml
        if not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._before, self._after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(self.IDS)
        for place, number in enumerate(self.IDS.values()):
            self._request.metrics[place].metricId = number
        nvml.nvmlGpmSampleGet(self._handle, self._before)
        self._taken_s = self._clock()

    def read(self, now_s: float, *, window_ended: bool = False) -> Average | None:  # noqa: ARG002 - samples stay apart
        """Take a sample and return the averages since the one before."""
        if self._clock() - self._taken_s < SMALLEST_PERIOD_S:
            return None
        self._nvml.nvmlGpmSampleGet(self._handle, self._after)
        # A round reads one device after another: the time of this sample counts, not the time of the tick.
        taken_s = self._clock()
        self._request.sample1, self._request.sample2 = self._before, self._after
        self._nvml.nvmlGpmMetricsGet(self._request)
        values: dict[str, float] = {}
        why: dict[str, str] = {}
        for place, (metric, number) in enumerate(self.IDS.items()):
            code, value = self._request.metrics[place].nvmlReturn, self._request.metrics[place].value
            if code or not math.isfinite(value):
                why[metric] = f"{self.method} [{number}]: {self._nvml.NVMLError(code) if code else f'gave {value}'}"
            else:
                values[metric] = value * _MIB if metric.endswith("_bytes_per_s") else value
        average = Average(values, taken_s - self._taken_s, why)
        self._before, self._after, self._taken_s = self._after, self._before, taken_s
        return average


class ByteCounters(Source):
    """PCIe byte counters of 32 bits. They are read before they can wrap twice; a longer gap is left out."""

    method = "nvmlDeviceGetFieldValues [197, 198]"
    IDS: Mapping[str, int] = {"pcie_tx_bytes_per_s": 197, "pcie_rx_bytes_per_s": 198}

    def _open(self) -> None:
        self._longest_s = _WRAP_BYTES / (self._link_bytes_per_s or _FASTEST_LINK_BYTES_PER_S)
        self.poll_s = min(_POLL_S, 0.6 * self._longest_s)
        """The maximum time between two calls of `poll`."""
        first = field_values(self._nvml, self._handle, list(self.IDS.values()))
        self.metrics = [metric for metric, value in zip(self.IDS, first, strict=True) if not isinstance(value, str)]
        if not self.metrics:
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)
        self._ids = [self.IDS[metric] for metric in self.metrics]
        self._last: list[int] | None = None
        self._refused: str | None = None
        self._bytes = [0] * len(self._ids)
        self._seconds = 0.0
        self._polled_s = self._clock()
        self.poll()

    def poll(self) -> None:
        """Add the bytes since the last call."""
        before, before_s = self._last, self._polled_s
        self._last, self._polled_s = None, self._clock()
        self.poll_due_s = self._polled_s + self.poll_s
        now = field_values(self._nvml, self._handle, self._ids)
        self._refused = next((value for value in now if isinstance(value, str)), None)
        if self._refused is not None:
            return
        self._last = [int(value) for value in now]
        passed_s = self._polled_s - before_s
        if before is None or passed_s > self._longest_s:
            return  # the counter may have wrapped more than once
        for place, (old, new) in enumerate(zip(before, self._last, strict=True)):
            self._bytes[place] += (new - old) % _WRAP_BYTES
        self._seconds += passed_s

    def read(self, now_s: float, *, window_ended: bool = False) -> Average | None:  # noqa: ARG002 - read at every tick
        """Return the rates over the time in which no wrap can be missed."""
        self.poll()
        counted_bytes, seconds = self._bytes, self._seconds
        self._bytes, self._seconds = [0] * len(self._ids), 0.0
        if seconds <= 0:
            late = f"read more than {self._longest_s:.3g} s late, the counter may have wrapped"
            return Average({}, 0.0, dict.fromkeys(self.metrics, self._refused or f"{self.method}: {late}"))
        rates = (size_bytes / seconds for size_bytes in counted_bytes)
        return Average(dict(zip(self.metrics, rates, strict=True)), seconds)


class NvLink(Source):
    """NVLink data counters over all links: 64 bits, in KiB. They are read once a second and when a window has ended."""

    method = "nvmlDeviceGetFieldValues [138, 139]"
    IDS: Mapping[str, int] = {"nvlink_tx_bytes_per_s": 138, "nvlink_rx_bytes_per_s": 139}

    def _open(self) -> None:
        first = self._counters()
        self.metrics = [metric for metric in self.IDS if not isinstance(first[metric], str)]
        if not self.metrics:
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)
        self._last, self._since_s = first, self._clock()

    def totals(self) -> dict[str, int]:
        """Return `nvlink_tx_bytes` and `nvlink_rx_bytes` since the driver was loaded, without one that is refused."""
        found = self._counters().items()
        return {metric.removesuffix("_per_s"): value * _KIB for metric, value in found if not isinstance(value, str)}

    def read(self, now_s: float, *, window_ended: bool = False) -> Average | None:
        """Return the rates since the last reading."""
        seconds = now_s - self._since_s
        if seconds <= 0 or (seconds < _SECOND_S and not window_ended):
            return None
        now = self._counters()
        values: dict[str, float] = {}
        why: dict[str, str] = {}
        for metric, value in now.items():
            before = self._last[metric]
            if isinstance(value, str):
                why[metric] = value
            elif isinstance(before, str) or value < before:
                why[metric] = f"{self.method}: the counter was reset, or the reading before was refused"
            else:
                values[metric] = (value - before) * _KIB / seconds
        self._last, self._since_s = now, now_s
        return Average(values, seconds, why)

    def _counters(self) -> dict[str, int | str]:
        ids = [(self.IDS[metric], _ALL_LINKS) for metric in self.metrics]
        return dict(zip(self.metrics, field_values(self._nvml, self._handle, ids), strict=True))


class SampleRing(Source):
    """The driver's own utilisation samples, all of them. The driver takes no samples of an idle GPU."""

    method = "nvmlDeviceGetSamples, without a sample for a second nvmlDeviceGetUtilizationRates"
    IDS: Mapping[str, int] = {"utilization_pct": 0}

    def _open(self) -> None:
        self._last_us = 0
        self._last_us = max((stamp_us for stamp_us, _ in self._new_samples()), default=0)
        self._since_s = self._clock()

    def read(self, now_s: float, *, window_ended: bool = False) -> Average | None:
        """Return the mean of the new samples, each weighted by its duration."""
        seconds = now_s - self._since_s
        if seconds <= 0 or (seconds < _SECOND_S and not window_ended):
            return None
        samples = self._new_samples()
        covered_s = seconds
        if samples:
            weighted = total_us = 0.0
            for stamp_us, percent in samples:
                # The first sample after an idle period does not cover all of it.
                took_us = min(stamp_us - self._last_us, _RING_SAMPLE_S * 1e6)
                weighted, total_us = weighted + took_us * percent, total_us + took_us
                self._last_us = stamp_us
            mean, sampled_s = weighted / total_us, total_us / 1e6
            # The ring holds about 70 samples: after a long gap the oldest are lost. The newest is up to 1 s old.
            covered_s = seconds if sampled_s > seconds - _RING_SAMPLE_S else sampled_s
        elif seconds < _SECOND_S:
            return None  # the driver has not finished its next sample
        else:
            # An idle GPU has no samples, and this call gives 0. It also holds for a ring that is always empty.
            mean = float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        self._since_s = now_s
        return Average({"utilization_pct": mean}, covered_s)

    def _new_samples(self) -> list[tuple[int, float]]:
        """Return the samples since the last call, oldest first: time in microseconds and percent."""
        try:
            of = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
            kind, samples = self._nvml.nvmlDeviceGetSamples(self._handle, of, self._last_us)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NOT_FOUND:
                return []
            raise
        member = _MEMBERS.get(kind, "uiVal")
        found = ((int(sample.timeStamp), float(getattr(sample.sampleValue, member))) for sample in samples)
        return sorted(sample for sample in found if sample[0] > self._last_us)


SOURCES: tuple[type[Source], ...] = (Gpm, ByteCounters, NvLink, SampleRing)
"""All kinds of sources. A metric comes from the first one that gives it."""

_PCIE_KB = 1000
"""The unit of NVML's PCIe throughput in bytes. NVIDIA does not document whether it is 1000 or 1024."""
_PCIE_WINDOW_S = 0.020


class Call(NamedTuple):
    """A call that gives one metric at one moment, or over a short window after its begin."""

    method: str
    """The NVML call."""
    read: Callable[[Any, Any], float]
    """From (pynvml, device handle) to the value, in the unit of the metric's name."""
    window_s: float | None = None
    """How long the call measures and blocks; None for an instant value or an unknown period of the driver.

    A call that blocks runs in its own thread and must be thread-safe; GetFieldValues and GPM are not.
    """


CALLS: dict[str, Call] = {
    # The driver averages over 1/6 s to 1 s, depending on the model.
    "utilization_pct": Call(
        "nvmlDeviceGetUtilizationRates", lambda nvml, handle: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    ),
    # As nvidia-smi shows it: without the memory that the driver reserves.
    "memory_used_bytes": Call("nvmlDeviceGetMemoryInfo_v2", lambda nvml, handle: float(memory_v2(nvml, handle).used)),
    "pcie_tx_bytes_per_s": Call(
        "nvmlDeviceGetPcieThroughput",
        lambda nvml, handle: _PCIE_KB * float(nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES)),
        window_s=_PCIE_WINDOW_S,
    ),
    "pcie_rx_bytes_per_s": Call(
        "nvmlDeviceGetPcieThroughput",
        lambda nvml, handle: _PCIE_KB * float(nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)),
        window_s=_PCIE_WINDOW_S,
    ),
    "power_w": Call("nvmlDeviceGetPowerUsage", lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
    "sm_clock_mhz": Call(
        "nvmlDeviceGetClockInfo", lambda nvml, handle: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    ),
}
"""Metric to the call that gives it."""

POLLED = ("utilization_pct", "memory_used_bytes", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")
"""The metrics that the method `polling` reads, in the order of Shin et al. 2024."""

THROTTLED = {"throttled_power_s": 74, "throttled_heat_s": 75}
"""Name to the field with the nanoseconds below the requested clock. A device may have only one of them."""

_MOST_EVENTS = 100
"""The most events that one reading takes. The next reading takes the rest."""


class Cumulative:
    """The counters of one GPU, and its number of compute processes at this moment."""

    NAMES = ("energy_j", *THROTTLED, "ecc_uncorrected", "xids", "compute_processes")

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._events: Any = None
        self._xids = 0

    def read(self, why: dict[str, str]) -> dict[str, float]:
        """Return the counts by name. A count that is not available is left out, and its reason is put into `why`."""
        nvml, handle, query = self._nvml, self._handle, Query(self._nvml, why)
        energy_mj = query("energy_j", nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        processes = query("compute_processes", nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        try:
            values = field_values(nvml, handle, list(THROTTLED.values()))
        except nvml.NVMLError as error:
            values = [f"nvmlDeviceGetFieldValues: {error}"] * len(THROTTLED)
        throttled = dict(zip(THROTTLED, values, strict=True))
        why.update((name, value) for name, value in throttled.items() if isinstance(value, str))
        for _ in range(_MOST_EVENTS if self.register(why) else 0):
            try:
                nvml.nvmlEventSetWait_v2(self._events, 0)  # milliseconds
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    why["xids"] = f"nvmlEventSetWait_v2: {error}"
                break
            self._xids += 1
        error_types = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        counts = {
            "energy_j": None if energy_mj is None else energy_mj / 1000,
            **{name: value / 1e9 for name, value in throttled.items() if not isinstance(value, str)},
            "ecc_uncorrected": query("ecc_uncorrected", nvml.nvmlDeviceGetTotalEccErrors, handle, *error_types),
            "xids": None if "xids" in why else self._xids,
            "compute_processes": None if processes is None else len(processes),
        }
        return {name: float(count) for name, count in counts.items() if count is not None}

    def register(self, why: dict[str, str]) -> bool:
        """Register for Xid errors, once; return whether that is done. After a refusal, a later call may succeed."""
        nvml, query = self._nvml, Query(self._nvml, why)
        if self._events is None and (events := query("xids", nvml.nvmlEventSetCreate)) is not None:
            query("xids", nvml.nvmlDeviceRegisterEvents, self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            if "xids" in why:
                Query(nvml)("xids", nvml.nvmlEventSetFree, events)
            else:
                self._events = events
        return self._events is not None


def field_values(nvml: Any, handle: Any, ids: Sequence[Any]) -> list[int | str]:
    """Return for each field id, or pair of id and scope, its value or the reason why there is none."""
    found: list[int | str] = []
    for value in nvml.nvmlDeviceGetFieldValues(handle, ids):
        if value.nvmlReturn:
            found.append(f"nvmlDeviceGetFieldValues [{value.fieldId}]: {nvml.NVMLError(value.nvmlReturn)}")
        else:
            found.append(int(getattr(value.value, _MEMBERS.get(value.valueType, "ullVal"))))
    return found


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
        self._pcie_limit_bytes_per_s = None if lane is None or lanes is None else lane * 1e9 * lanes * _LINK_TOLERANCE
        self._cumulative = Cumulative(nvml, handle)

    def open(self) -> float:
        """Open every source that the device has; return after how many seconds `choose` can be called."""
        if self.method == "polling":
            self.why = dict.fromkeys(METRICS[len(POLLED) :], _NOT_POLLED)
            return 0.0
        self._cumulative.register({})  # counts Xid errors from now on
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
    """Return the GPUs to sample with the source of each metric, and `gpu 3` to the reason why it did not answer.

    `uuids` are the GPUs in this order, None for all in NVML's order. NvmlMissingError if one is missing, or all are.
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
    devices = [found[uuid] for uuid in wanted]
    time.sleep(max(device.open() for device in devices))
    for device in devices:
        device.choose()
    return devices, why
