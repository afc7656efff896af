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
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from pytest_llmgpu.processes import die_with_parent
from pytest_llmgpu.profiling.nvml import NvmlMissingError, session
from pytest_llmgpu.profiling.recording import Header, HeaderDevice, MarkRecord, Refusal, TickRecord
from pytest_llmgpu.profiling.sampler.devices import METRICS, Call, Device, open_devices
from pytest_llmgpu.profiling.sampler.rounds import Sampler, ticks


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
                _stream(devices, why, write, period_s=period_s, drift=method == "polling")
        except NvmlMissingError as error:
            write(Refusal(error=str(error)))


def _stream(
    devices: Sequence[Device],
    why: dict[str, str],
    write: Callable[[msgspec.Struct], None],
    *,
    period_s: float,
    drift: bool,
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

    def wait(seconds: float) -> bool:
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
    for k, start_s in ticks(t0_s, period_s, time.monotonic, wait, drift=drift):
        window_ended, orders = requested > orders, requested
        values, seconds = sampler.round(start_s, window_ended=window_ended)
        write(
            TickRecord(
                k=k,
                t_s=start_s,
                values=values,
                why={at: device.why for at, device in enumerate(devices) if device.why != written[at]},
                seconds=seconds,
                cpu_s=time.process_time(),
                orders=orders,
            )
        )
        written = [dict(device.why) for device in devices]


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
