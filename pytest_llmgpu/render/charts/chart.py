"""The record of one chart: a Vega-Lite specification, a summary sentence and the same figures as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

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


class Charts(msgspec.Struct, frozen=True, kw_only=True):
    """The charts of a report."""

    charts: list[Chart]
    """The charts in display order, with unique ids."""
    omitted: list[str]
    """One sentence with the reason for each chart that could not be drawn."""


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
