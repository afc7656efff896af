"""Axes, channels and layers that several charts share: powers of two, ticks at 1, 2 and 5, curves by strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pytest_llmgpu.charts.chart import Spec, rounded
from pytest_llmgpu.charts.panels import Panel
from pytest_llmgpu.charts.theme import SHAPES

__all__ = ["HEIGHT", "NUMBER", "batch_sizes", "curves", "failures", "levels", "limit", "shapes", "sized"]

HEIGHT = 300
"""Of a plot, in pixels."""

NUMBER = ",.6~r"
"""Format of a figure in a tooltip: as it is in the data, never with an exponent."""

_LINE = 15  # pixels of a line of letters
_SIDE = 1.25  # room beside the first and the last batch size, as a factor
_ROOM = 1.08  # the same above and below the figures
_DECADES = 2.0  # from here on ticks at powers of ten do
_TICKS = 5
_LEAST = 3
_STEPS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8))


def sized(layers: Sequence[Spec], rows: Sequence[Spec], *, height: int | Spec = HEIGHT) -> Spec:
    """Return a specification of these layers over common data, as wide as its container."""
    return {"width": "container", "height": height, "data": {"values": list(rows)}, "layer": list(layers)}


def batch_sizes(sizes: Iterable[float]) -> Spec:
    """Return the x channel over the field `b`: powers of two, whatever sizes there are between them."""
    known = sorted(set(sizes))
    low, high = known[0], known[-1]
    ticks = [2**power for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
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
    share = 1 - _LINE * lines / HEIGHT
    if log:
        low, high = low / _ROOM, high * _ROOM
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
    """Return a layer for each strategy with the batch sizes that did not complete, in a line of its own at the top."""
    words = {"oom": "OoM"}
    layers: list[Spec] = []
    for title in dict.fromkeys(entry.title for entry in panel.failed):
        rows = [
            {
                "s": title,
                "b": entry.batch_size,
                "o": f"{title}: {words.get(entry.result.outcome, entry.result.outcome)}",
                "w": _message(entry.result.failure.message if entry.result.failure else ""),
            }
            for entry in panel.failed
            if entry.title == title
        ]
        layers.append(
            {
                "data": {"values": rows},
                "mark": {"type": "text", "style": "note", "fontWeight": "bold", "clip": False},
                "encoding": {
                    "y": {"value": _LINE * len(layers) + _LINE // 2},
                    "text": {"field": "o", "type": "nominal"},
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
