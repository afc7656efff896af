"""What the sampler has streamed so far, and the profiles that are cut out of it."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pytest_llmgpu.profiling.counter_deltas import Mark, counted
from pytest_llmgpu.profiling.stream import Header, MarkRecord, TickRecord
from pytest_llmgpu.report.profile_figures import Span, moments, spans
from pytest_llmgpu.report.result import DeviceProfile, Metric, Profile, Series

__all__ = ["HISTORY_BYTES", "SERIES_POINTS", "Reading", "Recording"]

HISTORY_BYTES = 64 << 20
"""The oldest readings are dropped beyond this, unless a window that is still open needs them: 2 hours of 8 GPUs."""

_READING_BYTES = 200
"""What a kept tick costs beside its values."""

SERIES_POINTS = 2000
"""Most points a series keeps."""

_MARKS = 1000
"""Marks kept: two a window."""

_REACH_S = 5.0
"""A reading so long after a window's end says nothing of it any more: the ring's speak for a second."""

_FULL = 0.95
"""Where readings speak for so much of a window, a reason of another time is none of this one."""

_Columns = dict[str, list[float | None]]
"""One device's values over the readings, by metric."""


class Reading(NamedTuple):
    """A tick as it is kept: 8 bytes a value, since sessions are long."""

    k: int
    t_s: float
    values: array[float]
    """[device * metric], NaN for None."""
    seconds: array[float] | None
    """[device * metric], NaN for None; None where no value has any."""
    cpu_s: float | None


