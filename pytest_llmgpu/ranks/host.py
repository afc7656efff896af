"""The use of CPU cores by this process and its machine: a rank that waits for a core is slower than its GPU or CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pytest_llmgpu.report.result import HostUse

_TASKS = Path("/proc/self/task")
_PRESSURE = Path("/proc/pressure/cpu")


def watch() -> Callable[[], HostUse]:
    """Begin a window; the function that is returned ends it and returns the use of CPU cores by this rank."""
    import torch

    wall_s, cpu_s, waits_s, pressure_s = time.monotonic(), time.process_time(), _waits_s(), _pressure_s()

    def end() -> HostUse:
        took_s, used_s = time.monotonic() - wall_s, time.process_time() - cpu_s
        later_s, later_pressure_s = _waits_s(), _pressure_s()
        waited_s = None
        if later_s is not None and waits_s is not None:
            waited_s = max((wait_s - waits_s.get(thread, 0.0) for thread, wait_s in later_s.items()), default=0.0)
        pressed_s = None
        if later_pressure_s is not None and pressure_s is not None:
            pressed_s = later_pressure_s - pressure_s
        return HostUse(
            wall_s=took_s,
            threads=[torch.get_num_threads()],
            cpu_s=[used_s],
            waited_s=[waited_s],
            pressure_s=pressed_s,
        )

    return end


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
