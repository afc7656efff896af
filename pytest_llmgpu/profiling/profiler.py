"""Starts the sampler, receives its stream, and cuts a profile for every window of time.

Times are CLOCK_MONOTONIC seconds, as `time.monotonic()` gives them in every process of the machine. Each node has a
sampler and a clock of its own: a time of a run is a list with an entry for each node. `NodeProfilers` joins the nodes.
"""

from __future__ import annotations

import bisect
import math
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from pytest_llmgpu import processes
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.recording import Header, MarkRecord, Recording, Refusal, TickRecord
from pytest_llmgpu.profiling.sampler.devices import Method
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.result import Profile, Series

_HEADER_S = 5.0
"""`start` waits this long for the sampler's first line. With a slow driver it comes later and is used from then on."""
_STREAM_S = 2.0
"""A slice waits this long for the stream to pass its end."""
_END_S = 1.0
"""After this time a sampler that should end is killed."""
_ERROR_BYTES = 2**16
"""The end of the sampler's errors, whose last line is reported."""
_FRESH_S = 0.1
_FRESH = 0.01
"""A window can be marked this many seconds after its end, or this fraction of its length (`recording`)."""

Settings = tuple[float, tuple[str, ...], Method]
"""The arguments of a `Profiler`."""


class Window(msgspec.Struct):
    """A block of code. The end and the profile are set when it ends."""

    start_s: float
    """The CLOCK_MONOTONIC time at which the block began."""
    end_s: float | None = None
    """The time at which it ended; None before."""
    profile: Profile | None = None
    """The profile of the block; None before its end."""


