"""Rows of a comparison as text."""

from __future__ import annotations

from typing import Any

from pytest_llmgpu.render.comparison import cases, figures, verdict
from pytest_llmgpu.report.verdicts import Row, Verdict


def _row(name: str, metric: str, judged: Verdict = "OK", ratio: float | None = 1.0, **fields: Any) -> Row:
    numbers = {} if ratio is None else {"base": 2.0, "head": 2 * ratio, "ratio": ratio}
    return Row(key=name, id=name, metric=metric, verdict=judged, reason="x", **{**numbers, **fields})


def test_each_case_has_one_row() -> None:
    """Wrong answers and a changed outcome come first, then the largest slowdown; device time comes before wall time."""
    rows = [
        _row("a", "time", "REGRESSED", 1.5),
        _row("a", "device_time", ratio=1.01),
        _row("b", "time", "UNDECIDED", 3.0),
        _row("c", "outcome", "MISSING", None),
        _row("d", "time", "NOT_COMPARABLE", None),
        _row("mp", "accuracy", "REGRESSED", None),
        _row("e", "outcome", "NEW", None),
        _row("e", "accuracy", "REGRESSED", None),
    ]
    assert [(row.id, row.metric) for row in cases(rows)] == [
        ("e", "accuracy"),
        ("c", "outcome"),
        ("b", "time"),
        ("a", "device_time"),
        ("d", "time"),
    ]


def test_figures_have_units_and_the_interval() -> None:
    """An equal value is `same`, and a row without numbers is empty."""
    assert figures(_row("a", "time", ratio=1.5, low=1.4, high=1.6)) == ("2 s", "3 s", "+50.0 %", "+40.0 to +60.0 %")
    assert figures(_row("a", "time")).change == "same"
    assert figures(_row("a", "time", ratio=None)) == ("", "", "", "")
    assert figures(_row("mp", "accuracy", ratio=None, base=0.5, head=0.4)).change == "-10.00 pt"


def test_a_verdict_states_why_it_cannot_fail() -> None:
    """The policy shows the metric only, or accepts the regression."""
    assert verdict(_row("a", "time", "REGRESSED")) == "REGRESSED"
    assert verdict(_row("a", "time", "REGRESSED", gated=False)) == "CHANGED"
    assert verdict(_row("a", "time", "REGRESSED", known="bug 7")) == "REGRESSED (known)"
