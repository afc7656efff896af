"""The gate's verdicts as text for people: a table by case, worst first, then the reasons and how much was compared."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from pytest_llmgpu.gate.classify import ExitStatus, exit_status, fails
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.stats.intervals import POWER
from pytest_llmgpu.gate.timing.verdicts import apart
from pytest_llmgpu.render.terminal.cases import WIDTH, Painter, painter
from pytest_llmgpu.report.metrics import JUDGED, MetricName, spec_of
from pytest_llmgpu.report.verdicts import BETTER, UNCLEAR, WORSE, Row, Verdict, Verdicts, worst_first

__all__ = ["MOST_CASES", "conclusion", "notes", "table"]

MOST_CASES = 50
"""Cases that a table shows unless it is asked for all, and at least as many reasons."""

_RED, _GREEN, _YELLOW, _BOLD = "31", "32", "33", "1"
_STYLES: dict[Verdict, str] = {
    **dict.fromkeys(UNCLEAR, _YELLOW),
    **dict.fromkeys((*WORSE, "MISSING"), _RED),
    **dict.fromkeys(BETTER, _GREEN),
}
_TITLES = ("case", "metric", "verdict", "was", "now", "change", "interval")
_INDENT = 4
_NAMED = 3
"""Most cases that a note names."""

_CONCLUSIONS = {
    ExitStatus.REGRESSED: "REGRESSED",
    ExitStatus.INCONCLUSIVE: "INCONCLUSIVE, and the policy fails on it",
    ExitStatus.NOT_COMPARABLE: "NOT COMPARABLE",
    ExitStatus.NOTHING_COMPARED: "NOT ARMED: a gate that compares nothing is not green",
}


def table(verdicts: Verdicts, color: bool = False, most: int | None = MOST_CASES) -> str:
    """Return all that was said: the table by case, the reasons of what is not OK, and how much was compared.

    The worst case comes first; within a case its outcome, then time, accuracy, traffic and memory.

    Args:
        verdicts: what a gate said.
        color: whether colours may be used.
        most: cases, and reasons, that are shown; None for all.
    """
    paint = painter(color)
    cases = _by_case(verdicts.rows)
    shown = cases[:most]
    parts = [_table(shown, paint)] if shown else []
    if left := cases[len(shown) :]:
        parts.append(f"and {_cases(len(left))} more, the worst of them {left[0][0].verdict}")
    parts.append("\n".join(_reasons(worst_first(verdicts.rows), paint, most)))
    parts.append("\n".join(_account(verdicts)))
    return "\n\n".join(filter(None, parts))


def conclusion(verdicts: Verdicts, policy: Policy, color: bool = False) -> str:
    """Return in one line how the gate ends and why."""
    status = exit_status(verdicts, policy)
    failing = [row for row in verdicts.rows if fails(row, policy)]
    inconclusive = sum(row.gated and row.verdict == "INCONCLUSIVE" for row in verdicts.rows)
    invalid = sum(row.gated and row.verdict == "INVALID" for row in verdicts.rows)
    if failing:
        which = _cases(len({(row.key, row.id) for row in failing}))
        text = f"{_rows(len(failing))} of {which} {'fails' if len(failing) == 1 else 'fail'} the gate"
    elif status:
        missed = verdicts.armed.gated_unarmed
        text = f"{_rows(verdicts.armed.gated)} gated" + (f", {missed:,} that should be could not" if missed else "")
    else:
        known = sum(row.known is not None for row in verdicts.rows)
        parts = [f"{_rows(verdicts.armed.gated)} gated"]
        parts += [f"{inconclusive:,} inconclusive{_unseen(verdicts)}"] if inconclusive else []
        parts += [f"{invalid:,} invalid"] if invalid else []
        parts += [f"{known:,} known"] if known else []
        text = ", ".join(parts)
    word = _CONCLUSIONS.get(status, "PASSED" if verdicts.baseline is not None else "PASSED without a baseline")
    kinds = {row.verdict for row in failing}
    if status == ExitStatus.REGRESSED and len(kinds) == 1:
        (word,) = kinds
    elif status == ExitStatus.REGRESSED and kinds.isdisjoint(WORSE):
        word = "MISSING"  # and not comparable: that is no slowdown
    elif status == ExitStatus.INCONCLUSIVE and any(row.metric == "outcome" for row in failing):
        word = "INVALID"  # a case was interrupted, which no policy lets pass
    elif status == ExitStatus.INCONCLUSIVE and kinds == {"INVALID"}:
        word = "INVALID, and the policy fails on it"
    return painter(color)(f"{word}: {text}", _RED if status else _YELLOW if inconclusive or invalid else _GREEN)


def _unseen(verdicts: Verdicts) -> str:
    """Return how much slower a case may be that passes because nothing could be told of its time."""
    untold = [row for row in verdicts.rows if row.gated and row.metric == "time" and row.verdict == "INCONCLUSIVE"]
    changes = [row.smallest_change for row in untold if row.smallest_change is not None]
    return f" (a slowdown of less than {_digits(100 * max(changes))} % may pass)" if changes else ""


def _by_case(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each case in the order of the metrics, the worst case first."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in worst_first(rows):
        cases.setdefault((row.key, row.id), []).append(row)
    return [sorted(case, key=lambda row: JUDGED.index(row.metric)) for case in cases.values()]


def _table(cases: Sequence[Sequence[Row]], paint: Painter) -> str:
    body = [
        (_plain(row.id) if number == 0 else "", row.metric, _verdict(row, paint), *_figures(row))
        for case in cases
        for number, row in enumerate(case)
    ]
    used = [n for n, title in enumerate(_TITLES) if title in _TITLES[:3] or any(line[n] for line in body)]
    return tabulate(
        [[line[n] for n in used] for line in body],
        headers=[_TITLES[n] for n in used],
        colalign=["left" if n < len(_TITLES[:3]) else "right" for n in used],
        disable_numparse=True,
    )


def _verdict(row: Row, paint: Painter) -> str:
    word = paint(row.verdict, _STYLES[row.verdict]) if row.verdict in _STYLES else row.verdict
    return word if row.gated and row.known is None else f"{word} ({'known' if row.gated else 'not gated'})"


def _figures(row: Row) -> tuple[str, str, str, str]:
    """Return what was, what is, the change and its interval."""
    was, now = (_figure(row, value) for value in (row.base, row.head))
    if spec_of(row.metric).points:
        # Differences, in points. Of items lost less those won: its sign is that of a loss.
        change = None if row.base is None or row.head is None else f"{100 * (row.head - row.base):+.2f} pt"
        low, high = (None if end is None else 0.0 - 100 * end for end in (row.high, row.low))  # never -0.0
        interval = "" if low is None or high is None else f"{low:+.2f} to {high:+.2f} pt"
        return was, now, change or "", interval
    if row.ratio is None:
        return was, now, "", ""
    interval = ""
    if row.low is not None and row.high is not None and row.low < row.high:
        interval = f"{_pct(row.low)} to {_pct(row.high)} %"
    if row.metric == "time" and row.base and row.head is not None and apart(row.head / row.base, row.ratio):
        # The sums before it say otherwise, which the reason explains: a few odd batches move them.
        return was, now, f"{_pct(row.ratio)} % a batch", interval
    return was, now, "same" if row.base == row.head else f"{_pct(row.ratio)} %", interval


def _figure(row: Row, value: float | None) -> str:
    return "" if value is None else spec_of(row.metric).written(value)


def _pct(ratio: float) -> str:
    change = 100 * (ratio - 1)
    # A float of hundreds of digits is no help: time that grew a million times is told by its seconds.
    return f"{change:+.1f}" if abs(change) < 1e6 else f"{change:+.1e}"  # noqa: PLR2004


def _reasons(rows: Sequence[Row], paint: Painter, most: int | None) -> Iterator[str]:
    """Yield why each row is not OK, worst first; those that are told the same share it."""
    told: dict[tuple[Verdict, str, str, str | None], list[str]] = {}
    for row in rows:
        if row.verdict != "OK":
            told.setdefault((row.verdict, row.metric, row.reason, row.known), []).append(row.id)
    for number, ((verdict, metric, reason, known), ids) in enumerate(told.items()):
        if number == most:
            yield f"and {len(told) - number:,} reasons more"
            return
        first, *also = dict.fromkeys(ids)
        name = f"{_plain(first)} and {_cases(len(also))} more" if also else _plain(first)
        yield f"{paint(verdict, _STYLES.get(verdict, _BOLD))}  {name}: {metric}"
        lines = reason.splitlines() + ([f"Known: {known}"] if known is not None else [])
        for line in lines:
            indent = " " * _INDENT
            text = textwrap.fill(_plain(line), WIDTH, initial_indent=indent, subsequent_indent=indent)
            yield text


def _account(verdicts: Verdicts) -> Iterator[str]:
    """Yield how much was compared, what it could have shown, and what else to know."""
    armed = verdicts.armed
    yield f"{_rows(armed.compared)} compared, {armed.gated:,} of them gated; {sum(armed.unarmed.values()):,} not armed"
    for reason, count in armed.unarmed.items():
        yield f"    {count:,} x {_plain(reason)}"
    changes = sorted(row.smallest_change for row in verdicts.rows if row.smallest_change is not None)
    if changes:
        least, typical, largest = (100 * c for c in (changes[0], statistics.median(changes), changes[-1]))
        of = f"{_digits(largest)} %"
        of = of if _digits(least) == _digits(largest) else f"{_digits(least)} to {of}"
        median = "" if len(changes) < 3 else f", half of the cases {_digits(typical)} %"  # noqa: PLR2004 - else an end
        yield f"smallest slowdown that these launches show with {100 * POWER:.0f} % probability: {of}{median}"
    for warning in notes(verdicts):
        yield textwrap.fill(f"note: {_plain(warning)}", WIDTH, subsequent_indent="    ")


def notes(verdicts: Verdicts) -> list[str]:
    """Return what else to know of the verdicts, a sentence or more each."""
    return [*_of_families(verdicts.rows), *verdicts.warnings]


def _of_families(rows: Sequence[Row]) -> Iterator[str]:
    """Yield which rows have another verdict than their interval says, and why."""
    said: dict[tuple[MetricName, Verdict], list[str]] = {}
    for row in rows:
        if row.alone is not None:
            said.setdefault((row.metric, row.alone), []).append(row.id)
    parts = []
    for (metric, verdict), ids in said.items():
        more = f" and {_cases(len(ids) - _NAMED)} more" if len(ids) > _NAMED else ""
        parts.append(f"{metric} of {', '.join(ids[:_NAMED])}{more} would be {verdict}")
    if parts:
        yield f"by the interval alone {'; '.join(parts)}. Rows are judged together (Holm): each has to be surer."


def _digits(number: float) -> str:
    """Return a number of percent with two digits at least, and none of an exponent."""
    return f"{number:.2g}" if number < 99.5 else f"{number:,.0f}"  # noqa: PLR2004 - from there on it has three


def _cases(count: int) -> str:
    return f"{count:,} case{'s' * (count != 1)}"


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


def _plain(text: str) -> str:
    """Return text that a terminal only shows: a report may come from anywhere."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
