"""The stream of the sampler so far, and the profiles that are cut out of it.

Each line of the stream is a JSON record: a header, then ticks and marks; or a refusal.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pytest_llmgpu.profiling.sampler.devices import THROTTLED, Cumulative
from pytest_llmgpu.report.result import DeviceProfile, Metric, Profile, Series

HISTORY_BYTES = 64 << 20
"""The oldest readings beyond this size are dropped. It holds 2 hours of 8 GPUs."""
_READING_BYTES = 200
"""The size of a stored tick without its values."""
SERIES_POINTS = 2000
"""The most points of a series."""
_MARKS = 1000
"""The most marks that are stored. A window has two."""
_REACH_S = 5.0
"""Readings up to this long after a window's end may cover a part of it; those of the ring cover a second."""
_FULL = 0.95
"""If readings cover this fraction of a window, a failure at another time is no reason of this window."""

_MARK_NEAR_S = 0.1
_MARK_NEAR = 0.01
"""A mark counts as the end of a window within this many seconds, or within this fraction of the window's length."""

_MOMENTARY = "compute_processes"
"""This is no counter: for a window it is the larger of the values at its ends."""

_BYTES = ("nvlink_tx_bytes", "nvlink_rx_bytes")
"""Counts of bytes. Each of them gives the metric that is its rate."""

_Columns = dict[str, list[float | None]]
"""The values of one device over the readings, by metric."""


class HeaderDevice(msgspec.Struct, frozen=True):
    """One GPU that the sampler reads."""

    index: int
    """NVML's index of the GPU."""
    uuid: str
    """NVML's UUID of the GPU."""
    why: dict[str, str]
    """Maps a metric to the reason why it is never read."""
    methods: list[str]
    """[metric] The NVML call that the metric comes from; empty if it has no source."""
    windows_s: list[float | None]
    """[metric] How long each reading measures from its tick on; None for an instant, an earlier or an unknown time."""


class Refusal(msgspec.Struct, frozen=True):
    """The only line of a sampler that has nothing to read."""

    error: str
    """The reason."""


class Header(msgspec.Struct, frozen=True):
    """The first line of the sampler's stream."""

    t0_s: float
    """The CLOCK_MONOTONIC time of the first deadline."""
    period_s: float
    """The seconds between two deadlines."""
    metrics: list[str]
    """The names of the values of each device, in order."""
    devices: list[HeaderDevice]
    """The GPUs, in the order of the values of a tick."""
    why: dict[str, str] = {}
    """Maps `gpu 3` to the reason why it did not answer."""


class TickRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The readings that began at one deadline."""

    k: int
    """The number of the deadline t0 + k * period."""
    t_s: float
    """The CLOCK_MONOTONIC time at which the readings began."""
    values: list[list[float | None]]
    """[device, metric] The reading; None if it failed or if it is too early for one."""
    why: dict[int, dict[str, str]] = {}
    """Maps a device's place in the header to the reasons by metric, if they have changed."""
    seconds: list[list[float | None]] = []
    """[device, metric] The seconds before the tick that a value covers; None for a moment or a time after it."""
    orders: int = 0
    """The number of marks requested before the tick. Sources that are read once a second are read after a request."""


class MarkRecord(msgspec.Struct, frozen=True):
    """A reading of the cumulative counters, made when a window begins or ends."""

    mark: int
    """The number of the mark, from 1."""
    t_s: list[float]
    """[device] The CLOCK_MONOTONIC time at which its reading began."""
    answered_s: list[float]
    """[device] The CLOCK_MONOTONIC time at which its reading ended."""
    counters: list[dict[str, float]]
    """[device] The counts by name."""
    why: list[dict[str, str]]
    """[device] Maps a name to the reason why it has no count."""


class Reading(NamedTuple):
    """A stored tick. Values take 8 bytes each, because sessions are long."""

    k: int
    """The number of the deadline."""
    t_s: float
    """The CLOCK_MONOTONIC time at which the readings began."""
    values: array[float]
    """[device * metric] NaN for None."""
    seconds: array[float] | None
    """[device * metric] NaN for None; None if no value covers a time."""


