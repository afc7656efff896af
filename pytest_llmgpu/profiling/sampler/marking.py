"""Marks that have been ordered: what cumulative counters say, read between ticks so that no tick waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Marking"]

_EXPECTED_S = 0.02
"""How long the counters of one device are expected to take before the first were read: energy alone takes 15 ms."""

_FORGET = 0.8
"""How much of what a device took is still expected when the next takes less."""


class Counting(Protocol):
    """A device that has cumulative counters."""

    def cumulative(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return the counters by name, and why one is missing."""
        ...


class Marking:
    """Marks in the order they came, each read device by device.

    A device is asked where its answer is expected before the next tick. One is asked after every tick, whatever it
    takes: marks end even where a period is shorter than that.
    """

    def __init__(
        self,
        devices: Sequence[Counting],
        period_s: float,
        clock: Callable[[], float],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        """Begin without an order.

        Args:
            devices: In the order of the stream.
            period_s: Seconds between ticks.
            clock: CLOCK_MONOTONIC.
            write: Takes the record of a mark that is complete.
        """
        self._devices = devices
        self._clock = clock
        self._write = write
        self._expected_s = min(_EXPECTED_S, period_s / 8)
        self._waiting: deque[dict[str, Any]] = deque()
        self._ordered = 0
        self._fresh = True

    def order(self) -> None:
        """Take in an order to read all counters."""
        self._ordered += 1
        self._waiting.append({"mark": self._ordered, "t_s": [], "answered_s": [], "counters": [], "why": []})

    def ticked(self) -> None:
        """Learn that a tick is over."""
        self._fresh = True

    def step(self, due_s: float) -> bool:
        """Ask one device, if one is to be asked and there is time; return whether that was so.

        Args:
            due_s: When the next tick is due.
        """
        start_s = self._clock()
        if not self._waiting or (start_s + self._expected_s > due_s and not self._fresh):
            return False
        self._fresh = False
        mark = self._waiting[0]
        counters, why = self._devices[len(mark["t_s"])].cumulative()
        answered_s = self._clock()
        mark["t_s"].append(start_s)
        mark["answered_s"].append(answered_s)
        mark["counters"].append(counters)
        mark["why"].append(why)
        self._expected_s = max(answered_s - start_s, _FORGET * self._expected_s)
        if len(mark["t_s"]) == len(self._devices):
            self._write(self._waiting.popleft())
        return True
