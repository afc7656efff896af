"""How the sampler gets a core in time on a machine that has none left."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress

__all__ = ["LATE_S", "Promptness"]

LATE_S = 0.001
"""Begun later than this though nothing of ours was in the way: every core was busy. The scheduler of a busy machine
looks at who runs every 4 ms only, and at who waits for several of these."""

_PRIORITY = 1
"""The lowest of real time."""

_SPIN_S = 1
"""After so long at real-time priority without a wait, the others get their turn."""
_HUNG_S = 10
"""After so long it hangs in a call that never waits, and is killed."""


class Promptness:
    """Takes real-time priority, where that is allowed, once a tick began late; never before.

    Where a core is idle the usual policy begins on that one in time, while real time would push from its core whatever
    runs there, which may be what is measured.
    """

    def __init__(self) -> None:
        self._tried = False

    def began(self, start_s: float, ready_s: float) -> None:
        """Judge a tick.

        Args:
            start_s: When it began.
            ready_s: When it could have: its deadline, or the end of our own work where that came later.
        """
        if self._tried or start_s - ready_s <= LATE_S:
            return
        self._tried = True
        signal.signal(signal.SIGXCPU, lambda *_: _leave())
        with suppress(OSError, ValueError):  # refused: late as every other process here
            resource.setrlimit(resource.RLIMIT_RTTIME, (_SPIN_S * 1_000_000, _HUNG_S * 1_000_000))
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))


def _leave() -> None:
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