class Profiler:
    """The session's sampler and its stream so far.

    Readings are stored up to `recording.HISTORY_BYTES` (hours of them): a slice may reach back that far. Nothing here
    raises on a machine without NVML or if the sampler dies; `why` and the profiles have the reason.
    """

    def __init__(self, period_s: float, uuids: Sequence[str] | None = None, method: Method = "auto") -> None:
        """Prepare to read these GPUs in this order; None for all in NVML's order. Nothing runs before `start`.

        The period is above 0. `method` is `auto` for the best source of each metric, `polling` for the calls of Shin et
        al. 2024.
        """
        self.period_s = period_s
        self.here = self
        """The profiler of the node of this process."""
        self.held_bytes: Mapping[str, int] = {}
        """UUID to the bytes that are subtracted from memory_used_bytes, unless a slice is given others."""
        self._method = method
        self._uuids = None if uuids is None else list(uuids)
        self._changed = threading.Condition()  # guards everything below
        self._listener: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.recording: Recording | None = None
        """The stream so far; None before its first line. The listening thread changes it."""
        self._marks = 0
        self._marked_s = -math.inf
        self._failure: str | None = None
        self._ended = False
        self._closing = False

    @property
    def why(self) -> str | None:
        """The reason why there are no readings, or no more; None while the sampler runs."""
        with self._changed:
            if self._failure is not None or self.recording is not None:
                return self._failure
            if self._listener is None:
                return "the sampler was not started"
            return "the sampler was closed before it answered" if self._ended else "the sampler has not answered yet"

    def now_s(self) -> list[float]:
        """Return the time that windows are cut by."""
        return [time.monotonic()]

    def used_bytes(self) -> Mapping[str, int]:
        """Return the memory in use now, by any process, for each of the chosen GPUs that can be read."""
        return nvml.used_bytes(self._uuids) if self._uuids else {}

    def start(self) -> None:
        """Start the sampler, unless it runs, and wait up to 5 s for its first line.

        A sampler that has ended is replaced, and its stream is dropped.
        """
        with self._changed:
            if self._uuids == []:
                self._failure = "no GPU is visible"
                return
            if self._ended and self.recording is not None and not self._closing:
                self._listener = self._process = self.recording = self._failure = None
                self._marks, self._marked_s, self._ended = 0, -math.inf, False
            if self._listener is None:
                self._listener = threading.Thread(target=self._listen, name="llmgpu sampler", daemon=True)
                self._listener.start()
            self._changed.wait_for(lambda: self.recording is not None or self._ended, _HEADER_S)

    def mark(self, *, wait: bool = False) -> None:
        """Request a reading of the cumulative counters now: energy, throttled time, bytes over NVLink.

        A slice that begins and ends near a mark has their differences. `window` marks both of its ends. `slice` marks
        the end of a window that has just ended. With `wait` they are read when this returns, or 2 s are over; a reading
        takes some milliseconds per device.
        """
        with self._changed:
            process = self._process
            if self.recording is None or self._ended or self._closing or process is None or process.stdin is None:
                return
            with suppress(OSError, ValueError):  # it has ended, which the listener will notice
                os.write(process.stdin.fileno(), b"mark\n")  # unbuffered: closing must not have to write
                self._marks += 1
                self._marked_s = time.monotonic()
            if wait:
                recording, marks = self.recording, self._marks
                self._changed.wait_for(lambda: self._ended or recording.marks >= marks, _STREAM_S)

    def slice(
        self, starts_s: Sequence[float], ends_s: Sequence[float], held_bytes: Mapping[str, int] | None = None
    ) -> Profile:
        """Return the profile between two times. Wait up to 2 s until the stream has passed the end.

        Neither is in the future; ValueError if the end is first. Without `held_bytes` those of the profiler count.
        """
        (start_s,), (end_s,) = starts_s, ends_s
        if end_s < start_s:
            raise ValueError(f"window ends at {end_s} s, before its start at {start_s} s")
        if self._marked_s < end_s and time.monotonic() < end_s + max(_FRESH_S, _FRESH * (end_s - start_s)):
            self.mark()
        with self._changed:
            recording = self.recording
            if recording is not None:
                marks = self._marks
                self._changed.wait_for(
                    lambda: self._ended or (recording.settled(end_s, marks) and recording.marks >= marks), _STREAM_S
                )
                why = {}
                if self._failure is not None:
                    why = {"sampler": self._failure}
                elif not self._ended and recording.behind(end_s):
                    why = {"sampler": f"the sampler did not answer within {_STREAM_S:g} s of the window's end"}
                return recording.profile(start_s, end_s, self.held_bytes if held_bytes is None else held_bytes, why)
        why_none = self.why or "the sampler answered only after the window"
        return _without_readings(self.period_s, start_s, end_s, why_none)

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Profile a block: `with profiler.window() as window: ...`, then `window.profile`.

        The block begins when the counters have been read, which takes some milliseconds per device. The profile's
        `invalid` has the disturbances that the profile shows; the programs of others are not known here.
        """
        self.start()
        self.mark(wait=True)
        window = Window(time.monotonic())
        try:
            yield window
        finally:
            window.end_s = time.monotonic()
            self.mark()
            profile = self.slice([window.start_s], [window.end_s])
            window.profile = msgspec.structs.replace(profile, invalid=disturbances.find(profile))

    def close(self) -> None:
        """End the sampler. Slices of its stream are still possible."""
        with self._changed:
            self._closing = True
            listener, process = self._listener, self._process
        if listener is None:
            return
        if process is not None and process.stdin is not None:
            with suppress(OSError):  # it has ended already
                process.stdin.close()
        listener.join(_END_S)
        if listener.is_alive() and process is not None:
            process.kill()
            listener.join(_END_S)

    def _listen(self) -> None:
        """Run the sampler and receive its stream until it ends, in the thread that the kernel binds the child to."""
        arguments = repr(self.period_s), self._method, str(os.getpid()), *(self._uuids or ())
        command = processes.command("pytest_llmgpu.profiling.sampler", *arguments)
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C in the terminal is for the test process
                )
            except OSError as error:
                self._end(f"the sampler could not be started: {error}")
                return
            if process.stdin is not None:
                os.set_blocking(process.stdin.fileno(), False)  # a sampler that is stopped reads no marks
            with self._changed:
                self._process = process
                closing = self._closing
            if closing and process.stdin is not None:
                process.stdin.close()
            with process:
                try:
                    for line in process.stdout or ():
                        self._take(line)
                except msgspec.MsgspecError as error:
                    self._end(f"the sampler wrote a line that is no record: {error}")
                    process.kill()
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _ERROR_BYTES))
            how = processes.describe_end(process.returncode)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            self._end(f"the sampler ended with {how}" + (f": {lines[-1]}" if lines else ""))

    def _take(self, line: bytes) -> None:
        if not line.endswith(b"\n"):
            return  # the sampler was killed while it wrote
        with self._changed:
            if line.startswith(b'{"error":'):
                self._failure = msgspec.json.decode(line, type=Refusal).error
            elif self.recording is None:
                self.recording = Recording(msgspec.json.decode(line, type=Header))
            elif line.startswith(b'{"mark":'):
                self.recording.kept_marks.append(msgspec.json.decode(line, type=MarkRecord))
            else:
                self.recording.add(msgspec.json.decode(line, type=TickRecord))
            self._changed.notify_all()

    def _end(self, failure: str) -> None:
        with self._changed:
            if not self._closing and self._failure is None:
                self._failure = failure
            self._ended = True
            self._changed.notify_all()


def _without_readings(period_s: float, start_s: float, end_s: float, why: str) -> Profile:
    duration_s, reasons = max(0.0, end_s - start_s), {"profile": why}
    return Profile(period_s=period_s, duration_s=duration_s, samples=0, missed=0, lateness_p99_s=None, why=reasons)


_here: dict[Settings, Profiler] = {}
"""The profiler that this process runs for another node; at most one."""


def ask_here(settings: Settings, method: str, arguments: Mapping[str, Any]) -> Any:
    """Call a method of the profiler of this node for another one. The agent of a node runs this."""
    if settings not in _here:
        close_here()
        _here[settings] = Profiler(*settings)
    return getattr(_here[settings], method)(**arguments)


def close_here() -> None:
    """End the sampler that this process runs for another node."""
    while _here:
        _here.popitem()[1].close()


class NodeProfilers:
    """The profilers of all nodes of a run, in the order of the nodes. It has the methods of a `Profiler` for a run.

    A node that is lost has a profile without readings.
    """

    def __init__(
        self, here: Profiler, others: Sequence[Callable[[str, Mapping[str, Any]], Any]], indices: Mapping[str, int]
    ) -> None:
        """Join the profiler of this node with those of the others; none is started.

        `others` call `ask_here` in a process of their node, and raise OSError if it cannot be reached. `indices` has
        the index of each GPU among those of all nodes by its UUID.
        """
        self.here = here
        self._others = others
        self._indices = indices
        self._lost: dict[int, str] = {}
        """Number of a node to the reason why it cannot be reached."""

    def start(self) -> None:
        """Start the samplers that do not run."""
        self._each("start")

    def now_s(self) -> list[float]:
        """Return the time of each node; 0 if it is lost."""
        return [0.0 if times_s is None else times_s[0] for times_s in self._each("now_s")]

    def mark(self, *, wait: bool = False) -> None:
        """Request a reading of the cumulative counters on every node."""
        self._each("mark", [{"wait": wait}] * (1 + len(self._others)))

    def slice(
        self, starts_s: Sequence[float], ends_s: Sequence[float], held_bytes: Mapping[str, int] | None = None
    ) -> Profile:
        """Return the profile of all devices; each node has a start and an end in its own time."""
        held = dict(self.here.held_bytes if held_bytes is None else held_bytes)
        windows = list(zip(starts_s, ends_s, strict=True))
        found = self._each("slice", [{"starts_s": [a], "ends_s": [b], "held_bytes": held} for a, b in windows])
        for node, reason in self._lost.items():
            found[node] = _without_readings(self.here.period_s, *windows[node], reason)
        return joined(found, self._indices)

    def used_bytes(self) -> dict[str, int]:
        """Return the memory in use now by UUID, on all nodes."""
        return {uuid: size for used in self._each("used_bytes") for uuid, size in (used or {}).items()}

    def close(self) -> None:
        """End the samplers."""
        self._each("close")

    def _each(self, method: str, arguments: Sequence[Mapping[str, Any]] | None = None) -> list[Any]:
        """Return what a method of each profiler returns with its node's arguments, all at once; None if it is lost."""

        def ask(node: int) -> Any:
            own = {} if arguments is None else arguments[node]
            if node == 0:
                return getattr(self.here, method)(**own)
            if node not in self._lost:
                try:
                    return self._others[node - 1](method, own)
                except OSError as error:
                    self._lost[node] = f"the node cannot be reached: {error}"
            return None

        with ThreadPoolExecutor(1 + len(self._others)) as pool:
            return list(pool.map(ask, range(1 + len(self._others))))


