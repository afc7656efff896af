"""The child process that reads NVML in a fixed period; its arguments are those of `main`.

It writes one line of JSON to stdout at each deadline t0 + k * period of CLOCK_MONOTONIC. `recording` has the
records: first a header, or a refusal and the end; then ticks. A line `mark` on stdin requests a reading of the
cumulative counters, whose record is written between two ticks.

It is a process of its own because a thread would have to wait up to 5 ms for the interpreter lock at each call. It ends
when its stdin closes or its parent ends. If nobody reads its stdout, it misses deadlines.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import msgspec

from pytest_llmgpu.processes import die_with_parent
from pytest_llmgpu.profiling.nvml import NvmlMissingError, session
from pytest_llmgpu.profiling.recording import Header, HeaderDevice, MarkRecord, Refusal, TickRecord
from pytest_llmgpu.profiling.sampler.devices import CALLS, METRICS, POLLED, Call, Device, open_devices

_GIVE_UP_S = 1.0
"""A blocking call that takes longer counts as hung. Its metric is null until it returns."""

_Row = dict[str, tuple[float | None, float | None]]
"""Metric to its value and the seconds before the round that the value covers."""


def ticks(
    t0_s: float, period_s: float, clock: Callable[[], float], wait: Callable[[float], bool]
) -> Iterator[tuple[int, float]]:
    """Yield the number and the begin of a round at each deadline t0 + k * period; one that has passed is skipped.

    `wait` waits for the given seconds (0 included) or less, and returns true when sampling is to end.
    """
    k = 0
    while True:
        remaining_s = t0_s + k * period_s - clock()
        if wait(max(0.0, remaining_s)):
            return
        if remaining_s > 0:
            continue
        yield k, clock()
        k = max(k + 1, int((clock() - t0_s) // period_s))


class Sampler:
    """Reads devices that have chosen their sources: blocking calls all at once in threads, the rest in this thread."""

    def __init__(self, devices: Sequence[Device]) -> None:
        """Make every call once. A call that a device does not have is not made again."""
        self._devices = devices
        self._called: list[list[str]] = []
        self._threads: dict[tuple[int, str], ThreadPoolExecutor] = {}
        """Device and metric of each call that blocks to its thread."""
        self._latest: dict[tuple[int, str], Future[float | None]] = {}
        for number, device in enumerate(devices):
            # The method polling makes its calls one after another, in the order of Shin et al. 2024.
            serial = device.method == "polling"
            calls = {metric for metric, source in device.chosen.items() if isinstance(source, Call)} - device.lacking
            self._called.append([metric for metric in (POLLED if serial else METRICS) if metric in calls])
            for metric in self._called[-1]:
                if CALLS[metric].window_s is not None and not serial:
                    self._threads[number, metric] = ThreadPoolExecutor(1)
        self.round()
        for called, device in zip(self._called, devices, strict=True):
            called[:] = [metric for metric in called if metric not in device.lacking]

    def round(
        self, now_s: float | None = None, *, window_ended: bool = False
    ) -> tuple[list[list[float | None]], list[list[float | None]]]:
        """Return the readings of the tick that begins now, and the seconds before it that they cover.

        Without a time the calls are made, and no source is read. If a window has ended since the last round, the
        sources that are read once a second are read too.

        Returns:
            [device, metric] The value, and its seconds. None for a reading that failed or is too early; None for the
            seconds of a value at one moment or over a time after it.
        """
        blocking = {at: thread for at, thread in self._threads.items() if at[1] in self._called[at[0]]}
        give_up_s, started = time.monotonic() + _GIVE_UP_S, {}
        for at, thread in blocking.items():
            if at not in self._latest or self._latest[at].done():  # else it hangs, and its result belongs to no tick
                self._latest[at] = started[at] = thread.submit(self._devices[at[0]].read, at[1])
        rows: list[_Row] = []
        for number, device in enumerate(self._devices):
            called = [metric for metric in self._called[number] if (number, metric) not in blocking]
            row: _Row = {metric: (device.read(metric), None) for metric in called}
            if now_s is not None:
                row.update(device.averages(now_s, window_ended=window_ended))
                self.poll()  # the counters of the other devices must not wrap meanwhile
            rows.append(row)
        for (number, metric), call in started.items():
            if wait([call], max(0.0, give_up_s - time.monotonic())).done:
                rows[number][metric] = (call.result(), None)
            else:
                self._devices[number].why[metric] = f"{CALLS[metric].method}: did not return within {_GIVE_UP_S:g} s"
        cells = [[row.get(metric, (None, None)) for metric in METRICS] for row in rows]
        return [[value for value, _ in row] for row in cells], [[covered_s for _, covered_s in row] for row in cells]

    def poll(self) -> float | None:
        """Poll the sources that are due; return when the next poll is due, None if no source needs it."""
        due_s = [device.poll(time.monotonic()) for device in self._devices]
        return min((each_s for each_s in due_s if each_s is not None), default=None)


def main(period_s: float, method: Any, parent: int, uuids: list[str]) -> None:
    """Sample these GPUs, or all, until stdin closes or the process with the id `parent` ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    # Descriptor 1 is for what libraries print: text between the records would end the stream.
    output = os.dup(1)
    os.dup2(2, 1)

    def write(record: msgspec.Struct) -> None:
        line = memoryview(msgspec.json.encode(record) + b"\n")
        while line:
            line = line[os.write(output, line) :]

    with suppress(BrokenPipeError):
        try:
            with session() as nvml:
                devices, why = open_devices(nvml, uuids or None, method)
                _stream(devices, why, write, period_s)
        except NvmlMissingError as error:
            write(Refusal(error=str(error)))


