"""Trends as text for the terminal: cases down, reports across."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tabulate import tabulate

from pytest_llmgpu.gate.trends import Change, Figure, Trend
from pytest_llmgpu.report.text import listed, signed_percent, significant

_STYLES: dict[Change, tuple[str, str]] = {
    "worse": ("!", "31"),
    "better": ("*", "32"),
    "changed": ("~", "33"),
    "disturbed": ("?", "33"),
}
"""The mark before a figure that changed, and its ANSI style."""

_LEGEND = "! worse   * better   ~ predictions changed   ? disturbed"
_NAMED = 2
_ENDED = {"oom": "OOM", "skipped_after_oom": "-"}


def tables(trends: Sequence[Trend], paint: Callable[[str, str], str]) -> str:
    """Return one table per metric, and the reason of each change."""
    parts = []
    for trend in trends:
        body = []
        for line in trend.lines:
            pairs = zip(line.figures, before(line.figures), strict=True)
            points = trend.metric == "accuracy"
            cells = [_painted(one, cell(one, then, points=points), paint) for one, then in pairs]
            body.append([line.name, *cells])
        align = ["left", *["right"] * len(trend.columns)]
        parts.append(
            f"{trend.title}\n" + tabulate(body, [trend.of, *head(trend)], disable_numparse=True, colalign=align)
        )
    marks: dict[Change, str] = {change: mark for change, (mark, _) in _STYLES.items()}
    reasons = [*(line for trend in trends for line in changes(trend, marks)), *disturbed(trends)]
    return "\n\n".join([*parts, "\n".join([_LEGEND, *reasons] if reasons else ["No change was found."])])


def head(trend: Trend) -> list[str]:
    """Return the titles of the columns: date, number and commit of each report."""
    return [f"{column.created[:10]}\n{column.number:04}\n{column.commit.split(' ')[0]}" for column in trend.columns]


def cell(one: Figure | None, then: float | None, *, points: bool = False) -> str:
    """Return a figure as text, with its change if there is one.

    Args:
        one: the figure; None if the report does not have the case.
        then: the value of the last earlier report that has one; None if there is none.
        points: True if a change is a difference of percentages; False if it is relative.
    """
    if one is None:
        return ""
    if one.value is None:
        return _ENDED.get(one.outcome, "done" if one.outcome == "completed" else one.outcome)
    text = significant(one.value)
    if not one.changed or not then or (one.growth is None and one.value == then):
        return text
    growth = one.value / then - 1 if one.growth is None else one.growth
    return f"{text} ({f'{one.value - then:+.2f} points' if points else signed_percent(growth)})"


def changes(trend: Trend, marks: Mapping[Change, str], *, named: bool = True) -> Iterator[str]:
    """Yield one line per change, with its reason; none for disturbed figures."""
    metric = f" {trend.metric}" if named else ""
    for line in trend.lines:
        for column, one in zip(trend.columns, line.figures, strict=True):
            if one is not None and one.change is not None and one.changed:
                reason = " ".join(one.reason.split())
                yield f"{marks[one.change]} {column.number:04} {line.name}{metric}: {reason}"


def disturbed(trends: Sequence[Trend]) -> Iterator[str]:
    """Yield one line per report with disturbed figures: its cases, and the reason of the first one."""
    for place, column in enumerate(trends[0].columns if trends else ()):
        figures = [(line.name, line.figures[place]) for trend in trends for line in trend.lines]
        found = {name: one.reason for name, one in figures if one is not None and one.change == "disturbed"}
        if found:
            reason = " ".join(next(iter(found.values())).split())
            yield f"? {column.number:04} {listed(found, _NAMED)}: {reason}"


def before(figures: Sequence[Figure | None]) -> list[float | None]:
    """Return for each figure the last earlier value."""
    found: list[float | None] = []
    last: float | None = None
    for one in figures:
        found.append(last)
        if one is not None and one.value is not None:
            last = one.value
    return found


def _painted(one: Figure | None, text: str, paint: Callable[[str, str], str]) -> str:
    if one is None or one.change is None:
        return text
    mark, style = _STYLES[one.change]
    return paint(f"{mark} {text}", style)
