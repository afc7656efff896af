"""What a chart is: a picture as data, what it shows in a sentence, and the same figures as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

__all__ = ["Chart", "Charts", "Spec", "rounded", "span", "written"]

Spec = dict[str, Any]
"""A specification of Vega-Lite, or a part of one."""


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One chart."""

    id: str
    """Letters, digits and hyphens: names its file, and its place in a page."""
    title: str
    summary: str
    """What it shows, in a sentence: its caption, and what a screen reader reads instead of it."""
    spec: Spec
    """Vega-Lite with the data inside, as wide as its container. It names no colour but by the styles and ranges of
    `theme`, so that one specification serves light and dark."""
    headers: list[str]
    rows: list[list[str]]
    """The same figures as a table, with units in the headers."""
    measured: str = ""
    """Model, type, GPUs and dataset, for a picture that stands alone; empty where the title says it."""


class Charts(msgspec.Struct, frozen=True, kw_only=True):
    """The charts of a report."""

    charts: list[Chart]
    """In the order to show them in; ids are unique."""
    omitted: list[str]
    """What there is no chart of, each with its reason in a sentence."""


def rounded(value: float) -> float:
    """Return a figure with four digits: what a chart can show, in a third of the bytes."""
    return float(f"{value:.4g}")


def written(value: float | None, unit: str = "", *, digits: int = 4) -> str:
    """Return a figure as people read it, with so many digits; a dash for None."""
    if value is None:
        return "-"
    text = f"{float(f'{value:.{digits}g}'):,.15g}"
    return f"{text} {unit}" if unit else text


def span(values: Iterable[float], unit: str) -> str:
    """Return the least and the largest of some figures, as a sentence has them."""
    known = sorted(values)
    low, high = (written(value, digits=3) for value in (known[0], known[-1]))
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
