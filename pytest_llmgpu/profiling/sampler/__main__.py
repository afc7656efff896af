"""The child process that reads NVML at a steady pace: `python -m pytest_llmgpu.profiling.sampler --period 0.1667`.

It writes one line of JSON to stdout at each deadline t0 + k * period of CLOCK_MONOTONIC. First comes a header:

    {"t0_s": ..., "period_s": ..., "metrics": [name], "spans": whether some values speak for the time before them,
     "devices": [{"index": ..., "uuid": ..., "methods": [call or ""], "windows_s": [seconds or null],
                  "why": {metric: reason}}], "why": {"gpu 3": reason}}

or `{"error": reason}` and the end; then ticks, values by device and metric in the header's order, null for what could
not be read, its reason told once, or for what has nothing to say yet; how many seconds before the tick each speaks
for, null for a moment; how many marks were ordered before it; and the CPU seconds that this process has used so far:

    {"k": 12, "t_s": ..., "values": [[...]], "seconds": [[...]], "orders": 3, "cpu_s": ...,
     "why": {"0": {metric: reason}}}

A line `mark` on stdin is answered by what cumulative counters say, per device, read between ticks:

    {"mark": 3, "t_s": [...], "answered_s": [...], "counters": [{"energy_j": ...}], "why": [{name: reason}]}

A process of its own, since a Python-bound thread beside it would hold the interpreter lock for up to 5 ms a call. It
ends when its stdin closes, and with its parent. A reader that stops reading makes it miss deadlines, nothing worse.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, get_args

from pytest_llmgpu.processes import die_with_parent
from pytest_llmgpu.profiling.nvml import NvmlMissingError, session
from pytest_llmgpu.profiling.sampler.calls import Call
from pytest_llmgpu.profiling.sampler.deadlines import compensated, ticks
from pytest_llmgpu.profiling.sampler.devices import METRICS, Device, Method, choose, open_devices
from pytest_llmgpu.profiling.sampler.marking import Marking
from pytest_llmgpu.profiling.sampler.sampling import Sampler

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample until stdin closes; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pytest_llmgpu.profiling.sampler", description=__doc__)
    parser.add_argument("--period", type=float, default=1 / 6, help="seconds between readings")
    parser.add_argument("--uuids", type=lambda text: text.split(","), help="GPUs to read, in this order (all)")
    parser.add_argument(
        "--method",
        choices=get_args(Method),
        default="auto",
        help="best sources, or the three calls of Shin et al. 2024",
    )
    parser.add_argument("--parent", type=int, help="process id to end with")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.parent is not None:
        die_with_parent(options.parent)
    with suppress(BrokenPipeError):
        try:
            with session() as nvml:
                devices, why = open_devices(nvml, options.uuids, options.method)
                choose(devices, options.period)
                _Stream(devices, options.period).run(why, compensated if options.method == "polling" else ticks)
        except (NvmlMissingError, ValueError) as error:
            _write({"error": str(error)})
    return 0


class _Stream:
    """Rounds at their deadlines; between them marks are answered and byte counters looked at."""

    def __init__(self, devices: Sequence[Device], period_s: float) -> None:
        self._devices = devices
        self._period_s = period_s
        self._sampler = Sampler(devices)
        self._marking = Marking(devices, period_s, time.monotonic, _write)
        self._orders = 0
        self._hurry = False

    def run(self, why: dict[str, str], deadlines: Any) -> None:
        """Stream until stdin closes."""
        told = [dict(device.why) for device in self._devices]
        t0_s = time.monotonic()
        _write(
            {
                "t0_s": t0_s,
                "period_s": self._period_s,
                "metrics": list(METRICS),
                "spans": any(device.sources for device in self._devices),
                "devices": [_introduced(device) for device in self._devices],
                "why": why,
            }
        )
        for tick in deadlines(t0_s, self._period_s, time.monotonic, self._wait):
            values, seconds = self._sampler.round(tick.start_s, hurry=self._hurry)
            self._hurry = False
            self._marking.ticked()
            record: dict[str, Any] = {"k": tick.k, "t_s": tick.start_s, "values": values}
            if any(device.sources for device in self._devices):
                record["seconds"] = seconds
                record["orders"] = self._orders
            record["cpu_s"] = time.process_time()
            news = {
                str(number): device.why for number, device in enumerate(self._devices) if device.why != told[number]
            }
            if news:
                record["why"] = news
                told = [dict(device.why) for device in self._devices]
            _write(record)

    def _wait(self, seconds: float) -> bool:
        """Wait so long, less where something is to be done; return whether stdin closed."""
        until_s = time.monotonic() + seconds
        poll_s = self._sampler.poll()
        while self._marking.step(until_s):
            poll_s = self._sampler.poll()  # an energy counter may take 15 ms
        if poll_s is not None:
            until_s = min(until_s, poll_s)
        readable, _, _ = select.select([0], [], [], max(0.0, until_s - time.monotonic()))
        if not readable:
            return False
        orders = os.read(0, 4096)
        for _ in range(orders.count(b"\n")):
            self._marking.order()
            self._orders += 1
            self._hurry = True
        return orders == b""


def _introduced(device: Device) -> dict[str, Any]:
    """Return the header's words on a device."""
    sources = [device.chosen.get(metric) for metric in METRICS]
    return {
        "index": device.index,
        "uuid": device.uuid,
        "methods": ["" if source is None else source.method for source in sources],
        "windows_s": [source.window_s if isinstance(source, Call) else None for source in sources],
        "why": device.why,
    }


def _write(record: dict[str, Any]) -> None:
    line = memoryview(json.dumps(record, separators=(",", ":")).encode() + b"\n")
    while line:
        line = line[os.write(1, line) :]


if __name__ == "__main__":
    sys.exit(main())
