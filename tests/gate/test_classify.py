"""What a verdict means under a policy."""

from __future__ import annotations

from typing import get_args

import pytest

from pytest_llmgpu.gate.classify import RowClass, classify, fails
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.verdicts import SEVERITY, Row, Verdict

_GATED = {
    "FAILED": RowClass.FAILS,
    "CAPACITY_REGRESSED": RowClass.FAILS,
    "REGRESSED": RowClass.FAILS,
    "MISSING": RowClass.FAILS,
    "NOT_COMPARABLE": RowClass.FAILS,
    "INVALID": RowClass.UNCLEAR,
    "NOT_ENOUGH_DATA": RowClass.UNCLEAR,
    "NO_BASELINE": RowClass.NEW,
    "NEW": RowClass.NEW,
    "CAPACITY_IMPROVED": RowClass.BETTER,
    "IMPROVED": RowClass.BETTER,
    "OK": RowClass.UNCHANGED,
}


def _row(verdict: Verdict, *, gated: bool = True, known: str | None = None, metric: str = "time") -> Row:
    return Row(key="k", id="mp-bs8", metric=metric, verdict=verdict, reason="none.", gated=gated, known=known)


def test_every_verdict_has_a_class() -> None:
    """No verdict is left out of the classes."""
    assert set(_GATED) == set(get_args(Verdict)) == set(SEVERITY)


@pytest.mark.parametrize("verdict", SEVERITY)
def test_a_gated_row_is_classed_by_its_verdict(verdict: Verdict) -> None:
    """Under the built-in policy a loss fails and a lack of data is unclear."""
    assert classify(_row(verdict), Policy()) is _GATED[verdict]


@pytest.mark.parametrize("verdict", SEVERITY)
def test_a_row_that_is_not_gated_or_known_never_fails(verdict: Verdict) -> None:
    """What the policy reports only, or knows, is allowed where it is worse."""
    for row in (_row(verdict, gated=False), _row(verdict, known="accepted")):
        assert not fails(row, Policy())
        if verdict in {"FAILED", "CAPACITY_REGRESSED", "REGRESSED"}:
            assert classify(row, Policy()) is RowClass.ALLOWED


def test_the_policy_decides_on_what_is_unclear() -> None:
    """Two keys turn a lack of data into a failure or let a missing case pass; an interrupted case always fails."""
    assert classify(_row("NOT_ENOUGH_DATA"), Policy(on_inconclusive="fail")) is RowClass.FAILS
    assert classify(_row("INVALID"), Policy(on_inconclusive="fail")) is RowClass.FAILS
    assert classify(_row("MISSING"), Policy(allow_missing=True)) is RowClass.UNCLEAR
    assert classify(_row("INVALID", metric="outcome"), Policy()) is RowClass.FAILS