class Recording:
    """The stream of one sampler. Not safe in threads: its owner locks."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._why = [dict(device.why) for device in header.devices]
        self._kept: deque[Reading] = deque()
        self._marks: deque[MarkRecord] = deque(maxlen=_MARKS)
        self._dropped = False
        self._orders = 0
        values = len(header.devices) * len(header.metrics)
        self._capacity = HISTORY_BYTES // (_READING_BYTES + (12 if header.spans else 8) * values)

    def add(self, tick: TickRecord, open_since_s: float = math.inf) -> None:
        """Keep a tick and drop what no slice needs any more.

        Args:
            tick: Ticks come in the order of their deadlines.
            open_since_s: Start of the oldest window still open.
        """
        seconds = _flat("f", tick.seconds) if tick.seconds else None
        self._kept.append(Reading(tick.k, tick.t_s, _flat("d", tick.values), seconds, tick.cpu_s))
        self._orders = tick.orders
        for place, reasons in tick.why.items():
            self._why[place].update(reasons)
        while len(self._kept) > self._capacity and self._kept[0].t_s < open_since_s:
            self._kept.popleft()
            self._dropped = True

    def mark(self, mark: MarkRecord) -> None:
        """Keep a mark; they come in order."""
        self._marks.append(mark)

    @property
    def marks(self) -> int:
        """Number of the latest mark; 0 before the first."""
        return self._marks[-1].mark if self._marks else 0

    def cpu_s(self, start_s: float, end_s: float) -> float | None:
        """Return the CPU seconds the sampler used in that time, by the ticks inside; None with fewer than two."""
        inside = [reading for reading in self._kept if start_s <= reading.t_s <= end_s and reading.cpu_s is not None]
        if not inside or inside[0] is inside[-1]:
            return None
        first, last = inside[0], inside[-1]
        return ((last.cpu_s or 0.0) - (first.cpu_s or 0.0)) / (last.t_s - first.t_s) * (end_s - start_s)

    def settled(self, start_s: float, end_s: float, orders: int = 0) -> bool:
        """Return whether no tick still to come can change the slice between these times.

        Args:
            start_s: Start of the window.
            end_s: Its end.
            orders: Marks ordered so far: the tick after the latest says what has been read once a second until then.
        """
        if self.behind(end_s):
            return False
        if self.header.spans:
            return self._kept[-1].t_s > end_s and self._orders >= orders
        # Without a reading inside, the one after may be nearer than the one before.
        if self._kept[-1].t_s > end_s:
            return True
        return any(start_s <= reading.t_s <= end_s for reading in reversed(self._kept))

    def behind(self, end_s: float) -> bool:
        """Return whether the tick of the last deadline before that time has not come yet."""
        return not self._kept or self._kept[-1].k < self._last_deadline(end_s)

    def profile(self, start_s: float, end_s: float, held_bytes: Mapping[str, int], why: Mapping[str, str]) -> Profile:
        """Cut the profile between two CLOCK_MONOTONIC times.

        A window without a reading inside gets the nearest one, says so in `why["samples"]`, and counts 0 samples.

        Args:
            start_s: Start of the window.
            end_s: Its end.
            held_bytes: UUID to bytes to take out of memory_used_bytes.
            why: What is wrong with the stream as a whole.
        """
        inside = [reading for reading in self._kept if start_s <= reading.t_s <= end_s]
        reasons = {**self.header.why, **why}
        readings = inside
        if not inside and self._kept:
            nearest = min(self._kept, key=lambda reading: max(start_s - reading.t_s, reading.t_s - end_s))
            distance_s = max(start_s - nearest.t_s, nearest.t_s - end_s)
            reasons["samples"] = f"no reading fell inside the window; the nearest is {distance_s:.3g} s away"
            readings = [nearest]
        if not self._kept:
            reasons["profile"] = "the sampler has given no reading"
        if self._dropped and (not self._kept or start_s < self._kept[0].t_s):
            reasons["history"] = "readings from its beginning were dropped to save memory; an open window keeps them"
        columns = self._columns(readings, held_bytes)
        return Profile(
            period_s=self.header.period_s,
            duration_s=end_s - start_s,
            samples=len(inside),
            missed=self._missed(start_s, end_s),
            lateness_p99_s=self._lateness_p99(inside),
            devices=self._devices(readings, columns, start_s, end_s),
            sampler_cpu_s=self.cpu_s(start_s, end_s),
            series=self._series(readings, columns, start_s),
            why=reasons,
        )

    def _last_deadline(self, end_s: float) -> int:
        return math.floor((end_s - self.header.t0_s) / self.header.period_s)

    def _missed(self, start_s: float, end_s: float) -> int:
        """Count the deadlines inside the window without a tick, as far back as ticks are kept."""
        first = max(0, math.ceil((start_s - self.header.t0_s) / self.header.period_s))
        if self._dropped and self._kept:
            first = max(first, self._kept[0].k)
        last = self._last_deadline(end_s)
        return max(0, last - first + 1) - sum(first <= reading.k <= last for reading in self._kept)

    def _lateness_p99(self, inside: Sequence[Reading]) -> float | None:
        late = sorted(reading.t_s - (self.header.t0_s + reading.k * self.header.period_s) for reading in inside)
        return max(0.0, late[math.ceil(0.99 * len(late)) - 1]) if late else None

    def _columns(self, readings: Sequence[Reading], held_bytes: Mapping[str, int]) -> list[_Columns]:
        """Return per device each metric's values over the readings, held bytes taken out."""
        columns: list[_Columns] = []
        for place, device in enumerate(self.header.devices):
            held = {"memory_used_bytes": held_bytes.get(device.uuid, 0)}
            offset = place * len(self.header.metrics)
            columns.append(
                {
                    metric: [
                        # A reading from before the bytes were held must not fall below zero.
                        None if math.isnan(value) else max(0.0, value - held.get(metric, 0))
                        for value in (reading.values[offset + number] for reading in readings)
                    ]
                    for number, metric in enumerate(self.header.metrics)
                }
            )
        return columns

    def _devices(
        self,
        readings: Sequence[Reading],
        columns: Sequence[_Columns],
        start_s: float,
        end_s: float,
    ) -> list[DeviceProfile]:
        devices: list[DeviceProfile] = []
        reaching = [reading for reading in self._kept if start_s < reading.t_s < end_s + _REACH_S] or readings
        for place, (device, why, column) in enumerate(zip(self.header.devices, self._why, columns, strict=True)):
            metrics: dict[str, Metric] = {}
            reasons: dict[str, str] = {}
            for number, metric in enumerate(self.header.metrics):
                method, window_s = device.methods[number], device.windows_s[number]
                known = [
                    (reading.t_s, value)
                    for reading, value in zip(readings, column[metric], strict=True)
                    if value is not None
                ]
                spoken = _spans(reaching, place * len(self.header.metrics) + number)
                if spoken is None:
                    figures = moments(known, window_s, method, start_s, end_s)
                    complete = bool(readings) and None not in column[metric]
                else:
                    figures = spans(spoken, known[-1][1] if known else None, method, start_s, end_s)
                    complete = (figures.coverage or 0.0) >= _FULL
                if figures.mean is None:
                    reasons[metric] = f"{method or 'NVML'}: no reading speaks for this window"
                # A reason from another time says nothing of a window in which every reading came.
                if not complete and metric in why:
                    reasons[metric] = why[metric]
                metrics[metric] = figures
            marks = [
                Mark(
                    mark.t_s[place],
                    mark.answered_s[place],
                    mark.counters[place],
                    mark.why[place],
                    (min(mark.t_s), max(mark.answered_s)),
                )
                for mark in self._marks
            ]
            counts = counted(marks, metrics, reasons, start_s, end_s)
            devices.append(
                DeviceProfile(
                    index=device.index,
                    uuid=device.uuid,
                    metrics=metrics,
                    energy_j=counts.pop("energy_j", None),
                    throttled_s=counts.pop("throttled_s", None),
                    counters=counts,
                    why=reasons,
                )
            )
        return devices

    def _series(self, readings: Sequence[Reading], columns: Sequence[_Columns], start_s: float) -> Series | None:
        if not readings:
            return None
        points = _thinned(len(readings), [values for column in columns for values in column.values()])
        return Series(
            t_s=[round(readings[point].t_s - start_s, 6) for point in points],
            devices=[
                {metric: [values[point] for point in points] for metric, values in column.items()} for column in columns
            ],
        )


def _spans(readings: Sequence[Reading], at: int) -> list[Span] | None:
    """Return what that column's readings say of the time before them; None where they speak for no span."""
    found = [
        Span(reading.values[at], reading.t_s - reading.seconds[at], reading.t_s)
        for reading in readings
        if reading.seconds is not None and not math.isnan(reading.seconds[at])
    ]
    return found or None


def _flat(kind: str, rows: Sequence[Sequence[float | None]]) -> array[float]:
    return array(kind, (math.nan if value is None else value for row in rows for value in row))


def _thinned(count: int, columns: Sequence[Sequence[Any]]) -> list[int]:
    """Return which of `count` points to keep: evenly spaced ones, and every column's smallest and largest."""
    if count <= SERIES_POINTS:
        return list(range(count))
    keep: set[int] = set()
    for column in columns:
        known = [point for point in range(count) if column[point] is not None]
        if known:
            keep.add(min(known, key=column.__getitem__))
            keep.add(max(known, key=column.__getitem__))
    stride = math.ceil(count / max(1, SERIES_POINTS - len(keep)))
    return sorted(keep.union(range(0, count, stride)))
