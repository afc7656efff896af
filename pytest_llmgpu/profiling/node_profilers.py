"""The profilers of several nodes as one: each node has a sampler, and cuts its own stream by its own clock."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from pytest_llmgpu.profiling.profiler import Profiler
from pytest_llmgpu.profiling.sampler.devices import Method
from pytest_llmgpu.report.result import Profile, Series

_Answer = TypeVar("_Answer")

Call = Callable[..., Any]
"""`call(fn, *args)` runs a function in the agent of another node and returns what it returns.

It raises OSError if the node cannot be reached.
"""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the profiler of another node."""

    period_s: float
    """Seconds between readings."""
    uuids: tuple[str, ...]
    """The GPUs to read."""
    method: Method = "auto"
    """See `Profiler`."""


class RemoteProfiler:
    """The profiler of another node, which its agent runs; a node that is lost has profiles without readings.

    All times are of the CLOCK_MONOTONIC of that node.
    """

    def __init__(self, call: Call, settings: Settings) -> None:
        self._call = call
        self._settings = settings
        self._lost: str | None = None

    def start(self) -> None:
        """Start the sampler."""
        self._ask("start", None)

    def now_s(self) -> list[float]:
        """Return the time of the node; 0 if it is lost."""
        return self._ask("now_s", [0.0])

    def mark(self, *, wait: bool = False) -> None:
        """Request a reading of the cumulative counters."""
        self._ask("mark", None, wait=wait)

    def slice(self, starts_s: Sequence[float], ends_s: Sequence[float], held_bytes: Mapping[str, int]) -> Profile:
        """Return the profile between two times; one without readings if the node is lost."""
        nothing = Profile(
            period_s=self._settings.period_s,
            duration_s=max(0.0, ends_s[0] - starts_s[0]),
            samples=0,
            missed=0,
            lateness_p99_s=None,
        )
        found = self._ask("slice", nothing, starts_s=starts_s, ends_s=ends_s, held_bytes=dict(held_bytes))
        return msgspec.structs.replace(found, why={"profile": self._lost}) if self._lost else found

    def used_bytes(self) -> Mapping[str, int]:
        """Return the memory in use now by UUID; nothing if the node is lost."""
        return self._ask("used_bytes", {})

    def close(self) -> None:
        """End the sampler."""
        self._ask("close", None)

    def _ask(self, method: str, default: _Answer, **arguments: object) -> _Answer:
        if self._lost is None:
            try:
                answer: _Answer = self._call(ask_here, self._settings, method, arguments)
            except OSError as error:
                self._lost = f"the node cannot be reached: {error}"
            else:
                return answer
        return default


_here: dict[Settings, Profiler] = {}
"""The profiler that this process runs for another node; at most one."""


def ask_here(settings: Settings, method: str, arguments: Mapping[str, Any]) -> Any:
    """Call a method of the profiler of this node for another one. The agent of a node runs this."""
    if settings not in _here:
        close_here()
        _here[settings] = Profiler(settings.period_s, settings.uuids, method=settings.method)
    return getattr(_here[settings], method)(**arguments)


def close_here() -> None:
    """End the sampler that this process runs for another node."""
    while _here:
        _here.popitem()[1].close()


class NodeProfilers:
    """The profilers of all nodes of a run, in the order of the nodes. It has the methods of a `Profiler` for a run."""

    def __init__(self, here: Profiler, others: Sequence[Profiler | RemoteProfiler], indices: Mapping[str, int]) -> None:
        """Join the profilers of the nodes; none is started.

        `indices` has the index of each GPU among those of all nodes by its UUID.
        """
        self.here = here
        """The profiler of the node of this process."""
        self._profilers = [here, *others]
        self._indices = indices

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """See `Profiler`."""
        return self.here.held_bytes

    @held_bytes.setter
    def held_bytes(self, held_bytes: Mapping[str, int]) -> None:
        self.here.held_bytes = held_bytes

    def start(self) -> None:
        """Start the samplers that do not run."""
        self._each(lambda profiler, _: profiler.start())

    def now_s(self) -> list[float]:
        """Return the time of each node."""
        return [time_s for times_s in self._each(lambda profiler, _: profiler.now_s()) for time_s in times_s]

    def mark(self, *, wait: bool = False) -> None:
        """Request a reading of the cumulative counters on every node."""
        self._each(lambda profiler, _: profiler.mark(wait=wait))

    def slice(
        self, starts_s: Sequence[float], ends_s: Sequence[float], held_bytes: Mapping[str, int] | None = None
    ) -> Profile:
        """Return the profile of all devices; each node has a start and an end in its own time."""
        held = self.held_bytes if held_bytes is None else held_bytes
        found = self._each(lambda profiler, node: profiler.slice([starts_s[node]], [ends_s[node]], held))
        return joined(found, self._indices)

    def used_bytes(self) -> dict[str, int]:
        """Return the memory in use now by UUID, on all nodes."""
        return {
            uuid: size for used in self._each(lambda profiler, _: profiler.used_bytes()) for uuid, size in used.items()
        }

    def close(self) -> None:
        """End the samplers."""
        self._each(lambda profiler, _: profiler.close())

    def _each(self, do: Callable[[Profiler | RemoteProfiler, int], _Answer]) -> list[_Answer]:
        """Return what a call of each profiler returns; nodes are called at the same time."""
        with ThreadPoolExecutor(len(self._profilers)) as pool:
            return list(pool.map(do, self._profilers, range(len(self._profilers))))


def joined(profiles: Sequence[Profile], indices: Mapping[str, int]) -> Profile:
    """Return the profiles of several nodes as one.

    Figures of a device are those of its node; `indices` has its index among those of all nodes by UUID. For the whole,
    the node with the fewest samples counts. The series of the other nodes are read at the times of the first one: each
    value is that of the nearest sample since the start of the window.
    """
    lateness = [one.lateness_p99_s for one in profiles if one.lateness_p99_s is not None]
    cpu = [one.sampler_cpu_s for one in profiles if one.sampler_cpu_s is not None]
    why: dict[str, str] = {}
    for node, one in enumerate(profiles):
        for name, reason in one.why.items():
            why[name] = "; ".join(filter(None, (why.get(name), f"node {node}: {reason}")))
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
        sampler_cpu_s=sum(cpu) if cpu else None,
        series=_joined_series([one.series for one in profiles if one.devices]),
        why=why,
    )


def _joined_series(series: Sequence[Series | None]) -> Series | None:
    known = [one for one in series if one is not None]
    if not known or len(known) < len(series):
        return None
    devices = []
    for one in known:
        places = []
        for moment_s in known[0].t_s:
            after = bisect.bisect_left(one.t_s, moment_s)
            near = range(max(0, after - 1), min(len(one.t_s), after + 1))
            places.append(min(near, key=lambda place: abs(one.t_s[place] - moment_s)))
        devices += [{name: [values[place] for place in places] for name, values in row.items()} for row in one.devices]
    return Series(t_s=known[0].t_s, devices=devices)
