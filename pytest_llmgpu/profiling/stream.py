"""The lines of the sampler's stream, each a JSON record: a header, then ticks and marks; or a refusal."""

from __future__ import annotations

import msgspec


class HeaderDevice(msgspec.Struct, frozen=True):
    """One GPU that the sampler reads."""

    index: int
    """NVML's index of the GPU."""
    uuid: str
    """NVML's UUID of the GPU."""
    why: dict[str, str]
    """Maps a metric to the reason why it is never read."""
    methods: list[str]
    """[metric] The NVML call that the metric comes from; empty if it has no source."""
    windows_s: list[float | None]
    """[metric] How long each reading measures from its tick on; None for an instant, an earlier or an unknown time."""


class Refusal(msgspec.Struct, frozen=True):
    """The only line of a sampler that has nothing to read."""

    error: str
    """The reason."""


class Header(msgspec.Struct, frozen=True):
    """The first line of the sampler's stream."""

    t0_s: float
    """The CLOCK_MONOTONIC time of the first deadline."""
    period_s: float
    """The seconds between two deadlines."""
    metrics: list[str]
    """The names of the values of each device, in order."""
    devices: list[HeaderDevice]
    """The GPUs, in the order of the values of a tick."""
    spans: bool = False
    """True if some readings cover the time before them. A window then needs the tick after its end."""
    why: dict[str, str] = {}
    """Maps `gpu 3` to the reason why it did not answer."""


class TickRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The readings that began at one deadline."""

    k: int
    """The number of the deadline t0 + k * period."""
    t_s: float
    """The CLOCK_MONOTONIC time at which the readings began."""
    values: list[list[float | None]]
    """[device, metric] The reading; None if it failed or if it is too early for one."""
    why: dict[int, dict[str, str]] = {}
    """Maps a device's place in the header to the reasons by metric, if they have changed."""
    seconds: list[list[float | None]] = []
    """[device, metric] The seconds before the tick that a value covers; None for a moment or a time after it."""
    cpu_s: float | None = None
    """The CPU seconds that the sampler has used so far."""
    orders: int = 0
    """The number of marks requested before the tick. Sources that are read once a second are read after a request."""


class MarkRecord(msgspec.Struct, frozen=True):
    """A reading of the cumulative counters, made when a window begins or ends."""

    mark: int
    """The number of the mark, from 1."""
    t_s: list[float]
    """[device] The CLOCK_MONOTONIC time at which its reading began."""
    answered_s: list[float]
    """[device] The CLOCK_MONOTONIC time at which its reading ended."""
    counters: list[dict[str, float]]
    """[device] The counts by name."""
    why: list[dict[str, str]]
    """[device] Maps a name to the reason why it has no count."""
