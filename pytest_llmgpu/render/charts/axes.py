"""Axes, channels and layers that several charts share: powers of two, ticks at 1, 2 and 5, curves by strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pytest_llmgpu.render.charts.chart import Spec, rounded
from pytest_llmgpu.render.charts.panels import Entry, Panel
from pytest_llmgpu.render.charts.theme import SHAPES
from pytest_llmgpu.render.time_table import wrong

__all__ = [
    "EDGE_NOTE",
    "HEIGHT",
    "LINE",
    "NUMBER",
    "batch_sizes",
    "curves",
    "failures",
    "levels",
    "limit",
    "shapes",
    "side",
    "sized",
]

EDGE_NOTE: Spec = {"type": "text", "style": "note", "fontWeight": "bold", "clip": False, "align": {"expr": "datum.a"}}
"""A mark at the top of a chart with what has no place in it; the field `a` is its `side`."""

HEIGHT = 300
"""Of a plot, in pixels."""

LINE = 15
"""Of letters, in pixels."""

NUMBER = ",.6~r"
"""Format of a figure in a tooltip: as it is in the data, never with an exponent."""

_SIDE = 1.25  # room beside the first and the last batch size, as a factor
_ROOM = 1.08  # the least room above and below the figures, as a factor
_SHARE = 0.04  # the same as a share of a logarithmic axis
_DECADES = 2.0  # from here on ticks at powers of ten do
_TICKS = 5
_LEAST = 3
_STEPS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8))


def sized(layers: Sequence[Spec], rows: Sequence[Spec], *, height: int | Spec = HEIGHT) -> Spec:
    """Return a specification of these layers over common data, as wide as its container."""
    return {"width": "container", "height": height, "data": {"values": list(rows)}, "layer": list(layers)}


def batch_sizes(sizes: Iterable[float]) -> Spec:
    """Return the x channel over the field `b`: powers of two, whatever sizes there are between them.

    Args:
        sizes: all places that have to be seen; beside 1 too, where strategies stand beside each other.
    """
    known = sorted(set(sizes))
    low, high = known[0], known[-1]
    ticks = [2**power for power in range(max(0, math.floor(math.log2(low))), math.ceil(math.log2(high)) + 1)]
    step = math.ceil(len(ticks) / 12)
    return {
        "field": "b",
        "type": "quantitative",
        "title": "batch size (sequences per forward)",
        "scale": {"type": "log", "base": 2, "domain": [low / _SIDE, high * _SIDE], "nice": False},
        "axis": {
            "values": [tick for tick in ticks if low / _SIDE <= tick <= high * _SIDE][::step],
            "format": ",d",
            "labelOverlap": "greedy",
        },
    }


def levels(
    values: Iterable[float], title: str, *, log: bool, field: str = "v", lines: int = 0, zero: bool = False
) -> Spec:
    """Return the channel of a figure.

    Args:
        values: all that has to be seen.
        title: with the unit.
        log: whether equal distances are equal ratios; all values are above 0 then.
        field: of the data.
        lines: lines of letters that need room above the figures.
        zero: whether the axis begins at 0.
    """
    known = list(values)
    low, high = min(known), max(known)
    share = 1 - LINE * lines / HEIGHT
    if log:
        room = max(_ROOM, (high / low) ** _SHARE)
        low, high = low / room, high * room
        ticks = _log_ticks(low, high)
        low, high = min(low, ticks[0]), max(high, ticks[-1])
        top = low * (high / low) ** (1 / share)
    else:
        margin = (high - low) * (_ROOM - 1) or abs(high) * (_ROOM - 1) or 1.0
        low, high = (0.0 if zero else low - margin), high + margin
        top = low + (high - low) / share
        ticks = _ticks(low, high)
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"type": "log" if log else "linear", "domain": [rounded(low), rounded(top)], "nice": False},
        "axis": {"values": ticks, "format": NUMBER},
    }


def curves(panel: Panel, *, title: str = "strategy") -> Spec:
    """Return the colour channel over the field `s`, by strategy."""
    return {
        "field": "s",
        "type": "nominal",
        "title": title,
        "scale": {"domain": panel.domain, "range": "category"},
        "legend": {"values": panel.titles},
    }


def shapes(panel: Panel, *, title: str = "strategy") -> Spec:
    """Return the shape channel that goes with `curves`."""
    count = len(panel.domain)
    scale = {"domain": panel.domain, "range": (SHAPES * (count // len(SHAPES) + 1))[:count]}
    return {**curves(panel, title=title), "scale": scale}


def limit(value: float, text: str) -> list[Spec]:
    """Return the layers of a line across the chart at a value of the field `v`, with a text at its left end."""
    rows = [{"v": rounded(value), "t": text}]
    y = {"field": "v", "type": "quantitative"}
    note = {"type": "text", "style": "limit-note", "align": "left", "baseline": "bottom", "dy": -3}
    left, right = {"value": 0}, {"value": "width"}
    return [
        {
            "data": {"values": rows},
            "mark": {"type": "rule", "style": "limit"},
            "encoding": {"x": left, "x2": right, "y": y, "tooltip": {"field": "t", "type": "nominal"}},
        },
        {
            "data": {"values": rows},
            "mark": note,
            "encoding": {"x": {"value": 6}, "y": y, "text": {"field": "t", "type": "nominal"}},
        },
    ]


def failures(panel: Panel) -> list[Spec]:
    """Return the layers with the batch sizes that did not complete or answered wrongly, each in a line at the top.

    A strategy has a line for each of the two. Of several wrong answers the first is named and the others are crosses.
    """
    sizes = [entry.batch_size for entry in (*panel.completed, *panel.failed)]
    lines: dict[tuple[str, bool], list[Spec]] = {}
    for entry in (*panel.failed, *(entry for entry in panel.completed if wrong(entry.result))):
        failed = entry.result.outcome != "completed"
        rows = lines.setdefault((entry.title, failed), [])
        text = f"{entry.title}: {_ending(entry)}"
        rows.append(
            {
                "s": entry.title,
                "b": entry.batch_size,
                "o": text,
                "l": text if failed or not rows else "\N{BALLOT X}",
                "w": _message(_why(entry)),
                "a": side(entry.batch_size, sizes),
            }
        )
    layers: list[Spec] = []
    for rows in lines.values():
        layers.append(
            {
                "data": {"values": rows},
                "mark": EDGE_NOTE,
                "encoding": {
                    "y": {"value": LINE * len(layers) + LINE // 2},
                    "text": {"field": "l", "type": "nominal"},
                    "color": curves(panel),
                    "tooltip": [
                        {"field": "o", "type": "nominal", "title": "outcome"},
                        {"field": "b", "type": "quantitative", "title": "batch size"},
                        {"field": "w", "type": "nominal", "title": "why"},
                    ],
                },
            }
        )
    return layers


def side(place: int, places: Sequence[int]) -> str:
    """Return how a text is aligned at one of several places on the x axis: to the inside at both ends.

    There it would lie over the axis or be cut off.
    """
    low, high = min(places), max(places)
    return "center" if low == high or low < place < high else "left" if place == low else "right"


def _ending(entry: Entry) -> str:
    if entry.result.outcome == "completed":
        return "wrong answers"
    return "OoM" if entry.result.outcome == "oom" else entry.result.outcome


def _why(entry: Entry) -> str:
    failure, check = entry.result.failure, entry.result.accuracy_check
    if failure is not None:
        return failure.message
    return check.text if check is not None and entry.result.outcome == "completed" else ""


def _message(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."  # noqa: PLR2004 - what a tooltip holds


def _log_ticks(low: float, high: float) -> list[float]:
    """Return ticks at powers of ten, at 1, 2 and 5, or closer ones: the first of these that are enough."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in _STEPS[1 if math.log10(high / low) <= _DECADES else 0 :]:
        ticks = [rounded(step * 10.0**power) for power in range(first - 1, last + 1) for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= _LEAST:
            return inside
    below = max((tick for tick in ticks if tick <= low), default=ticks[0])
    above = min((tick for tick in ticks if tick >= high), default=ticks[-1])
    return sorted({below, *inside, above})


def _ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [rounded(number * step) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
