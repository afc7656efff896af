"""One round of readings: every metric of every device, as each device's choice of sources has it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from pytest_llmgpu.profiling.sampler.calls import CALLS, POLLED, Call
from pytest_llmgpu.profiling.sampler.devices import METRICS, Device

__all__ = ["BlockingCall", "Round", "Sampler"]

_GIVE_UP_S = 1.0
"""After this long a blocking call counts as hung; its metric is null until it returns."""


class Round(NamedTuple):
    """What one round gave, by device and metric."""

    values: list[list[float | None]]
    """None for what could not be read or has nothing to say yet."""
    seconds: list[list[float | None]]
    """How long before the round a value speaks for; None for one of a moment, or of a time after it."""


class BlockingCall:
    """A call that blocks, in a thread of its own that lives as long as the process."""

    def __init__(self, device: Device, metric: str) -> None:
        self.device = device
        self.metric = metric
        self._questions: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._busy = False
        self._hung = False
        threading.Thread(target=self._serve, name=f"{metric} {device.index}", daemon=True).start()

    def ask(self) -> None:
        """Start the call, unless the one before has still not returned."""
        with suppress(queue.Empty):
            self._answers.get_nowait()  # what a call given up returned in the end belongs to no tick
            self._busy = self._hung = False
        if not self._busy:
            self._busy = True
            self._questions.put(None)

    def answer(self, timeout_s: float) -> float | None:
        """Return what the call gave; None, with the device's reason, once it has not returned within the time."""
        if self._hung:
            return None
        try:
            value = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self._hung = True
            self.device.why[self.metric] = f"{CALLS[self.metric].method}: did not return within {_GIVE_UP_S:g} s"
            return None
        self._busy = False
        return value

    def _serve(self) -> None:
        while True:
            self._questions.get()
            self._answers.put(self.device.read(self.metric))


class Sampler:
    """Reads devices that have chosen, the blocking calls all at once in threads, all others in this thread."""

    def __init__(self, devices: Sequence[Device]) -> None:
        """Make every call once; what a device turns out not to have is not asked again."""
        self._devices = devices
        self._polled = [device for device in devices if device.polled]
        self._asked: list[list[str]] = []
        self._threads: dict[tuple[int, str], BlockingCall] = {}
        for number, device in enumerate(devices):
            serial = device.method == "polling"
            chosen = device.chosen.items()
            calls = [metric for metric, source in chosen if isinstance(source, Call) and metric not in device.lacking]
            # The method polling makes its calls one after another, in the order of Shin et al. 2024.
            self._asked.append([metric for metric in (POLLED if serial else METRICS) if metric in calls])
            for metric in self._asked[-1]:
                if CALLS[metric].window_s is not None and not serial:
                    self._threads[number, metric] = BlockingCall(device, metric)
        self._calls()
        for asked, device in zip(self._asked, devices, strict=True):
            asked[:] = [metric for metric in asked if metric not in device.lacking]

    def round(self, now_s: float, *, hurry: bool = False) -> Round:
        """Return the readings of the tick that began then.

        Args:
            now_s: CLOCK_MONOTONIC.
            hurry: A window has ended: what has something to say says it now.
        """
        called = self._calls(now_s, hurry=hurry)
        values: list[list[float | None]] = []
        seconds: list[list[float | None]] = []
        for row in called:
            values.append([row[metric][0] if metric in row else None for metric in METRICS])
            seconds.append([row[metric][1] if metric in row else None for metric in METRICS])
        return Round(values, seconds)

    def poll(self) -> float | None:
        """Look at the byte counters where it is time; return when the next look is due, None where there are none."""
        due = [device.poll(time.monotonic()) for device in self._polled]
        return min((due_s for due_s in due if due_s is not None), default=None)

    def _calls(
        self, now_s: float | None = None, *, hurry: bool = False
    ) -> list[dict[str, tuple[float | None, float | None]]]:
        """Make the calls, and with a time ask the sources too."""
        waiting = {at: call for at, call in self._threads.items() if at[1] in self._asked[at[0]]}
        give_up_s = time.monotonic() + _GIVE_UP_S
        for call in waiting.values():
            call.ask()
        rows: list[dict[str, tuple[float | None, float | None]]] = []
        for number, device in enumerate(self._devices):
            row: dict[str, tuple[float | None, float | None]] = {
                metric: (device.read(metric), None) for metric in self._asked[number] if (number, metric) not in waiting
            }
            if now_s is not None:
                row.update(device.hear(now_s, hurry=hurry))
                self.poll()  # the counters of the other devices go on
            rows.append(row)
        for (number, metric), call in waiting.items():
            rows[number][metric] = (call.answer(max(0.0, give_up_s - time.monotonic())), None)
        return rows
