"""Trends as text for a terminal: cases down, reports across."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tabulate import tabulate

from pytest_llmgpu.gate.trends import Change, Figure, Trend

__all__ = ["before", "cell", "changes", "head", "tables"]

_STYLES: dict[Change, tuple[str, str]] = {"worse": ("!", "31"), "better": ("*", "32"), "changed": ("~", "33")}
"""What stands before a figure that changed, and how it is painted."""

_LEGEND = "! worse   * better   ~ other answers   by the gate, against the last report before it that has the case"
_ENDED = {"oom": "OoM", "skipped_after_oom": "-"}


def tables(trends: Sequence[Trend], paint: Callable[[str, str], str]) -> str:
    """Return a table a metric, and what the gate said of each change.

    Args:
        trends: of the same reports.
        paint: text and the number of an ANSI style to the text in that style.
    """
    parts = []
    for trend in trends:
        body = []
        for line in trend.lines:
            pairs = zip(line.figures, before(line.figures), strict=True)
            points = trend.metric == "accuracy"
            cells = [_painted(one, cell(one, then, points=points), paint) for one, then in pairs]
            body.append([line.name, *cells])
        align = ["left", *["right"] * len(trend.columns)]
        parts.append(f"{trend.title}\n" + tabulate(body, ["case", *head(trend)], disable_numparse=True, colalign=align))
    marks: dict[Change, str] = {change: mark for change, (mark, _) in _STYLES.items()}
    told = [line for trend in trends for line in changes(trend, marks)]
    return "\n\n".join([*parts, "\n".join([_LEGEND, *told] if told else ["nothing changed that the gate is sure of"])])


def head(trend: Trend) -> list[str]:
    """Return the titles of the columns: number and commit."""
    return [f"{column.number:04}\n{column.commit.split(' ')[0]}" for column in trend.columns]


def cell(one: Figure | None, then: float | None, *, points: bool = False) -> str:
    """Return a figure as people read it, with by how much it changed where the gate says that it did.

    Args:
        one: the figure; None where there is none.
        then: the one before it.
        points: whether its changes are differences, as of percentages.
    """
    if one is None:
        return ""
    if one.value is None:
        return _ENDED.get(one.outcome, "done" if one.outcome == "completed" else one.outcome)
    text = f"{float(f'{one.value:.4g}'):,.15g}"
    if one.change is None or not then or one.value == then:
        return text
    by = f"{one.value - then:+.2f} points" if points else f"{100 * (one.value / then - 1):+.1f} %"
    return f"{text} ({by})"


def changes(trend: Trend, marks: Mapping[Change, str], *, named: bool = True) -> Iterator[str]:
    """Yield a line for each change, with what the gate says of it.

    Args:
        trend: whose changes.
        marks: what stands before each kind.
        named: whether a line says of which metric it is.
    """
    metric = f" {trend.metric}" if named else ""
    for line in trend.lines:
        for column, one in zip(trend.columns, line.figures, strict=True):
            if one is not None and one.change is not None:
                reason = " ".join(one.reason.split())
                yield f"{marks[one.change]} {column.number:04} {line.name}{metric}: {reason}"


def before(figures: Sequence[Figure | None]) -> list[float | None]:
    """Return for each figure the value of the last one before it that has one."""
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
