"""The rows of the gate as text, and those that stand for a case."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from pytest_llmgpu.gate.judge import TIMES
from pytest_llmgpu.report.metrics import spec_of
from pytest_llmgpu.report.text import plural, signed_percent
from pytest_llmgpu.report.verdicts import NEITHER, SEVERITY, UNCLEAR, Row, Verdict, Verdicts, worst_first


class Figures(NamedTuple):
    """The numbers of a row as text; empty where it has none."""

    was: str
    now: str
    change: str
    """Relative, or in percentage points."""
    interval: str
    """The confidence interval of the change."""


def figures(row: Row) -> Figures:
    """Return the numbers of a row as text."""
    spec = spec_of(row.metric)
    was, now = ("" if value is None else spec.written(value) for value in (row.base, row.head))
    if spec.points:
        change = "" if row.base is None or row.head is None else f"{100 * (row.head - row.base):+.2f} pt"
        # The interval is of items lost minus items won: a loss is a negative change. `0.0 -` prevents -0.0.
        ends = [None if end is None else 0.0 - 100 * end for end in (row.high, row.low)]
        return Figures(was, now, change, "" if None in ends else f"{ends[0]:+.2f} to {ends[1]:+.2f} pt")
    if row.ratio is None:
        return Figures(was, now, "", "")
    interval = ""
    if row.low is not None and row.high is not None and row.low < row.high:
        interval = f"{signed_percent(row.low - 1).removesuffix(' %')} to {signed_percent(row.high - 1)}"
    return Figures(was, now, "same" if row.base == row.head else signed_percent(row.ratio - 1), interval)


def verdict(row: Row) -> str:
    """Return the verdict of a row, with a sign if the candidate is better or the change is known."""
    why = "improved" if row.improved else "allowed" if row.allowed is not None else ""
    return f"{row.verdict} ({why})" if why else row.verdict


def mark(verdict: Verdict) -> Literal["failure", "warning", "changed", "ok"]:
    """Return the kind of a verdict, by which it is coloured wherever it is shown: CHANGED is grey."""
    if verdict in {"REGRESSED", "MISSING"}:
        return "failure"
    return "warning" if verdict in UNCLEAR else "changed" if verdict == "CHANGED" else "ok"


def counts(verdicts: Verdicts) -> str:
    """Return how many rows were compared, how many are OK, and why the others were not compared."""
    compared = [row for row in verdicts.rows if row.compared]
    ok = sum(row.verdict == "OK" for row in verdicts.rows)
    text = f"{plural(len(compared), 'row')} compared, {sum(row.gated for row in compared):,} gated, {ok:,} OK"
    missing = [
        f"{reason.removesuffix(NEITHER)}{'not recorded' if reason.endswith(NEITHER) else ''} ({plural(count, 'case')})"
        for reason, count in verdicts.not_compared.items()
    ]
    return f"{text}; not compared: {'; '.join(missing)}" if missing else text


def by_id(verdicts: Verdicts | None) -> dict[str, list[Row]]:
    """Return the rows by id of their case, or by strategy for a series, worst first."""
    rows: dict[str, list[Row]] = {}
    for row in worst_first(verdicts.rows) if verdicts is not None else ():
        rows.setdefault(row.id, []).append(row)
    return rows


def cases(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each case: wrong answers without a baseline, its outcome if that changed, else its time.

    Cases whose outcome changed come first, by severity, then the largest slowdown; those without numbers come last.
    """
    of_cases: dict[tuple[str, str], list[Row]] = {}
    for row in worst_first(rows):
        of_cases.setdefault((row.key, row.id), []).append(row)
    found = [
        min(of_case, key=_order)
        for of_case in of_cases.values()
        if any(spec_of(row.metric).scope == "case" for row in of_case)  # the others are of a series
    ]
    return sorted(found, key=lambda row: (_order(row) > 0, -round(row.ratio or 0.0, 9), SEVERITY.index(row.verdict)))


def _order(row: Row) -> int:
    """Return the rank of a row among those of its case."""
    if row.metric == "accuracy" and row.worse:
        return -1
    if row.metric == "outcome" and not row.unchanged:
        return 0
    return 1 + TIMES.index(row.metric) if row.metric in TIMES and row.ratio is not None else 1 + len(TIMES)
