"""One round of readings: every metric of every device from its chosen source."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from pytest_llmgpu.profiling.sampler.calls import CALLS, POLLED, Call
from pytest_llmgpu.profiling.sampler.devices import METRICS, Device

_GIVE_UP_S = 1.0
"""A blocking call that takes longer counts as hung. Its metric is null until it returns."""


class Round(NamedTuple):
    """The readings of one round, by device and metric."""

    values: list[list[float | None]]
    """None for a reading that failed, or where it is too early for one."""
    seconds: list[list[float | None]]
    """The seconds before the round that a value covers; None for a value at one moment or over a time after it."""


class BlockingCall:
    """A call that blocks, in a thread of its own that lives as long as the process."""

    def __init__(self, device: Device, metric: str) -> None:
        self.device = device
        self.metric = metric
        self._requests: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._busy = False
        self._hung = False
        threading.Thread(target=self._serve, name=f"{metric} {device.index}", daemon=True).start()

    def start(self) -> None:
        """Start the call, unless the call before has still not returned."""
        with suppress(queue.Empty):
            self._results.get_nowait()  # the late result of a call that was given up belongs to no tick
            self._busy = self._hung = False
        if not self._busy:
            self._busy = True
            self._requests.put(None)

    def result(self, timeout_s: float) -> float | None:
        """Return the value of the call; None, with the device's reason, if it has not returned within the time."""
        if self._hung:
            return None
        try:
            value = self._results.get(timeout=timeout_s)
        except queue.Empty:
            self._hung = True
            self.device.why[self.metric] = f"{CALLS[self.metric].method}: did not return within {_GIVE_UP_S:g} s"
            return None
        self._busy = False
        return value

    def _serve(self) -> None:
        while True:
            self._requests.get()
            self._results.put(self.device.read(self.metric))


class Sampler:
    """Reads devices that have chosen their sources: blocking calls all at once in threads, the rest in this thread."""

    def __init__(self, devices: Sequence[Device]) -> None:
        """Make every call once. A call that a device does not have is not made again."""
        self._devices = devices
        self._called: list[list[str]] = []
        self._threads: dict[tuple[int, str], BlockingCall] = {}
        for number, device in enumerate(devices):
            # The method polling makes its calls one after another, in the order of Shin et al. 2024.
            serial = device.method == "polling"
            calls = {metric for metric, source in device.chosen.items() if isinstance(source, Call)} - device.lacking
            self._called.append([metric for metric in (POLLED if serial else METRICS) if metric in calls])
            for metric in self._called[-1]:
                if CALLS[metric].window_s is not None and not serial:
                    self._threads[number, metric] = BlockingCall(device, metric)
        self._read()
        for called, device in zip(self._called, devices, strict=True):
            called[:] = [metric for metric in called if metric not in device.lacking]

    def round(self, now_s: float, *, window_ended: bool = False) -> Round:
        """Return the readings of the tick that begins now.

        Args:
            now_s: CLOCK_MONOTONIC.
            window_ended: A window has ended since the last round: sources that are read once a second are read now.
        """
        rows = self._read(now_s, window_ended=window_ended)
        nothing = (None, None)
        return Round(
            [[row.get(metric, nothing)[0] for metric in METRICS] for row in rows],
            [[row.get(metric, nothing)[1] for metric in METRICS] for row in rows],
        )

    def poll(self) -> float | None:
        """Poll the sources that are due; return when the next poll is due, None if no source needs it."""
        due_s = [device.poll(time.monotonic()) for device in self._devices]
        return min((each_s for each_s in due_s if each_s is not None), default=None)

    def _read(
        self, now_s: float | None = None, *, window_ended: bool = False
    ) -> list[dict[str, tuple[float | None, float | None]]]:
        """Make the calls and, if a time is given, read the sources; return value and seconds by device and metric."""
        blocking = {at: call for at, call in self._threads.items() if at[1] in self._called[at[0]]}
        give_up_s = time.monotonic() + _GIVE_UP_S
        for call in blocking.values():
            call.start()
        rows: list[dict[str, tuple[float | None, float | None]]] = []
        for number, device in enumerate(self._devices):
            row: dict[str, tuple[float | None, float | None]] = {
                metric: (device.read(metric), None)
                for metric in self._called[number]
                if (number, metric) not in blocking
            }
            if now_s is not None:
                row.update(device.averages(now_s, window_ended=window_ended))
                self.poll()  # the counters of the other devices must not wrap meanwhile
            rows.append(row)
        for (number, metric), call in blocking.items():
            rows[number][metric] = (call.result(max(0.0, give_up_s - time.monotonic())), None)
        return rows