class Recording:
    """The stream of one sampler. It is not thread-safe: its owner locks."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._why = [dict(device.why) for device in header.devices]
        values = len(header.devices) * len(header.metrics)
        self.readings: deque[Reading] = deque(maxlen=HISTORY_BYTES // (_READING_BYTES + 12 * values))
        """The ticks that are stored."""
        self.kept_marks: deque[MarkRecord] = deque(maxlen=_MARKS)
        """The latest marks."""
        self._orders = 0

    def add(self, tick: TickRecord) -> None:
        """Store a tick; the oldest one beyond the limit is dropped."""
        seconds = _flat("f", tick.seconds) if tick.seconds else None
        self.readings.append(Reading(tick.k, tick.t_s, _flat("d", tick.values), seconds))
        self._orders = tick.orders
        for place, reasons in tick.why.items():
            self._why[place].update(reasons)

    @property
    def marks(self) -> int:
        """The number of the latest mark; 0 before the first."""
        return self.kept_marks[-1].mark if self.kept_marks else 0

    def settled(self, end_s: float, orders: int = 0) -> bool:
        """Return whether later ticks cannot change a slice with this end: readings cover the time before them.

        The tick after the latest of the marks requested so far, `orders`, has the readings that are made once a second.
        """
        return not self.behind(end_s) and self.readings[-1].t_s > end_s and self._orders >= orders

    def behind(self, end_s: float) -> bool:
        """Return whether the tick of the last deadline before a time is missing so far."""
        return not self.readings or self.readings[-1].k < self._last_deadline(end_s)

    def profile(self, start_s: float, end_s: float, held_bytes: Mapping[str, int], why: Mapping[str, str]) -> Profile:
        """Cut the profile between two CLOCK_MONOTONIC times.

        A window without a reading inside gets the nearest reading, its distance in `why["samples"]`, and 0 samples.
        `why` has the faults of the whole stream.
        """
        inside = [reading for reading in self.readings if start_s <= reading.t_s <= end_s]
        reasons = {**self.header.why, **why}
        readings = inside
        if not inside and self.readings:
            nearest = min(self.readings, key=lambda reading: max(start_s - reading.t_s, reading.t_s - end_s))
            distance_s = max(start_s - nearest.t_s, nearest.t_s - end_s)
            reasons["samples"] = f"no reading lies inside the window; the nearest is {distance_s:.3g} s away"
            readings = [nearest]
        if not self.readings:
            reasons["profile"] = "the sampler has sent no reading"
        full = len(self.readings) == self.readings.maxlen
        if full and start_s < self.readings[0].t_s:
            reasons["history"] = "the oldest readings of the window were dropped to save memory"
        columns: list[_Columns] = []
        for place, device in enumerate(self.header.devices):
            columns.append({})
            for at, metric in enumerate(self.header.metrics, place * len(self.header.metrics)):
                held = held_bytes.get(device.uuid, 0) if metric == "memory_used_bytes" else 0
                values = (reading.values[at] for reading in readings)
                # A reading from before the bytes were held must not fall below zero.
                columns[-1][metric] = [None if math.isnan(value) else max(0.0, value - held) for value in values]
        first = max(0, math.ceil((start_s - self.header.t0_s) / self.header.period_s))
        if full:
            first = max(first, self.readings[0].k)
        last = self._last_deadline(end_s)
        ticked = sum(first <= reading.k <= last for reading in self.readings)
        late_s = sorted(reading.t_s - (self.header.t0_s + reading.k * self.header.period_s) for reading in inside)
        return Profile(
            period_s=self.header.period_s,
            duration_s=end_s - start_s,
            samples=len(inside),
            missed=max(0, last - first + 1) - ticked,
            lateness_p99_s=max(0.0, late_s[math.ceil(0.99 * len(late_s)) - 1]) if late_s else None,
            devices=[
                self._device(place, readings, columns[place], start_s, end_s)
                for place in range(len(self.header.devices))
            ],
            series=_series(readings, columns, start_s),
            why=reasons,
        )

    def _last_deadline(self, end_s: float) -> int:
        return math.floor((end_s - self.header.t0_s) / self.header.period_s)

    def _device(
        self, place: int, readings: Sequence[Reading], columns: _Columns, start_s: float, end_s: float
    ) -> DeviceProfile:
        device = self.header.devices[place]
        metrics: dict[str, Metric] = {}
        reasons: dict[str, str] = {}
        reaching = [reading for reading in self.readings if start_s < reading.t_s < end_s + _REACH_S] or readings
        for number, (metric, column) in enumerate(columns.items()):
            method = device.methods[number]
            known = [(reading.t_s, value) for reading, value in zip(readings, column, strict=True) if value is not None]
            at = place * len(columns) + number
            spans = [
                (reading.values[at], reading.t_s - reading.seconds[at], reading.t_s)
                for reading in reaching
                if reading.seconds is not None and not math.isnan(reading.seconds[at])
            ]
            figures = _figures(spans, known, device.windows_s[number], method, start_s, end_s)
            complete = (figures.coverage or 0.0) >= _FULL if spans else bool(readings) and None not in column
            if figures.mean is None:
                reasons[metric] = f"{method or 'NVML'}: no reading covers this window"
            # A failure at another time is no reason of a window in which every reading was made.
            if not complete and metric in self._why[place]:
                reasons[metric] = self._why[place][metric]
            metrics[metric] = figures
        counts = _window_counts(self.kept_marks, place, metrics, reasons, start_s, end_s)
        return DeviceProfile(
            index=device.index,
            uuid=device.uuid,
            metrics=metrics,
            energy_j=counts.pop("energy_j", None),
            throttled_s=counts.pop("throttled_s", None),
            counters=counts,
            why=reasons,
        )


def _figures(
    spans: Sequence[tuple[float, float, float]],
    moments: Sequence[tuple[float, float]],
    window_s: float | None,
    method: str,
    start_s: float,
    end_s: float,
) -> Metric:
    """Return the figures of a metric in a window.

    `spans` have value, start and end of the readings that cover a time, which are weighted by their part of the window.
    `moments` have time and value of the readings in the window. Where no span has a part of it, the last moment is the
    figure, of coverage 0. `window_s` is the time after a moment that its value covers; None if it covers none.
    """
    weighted = spans or [(value, at_s, at_s + (window_s or 0.0)) for at_s, value in moments]
    parts = [(value, max(0.0, min(last_s, end_s) - max(first_s, start_s))) for value, first_s, last_s in weighted]
    covered_s = math.fsum(part_s for _, part_s in parts)
    coverage = min(1.0, covered_s / (end_s - start_s)) if end_s > start_s else 0.0
    values = [value for value, part_s in parts if part_s > 0 or not spans]
    if not values:
        nearest = moments[-1][1] if moments else None
        return Metric(mean=nearest, max=nearest, method=method, coverage=None if nearest is None else 0.0)
    sum_s = math.fsum(value * part_s for value, part_s in parts)
    mean = sum_s / covered_s if spans else math.fsum(values) / len(values)
    known = bool(spans) or window_s is not None
    return Metric(mean=mean, max=max(values), method=method, coverage=coverage if known else None)


def _series(readings: Sequence[Reading], columns: Sequence[_Columns], start_s: float) -> Series | None:
    """Return up to 2,000 points: evenly spaced ones, and the smallest and largest of every column."""
    if not readings:
        return None
    count = len(readings)
    points: Sequence[int] = range(count)
    if count > SERIES_POINTS:
        keep: set[int] = set()
        of_metrics: list[list[Any]] = [values for column in columns for values in column.values()]
        for values in of_metrics:
            if known := [point for point, value in enumerate(values) if value is not None]:
                keep |= {min(known, key=values.__getitem__), max(known, key=values.__getitem__)}
        stride = math.ceil(count / max(1, SERIES_POINTS - len(keep)))
        points = sorted(keep.union(range(0, count, stride)))
    t_s = [round(readings[point].t_s - start_s, 6) for point in points]
    devices = [{name: [values[point] for point in points] for name, values in column.items()} for column in columns]
    return Series(t_s=t_s, devices=devices)


def _flat(kind: str, rows: Sequence[Sequence[float | None]]) -> array[float]:
    return array(kind, (math.nan if value is None else value for row in rows for value in row))


def _window_counts(
    marks: Sequence[MarkRecord],
    place: int,
    metrics: dict[str, Metric],
    why: dict[str, str],
    start_s: float,
    end_s: float,
) -> dict[str, float]:
    """Return the counts of one device in a window: differences of the counters between the marks at its two ends.

    `place` is that of the device in the marks. The rates of bytes in its metrics are replaced by exact ones, and `why`
    receives the reason of every count that is missing.
    """
    counts: dict[str, float] = {}
    measured = [name for name in _BYTES if (old := metrics.get(f"{name}_per_s")) is not None and old.method]
    for name in (*Cumulative.NAMES, *measured):  # a metric of bytes without a method has the reason itself
        ends = _ends(name, marks, place, start_s, end_s)
        if isinstance(ends, str):
            why[name] = ends
            continue
        before, after = ends
        first, last = before.counters[place][name], after.counters[place][name]
        counts[name] = max(first, last) if name == _MOMENTARY else last - first
        if name in measured:
            # Marks around the window have the window's bytes: the device is idle between the window and its marks.
            around = before.answered_s[place] <= start_s and end_s <= after.t_s[place]
            rate = counts[name] / (end_s - start_s if around else after.t_s[place] - before.t_s[place])
            old = metrics[f"{name}_per_s"]
            # Readings of a second may extend beyond the window's ends, where nothing was sent.
            largest = rate if old.max is None else max(rate, old.max)
            metrics[f"{name}_per_s"] = Metric(mean=rate, max=largest, method=old.method, coverage=1.0)
    # The times throttled for power and for heat count together.
    missing = [why.pop(name) for name in THROTTLED if name in why]
    if known := [counts.pop(name) for name in THROTTLED if name in counts]:
        counts["throttled_s"] = math.fsum(known)
    if missing:
        why["throttled_s"] = f"incomplete: {missing[0]}" if known else missing[0]
    return counts


def _ends(
    name: str, marks: Sequence[MarkRecord], place: int, start_s: float, end_s: float
) -> tuple[MarkRecord, MarkRecord] | str:
    """Return the marks nearest to both ends of a window; or the reason why the window has no count."""

    def distance_s(mark: MarkRecord, at_s: float) -> float:
        """Return how far the whole mark is from a time, or how late after it this device's reading may have ended.

        While another program starts, the driver may take a tenth of a second, and for eight GPUs over 0.1 s.
        """
        late_s = mark.answered_s[place] - at_s if mark.t_s[place] < at_s < mark.answered_s[place] else 0.0
        return max(late_s, min(mark.t_s) - at_s, at_s - max(mark.answered_s))

    near_s = max(_MARK_NEAR_S, _MARK_NEAR * (end_s - start_s))
    ends = []
    for end, at_s in (("start", start_s), ("end", end_s)):
        mark = min(marks, key=lambda mark: (distance_s(mark, at_s), abs(mark.t_s[place] - at_s)), default=None)
        if mark is None or distance_s(mark, at_s) > near_s:
            return f"the counter was not read at the window's {end}"
        if name not in mark.counters[place]:
            return mark.why[place].get(name, "the counter is not supported")
        ends.append(mark)
    before, after = ends
    if name != _MOMENTARY and after.t_s[place] <= before.t_s[place]:
        return "the window is too short for a counter: one reading is nearest to both of its ends"
    if name != _MOMENTARY and after.counters[place][name] < before.counters[place][name]:
        return "the counter went back between the window's ends"
    return before, after
