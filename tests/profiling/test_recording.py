"""Slices of a synthetic stream."""

from __future__ import annotations

import pytest
from support.report_factory import known

from pytest_llmgpu.profiling import recording as module
from pytest_llmgpu.profiling.recording import Header, HeaderDevice, MarkRecord, Recording, TickRecord
from pytest_llmgpu.profiling.sampler.devices import THROTTLED, Cumulative
from pytest_llmgpu.report.derived import of_window
from pytest_llmgpu.report.result import Profile


def recording(devices: int = 1) -> Recording:
    """Return an empty recording from t0 = 100 s, a tick per second, of an instant metric, memory and one of 0.25 s."""
    return Recording(
        Header(
            t0_s=100.0,
            period_s=1.0,
            metrics=["power_w", "memory_used_bytes", "pcie_tx_bytes_per_s"],
            devices=[
                HeaderDevice(index, f"GPU-{index}", {}, ["power()", "memory()", "pcie()"], [None, None, 0.25])
                for index in range(devices)
            ],
        )
    )


def fill(stream: Recording, ks: list[int], late_s: float = 0.0) -> Recording:
    """Add a tick for each k with power 10 k, memory 1000 + k, PCIe 5 k."""
    for k in ks:
        row: list[float | None] = [10.0 * k, 1000.0 + k, 5.0 * k]
        stream.add(TickRecord(k, 100.0 + k + late_s, [row for _ in stream.header.devices]))
    return stream


UNMARKED = dict.fromkeys(
    (set(Cumulative.NAMES) - set(THROTTLED)) | {"throttled_s"}, "the counter was not read at the window's start"
)
"""Reasons of counters without a mark."""


def cut(stream: Recording, start_s: float, end_s: float, **held_bytes: int) -> Profile:
    """Return a profile; held bytes are given as gpu0=..."""
    held = {name.replace("gpu", "GPU-"): size for name, size in held_bytes.items()}
    return stream.profile(start_s, end_s, held, {})


def test_a_slice_has_the_readings_that_began_inside() -> None:
    """Mean, maximum, counts and series are those of the ticks between the two times."""
    profile = cut(fill(recording(), list(range(10))), 101.5, 104.5)
    assert (profile.period_s, profile.duration_s, profile.samples, profile.missed) == (1.0, 3.0, 3, 0)
    power = profile.devices[0].metrics["power_w"]
    assert (power.mean, power.max, power.method, power.coverage) == (30.0, 40.0, "power()", None)
    series = known(profile.series)
    assert (series.t_s, series.devices[0]["power_w"]) == ([0.5, 1.5, 2.5], [20.0, 30.0, 40.0])
    assert profile.why == {}


def test_deadlines_without_a_tick_are_missed() -> None:
    """Only deadlines inside the window count, those after the stream's end included."""
    stream = fill(recording(), [0, 1, 4, 5])
    windows = [(100.5, 105.5), (102.5, 105.5), (104.0, 108.0), (90.0, 101.0)]
    assert [cut(stream, *window).missed for window in windows] == [2, 1, 3, 0]


def test_lateness_is_of_the_slice() -> None:
    """The 99th percentile is over the ticks inside."""
    stream = fill(recording(), list(range(99)))
    fill(stream, [99], late_s=0.5)
    fill(stream, [100], late_s=0.25)
    windows = [(100.0, 199.9), (198.9, 200.9), (200.1, 200.9)]
    assert [cut(stream, *window).lateness_p99_s for window in windows] == pytest.approx([0.0, 0.5, 0.25])


def test_held_bytes_are_subtracted_from_memory_alone() -> None:
    """Each device's held bytes are subtracted from its memory and its series, and nothing falls below zero."""
    profile = cut(fill(recording(devices=2), [0, 1]), 100.0, 101.5, gpu0=400, gpu1=5000)
    first, second = (device.metrics["memory_used_bytes"] for device in profile.devices)
    assert (first.mean, first.max, second.max) == (600.5, 601.0, 0.0)
    assert known(profile.series).devices[0]["memory_used_bytes"] == [600.0, 601.0]
    assert profile.devices[0].metrics["power_w"].max == 10.0


@pytest.mark.parametrize(("start_s", "end_s", "k"), [(101.1, 101.3, 1), (101.6, 101.9, 2), (150, 151, 3), (90, 91, 0)])
def test_a_window_between_two_ticks_gets_the_nearest_reading(start_s: float, end_s: float, k: int) -> None:
    """The reading is not one of the window's samples, has no coverage, and the reason names its distance."""
    profile = cut(fill(recording(), [0, 1, 2, 3]), start_s, end_s)
    assert profile.devices[0].metrics["power_w"].mean == 10.0 * k
    assert (profile.samples, profile.lateness_p99_s) == (0, None)
    assert "nearest" in profile.why["samples"]
    assert profile.devices[0].metrics["pcie_tx_bytes_per_s"].coverage == pytest.approx(0.75 if k == 1 else 0.0)


