"""The child process that reads NVML at a steady pace: `python -m pytest_llmgpu.profiling.sampler --period 0.1667`.

It writes one line of JSON to stdout at each deadline t0 + k * period of CLOCK_MONOTONIC. First comes a header:

    {"t0_s": ..., "period_s": ..., "metrics": [name], "methods": [call], "windows_s": [seconds or null],
     "devices": [{"index": ..., "uuid": ..., "why": {metric: reason}}], "why": {"gpu 3": reason}}

or `{"error": reason}` and the end; then ticks, values by device and metric in the header's order, null for what could
not be read, its reason told once:

    {"k": 12, "t_s": ..., "values": [[...]], "why": {"0": {metric: reason}}}

A process of its own, since a Python-bound thread beside it would hold the interpreter lock for up to 5 ms a call. It
ends when its stdin closes, and with its parent. A reader that stops reading makes it miss deadlines, nothing worse.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pytest_llmgpu.profiling.devices import SOURCES, Device, open_devices
from pytest_llmgpu.profiling.nvml import NvmlMissingError, session

__all__ = ["BlockingCall", "Sampler", "Tick", "main", "ticks"]

_PR_SET_PDEATHSIG = 1
_GIVE_UP_S = 1.0
"""After this long a blocking call counts as hung; its metric is null until it returns."""


class Tick(NamedTuple):
    """One deadline that is kept, late or not."""

    k: int
    start_s: float


def ticks(t0_s: float, period_s: float, clock: Callable[[], float], wait: Callable[[float], bool]) -> Iterator[Tick]:
    """Yield at each deadline t0 + k * period; one that has passed entirely is skipped, so that ticks never bunch up.

    Args:
        t0_s: First deadline.
        period_s: Seconds between deadlines.
        clock: The time now.
        wait: Waits so many seconds, 0 included; true when sampling is to end.
    """
    k = 0
    while True:
        while True:
            remaining = t0_s + k * period_s - clock()
            if wait(max(0.0, remaining)):
                return
            if remaining <= 0:
                break
        yield Tick(k, clock())
        k = max(k + 1, int((clock() - t0_s) // period_s))


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
            self.device.why[self.metric] = f"{SOURCES[self.metric].method}: did not return within {_GIVE_UP_S:g} s"
            return None
        self._busy = False
        return value

    def _serve(self) -> None:
        while True:
            self._questions.get()
            self._answers.put(self.device.read(self.metric))


class Sampler:
    """Reads every metric of every device, the blocking ones all at once in threads, all others in this thread."""

    def __init__(self, devices: Sequence[Device]) -> None:
        """Read everything once; what NVML refuses now is not asked again."""
        self._devices = devices
        self._calls = {
            (number, metric): BlockingCall(device, metric)
            for number, device in enumerate(devices)
            for metric, source in SOURCES.items()
            if source.window_s is not None
        }
        self._unsupported: set[tuple[int, str]] = set()
        self.sample()
        self._unsupported = {(number, metric) for number, device in enumerate(devices) for metric in device.why}

    def sample(self) -> list[list[float | None]]:
        """Return the values by device and metric, None for what could not be read."""
        asked = {at: call for at, call in self._calls.items() if at not in self._unsupported}
        give_up_s = time.monotonic() + _GIVE_UP_S
        for call in asked.values():
            call.ask()
        values: list[list[float | None]] = [
            [
                None if (number, metric) in self._unsupported or (number, metric) in asked else device.read(metric)
                for metric in SOURCES
            ]
            for number, device in enumerate(self._devices)
        ]
        column = {metric: position for position, metric in enumerate(SOURCES)}
        for (number, metric), call in asked.items():
            values[number][column[metric]] = call.answer(max(0.0, give_up_s - time.monotonic()))
        return values


def main(arguments: Sequence[str] | None = None) -> int:
    """Sample until stdin closes; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pytest_llmgpu.profiling.sampler", description=__doc__)
    parser.add_argument("--period", type=float, default=1 / 6, help="seconds between readings")
    parser.add_argument("--uuids", type=lambda text: text.split(","), help="GPUs to read, in this order (all)")
    parser.add_argument("--parent", type=int, help="process id to end with")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.parent is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != options.parent:  # it ended before the line above
            return 0
    with suppress(BrokenPipeError):
        try:
            with session() as nvml:
                devices, why = open_devices(nvml, options.uuids)
                _stream(devices, why, options.period)
        except NvmlMissingError as error:
            _write({"error": str(error)})
    return 0


def _stream(devices: Sequence[Device], why: dict[str, str], period_s: float) -> None:
    sampler = Sampler(devices)
    told = [dict(device.why) for device in devices]
    t0_s = time.monotonic()
    _write(
        {
            "t0_s": t0_s,
            "period_s": period_s,
            "metrics": list(SOURCES),
            "methods": [source.method for source in SOURCES.values()],
            "windows_s": [source.window_s for source in SOURCES.values()],
            "devices": [{"index": device.index, "uuid": device.uuid, "why": device.why} for device in devices],
            "why": why,
        }
    )
    for tick in ticks(t0_s, period_s, time.monotonic, _stdin_closed):
        record: dict[str, Any] = {"k": tick.k, "t_s": tick.start_s, "values": sampler.sample()}
        news = {str(number): device.why for number, device in enumerate(devices) if device.why != told[number]}
        if news:
            record["why"] = news
            told = [dict(device.why) for device in devices]
        _write(record)


def _write(record: dict[str, Any]) -> None:
    line = memoryview(json.dumps(record, separators=(",", ":")).encode() + b"\n")
    while line:
        line = line[os.write(1, line) :]


def _stdin_closed(seconds: float) -> bool:
    """Wait so long, or until stdin closes; return whether it did."""
    readable, _, _ = select.select([0], [], [], seconds)
    return bool(readable) and os.read(0, 4096) == b""


if __name__ == "__main__":
    sys.exit(main())
