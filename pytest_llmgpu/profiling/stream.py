"""The lines of the sampler's stream: a header, then ticks and marks."""

from __future__ import annotations

import msgspec

__all__ = ["Header", "HeaderDevice", "MarkRecord", "TickRecord"]


class HeaderDevice(msgspec.Struct, frozen=True):
    """One GPU the sampler reads."""

    index: int
    uuid: str
    why: dict[str, str]
    """Metric to the reason it is never read."""
    methods: list[str]
    """Where each metric comes from; empty where nothing gives it."""
    windows_s: list[float | None]
    """How long each reading looks from its tick on; None for an instant, a time before it, or where it is not known."""


class Header(msgspec.Struct, frozen=True):
    """First line of the sampler's stream."""

    t0_s: float
    """CLOCK_MONOTONIC of the first deadline."""
    period_s: float
    metrics: list[str]
    """Names of the values of each device, in order."""
    devices: list[HeaderDevice]
    spans: bool = False
    """Whether some readings speak for the time before them, so that a window needs the tick after its end."""
    why: dict[str, str] = {}


class TickRecord(msgspec.Struct, frozen=True):
    """Every other line of the stream: the readings that began at one deadline."""

    k: int
    """Number of the deadline: t0 + k * period."""
    t_s: float
    """CLOCK_MONOTONIC when the readings began."""
    values: list[list[float | None]]
    """[device, metric]"""
    why: dict[int, dict[str, str]] = {}
    """Device's place in the header to metric to the reason, where it is new."""
    seconds: list[list[float | None]] = []
    """[device, metric] how long before the tick a value speaks for; None for a moment or a time after it."""
    cpu_s: float | None = None
    """CPU seconds the sampler has used so far."""
    orders: int = 0
    """Marks that were ordered before it began: after an order, what has something to say says it at the next tick."""


class MarkRecord(msgspec.Struct, frozen=True):
    """What cumulative counters said when a window began or ended."""

    mark: int
    """Marks are numbered from 1."""
    t_s: list[float]
    """[device] CLOCK_MONOTONIC when it was asked."""
    answered_s: list[float]
    """[device] when it had answered."""
    counters: list[dict[str, float]]
    """[device] name to the count."""
    why: list[dict[str, str]]
    """[device] name to the reason it has none."""
