"""Slices of a synthetic stream."""

from __future__ import annotations

import math

import pytest

from pytest_llmgpu.profiling import recording as module
from pytest_llmgpu.profiling.recording import Header, HeaderDevice, Recording, TickRecord
from pytest_llmgpu.result import Profile


def recording(devices: int = 1) -> Recording:
    """Return an empty recording from t0 = 100 s, a tick a second, of one instant metric, memory and one of 0.25 s."""
    return Recording(
        Header(
            t0_s=100.0,
            period_s=1.0,
            metrics=["power_w", "memory_used_bytes", "pcie_tx_bytes_per_s"],
            methods=["power()", "memory()", "pcie()"],
            windows_s=[None, None, 0.25],
            devices=[HeaderDevice(index, f"GPU-{index}", {}) for index in range(devices)],
        )
    )


def fill(stream: Recording, ks: list[int], late_s: float = 0.0) -> Recording:
    """Add a tick for each k, its power 10 k, memory 1000 + k, PCIe 5 k."""
    for k in ks:
        row: list[float | None] = [10.0 * k, 1000.0 + k, 5.0 * k]
        stream.add(TickRecord(k, 100.0 + k + late_s, [row for _ in stream.header.devices]))
    return stream


def cut(stream: Recording, start_s: float, end_s: float, **held_bytes: int) -> Profile:
    """Return a profile, held bytes given as gpu0=..."""
    held = {name.replace("gpu", "GPU-"): size for name, size in held_bytes.items()}
    return stream.profile(start_s, end_s, held, {})


def test_a_slice_has_the_readings_that_began_inside() -> None:
    """Mean, maximum, counts and series are those of the ticks between the two times."""
    profile = cut(fill(recording(), list(range(10))), 101.5, 104.5)
    assert (profile.period_s, profile.duration_s, profile.samples, profile.missed) == (1.0, 3.0, 3, 0)
    power = profile.devices[0].metrics["power_w"]
    assert (power.mean, power.max, power.method, power.coverage) == (30.0, 40.0, "power()", None)
    assert profile.series is not None
    assert profile.series.t_s == [0.5, 1.5, 2.5]
    assert profile.series.devices[0]["power_w"] == [20.0, 30.0, 40.0]
    assert profile.why == {}


def test_coverage_is_the_part_of_the_window_that_readings_look_at() -> None:
    """Readings of 0.25 s a second cover a quarter, and what reaches past the end does not count."""
    stream = fill(recording(), list(range(10)))
    assert cut(stream, 101.0, 104.9).devices[0].metrics["pcie_tx_bytes_per_s"].coverage == pytest.approx(1.0 / 3.9)
    assert cut(stream, 101.0, 101.1).devices[0].metrics["pcie_tx_bytes_per_s"].coverage == pytest.approx(1.0)
    assert cut(stream, 101.5, 102.1).devices[0].metrics["pcie_tx_bytes_per_s"].coverage == pytest.approx(0.1 / 0.6)


def test_deadlines_without_a_tick_are_missed() -> None:
    """Only deadlines inside the window count, those after the stream's end included."""
    stream = fill(recording(), [0, 1, 4, 5])
    assert cut(stream, 100.5, 105.5).missed == 2
    assert cut(stream, 102.5, 105.5).missed == 1
    assert cut(stream, 104.0, 108.0).missed == 3
    assert cut(stream, 90.0, 101.0).missed == 0


def test_lateness_is_of_the_slice() -> None:
    """The 99th percentile is over the ticks inside."""
    stream = fill(recording(), list(range(99)))
    fill(stream, [99], late_s=0.5)
    fill(stream, [100], late_s=0.25)
    assert cut(stream, 100.0, 199.9).lateness_p99_s == pytest.approx(0.0)
    assert cut(stream, 198.9, 200.9).lateness_p99_s == pytest.approx(0.5)
    assert cut(stream, 200.1, 200.9).lateness_p99_s == pytest.approx(0.25)


def test_held_bytes_are_taken_out_of_memory_alone() -> None:
    """Each device's own held bytes leave its memory figures and series, and nothing falls below zero."""
    profile = cut(fill(recording(devices=2), [0, 1]), 100.0, 101.5, gpu0=400, gpu1=5000)
    first, second = (device.metrics["memory_used_bytes"] for device in profile.devices)
    assert (first.mean, first.max, second.max) == (600.5, 601.0, 0.0)
    assert profile.series is not None
    assert profile.series.devices[0]["memory_used_bytes"] == [600.0, 601.0]
    assert profile.devices[0].metrics["power_w"].max == 10.0


