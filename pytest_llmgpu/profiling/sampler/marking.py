"""Marks: readings of the cumulative counters on request, made between ticks so that they delay no tick."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from pytest_llmgpu.profiling.stream import MarkRecord

_DECAY = 0.8
"""The time expected for a device falls to this fraction of itself at most, if the next reading takes less."""


class Counting(Protocol):
    """A device that has cumulative counters."""

    def cumulative(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return the counts by name, and the reasons of those that are missing."""
        ...


class Marking:
    """Marks in the order of their requests, each read device by device.

    A device is read if the reading is expected to end before the next tick. One device is read after every tick in any
    case: marks are completed even if the period is shorter than a reading.
    """

    def __init__(
        self,
        devices: Sequence[Counting],
        clock: Callable[[], float],
        write: Callable[[MarkRecord], None],
    ) -> None:
        """Begin without a request."""
        self._devices = devices
        self._clock = clock
        self._write = write
        self._expected_s = 0.0
        self._waiting: deque[MarkRecord] = deque()
        self.requested = 0
        """The number of marks requested so far."""
        self._after_tick = True

    def request(self) -> None:
        """Add a request to read all counters."""
        self.requested += 1
        self._waiting.append(MarkRecord(mark=self.requested, t_s=[], answered_s=[], counters=[], why=[]))

    def ticked(self) -> None:
        """Note that a tick has ended."""
        self._after_tick = True

    def step(self, due_s: float) -> bool:
        """Read one device, if a mark waits and there is time before the next tick; return whether a device was read."""
        start_s = self._clock()
        if not self._waiting or (start_s + self._expected_s > due_s and not self._after_tick):
            return False
        self._after_tick = False
        mark = self._waiting[0]
        counters, why = self._devices[len(mark.t_s)].cumulative()
        answered_s = self._clock()
        mark.t_s.append(start_s)
        mark.answered_s.append(answered_s)
        mark.counters.append(counters)
        mark.why.append(why)
        self._expected_s = max(answered_s - start_s, _DECAY * self._expected_s)
        if len(mark.t_s) == len(self._devices):
            self._write(self._waiting.popleft())
        return True