def _stream(
    devices: Sequence[Device], why: dict[str, str], write: Callable[[msgspec.Struct], None], period_s: float
) -> None:
    """Write the stream until stdin closes. Between the rounds, marks are made and byte counters are polled."""
    sampler, requested = Sampler(devices), 0

    def mark() -> None:
        """Read the cumulative counters of one device after another; the tick that is due meanwhile is late."""
        record = MarkRecord(mark=requested, t_s=[], answered_s=[], counters=[], why=[])
        for device in devices:
            record.t_s.append(time.monotonic())
            counters, reasons = device.cumulative()
            record.answered_s.append(time.monotonic())
            record.counters.append(counters)
            record.why.append(reasons)
            sampler.poll()  # an energy counter may take 15 ms
        write(record)

    def idle(seconds: float) -> bool:
        """Wait for the given time, or less if something must be done; return whether stdin has closed."""
        nonlocal requested
        until_s = time.monotonic() + seconds
        if (poll_s := sampler.poll()) is not None:
            until_s = min(until_s, poll_s)
        readable, _, _ = select.select([0], [], [], max(0.0, until_s - time.monotonic()))
        requests = os.read(0, 4096) if readable else None
        for _ in range(requests.count(b"\n") if requests else 0):
            requested += 1
            mark()
        return requests == b""

    headers = []
    for device in devices:
        sources = [device.chosen.get(metric) for metric in METRICS]
        methods = ["" if source is None else source.method for source in sources]
        windows_s = [source.window_s if isinstance(source, Call) else None for source in sources]
        headers.append(HeaderDevice(device.index, device.uuid, device.why, methods, windows_s))
    written = [dict(device.why) for device in devices]
    t0_s = time.monotonic()
    write(Header(t0_s, period_s, list(METRICS), headers, why))
    orders = 0
    for k, start_s in ticks(t0_s, period_s, time.monotonic, idle):
        window_ended, orders = requested > orders, requested
        values, seconds = sampler.round(start_s, window_ended=window_ended)
        changed = {at: device.why for at, device in enumerate(devices) if device.why != written[at]}
        write(TickRecord(k=k, t_s=start_s, values=values, why=changed, seconds=seconds, orders=orders))
        written = [dict(device.why) for device in devices]


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