def test_a_failed_reading_does_not_count() -> None:
    """It is None in the series, does not enter the mean, and the reason is kept."""
    stream = fill(recording(), [0])
    stream.add(TickRecord(1, 101.0, [[None, 7.0, None]], {0: {"power_w": "lost", "pcie_tx_bytes_per_s": "lost"}}))
    fill(stream, [2])
    profile = cut(stream, 100.0, 102.5)
    assert profile.devices[0].metrics["power_w"].mean == 10.0
    assert profile.devices[0].metrics["pcie_tx_bytes_per_s"].coverage == pytest.approx(0.5 / 2.5)
    assert profile.devices[0].why == {**UNMARKED, "power_w": "lost", "pcie_tx_bytes_per_s": "lost"}
    assert known(profile.series).devices[0]["power_w"] == [0.0, None, 20.0]
    assert cut(stream, 101.9, 102.5).devices[0].why == UNMARKED


def test_the_series_is_thinned_and_keeps_extremes() -> None:
    """At most 2,000 of 10,000 points remain, with the largest and the smallest; the mean is over all."""
    stream = recording()
    for k in range(10_000):
        power = {1234: 900.0, 5678: 1.0}.get(k, 300.0)
        stream.add(TickRecord(k, 100.0 + k, [[power, 0.0, 0.0]]))
    profile = cut(stream, 100.0, 10_099.0)
    series = known(profile.series)
    assert 1000 < len(series.t_s) <= 2000
    assert series.t_s == sorted(series.t_s)
    power_w = [value for value in series.devices[0]["power_w"] if value is not None]
    assert (max(power_w), min(power_w)) == (900.0, 1.0)
    assert profile.samples == 10_000
    assert profile.devices[0].metrics["power_w"].mean == pytest.approx((9998 * 300 + 901) / 10_000)


def test_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ticks are dropped with a reason and do not count as missed."""
    monkeypatch.setattr(module, "HISTORY_BYTES", 5 * (200 + 12 * 3))
    stream = fill(recording(), list(range(20)))
    profile = cut(stream, 100.0, 119.5)
    assert (profile.samples, profile.missed) == (5, 0)
    assert "dropped" in profile.why["history"]
    assert cut(stream, 115.0, 119.5).why == {}


def spanning(ks: list[int], orders: int = 0) -> Recording:
    """Return a stream of two metrics with values 10 k that cover the second before the tick."""
    device = HeaderDevice(0, "GPU-0", {}, ["fields", "ring"], [None, None])
    stream = Recording(Header(100.0, 1.0, ["nvlink_tx_bytes_per_s", "utilization_pct"], [device]))
    for k in ks:
        # The ring is read at every second tick only.
        ring = (10.0 * k, 2.0) if k % 2 == 0 else (None, None)
        stream.add(TickRecord(k, 100.0 + k, [[10.0 * k, ring[0]]], {}, [[1.0, ring[1]]], orders=orders))
    return stream


def test_readings_of_spans_count_by_their_part_of_the_window() -> None:
    """The mean weighs each reading by its time inside, that of the tick after the end included."""
    metric = cut(spanning(list(range(8))), 101.5, 104.25).devices[0].metrics["nvlink_tx_bytes_per_s"]
    assert metric.mean == pytest.approx((0.5 * 20 + 30 + 40 + 0.25 * 50) / 2.75)
    assert (metric.max, metric.method) == (50.0, "fields")
    assert metric.coverage == pytest.approx(1.0)


def test_a_span_that_is_missing_lowers_the_coverage() -> None:
    """Time without a reading is not covered, and a tick without a reading of the ring is no gap."""
    profile = cut(spanning([0, 1, 2, 4, 5, 6]), 100.0, 106.0)
    assert profile.devices[0].metrics["nvlink_tx_bytes_per_s"].coverage == pytest.approx(5 / 6)
    ring = profile.devices[0].metrics["utilization_pct"]
    assert ring.mean == pytest.approx(40.0)
    assert ring.coverage == pytest.approx(1.0)
    assert known(profile.series).devices[0]["utilization_pct"] == [0.0, None, 20.0, 40.0, None, 60.0]


@pytest.mark.parametrize(
    ("stream", "end_s", "orders", "settled"),
    [
        (fill(recording(), [0, 1]), 101.9, 0, False),
        (fill(recording(), [0, 1]), 102.0, 0, False),
        (fill(recording(), [0, 1, 2]), 101.8, 0, True),
        (recording(), 100.5, 0, False),
        # The ring is not read at a tick between a window's end and its mark.
        (spanning([0, 1, 2]), 101.9, 1, False),
        (spanning([0, 1, 2, 3], orders=1), 101.9, 1, True),
        (spanning([0, 1, 2, 3], orders=1), 101.9, 2, False),
    ],
)
def test_a_slice_is_settled_once_no_tick_can_change_it(
    stream: Recording, end_s: float, orders: int, settled: bool
) -> None:
    """A reading covers the time before it, so that a window waits for the tick after its end and after its mark."""
    assert stream.settled(end_s, orders=orders) is settled


@pytest.mark.parametrize(
    ("start_s", "end_s", "metric", "expected"),
    [
        (100.5, 102.5, "power_w", 15.0),
        (101.2, 101.8, "power_w", "no reading lies inside the window; the nearest is 0.2 s away"),
        (101.1, 101.3, "pcie_tx_bytes_per_s", 5.0),
        (101.4, 101.8, "pcie_tx_bytes_per_s", "no reading lies inside the window; the nearest is 0.2 s away"),
        (100.5, 102.5, "nvlink_tx_bytes_per_s", "no sample"),
    ],
)
def test_the_nearest_reading_is_no_value(start_s: float, end_s: float, metric: str, expected: float | str) -> None:
    """A reading at another time is not the case's; one that reaches into the window is."""
    profile = cut(fill(recording(), [0, 1, 2]), start_s, end_s)
    found = of_window(profile, profile.devices[0], metric)
    assert (found if isinstance(found, str) else found.mean) == expected


