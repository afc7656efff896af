"""The counts of a window: differences of the cumulative counters between the marks at its two ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pytest_llmgpu.profiling.sampler.cumulative import THROTTLED, Cumulative
from pytest_llmgpu.report.result import Metric

_MARK_NEAR_S = 0.1
_MARK_NEAR = 0.01
"""A mark counts as the end of a window within this many seconds, or within this fraction of the window's length."""

_MOMENTARY = "compute_processes"
"""This is no counter: for a window it is the larger of the values at its ends."""

_BYTES = ("nvlink_tx_bytes", "nvlink_rx_bytes")
"""Counts of bytes. Each of them gives the metric that is its rate."""


class Mark(NamedTuple):
    """The counters of one device at a mark."""

    t_s: float
    """The CLOCK_MONOTONIC time at which the reading began."""
    answered_s: float
    """The time at which it ended. While another program starts, the driver may take a tenth of a second."""
    counts: Mapping[str, float]
    """The counts by name."""
    why: Mapping[str, str]
    """Maps a name to the reason why it has no count."""
    span_s: tuple[float, float]
    """When the reading of the first device began and that of the last ended: with eight GPUs that takes over 0.1 s."""

    def distance_s(self, at_s: float) -> float:
        """Return how far the whole mark is from a time, or how late after it this device's reading may have ended."""
        late_s = self.answered_s - at_s if self.t_s < at_s < self.answered_s else 0.0
        return max(late_s, self.span_s[0] - at_s, at_s - self.span_s[1])


_Ends = tuple[tuple[Mark, float], tuple[Mark, float]]
"""Mark and count at both ends of a window."""


def window_counts(
    marks: Sequence[Mark], metrics: dict[str, Metric], why: dict[str, str], start_s: float, end_s: float
) -> dict[str, float]:
    """Return the counts of one device in a window, and put the rates that follow from them into `metrics`.

    Args:
        marks: The marks of the device, in order.
        metrics: Its metrics in the window; the rates of bytes are replaced by exact ones.
        why: Receives the reason of every count that is missing.
        start_s: Start of the window.
        end_s: End of the window.
    """
    counts: dict[str, float] = {}
    for name in Cumulative.NAMES:
        ends = _ends(name, marks, start_s, end_s)
        difference = _difference(ends)
        if name == _MOMENTARY and not isinstance(ends, str):
            counts[name] = max(count for _, count in ends)
        elif isinstance(difference, str):
            why[name] = difference
        else:
            counts[name] = difference
    _add_throttled(counts, why)
    for name in _BYTES:
        old = metrics.get(f"{name}_per_s")
        if old is None or not old.method:
            continue  # the metric has the reason why the device has none
        ends = _ends(name, marks, start_s, end_s)
        difference = _difference(ends)
        if isinstance(ends, str) or isinstance(difference, str):
            why[name] = str(difference)
            continue
        counts[name] = difference
        before, after = ends[0][0], ends[1][0]
        # Marks around the window have the window's bytes: the device is idle between the window and its marks.
        around = before.answered_s <= start_s and end_s <= after.t_s
        rate = difference / (end_s - start_s if around else after.t_s - before.t_s)
        # Readings of a second may extend beyond the window's ends, where nothing was sent.
        largest = rate if old.max is None else max(rate, old.max)
        metrics[f"{name}_per_s"] = Metric(mean=rate, max=largest, method=old.method, coverage=1.0)
    return counts


def _add_throttled(counts: dict[str, float], why: dict[str, str]) -> None:
    """Replace the times throttled for power and for heat by their sum; if one is missing, add the reason."""
    known = [counts.pop(name) for name in THROTTLED if name in counts]
    missing = [why.pop(name) for name in THROTTLED if name in why]
    if known:
        counts["throttled_s"] = math.fsum(known)
    if missing:
        why["throttled_s"] = f"incomplete: {missing[0]}" if known else missing[0]


def _ends(name: str, marks: Sequence[Mark], start_s: float, end_s: float) -> _Ends | str:
    """Return the counts at the marks nearest to the ends of a window; or the reason why one is missing."""
    near_s = max(_MARK_NEAR_S, _MARK_NEAR * (end_s - start_s))
    ends = []
    for end, at_s in (("start", start_s), ("end", end_s)):
        mark = min(marks, key=lambda mark: (mark.distance_s(at_s), abs(mark.t_s - at_s)), default=None)
        if mark is None or mark.distance_s(at_s) > near_s:
            return f"the counter was not read at the window's {end}"
        if name not in mark.counts:
            return mark.why.get(name, "the counter is not supported")
        ends.append((mark, mark.counts[name]))
    first, last = ends
    return first, last


def _difference(ends: _Ends | str) -> float | str:
    """Return the count between both ends; or the reason why there is none."""
    if isinstance(ends, str):
        return ends
    (before, first), (after, last) = ends
    if after.t_s <= before.t_s:
        return "the window is too short for a counter: one reading is nearest to both of its ends"
    if last < first:
        return "the counter went back between the window's ends"
    return last - first
