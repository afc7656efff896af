"""What counters counted in a window: from the marks at its ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pytest_llmgpu.profiling.sampler.cumulative import THROTTLED, Cumulative
from pytest_llmgpu.report.result import Metric

__all__ = ["Mark", "counted"]

_MARK_NEAR_S = 0.1
_MARK_NEAR = 0.01
"""A mark stands for the end of a window within so many seconds, or so much of the window's length."""

_OF_A_MOMENT = "compute_processes"
"""No counter: of a window it is the larger of both ends."""

_BYTES = ("nvlink_tx_bytes", "nvlink_rx_bytes")
"""Counts of bytes, each of which gives the metric that is its rate."""


class Mark(NamedTuple):
    """What one device said at a mark."""

    t_s: float
    """CLOCK_MONOTONIC when it was asked."""
    answered_s: float
    """When it had answered: while another program starts up, the driver may take a tenth of a second."""
    counts: Mapping[str, float]
    why: Mapping[str, str]
    """Name to the reason it has no count."""
    span_s: tuple[float, float]
    """When the first device was asked and the last had answered: energy counters take 15 ms each, so that eight GPUs
    take 0.1 s and the ticks in between."""

    def distance_s(self, at_s: float) -> float:
        """Return how far the mark as a whole is from a time, or by how much this device's answer may be late for it."""
        late_s = self.answered_s - at_s if self.t_s < at_s < self.answered_s else 0.0
        return max(late_s, self.span_s[0] - at_s, at_s - self.span_s[1])


def counted(
    marks: Sequence[Mark], metrics: dict[str, Metric], why: dict[str, str], start_s: float, end_s: float
) -> dict[str, float]:
    """Return what a device counted in a window, and put the rates that this gives exactly into `metrics`.

    Args:
        marks: Of that device, in order.
        metrics: Its figures of the window by metric.
        why: Gets the reason of every count that is missing.
        start_s: Start of the window.
        end_s: Its end.
    """
    counts: dict[str, float] = {}
    for name in Cumulative.NAMES:
        ends = _ends(name, marks, start_s, end_s)
        if name == _OF_A_MOMENT and not isinstance(ends, str):
            counts[name] = max(count for _, count in ends)
        elif isinstance(answer := _difference(ends), str):
            why[name] = answer
        else:
            counts[name] = answer[0]
    _throttled(counts, why)
    for name in _BYTES:
        old = metrics.get(f"{name}_per_s")
        if old is None or not old.method:
            continue  # the metric says why the device has none
        ends = _ends(name, marks, start_s, end_s)
        answer = _difference(ends)
        if isinstance(ends, str) or isinstance(answer, str):
            why[name] = str(answer)
            continue
        counts[name], seconds = answer
        if ends[0][0].answered_s <= start_s and end_s <= ends[1][0].t_s:
            seconds = end_s - start_s  # the bytes are the window's: what lies between it and its marks is idle time
        rate = counts[name] / seconds
        # Readings of a second may reach over the window's ends, where nothing was sent.
        most = rate if old.max is None else max(rate, old.max)
        metrics[f"{name}_per_s"] = Metric(mean=rate, max=most, method=old.method, coverage=1.0)
    return counts


def _throttled(counts: dict[str, float], why: dict[str, str]) -> None:
    """Put in one what was counted for power and for heat; where one of them is missing, say so."""
    known = [counts.pop(name) for name in THROTTLED if name in counts]
    missing = [why.pop(name) for name in THROTTLED if name in why]
    if known:
        counts["throttled_s"] = math.fsum(known)
    if missing:
        why["throttled_s"] = f"only in part: {missing[0]}" if known else missing[0]


_Ends = tuple[tuple[Mark, float], tuple[Mark, float]]
"""Mark and count at both ends."""


def _ends(name: str, marks: Sequence[Mark], start_s: float, end_s: float) -> _Ends | str:
    """Return what the marks nearest to the ends of a window say; or why they do not."""
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


def _difference(ends: _Ends | str) -> tuple[float, float] | str:
    """Return the count between both ends and in how many seconds; or why there is none."""
    if isinstance(ends, str):
        return ends
    (before, first), (after, last) = ends
    if after.t_s <= before.t_s:
        return "the window is too short for a counter: one reading is nearest to both of its ends"
    if last < first:
        return "the counter went back between the window's ends"
    return last - first, after.t_s - before.t_s