def test_a_window_without_coverage_has_the_nearest_value_or_a_reason() -> None:
    """The nearest value has coverage 0; without any value the metric is None with the reason."""
    stream = spanning([0, 1, 2, 3])
    assert cut(stream, 100.2, 100.8).devices[0].metrics["nvlink_tx_bytes_per_s"].mean == pytest.approx(10.0)
    late = cut(stream, 150.0, 151.0).devices[0]
    nvlink = late.metrics["nvlink_tx_bytes_per_s"]
    assert (nvlink.mean, nvlink.coverage) == (30.0, 0.0)
    assert late.metrics["utilization_pct"].mean is None
    assert late.why["utilization_pct"] == "ring: no reading covers this window"


def marked(*marks: tuple[float, dict[str, float]]) -> Recording:
    """Return a stream with these marks: time and counters."""
    stream = spanning(list(range(20)))
    for number, (t_s, counters) in enumerate(marks, 1):
        refused = {name: f"{name} refused" for name in THROTTLED if name not in counters}
        stream.kept_marks.append(MarkRecord(number, [t_s], [t_s], [counters], [refused]))
    return stream


def test_counters_are_those_between_the_marks_at_the_ends() -> None:
    """Energy is the difference, a rate of bytes is exact with coverage 1, and other marks do not matter."""
    stream = marked(
        (100.5, {"energy_j": 1.0, "nvlink_tx_bytes": 0.0}),
        (102.02, {"energy_j": 10.0, "nvlink_tx_bytes": 500.0}),
        (105.02, {"energy_j": 310.0, "nvlink_tx_bytes": 3500.0}),
        (109.0, {"energy_j": 999.0, "nvlink_tx_bytes": 9999.0}),
    )
    device = cut(stream, 102.0, 105.0).devices[0]
    assert (device.energy_j, device.counters) == (300.0, {"nvlink_tx_bytes": 3000.0})
    rate = device.metrics["nvlink_tx_bytes_per_s"]
    assert (rate.mean, rate.coverage) == pytest.approx((1000.0, 1.0))
    assert (device.throttled_s, device.why["throttled_s"]) == (None, "throttled_power_s refused")


def test_a_rate_of_bytes_excludes_the_time_between_marks_and_window() -> None:
    """Devices are idle between a mark and the window: with that time the rate of a short case would be too low."""
    stream = marked((101.95, {"nvlink_tx_bytes": 0.0}), (104.09, {"nvlink_tx_bytes": 3000.0}))
    # Readings of a second are 20 to 40, with idle time in them.
    for start_s, rate in ((102.0, 1500.0), (101.9, 3000 / 2.14)):
        metric = cut(stream, start_s, 104.0).devices[0].metrics["nvlink_tx_bytes_per_s"]
        assert (metric.mean, metric.max) == pytest.approx((rate, rate))


@pytest.mark.parametrize(
    ("first", "last", "throttled_s", "why"),
    [
        ((1.0, 5.0), (2.0, 7.0), 3, None),
        ((1.0,), (2.0,), 1, "incomplete: throttled_heat_s refused"),
        ((1.0, 5.0), (2.0,), 1, "incomplete: throttled_heat_s refused"),
        ((), (), None, "throttled_power_s refused"),
    ],
)
def test_throttled_time_needs_counters_at_both_ends(
    first: tuple[float, ...], last: tuple[float, ...], throttled_s: float | None, why: str | None
) -> None:
    """A missing part is named as such, and a counter that is missing at one end gives no difference."""
    before, after = (dict(zip(("throttled_power_s", "throttled_heat_s"), end, strict=False)) for end in (first, last))
    device = cut(marked((102.0, before), (105.0, after)), 102.0, 105.0).devices[0]
    assert (device.throttled_s, device.why.get("throttled_s")) == (throttled_s, why)
    assert not {*THROTTLED} & (device.counters.keys() | device.why.keys())