@pytest.mark.parametrize(
    ("start_s", "end_s", "k"), [(101.1, 101.3, 1), (101.6, 101.9, 2), (150.0, 151.0, 3), (90, 91, 0)]
)
def test_a_window_between_two_ticks_gets_the_nearest_and_says_so(start_s: float, end_s: float, k: int) -> None:
    """The reading is there, but as none of the window's own samples and with no coverage."""
    profile = cut(fill(recording(), [0, 1, 2, 3]), start_s, end_s)
    assert profile.devices[0].metrics["power_w"].mean == 10.0 * k
    assert (profile.samples, profile.lateness_p99_s) == (0, None)
    assert "nearest" in profile.why["samples"]
    assert profile.devices[0].metrics["pcie_tx_bytes_per_s"].coverage == pytest.approx(
        max(0.0, 0.15 / 0.2) if k == 1 else 0.0
    )


def test_a_reading_that_could_not_be_had_counts_for_nothing() -> None:
    """None stays None in the series, leaves the mean alone, and the reason is at hand."""
    stream = fill(recording(), [0])
    stream.add(TickRecord(1, 101.0, [[None, 7.0, None]], {0: {"power_w": "lost", "pcie_tx_bytes_per_s": "lost"}}))
    fill(stream, [2])
    profile = cut(stream, 100.0, 102.5)
    assert profile.devices[0].metrics["power_w"].mean == 10.0
    assert profile.devices[0].metrics["pcie_tx_bytes_per_s"].coverage == pytest.approx(0.5 / 2.5)
    assert profile.devices[0].why == {"power_w": "lost", "pcie_tx_bytes_per_s": "lost"}
    assert profile.series is not None
    assert profile.series.devices[0]["power_w"] == [0.0, None, 20.0]
    assert cut(stream, 101.9, 102.5).devices[0].why == {}


def test_a_metric_never_had_is_none() -> None:
    """Mean, maximum and coverage are None, never 0."""
    stream = recording()
    stream.add(TickRecord(0, 100.0, [[None, None, None]], {0: {"pcie_tx_bytes_per_s": "not supported"}}))
    metric = cut(stream, 99.5, 100.5).devices[0].metrics["pcie_tx_bytes_per_s"]
    assert (metric.mean, metric.max, metric.coverage) == (None, None, None)


def test_a_stream_without_a_tick_is_no_profile() -> None:
    """A sampler that never came to its first reading is the reason there is no profile."""
    profile = cut(recording(), 100.0, 101.0)
    assert "profile" in profile.why
    assert profile.series is None
    assert profile.devices[0].metrics["power_w"].mean is None


def test_the_series_is_thinned_and_keeps_extremes() -> None:
    """Of 10,000 ticks at most 2,000 points stay, the one peak and the one dip among them; the mean is of all."""
    stream = recording()
    for k in range(10_000):
        power = {1234: 900.0, 5678: 1.0}.get(k, 300.0)
        stream.add(TickRecord(k, 100.0 + k, [[power, 0.0, 0.0]]))
    profile = cut(stream, 100.0, 10_099.0)
    assert profile.series is not None
    assert 1000 < len(profile.series.t_s) <= 2000
    assert profile.series.t_s == sorted(profile.series.t_s)
    power_w = [value for value in profile.series.devices[0]["power_w"] if value is not None]
    assert (max(power_w), min(power_w)) == (900.0, 1.0)
    assert profile.samples == 10_000
    assert profile.devices[0].metrics["power_w"].mean == pytest.approx((9998 * 300 + 901) / 10_000)


def test_memory_stays_bounded_but_for_an_open_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ticks go and a slice that reaches back says so, calling none of them missed; an open window keeps its own."""
    monkeypatch.setattr(module, "HISTORY_BYTES", 5 * (200 + 8 * 3))
    stream = fill(recording(), list(range(20)))
    profile = cut(stream, 100.0, 119.5)
    assert (profile.samples, profile.missed) == (5, 0)
    assert "dropped" in profile.why["history"]
    assert cut(stream, 115.0, 119.5).why == {}
    opened = recording()
    for k in range(20):
        opened.add(TickRecord(k, 100.0 + k, [[0.0, 0.0, 0.0]]), open_since_s=103.0 if k > 2 else math.inf)
    assert cut(opened, 103.0, 119.5).samples == 17


def test_a_slice_is_settled_once_no_tick_can_change_it() -> None:
    """The last deadline's tick settles a window with readings; one without waits for the tick after it."""
    stream = fill(recording(), [0, 1])
    assert stream.settled(100.5, 101.9)
    assert not stream.settled(100.5, 102.0)
    assert not stream.settled(101.2, 101.8)
    fill(stream, [2])
    assert stream.settled(101.2, 101.8)
    assert stream.settled(100.5, 102.0)
    assert not recording().settled(100.0, 100.5)
