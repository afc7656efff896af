"""Sources that speak for a stretch of time and lose nothing of it: their contract, GPM, the ring of samples.

Each reads several metrics at once and answers with what they were since its reading before. None of them may be called
from two threads at once: some drivers are not safe there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

__all__ = ["GPM_APART_S", "MEMBERS", "Clock", "Gpm", "SampleRing", "Source", "Spoken"]

GPM_APART_S = 0.1
"""Two GPM samples closer than this give no average to be trusted (NVIDIA's NVML reference)."""

_MIB = 1 << 20
_RING_S = 0.95
"""How often the ring is read: it holds many seconds, and a reading costs 2.4 ms."""

_RING_SAMPLE_S = 1.0
"""Longest period of the driver's own samples: after so long without one the GPU had nothing to sample."""

MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""nvmlValueType_t to the member of the union."""

Clock = Callable[[], float]


class Spoken(NamedTuple):
    """One answer of a source."""

    values: dict[str, float]
    seconds: float
    """How long before the reading the values speak for."""
    why: Mapping[str, str] = MappingProxyType({})
    """Metric to the reason it has no value."""


class Source(Protocol):
    """One way to several metrics of one device. What it cannot do at all, its constructor raises as an NVMLError."""

    method: str
    smallest_period_s: float

    @property
    def metrics(self) -> Sequence[str]:
        """What it can give."""
        ...

    def read(self, now_s: float, *, hurry: bool = False) -> Spoken | None:
        """Answer for the time since the last answer; None while there is nothing to say yet.

        Args:
            now_s: CLOCK_MONOTONIC of the tick, at which the stretch ends.
            hurry: A window has ended: answer now if that is possible at all.

        Raises:
            NVMLError: The device refuses. Where a counter goes on, the next answer speaks for this time too.
        """
        ...


class Gpm:
    """GPU performance monitoring, Hopper and newer: averages over about the time between two samples.

    Not exactly: the device averages over a time of its own near that one. What a rate is multiplied by to give bytes is
    off where sending begins and ends, by a few percent of a burst of 2 s and by up to a quarter of one of 0.35 s
    (`benchmarks/overhead/agreement.py`).
    """

    method = "nvmlGpmMetricsGet"
    smallest_period_s = GPM_APART_S
    IDS: Mapping[str, tuple[int, float]] = {
        "pcie_tx_bytes_per_s": (20, _MIB),
        "pcie_rx_bytes_per_s": (21, _MIB),
        "sm_active_pct": (2, 1.0),
        "tensor_active_pct": (5, 1.0),
        "dram_active_pct": (10, 1.0),
    }
    """Metric to its number and the factor to our unit."""

    def __init__(self, nvml: Any, handle: Any, clock: Clock) -> None:
        """Take the first sample."""
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self.metrics = list(self.IDS)
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self._before, self._after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._question = nvml.c_nvmlGpmMetricsGet_t()
        self._question.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._question.numMetrics = len(self.IDS)
        self._answers = [self._question.metrics[place] for place in range(len(self.IDS))]
        for answer, (number, _) in zip(self._answers, self.IDS.values(), strict=True):
            answer.metricId = number
        nvml.nvmlGpmSampleGet(handle, self._before)
        self._taken_s = clock()

    def read(self, now_s: float, *, hurry: bool = False) -> Spoken | None:  # noqa: ARG002 - samples stay apart
        """Take a sample and average from the one before."""
        del now_s
        if self._clock() - self._taken_s < GPM_APART_S:
            return None
        question = self._question
        self._nvml.nvmlGpmSampleGet(self._handle, self._after)
        taken_s = self._clock()
        question.sample1, question.sample2 = self._before, self._after
        self._nvml.nvmlGpmMetricsGet(question)
        values: dict[str, float] = {}
        why: dict[str, str] = {}
        for answer, (metric, (number, factor)) in zip(self._answers, self.IDS.items(), strict=True):
            code, value = answer.nvmlReturn, answer.value
            if code or not math.isfinite(value):
                why[metric] = f"{self.method} [{number}]: {self._nvml.NVMLError(code) if code else f'gave {value}'}"
            else:
                values[metric] = value * factor
        # A round asks one device after another, and takes longer where the ring is read: the samples' own times count.
        spoken = Spoken(values, taken_s - self._taken_s, why)
        self._before, self._after = self._after, self._before
        self._taken_s = taken_s
        return spoken


class SampleRing:
    """The driver's own utilisation samples, all of them; while there are none, its rate."""

    method = "nvmlDeviceGetSamples, without a sample for a second nvmlDeviceGetUtilizationRates"
    smallest_period_s = 0.0
    metrics = ("utilization_pct",)

    def __init__(self, nvml: Any, handle: Any, clock: Clock) -> None:
        """Find the end of the ring. An empty one is no refusal: the GPU is idle."""
        self._nvml, self._handle = nvml, handle
        self._last_us = 0
        self._last_us = max((stamp for stamp, _ in self._news()), default=0)
        self._since_s = clock()

    def read(self, now_s: float, *, hurry: bool = False) -> Spoken | None:
        """Answer with the mean of the samples that are new, each weighted by the time it took."""
        seconds = now_s - self._since_s
        if seconds <= 0 or (seconds < _RING_S and not hurry):
            return None
        news = self._news()
        spoken_s = seconds
        if news:
            mean, took_s = self._mean(news)
            # It holds some 70 samples: after a longer stand-still the oldest are gone. The newest is not of just now.
            spoken_s = seconds if took_s > seconds - _RING_SAMPLE_S else took_s
        elif seconds < _RING_S:
            return None  # the driver has not finished its next sample
        else:
            # The driver samples no idle GPU, and this call says 0 then; of a ring that stays empty it says the truth.
            mean = float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        self._since_s = now_s
        return Spoken({"utilization_pct": mean}, spoken_s)

    def _news(self) -> list[tuple[int, float]]:
        """Return the samples since the last, oldest first: microseconds and percent."""
        try:
            kind, samples = self._nvml.nvmlDeviceGetSamples(
                self._handle, self._nvml.NVML_GPU_UTILIZATION_SAMPLES, self._last_us
            )
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NOT_FOUND:
                return []
            raise
        member = MEMBERS.get(kind, "uiVal")
        found = ((int(sample.timeStamp), float(getattr(sample.sampleValue, member))) for sample in samples)
        return sorted(sample for sample in found if sample[0] > self._last_us)

    def _mean(self, news: Sequence[tuple[int, float]]) -> tuple[float, float]:
        """Return the weighted mean and the seconds that the samples took, and remember the newest."""
        before_us = self._last_us
        weighted = total = 0.0
        for stamp, percent in news:
            # The first after an idle stretch did not take all of it.
            took = min(stamp - before_us, _RING_SAMPLE_S * 1e6)
            weighted, total = weighted + took * percent, total + took
            before_us = stamp
        self._last_us = before_us
        return weighted / total, total / 1e6