@pytest.mark.parametrize(
    ("start_s", "end_s", "why"),
    [
        (101.0, 105.0, "the counter was not read at the window's start"),
        (102.0, 106.0, "the counter was not read at the window's end"),
        (105.0, 108.0, "the counter went back between the window's ends"),
        (102.0, 102.01, "the window is too short for a counter: one reading is nearest to both of its ends"),
    ],
)
def test_a_window_without_its_marks_has_no_counter(start_s: float, end_s: float, why: str) -> None:
    """Energy is None with the reason, never that of another time."""
    stream = marked((102.0, {"energy_j": 10.0}), (105.0, {"energy_j": 310.0}), (108.0, {"energy_j": 5.0}))
    device = cut(stream, start_s, end_s).devices[0]
    assert (device.energy_j, device.why["energy_j"]) == (None, why)


def test_a_mark_of_many_devices_counts_for_each_of_them() -> None:
    """The first and the last device have their counters, however long the others take."""
    devices = [HeaderDevice(index, f"GPU-{index}", {}, ["fields"], [None]) for index in range(2)]
    stream = Recording(Header(100.0, 1.0, ["nvlink_tx_bytes_per_s"], devices))
    for number, t_s in enumerate(([101.75, 101.95], [105.05, 105.25]), 1):
        counts = {"energy_j": 10.0 * number, "nvlink_tx_bytes": 330.0 * number}
        stream.kept_marks.append(MarkRecord(number, t_s, t_s, [counts, counts], [{}, {}]))
    stream.add(TickRecord(6, 106.0, [[1.0], [1.0]], {}, [[1.0], [1.0]]))
    for device in cut(stream, 102.0, 105.0).devices:
        assert device.energy_j == 10.0
        assert device.metrics["nvlink_tx_bytes_per_s"].mean == pytest.approx(110.0)
    assert cut(stream, 102.06, 105.0).devices[1].energy_j is None


def test_a_mark_is_near_to_a_window_when_its_reading_ended_there() -> None:
    """With a slow driver the end of the reading counts, if nothing lies between it and the window."""
    stream = spanning(list(range(20)))
    for number, (asked_s, answered_s) in enumerate(((101.6, 101.95), (105.01, 105.3)), 1):
        stream.kept_marks.append(MarkRecord(number, [asked_s], [answered_s], [{"energy_j": 10.0 * number}], [{}]))
    # 102.1 s is too early, and before 101.7 s the reading may have ended as late as 101.95 s.
    starts_s = {102.0: 10.0, 102.1: None, 101.7: None, 101.9: 10.0}
    assert {start_s: cut(stream, start_s, 105.0).devices[0].energy_j for start_s in starts_s} == starts_s


def test_errors_are_counted_and_processes_are_the_larger_of_both_ends() -> None:
    """A program at one end of the window only is counted; errors before the window are not."""
    names = ("ecc_uncorrected", "xids", "compute_processes")
    at_s = {102.0: (5.0, 1.0, 3.0), 105.0: (7.0, 1.0, 1.0), 108.0: (7.0, 1.0, 2.0)}
    stream = marked(*((t_s, dict(zip(names, counts, strict=True))) for t_s, counts in at_s.items()))
    for start_s, expected in ((102.0, (2.0, 0.0, 3.0)), (105.0, (0.0, 0.0, 2.0))):
        assert cut(stream, start_s, start_s + 3.0).devices[0].counters == dict(zip(names, expected, strict=True))


def test_missing_counts_of_bytes_have_a_reason_with_nvlink() -> None:
    """A window without marks has a reason for the bytes; a GPU without NVLink has one for the metric only."""
    with_nvlink = cut(spanning([0, 1, 2]), 100.0, 102.0).devices[0]
    assert with_nvlink.counters == {}
    assert with_nvlink.why["nvlink_tx_bytes"] == "the counter was not read at the window's start"
    device = HeaderDevice(0, "GPU-0", {"nvlink_tx_bytes_per_s": "Not Supported"}, [""], [None])
    without = Recording(Header(100.0, 1.0, ["nvlink_tx_bytes_per_s"], [device]))
    without.add(TickRecord(0, 100.0, [[None]]))
    assert cut(without, 100.0, 102.0).devices[0].why == {**UNMARKED, "nvlink_tx_bytes_per_s": "Not Supported"}
