"""What a verdict means under a policy."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from pytest_llmgpu.gate.classify import RowClass, classify, fails, with_unseen
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.verdicts import SEVERITY, Row, Verdict

_GATED = {
    "REGRESSED": RowClass.FAILS,
    "MISSING": RowClass.FAILS,
    "NOT_COMPARABLE": RowClass.FAILS,
    "UNDECIDED": RowClass.UNCLEAR,
    "CHANGED": RowClass.ALLOWED,
    "NEW": RowClass.NEW,
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
        if verdict == "REGRESSED":
            assert classify(row, Policy()) is RowClass.ALLOWED


def _timed(verdict: Verdict, smallest_seen: float | None = None, **fields: Any) -> Row:
    return msgspec.structs.replace(_row(verdict), **{"smallest_seen": smallest_seen, **fields})


@pytest.mark.parametrize(
    ("rows", "unseen"),
    [
        ([_timed("UNDECIDED", 0.6)], [True]),
        ([_timed("UNDECIDED", 0.5)], [False]),
        ([_timed("OK", 0.6)], [True]),
        ([_timed("UNDECIDED")], [True]),
        ([_timed("REGRESSED", 0.6)], [False]),
        ([_timed("OK", 0.6, improved=True)], [False]),
        ([_timed("NEW")], [False]),
        ([_timed("UNDECIDED", 0.6, gated=False)], [False]),
        ([_timed("UNDECIDED", 0.6, known="accepted")], [False]),
        ([_timed("UNDECIDED", 0.6), _timed("OK", 0.02, metric="device_time")], [False, False]),
        ([_timed("OK", 0.02, metric="device_time", gated=False), _timed("UNDECIDED", 0.6)], [False, True]),
        ([_timed("UNDECIDED", metric="device_time"), _timed("UNDECIDED", 0.1)], [False, False]),
        ([_timed("UNDECIDED", 0.1), _timed("UNDECIDED", 0.6, key="other")], [False, True]),
    ],
)
def test_a_case_whose_slowdown_would_not_be_seen_fails(rows: list[Row], unseen: list[bool]) -> None:
    """Its best gated time decides, whatever `on_inconclusive` is; a row that is OK by chance has not enough data."""
    found = with_unseen(rows, Policy())
    assert [row.unseen for row in found] == unseen
    assert all(fails(row, Policy()) for row in found if row.unseen)
    assert not any(row.unseen and row.verdict == "OK" for row in found)


def test_the_policy_decides_on_what_is_unclear() -> None:
    """Two keys turn a lack of data into a failure or let a missing case pass; an interrupted case always fails."""
    assert classify(_row("UNDECIDED"), Policy(on_inconclusive="fail")) is RowClass.FAILS
    assert classify(_row("UNDECIDED"), Policy(on_inconclusive="fail")) is RowClass.FAILS
    assert classify(_row("MISSING"), Policy(allow_missing=True)) is RowClass.UNCLEAR
    assert classify(_row("UNDECIDED", metric="outcome"), Policy()) is RowClass.FAILS
