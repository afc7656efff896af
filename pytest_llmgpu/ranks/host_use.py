"""The use of CPU cores by this process and its machine: a rank that waits for a core is slower than its GPU or CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

_TASKS = Path("/proc/self/task")
_PRESSURE = Path("/proc/pressure/cpu")


class RankHostUse(msgspec.Struct, kw_only=True):
    """The use of CPU cores by one rank in a window; None is what the kernel does not count."""

    wall_s: float = 0.0
    """Length of the window."""
    cpu_s: float = 0.0
    """CPU time of all threads of the rank."""
    waited_s: float | None = None
    """Longest time in which one thread of the rank could run and waited for a core."""
    pressure_s: float | None = None
    """Time in which any process of the machine waited for a core."""


@contextmanager
def watched() -> Iterator[RankHostUse]:
    """Fill the record with the use of CPU cores in the block."""
    use = RankHostUse()
    wall_s, cpu_s, waits_s, pressure_s = time.monotonic(), time.process_time(), _waits_s(), _pressure_s()
    yield use
    use.wall_s, use.cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
    later_s, later_pressure_s = _waits_s(), _pressure_s()
    if later_s is not None and waits_s is not None:
        use.waited_s = max((wait_s - waits_s.get(thread, 0.0) for thread, wait_s in later_s.items()), default=0.0)
    if later_pressure_s is not None and pressure_s is not None:
        use.pressure_s = later_pressure_s - pressure_s


def _waits_s() -> dict[str, float] | None:
    """Return for each thread the time in which it could run and waited for a core; None where it is not counted."""
    found = {}
    try:
        for thread in _TASKS.iterdir():
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # no such file, or a thread that has just ended
        return None
    return found


def _pressure_s() -> float | None:
    """Return the time since the start of the machine in which a process waited for a core; None if not counted."""
    try:
        line = _PRESSURE.read_text().splitlines()[0]  # some avg10=0.00 avg60=0.00 avg300=0.00 total=12345
        return int(line.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return None
