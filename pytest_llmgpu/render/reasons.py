"""Reasons of verdicts by cause: rows whose reasons differ in their numbers alone have one cause."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pytest_llmgpu.report.verdicts import Row, worst_first

# A number within a name, as in float16 or mp-bs8, is part of the name.
_NUMBER = re.compile(r"(?<![\w.-])[-+]?\d[\d,.]*(?:e[-+]?\d+)?(?!\w)")


def by_cause(rows: Iterable[Row]) -> list[list[Row]]:
    """Return rows in groups with one metric, verdict and cause; the worst group and the worst change come first."""
    found: dict[tuple[str, str, str, str | None], list[Row]] = {}
    for row in worst_first(rows):
        found.setdefault((row.verdict, row.metric, _NUMBER.sub("#", row.reason), row.known), []).append(row)
    return list(found.values())
