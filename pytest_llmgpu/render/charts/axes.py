"""The record of a chart, the panels of cases that share one, and the axes, channels and layers of several charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pytest_llmgpu.render.table import Entry, blocks, captions
from pytest_llmgpu.render.table import entries as entries_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.text import significant

Spec = dict[str, Any]
"""A Vega-Lite specification, or a part of one."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One chart."""

    id: str
    """The name of the chart's file and of its place in a page: lower-case letters, digits and hyphens."""
    title: str
    """The heading of the chart."""
    summary: str
    """The sentence that states what the chart shows: the caption, and the text for screen readers."""
    spec: Spec
    """The Vega-Lite specification with the data inside, as wide as its container. It names no colour except through
    the styles and ranges of `theme`, so that one specification serves light and dark pages."""
    headers: list[str]
    """The column headers of the table, with units."""
    rows: list[list[str]]
    """The cells of the table, with the same figures as the chart."""
    filter: dict[str, str] = {}
    """The properties that the cases of the chart share and by which a page hides it: `model`."""
    measured: str = ""
    """Model, dtype, GPUs and dataset for an image that stands alone; empty where the title names them."""


_FIRST = ("mp", "tp", "iok")  # strategies that have the same colours and shapes in every chart of every report


class Panel(NamedTuple):
    """The cases of one chart: they differ only in strategy and batch size."""

    entries: list[Entry]
    """The results in the order of their curves, then of their batch sizes."""
    titles: list[str]
    """The titles of the curves that the report has."""
    domain: list[str]
    """All titles in the order of their colours, including strategies that the report lacks."""
    report: Report
    suffix: str = ""
    """The end of the charts' ids where a report has several panels."""
    caption: str = ""
    """The fields in which the panel differs from the report's other panels."""
    measured: str = ""
    """Model, dtype, GPUs and dataset, for an image that stands alone."""

    @property
    def completed(self) -> list[Entry]:
        """Return the entries with figures."""
        return [entry for entry in self.entries if entry.result.outcome == "completed"]

    @property
    def failed(self) -> list[Entry]:
        """Return the entries that ran and did not complete."""
        return [entry for entry in self.entries if entry.result.outcome not in {"completed", "skipped_after_oom"}]

    @property
    def several(self) -> bool:
        """Return whether a case uses more than one device."""
        return any(entry.result.case.devices > 1 for entry in self.entries)


def panels(report: Report) -> list[Panel]:
    """Return the panels of a report in the order in which their cases ran."""
    groups = blocks(report.cases)
    several = len(groups) > 1
    found = []
    for number, (group, (measured, caption)) in enumerate(zip(groups, captions(groups, report), strict=True), 1):
        entries = entries_of(group)
        strategies = {entry.title: entry.result.case.strategy for entry in entries}
        found.append(
            Panel(
                entries=entries,
                titles=list(strategies),
                domain=domain(list(strategies.items())),
                report=report,
                suffix=f"-{number}" if several else "",
                caption=caption,
                measured=measured,
            )
        )
    return found


def domain(columns: Sequence[tuple[str, str]]) -> list[str]:
    """Return the titles in the order of their colours; mp, tp and iok keep their places also when they are absent.

    The first title of a strategy gets the strategy's colour.
    """
    places = list(_FIRST)
    for title, strategy in columns:
        if title in places:
            continue
        if strategy in places and strategy not in {other for other, _ in columns}:
            places[places.index(strategy)] = title
        else:
            places.append(title)
    return places


def rounded(value: float) -> float:
    """Return a figure with four significant digits: a chart shows no more, and the page takes a third of the bytes."""
    return float(f"{value:.4g}")


def formatted(value: float | None, unit: str = "", *, digits: int = 4) -> str:
    """Return a figure with a number of significant digits and its unit; a hyphen for None."""
    if value is None:
        return "-"
    text = significant(value, digits)
    return f"{text} {unit}" if unit else text


def value_range(values: Sequence[float], unit: str) -> str:
    """Return the smallest and the largest value: `0.5 to 2 GB/s`."""
    ends = dict.fromkeys(formatted(value, digits=3) for value in (min(values), max(values)))
    return f"{' to '.join(ends)} {unit}"


LINE = 15  # height of a line of text in pixels
PADDING = 16  # pixels between the outermost figures and the edges of the plot
_NUMBER = ",.6~r"  # format of figures on axes and in tooltips: no exponent, no trailing zeros

_LETTER = 6.7  # largest mean width in pixels of a letter of a note, over the fonts of browsers

_WIDE = 5.0
"""A logarithmic axis over at least this factor has ticks at 1, 2 and 5; Vega's own are better on a narrower one."""

_LOG_TICKS = [rounded(step * 10.0**power) for power in range(-9, 13) for step in (1, 2, 5)]
_POWERS = [2**power for power in range(24)]

_MOST_MESSAGE = 200  # characters of a failure's message in a tooltip


def text(field: str, title: str | None = None) -> Spec:
    """Return the channel or tooltip entry of a field that holds text."""
    return {"field": field, "type": "nominal", "title": title}


def number(field: str, title: str | None = None) -> Spec:
    """Return the tooltip entry of a field that holds a number."""
    return {"field": field, "type": "quantitative", "title": title, "format": _NUMBER}


