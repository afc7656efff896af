"""The figures of one metric over a window, from the periods that its readings cover."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pytest_llmgpu.report.result import DeviceProfile, Metric, Profile


class Span(NamedTuple):
    """A reading that covers the period before it."""

    value: float
    start_s: float
    end_s: float


def of_window(profile: Profile, device: DeviceProfile, name: str) -> Metric | str:
    """Return the figures of a metric if they are of the window, else the reason why there are none.

    A profile without a reading in the window has the nearest reading, which is not a figure of the case.
    """
    metric = device.metrics.get(name)
    if metric is None or metric.mean is None:
        return device.why.get(name) or profile.why.get("profile", "no sample")
    if metric.coverage == 0 or (metric.coverage is None and not profile.samples):
        return profile.why.get("samples") or f"{metric.method}: no reading covers this window"
    return metric


def moments(
    readings: Sequence[tuple[float, float]], window_s: float | None, method: str, start_s: float, end_s: float
) -> Metric:
    """Return the figures of readings that cover [t, t + window_s] each, or a moment.

    Args:
        readings: time and value of each reading.
        window_s: length of the period that each reading covers; None for a moment or if it is not known.
        method: NVML call that returned the values.
        start_s: start of the window.
        end_s: end of the window.
    """
    values = [value for _, value in readings]
    coverage = None
    if window_s is not None and values:
        coverage = _fraction([(time_s, time_s + window_s) for time_s, _ in readings], start_s, end_s)
    mean = math.fsum(values) / len(values) if values else None
    return Metric(mean=mean, max=max(values, default=None), method=method, coverage=coverage)


def spans(readings: Sequence[Span], nearest: float | None, method: str, start_s: float, end_s: float) -> Metric:
    """Return the figures of readings that cover spans, weighted by the part of each span in the window.

    Args:
        readings: readings that may overlap with the window.
        nearest: value to return if none does.
        method: NVML call that returned the values.
        start_s: start of the window.
        end_s: end of the window.
    """
    parts = [(span, min(span.end_s, end_s) - max(span.start_s, start_s)) for span in readings]
    parts = [(span, part_s) for span, part_s in parts if part_s > 0]
    if not parts:
        return Metric(mean=nearest, max=nearest, method=method, coverage=None if nearest is None else 0.0)
    return Metric(
        mean=math.fsum(span.value * part_s for span, part_s in parts) / math.fsum(part_s for _, part_s in parts),
        max=max(span.value for span, _ in parts),
        method=method,
        coverage=_fraction([(span.start_s, span.end_s) for span, _ in parts], start_s, end_s),
    )


def _fraction(periods: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Return the fraction of [start, end] that the periods cover, which do not overlap."""
    if end_s <= start_s:
        return 0.0
    covered = math.fsum(max(0.0, min(last_s, end_s) - max(first_s, start_s)) for first_s, last_s in periods)
    return min(1.0, covered / (end_s - start_s))
