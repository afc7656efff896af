"""Measure other samplers with the same period, each in a process of its own; prints JSON.

These are nvitop's ResourceMetricCollector in its own thread, and zeus's PowerMonitor with a process per kind of power,
both started as in their documentation except for the period. Each of them reads different metrics.

    python benchmarks/overhead/peers.py nvitop --period 0.1667 --seconds 4
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import statistics
import time
from typing import Any

SETTLE_S = 1.0
"""The time at the beginning that does not count."""


def main() -> None:
    """Run one sampler and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("nvitop", "zeus"))
    parser.add_argument("--period", type=float, default=1 / 6, help="requested seconds between readings (1/6)")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long to measure (4)")
    options = parser.parse_args()
    try:
        version = importlib.metadata.version(options.name)
    except importlib.metadata.PackageNotFoundError:
        print(json.dumps({"installed": None, "why": f"{options.name} is not installed"}))
        return
    try:
        run = {"nvitop": nvitop, "zeus": zeus}[options.name]
        figures = run(options.period, options.seconds)
    except ImportError as error:
        figures = {"why": f"cannot be imported: {error}"}
    print(json.dumps({"installed": version, **figures}))


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and all its threads (Linux: clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


def nvitop(period_s: float, seconds: float) -> dict[str, Any]:
    """Return the cost and the achieved period of nvitop's collector for all GPUs."""
    from nvitop import Device, ResourceMetricCollector

    began_s: list[float] = []

    class Timed(ResourceMetricCollector):  # type: ignore[misc]  # Any, if it is not installed
        def take_snapshots(self) -> Any:
            began_s.append(time.monotonic())
            return super().take_snapshots()

    devices = Device.all()
    with Timed(devices, interval=period_s)("overhead"):
        time.sleep(SETTLE_S)
        start_s, before_s = time.monotonic(), time.process_time()
        time.sleep(seconds)
        taken_s, used_s = time.monotonic() - start_s, time.process_time() - before_s
    inside = [at_s for at_s in began_s if start_s <= at_s <= start_s + taken_s]
    return {
        "class": "ResourceMetricCollector",
        "gpus": len(devices),
        "cpu_s_per_s": used_s / taken_s,
        **_achieved(inside),
    }


def zeus(period_s: float, seconds: float) -> dict[str, Any]:
    """Return the cost, its processes included, and the achieved period of zeus's power monitor for all GPUs."""
    from zeus.monitor.power import PowerMonitor

    monitor = PowerMonitor(update_period=period_s)
    try:
        pids = [process.pid for process in monitor.processes.values()]
        if not pids:
            return {"why": "it found no kind of power to read on these GPUs, and started no process"}
        time.sleep(SETTLE_S)
        wall_s, start_s, before_s = time.time(), time.monotonic(), time.process_time() + sum(map(cpu_s, pids))
        time.sleep(seconds)
        taken_s, used_s = time.monotonic() - start_s, time.process_time() + sum(map(cpu_s, pids)) - before_s
        timelines = monitor.get_all_power_timelines(start_time=wall_s, end_time=wall_s + taken_s)
    finally:
        monitor.stop()
    # It stores only readings that changed: the kind of power that changed most often is closest to the real period.
    kept = [sorted({at_s for points in gpus.values() for at_s, _ in points}) for gpus in timelines.values()]
    return {
        "class": "PowerMonitor",
        "gpus": len(monitor.gpu_indices),
        "processes": len(pids),
        "cpu_s_per_s": used_s / taken_s,
        **_achieved(max(kept, key=len, default=[])),
    }


def _achieved(times_s: list[float]) -> dict[str, Any]:
    gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
    if not gaps_s:
        return {"period_s": None, "why": "fewer than two readings were stored; zeus stores only those that changed"}
    return {"period_s": statistics.median(gaps_s), "period_max_s": max(gaps_s), "readings": len(times_s)}


if __name__ == "__main__":
    main()
