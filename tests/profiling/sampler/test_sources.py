"""Sources that cover time without gaps: wraps, gaps, idle rings, and the choice of a source."""

# ruff: noqa: N802 - names of pynvml's

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from pytest_llmgpu.profiling.sampler.__main__ import Sampler
from pytest_llmgpu.profiling.sampler.devices import (
    CALLS,
    METRICS,
    Average,
    ByteCounters,
    Device,
    Gpm,
    NvLink,
    SampleRing,
)

GIB = 1 << 30
WRAP = 1 << 32


class _Refusal(Exception):  # noqa: N818 - stands for NVMLError
    """As pynvml refuses."""

    def __init__(self, value: int) -> None:
        super().__init__(f"refusal {value}")
        self.value = value


class _FakeNvml:
    """The calls of the sources, with values that the test sets and a clock that it advances."""

    NVMLError = _Refusal
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25
    NVML_GPU_UTILIZATION_SAMPLES = 1
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self) -> None:
        self.now_s = 100.0
        self.fields: dict[int, int | None] = {}
        self.ring: list[tuple[int, int]] = []
        self.gpm: dict[int, float] = {}
        self.rate = 0
        self.lost = False
        self.requested: list[Any] = []
        self.taken: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def nvmlDeviceGetFieldValues(self, _: object, ids: Sequence[Any]) -> list[SimpleNamespace]:
        """Return the values of `fields`; None is a refusal."""
        self._alive()
        self.requested += ids
        fields = [entry[0] if isinstance(entry, tuple) else entry for entry in ids]
        values = {field: self.fields.get(field) for field in fields}
        return [
            SimpleNamespace(
                fieldId=field, nvmlReturn=3 * (value is None), valueType=1, value=SimpleNamespace(uiVal=value)
            )
            for field, value in values.items()
        ]

    def nvmlDeviceGetSamples(self, *_: object) -> tuple[int, list[SimpleNamespace]]:
        """Return the samples after that time, the older ones of a ring too."""
        self._alive()
        if not self.ring:
            raise _Refusal(6)
        return 1, [SimpleNamespace(timeStamp=t, sampleValue=SimpleNamespace(uiVal=v)) for t, v in self.ring]

    def nvmlDeviceGetUtilizationRates(self, _: object) -> SimpleNamespace:
        return SimpleNamespace(gpu=self.rate)

    def nvmlGpmQueryDeviceSupport(self, _: object) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=int(bool(self.gpm)))

    def nvmlGpmSampleAlloc(self) -> list[float]:
        return [0.0]

    def nvmlGpmSampleGet(self, _: object, sample: list[float]) -> None:
        self._alive()
        sample[0] = self.now_s
        self.taken.append(self.now_s)

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace() for _ in range(98)])

    def nvmlGpmMetricsGet(self, question: Any) -> None:
        """Set the values of `gpm`; a metric it lacks is refused. Samples too close together are an error."""
        assert question.sample2[0] - question.sample1[0] >= 0.1
        for metric in question.metrics[: question.numMetrics]:
            metric.nvmlReturn = 0 if metric.metricId in self.gpm else 3
            metric.value = self.gpm.get(metric.metricId, 0.0)

    def _alive(self) -> None:
        if self.lost:
            raise _Refusal(15)


@pytest.fixture
def nvml() -> _FakeNvml:
    """The calls of a GPU that has no source yet."""
    return _FakeNvml()


def read(average: Average | None) -> Average:
    """Return an average that is there."""
    assert average is not None
    return average


def utilization(average: Average | None) -> tuple[float, float]:
    """Return the utilisation in percent and the seconds that it covers."""
    return read(average).values["utilization_pct"], read(average).seconds


def counters(nvml: _FakeNvml, **values: int) -> ByteCounters:
    """Return the counters of a Gen5 x16 link that start at these values."""
    nvml.fields = {197: values.get("tx"), 198: values.get("rx")}
    return ByteCounters(nvml, None, nvml.clock, 69e9)


def test_a_byte_counter_that_wraps_loses_nothing(nvml: _FakeNvml) -> None:
    """Bytes across any number of wraps are counted, by polls and by readings."""
    source = counters(nvml, tx=WRAP - GIB, rx=0)
    for step in range(1, 11):
        nvml.now_s += 0.04
        nvml.fields = {197: (WRAP - GIB + step * 2 * GIB) % WRAP, 198: step}
        source.poll()
    average = read(source.read(nvml.now_s))
    assert average.seconds == pytest.approx(0.4)
    assert average.values["pcie_tx_bytes_per_s"] * average.seconds == pytest.approx(20 * GIB)
    assert average.values["pcie_rx_bytes_per_s"] * average.seconds == pytest.approx(10)