def joined(profiles: Sequence[Profile], indices: Mapping[str, int]) -> Profile:
    """Return the profiles of several nodes as one.

    Figures of a device are those of its node; `indices` has its index among those of all nodes by UUID. For the whole,
    the node with the fewest samples counts. The series of the other nodes are read at the times of the first one: each
    value is that of the latest sample, or of the first one.
    """
    lateness = [one.lateness_p99_s for one in profiles if one.lateness_p99_s is not None]
    why: dict[str, str] = {}
    for node, one in enumerate(profiles):
        for name, reason in one.why.items():
            why[name] = "; ".join(filter(None, (why.get(name), f"node {node}: {reason}")))
    series = [one.series for one in profiles if one.devices]
    known = [one for one in series if one is not None]
    columns = []
    for each in known:
        places = [max(0, bisect.bisect(each.t_s, moment_s) - 1) for moment_s in known[0].t_s]
        columns += [{name: [values[place] for place in places] for name, values in row.items()} for row in each.devices]
    return Profile(
        period_s=profiles[0].period_s,
        duration_s=max(one.duration_s for one in profiles),
        samples=min(one.samples for one in profiles),
        missed=max(one.missed for one in profiles),
        lateness_p99_s=max(lateness, default=None),
        devices=[
            msgspec.structs.replace(device, index=indices.get(device.uuid, device.index))
            for one in profiles
            for device in one.devices
        ],
        series=Series(t_s=known[0].t_s, devices=columns) if known and len(known) == len(series) else None,
        why=why,
    )