def tooltip(figures: Mapping[str, str]) -> list[Spec]:
    """Return the entries of a tooltip: strategy and batch size of the case, then its figures, as field to title."""
    return [text("s", "strategy"), *(number(*one) for one in {"b": "batch size", **figures}.items())]


def layered(layers: Sequence[Spec], rows: Sequence[Spec], *, height: int = 300, **encoding: Spec) -> Spec:
    """Return layers over common data and channels, as wide as their container and `height` pixels high."""
    data = {"values": list(rows)}
    return {"width": "container", "height": height, "data": data, "encoding": encoding, "layer": list(layers)}


def batch_sizes(sizes: Iterable[int]) -> Spec:
    """Return the x channel over the field `b`: a logarithmic axis with ticks at powers of two.

    The batch sizes themselves are the ticks where there is a single one, or no power of two is among or between them.
    """
    known = sorted(set(sizes))
    several = len(known) > 1 and any(known[0] <= power <= known[-1] for power in _POWERS)
    return {
        "field": "b",
        "type": "quantitative",
        "title": "batch size (sequences per forward), logarithmic",
        "scale": {"type": "log", "base": 2, "nice": False, "padding": 2 * PADDING},
        "axis": {"values": _POWERS if several else known, "format": ",d", "labelOverlap": "greedy"},
    }


def levels(values: Iterable[float], title: str, *, log: bool, field: str = "v", zero: bool = False) -> Spec:
    """Return the axis channel of the figures that are drawn; on a logarithmic axis all are above 0."""
    known = list(values)
    ticks: Spec = {"values": _LOG_TICKS} if log and max(known) >= _WIDE * min(known) else {"tickCount": 5}
    kind = {"type": "log"} if log else {"type": "linear", "zero": zero}
    return {
        "field": field,
        "type": "quantitative",
        "title": title if zero else f"{title}, {'logarithmic' if log else 'not from 0'}",
        "scale": {**kind, "nice": zero, "padding": 0 if zero else PADDING},
        # An expression: the `format` of a logarithmic axis has no text for ticks of a high first digit, such as 7.
        "axis": {"labelExpr": f"format(datum.value, '{_NUMBER}')", "labelOverlap": "greedy", **ticks},
    }


def curves(panel: Panel) -> Spec:
    """Return the colour channel over the field `s`, by strategy; the shape channel is the same."""
    legend = {"values": panel.titles, "symbolOpacity": 1}
    return {**text("s", "strategy"), "scale": {"domain": panel.domain}, "legend": legend}


def limit(value: float, label: str) -> list[Spec]:
    """Return the layers of a line across the chart at a value of the field `v`, with a text at its left end."""
    data = {"values": [{"v": rounded(value), "t": label}]}
    y = {"field": "v", "type": "quantitative"}
    left, right = {"value": 0}, {"value": "width"}
    note = {"type": "text", "style": "limit-note", "align": "left", "baseline": "bottom", "dx": 6, "dy": -3}
    line = {"x": left, "x2": right, "y": y, "tooltip": text("t")}
    return [
        {"data": data, "mark": {"type": "rule", "style": "limit"}, "encoding": line},
        {"data": data, "mark": note, "encoding": {"x": left, "y": y, "text": text("t")}},
    ]


def failures(panel: Panel) -> list[Spec]:
    """Return the notes above the plot on batch sizes that did not complete or gave wrong answers, a line per strategy.

    The first of several wrong answers is named and the others are crosses.
    """
    lines: dict[tuple[str, bool], list[Spec]] = {}
    for entry in (*panel.failed, *(entry for entry in panel.completed if entry.result.has_wrong_answers)):
        result = entry.result
        failed = result.outcome != "completed"
        rows = lines.setdefault((entry.title, failed), [])
        ending = "wrong answers" if not failed else "OOM" if result.outcome == "oom" else result.outcome
        name = f"{entry.title}: {ending}"
        why = result.failure.message if result.failure is not None else ""
        if not failed and result.accuracy_check is not None:
            why = result.accuracy_check.text
        reason = why if len(why) <= _MOST_MESSAGE else f"{why[:_MOST_MESSAGE]}..."
        label = name if failed or not rows else "\N{BALLOT X}"
        rows.append({"s": entry.title, "b": entry.batch_size, "o": name, "l": label, "w": reason})
    place, half = "scale('x', datum.b)", f"{_LETTER / 2} * length(datum.l)"
    # Centred, but not beyond the left or the right edge of the plot, whose width only the browser knows.
    align = f"{place} < {half} ? 'left' : {place} > width - {half} ? 'right' : 'center'"
    dx = f"{place} < {half} ? -{place} : {place} > width - {half} ? width - {place} : 0"
    mark = {"type": "text", "style": "note", "fontWeight": "bold", "align": {"expr": align}, "dx": {"expr": dx}}
    shown = [text("o", "outcome"), number("b", "batch size"), text("w", "reason")]
    channels = {"text": text("l"), "color": curves(panel), "tooltip": shown}
    return [
        {"data": {"values": rows}, "mark": mark, "encoding": {"y": {"value": -LINE * level - LINE // 2}, **channels}}
        for level, rows in enumerate(lines.values())
    ]