def test_a_gap_in_which_a_counter_may_wrap_twice_is_left_out(nvml: _FakeNvml) -> None:
    """The average does not cover the gap, and a reading of the gap alone is a reason."""
    source = counters(nvml, tx=0, rx=0)
    nvml.now_s += 0.2
    nvml.fields = {197: 5, 198: 5}
    average = read(source.read(nvml.now_s))
    assert (average.values, average.seconds) == ({}, 0.0)
    assert "may have wrapped" in average.why["pcie_tx_bytes_per_s"]
    nvml.now_s += 0.03
    nvml.fields = {197: 35, 198: 5}
    average = read(source.read(nvml.now_s))
    assert average.values["pcie_tx_bytes_per_s"] == pytest.approx(1000)
    assert average.seconds == pytest.approx(0.03)


@pytest.mark.parametrize(("limit", "poll_s"), [(None, 0.036), (69e9, 0.037), (8e9, 0.04), (133e9, 0.019)])
def test_a_faster_link_is_polled_more_often(nvml: _FakeNvml, limit: float | None, poll_s: float) -> None:
    """Polls are at most 40 ms apart and come before the counter can wrap."""
    nvml.fields = {197: 0, 198: 0}
    source = ByteCounters(nvml, None, nvml.clock, limit)
    assert source.poll_s == pytest.approx(poll_s, abs=0.001)
    assert source.poll_due_s == 100.0 + source.poll_s


def test_a_counter_refused_at_the_start_is_not_read_again(nvml: _FakeNvml) -> None:
    """One direction alone is a source of one metric, none is no source, and a later refusal is a reason."""
    source = counters(nvml, rx=0)
    assert list(source.metrics) == ["pcie_rx_bytes_per_s"]
    nvml.requested.clear()
    nvml.now_s += 0.01
    nvml.fields = {}
    average = read(source.read(nvml.now_s))
    assert nvml.requested == [198]
    assert average.why == {"pcie_rx_bytes_per_s": "nvmlDeviceGetFieldValues [198]: refusal 3"}
    with pytest.raises(_Refusal):
        counters(nvml)
    nvml.lost = True
    with pytest.raises(_Refusal):
        SampleRing(nvml, None, nvml.clock)


def test_nvlink_counts_over_a_refusal(nvml: _FakeNvml) -> None:
    """Kibibytes over all links become bytes per second; a refused tick loses no bytes."""
    nvml.fields = {138: 1000, 139: 0}
    source = NvLink(nvml, None, nvml.clock)
    assert nvml.requested == [(138, 0xFFFFFFFF), (139, 0xFFFFFFFF)]
    nvml.lost = True
    with pytest.raises(_Refusal):
        source.read(101.0)
    nvml.lost = False
    nvml.fields = {138: 5000, 139: 2000}
    assert source.totals() == {"nvlink_tx_bytes": 5000 * 1024, "nvlink_rx_bytes": 2000 * 1024}
    expected = {"nvlink_tx_bytes_per_s": 2000 * 1024, "nvlink_rx_bytes_per_s": 1000 * 1024}
    assert source.read(102.0) == (expected, 2.0, {})


def test_nvlink_is_read_once_a_second_or_where_a_window_ends(nvml: _FakeNvml) -> None:
    """A tick in between makes no call, an average covers all since the one before, a reset counter gives no rate."""
    nvml.fields = {138: 0, 139: 0}
    source = NvLink(nvml, None, nvml.clock)
    for now_s, window_ended, counted_kib, expected in (
        (100.5, False, 600, None),
        (100.5, True, 600, (0.5, 1200)),
        (101.4, False, 1600, None),
        (101.5, False, 1600, (1.0, 1000)),
        (102.5, False, 10, "reset"),
        (103.5, False, 11, (1.0, 1)),
    ):
        nvml.requested.clear()
        nvml.fields[138] = counted_kib
        average = source.read(now_s, window_ended=window_ended)
        assert (average is None) == (expected is None) == (not nvml.requested)
        if expected == "reset":
            assert set(read(average).why) == {"nvlink_tx_bytes_per_s"}
        elif average is not None:
            assert (average.seconds, average.values["nvlink_tx_bytes_per_s"] / 1024) == expected


def test_gpm_averages_cover_the_time_between_samples(nvml: _FakeNvml) -> None:
    """A tick that comes too early takes no sample; PCIe is in bytes, activity in percent."""
    nvml.gpm = {20: 3.0, 21: 4.0, 2: 50.0, 5: 25.0}
    source = Gpm(nvml, None, nvml.clock)
    nvml.now_s = 100.09
    assert source.read(100.09) is None
    nvml.now_s = 100.15
    average = read(source.read(100.15))
    assert average.seconds == pytest.approx(0.15)
    assert average.values == {
        "pcie_tx_bytes_per_s": 3 << 20,
        "pcie_rx_bytes_per_s": 4 << 20,
        "sm_active_pct": 50.0,
        "tensor_active_pct": 25.0,
    }
    assert average.why == {"dram_active_pct": "nvmlGpmMetricsGet [10]: refusal 3"}
    assert nvml.taken == [100.0, 100.15]
    nvml.now_s, nvml.gpm = 101.0, {2: float("nan")}
    average = read(source.read(101.0))
    assert (average.values, average.why["sm_active_pct"]) == ({}, "nvmlGpmMetricsGet [2]: gave nan")


def test_the_ring_gives_every_new_sample_once_weighted_by_its_time(nvml: _FakeNvml) -> None:
    """Old samples do not count again, and a sample of 200 ms has twice the weight of one of 100 ms."""
    nvml.ring = [(900_000, 99), (1_000_000, 100)]
    source = SampleRing(nvml, None, nvml.clock)
    assert source.read(100.5) is None
    nvml.ring += [(1_100_000, 10), (1_300_000, 40)]
    assert utilization(source.read(101.0)) == pytest.approx((30.0, 1.0))
    nvml.ring += [(1_400_000, 70)]
    assert utilization(source.read(101.2, window_ended=True)) == pytest.approx((70.0, 0.2))


def test_an_empty_ring_is_an_idle_gpu(nvml: _FakeNvml) -> None:
    """A second without a sample is idle unless the other call contradicts; less than a second gives no value yet."""
    source = SampleRing(nvml, None, nvml.clock)
    assert source.read(100.3, window_ended=True) is None
    assert utilization(source.read(101.0)) == (0.0, 1.0)
    nvml.rate = 80
    assert utilization(source.read(102.0)) == (80.0, 1.0)
    # The first sample after it covers a second at most.
    nvml.ring = [(61_000_000, 20), (62_000_000, 40)]
    assert utilization(source.read(162.0)) == (30.0, 2.0)


def test_a_ring_that_ran_over_covers_its_remaining_samples(nvml: _FakeNvml) -> None:
    """A minute after the last reading, 71 samples of 0.2 s cover 15 s, not the whole minute."""
    nvml.ring = [(1_000_000, 0)]
    source = SampleRing(nvml, None, nvml.clock)
    nvml.ring = [(47_000_000 + 200_000 * number, 100) for number in range(71)]
    assert utilization(source.read(160.0)) == pytest.approx((100.0, 15.0))
    nvml.ring = [(61_000_000 + 200_000 * number, 50) for number in range(1, 5)]
    assert read(source.read(161.0)).seconds == 1.0, "the newest sample is up to a second old, and no time is lost"


def device(nvml: _FakeNvml, **calls: Any) -> Device:
    """Return a device with more calls than those of the sources."""
    link = {"nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5, "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16}
    for name, call in (link | calls).items():
        setattr(nvml, name, call)
    return Device(nvml, None, 0, "GPU-0")


@pytest.mark.parametrize(("code", "kept"), [(999, True), (15, True), (3, False), (13, False), (4, False), (25, False)])
def test_only_a_permanent_refusal_drops_a_metric(nvml: _FakeNvml, code: int, kept: bool) -> None:
    """A single failure at the start does not drop the metric; a call that does not exist is made once."""
    power = Mock(side_effect=[_Refusal(code), 300_000, 300_000])
    one = device(nvml, nvmlDeviceGetPowerUsage=power)
    one.chosen = {"power_w": CALLS["power_w"]}
    sampler = Sampler([one])
    rounds = [sampler.round(100.0)[0][0][METRICS.index("power_w")] for _ in range(2)]
    assert rounds == ([300.0] * 2 if kept else [None] * 2)
    assert power.call_count == (3 if kept else 1)
    assert one.why == {"power_w": f"nvmlDeviceGetPowerUsage: refusal {code}"}


@pytest.mark.parametrize(("code", "opened"), [(999, True), (3, False)])
def test_a_source_that_refuses_once_is_opened_again(nvml: _FakeNvml, code: int, opened: bool) -> None:
    """A single failure that may not be permanent does not drop a source for the session."""
    refusals = [_Refusal(code)]
    nvml.fields = {138: 0, 139: 0}
    read = nvml.nvmlDeviceGetFieldValues

    def fields(handle: object, ids: Sequence[Any]) -> list[SimpleNamespace]:
        if ids[0] == (138, 0xFFFFFFFF) and refusals:
            raise refusals.pop()
        return read(handle, ids)

    one = device(nvml, nvmlDeviceGetFieldValues=fields, nvmlEventSetCreate=_refuse)
    one.open()
    assert any(isinstance(source, NvLink) for source in one.sources) is opened
    assert ("nvlink_tx_bytes_per_s" in one.why) is not opened


def _refuse(*_: object) -> None:
    raise _Refusal(3)
