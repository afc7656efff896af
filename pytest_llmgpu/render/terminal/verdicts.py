"""The verdicts of the gate as text: a table by case, worst first, then the reasons and the number of comparisons."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Sequence

import msgspec
from tabulate import tabulate

from pytest_llmgpu.gate.classify import ExitStatus, exit_status, fails
from pytest_llmgpu.gate.noise_model import POWER
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.render.terminal.cases import WIDTH, Painter, painter
from pytest_llmgpu.report.metrics import JUDGED, MetricName, spec_of
from pytest_llmgpu.report.text import plural, printable, signed_percent
from pytest_llmgpu.report.verdicts import BETTER, UNCLEAR, WORSE, Row, Verdict, Verdicts, worst_first

__all__ = ["MOST_CASES", "GateResult", "conclusion", "describe", "gate_result", "notes", "table"]

MOST_CASES = 50
"""The default limit on the cases of a table, and on its reasons."""

_RED, _GREEN, _YELLOW, _BOLD = "31", "32", "33", "1"
_STYLES: dict[Verdict, str] = {
    **dict.fromkeys(UNCLEAR, _YELLOW),
    **dict.fromkeys((*WORSE, "MISSING"), _RED),
    **dict.fromkeys(BETTER, _GREEN),
}
_TITLES = ("case", "metric", "verdict", "was", "now", "change", "interval")
_INDENT = " " * 4
_MOST_NAMES = 3  # cases that a note names


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the gate in figures."""

    status: ExitStatus
    """The exit status of the gate."""
    has_baseline: bool
    """False if the gate had no baseline."""
    gated: int
    """The number of compared rows that can fail the gate."""
    gated_unarmed: int
    """The number of rows that the policy gates and that were not compared."""
    failing_rows: int
    """The number of rows that fail the gate."""
    failing_cases: int
    """The number of cases with such a row."""
    failing: frozenset[Verdict]
    """The verdicts of these rows."""
    interrupted: bool
    """True if the outcome of a case fails the gate."""
    undecided: int
    """The number of gated rows with too few launches to decide."""
    invalid: int
    """The number of gated rows whose measurement was disturbed."""
    known: int
    """The number of rows that a `known` entry of the policy accepts."""
    undetected: float | None
    """The largest slowdown that the undecided times may hide, as a fraction; None if there is none."""


def gate_result(verdicts: Verdicts, policy: Policy) -> GateResult:
    """Return the result of the gate under a policy."""
    failing = [row for row in verdicts.rows if fails(row, policy)]
    gated = [row for row in verdicts.rows if row.gated]
    undecided = [row for row in gated if row.verdict == "NOT_ENOUGH_DATA"]
    changes = [row.smallest_seen for row in undecided if row.metric == "time" and row.smallest_seen is not None]
    return GateResult(
        status=exit_status(verdicts, policy),
        has_baseline=verdicts.baseline is not None,
        gated=verdicts.armed.gated,
        gated_unarmed=verdicts.armed.gated_unarmed,
        failing_rows=len(failing),
        failing_cases=len({(row.key, row.id) for row in failing}),
        failing=frozenset(row.verdict for row in failing),
        interrupted=any(row.metric == "outcome" for row in failing),
        undecided=len(undecided),
        invalid=sum(row.verdict == "INVALID" for row in gated),
        known=sum(row.known is not None for row in verdicts.rows),
        undetected=max(changes, default=None),
    )


def describe(result: GateResult) -> str:
    """Return the result of the gate as one line."""
    if result.failing_rows:
        verb = "fails" if result.failing_rows == 1 else "fail"
        rows, cases = plural(result.failing_rows, "row"), plural(result.failing_cases, "case")
        return f"{_word(result)}: {rows} of {cases} {verb} the gate"
    parts = [f"{plural(result.gated, 'row')} gated"]
    if result.status is not ExitStatus.PASSED:
        parts += [f"{result.gated_unarmed:,} not compared"] if result.gated_unarmed else []
        return f"{_word(result)}: {', '.join(parts)}"
    if result.undecided:
        hidden = "" if result.undetected is None else f" (may hide a slowdown up to {_pct(result.undetected)})"
        parts.append(f"{result.undecided:,} with not enough data{hidden}")
    parts += [f"{result.invalid:,} invalid"] if result.invalid else []
    parts += [f"{result.known:,} known"] if result.known else []
    return f"{_word(result)}: {', '.join(parts)}"


def conclusion(verdicts: Verdicts, policy: Policy, color: bool = False) -> str:
    """Return the result of the gate as one line, with its colour."""
    result = gate_result(verdicts, policy)
    unclear = result.undecided or result.invalid
    return painter(color)(describe(result), _RED if result.status else _YELLOW if unclear else _GREEN)


def table(verdicts: Verdicts, color: bool = False, most: int | None = MOST_CASES) -> str:
    """Return the table by case, the reason of each row that is not OK, and the number of comparisons.

    The worst case comes first. The rows of a case are in the order of the table of metrics.

    Args:
        verdicts: the verdicts of the gate.
        color: True if the text may have colours.
        most: the limit on cases and on reasons; None for no limit.
    """
    paint = painter(color)
    cases = _by_case(verdicts.rows)
    shown = cases[:most]
    parts = [_table(shown, paint)] if shown else []
    if left := cases[len(shown) :]:
        parts.append(f"and {plural(len(left), 'more case')}; their worst verdict is {left[0][0].verdict}")
    parts.append("\n".join(_reasons(worst_first(verdicts.rows), paint, most)))
    parts.append("\n".join(_comparisons(verdicts)))
    return "\n\n".join(filter(None, parts))


def notes(verdicts: Verdicts) -> list[str]:
    """Return the notes on all verdicts: the effect of the correction by Holm, and the warnings of the gate."""
    return [*_corrected(verdicts.rows), *verdicts.warnings]


def _word(result: GateResult) -> str:
    """Return the word for the result, with the setting of the policy that decided it."""
    if result.status is ExitStatus.REGRESSED:
        if len(result.failing) == 1:
            return next(iter(result.failing))
        return "MISSING" if result.failing.isdisjoint(WORSE) else "REGRESSED"  # MISSING and NOT_COMPARABLE together
    if result.status is ExitStatus.NOT_ENOUGH_DATA:
        word = "INVALID" if result.interrupted or result.failing == {"INVALID"} else "NOT_ENOUGH_DATA"
        return word if result.interrupted else f'{word} (the policy has on_inconclusive = "fail")'
    if result.status is ExitStatus.NOTHING_COMPARED:
        reason = "no baseline" if not result.has_baseline else "the policy has require_armed" if result.gated else ""
        return f"NOT ARMED ({reason})" if reason else "NOT ARMED"
    if result.status is ExitStatus.NOT_COMPARABLE:
        return "NOT_COMPARABLE"
    return "PASSED" if result.has_baseline else "PASSED without a baseline"


def _by_case(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each case in the order of the metrics; the worst case comes first."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in worst_first(rows):
        cases.setdefault((row.key, row.id), []).append(row)
    return [sorted(case, key=lambda row: JUDGED.index(row.metric)) for case in cases.values()]


def _table(cases: Sequence[Sequence[Row]], paint: Painter) -> str:
    body = [
        (printable(row.id) if number == 0 else "", row.metric, _verdict(row, paint), *_figures(row))
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
    """Return the value of the baseline, the value of the candidate, the change and its interval."""
    spec = spec_of(row.metric)
    was, now = ("" if value is None else spec.written(value) for value in (row.base, row.head))
    if spec.points:
        change = "" if row.base is None or row.head is None else f"{100 * (row.head - row.base):+.2f} pt"
        # The interval is of items lost minus items won: a loss is a negative change. `0.0 -` prevents -0.0.
        ends = [None if end is None else 0.0 - 100 * end for end in (row.high, row.low)]
        interval = "" if None in ends else f"{ends[0]:+.2f} to {ends[1]:+.2f} pt"
        return was, now, change, interval
    if row.ratio is None:
        return was, now, "", ""
    interval = ""
    if row.low is not None and row.high is not None and row.low < row.high:
        interval = f"{signed_percent(row.low - 1).removesuffix(' %')} to {signed_percent(row.high - 1)}"
    change = signed_percent(row.ratio - 1)
    return was, now, "same" if row.base == row.head else change, interval


def _reasons(rows: Sequence[Row], paint: Painter, most: int | None) -> Iterator[str]:
    """Yield the reason of each row that is not OK, worst first; rows with the same reason share it."""
    found: dict[tuple[Verdict, str, str, str | None], list[str]] = {}
    for row in rows:
        if row.verdict != "OK":
            found.setdefault((row.verdict, row.metric, row.reason, row.known), []).append(row.id)
    for number, ((verdict, metric, reason, known), ids) in enumerate(found.items()):
        if number == most:
            yield f"and {plural(len(found) - number, 'more reason')}"
            return
        first, *also = dict.fromkeys(ids)
        more = f" and {plural(len(also), 'more case')}" if also else ""
        yield f"{paint(verdict, _STYLES.get(verdict, _BOLD))}  {printable(first)}{more}: {metric}"
        for line in [*reason.splitlines(), *([f"Known: {known}"] if known is not None else [])]:
            yield textwrap.fill(printable(line), WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def _comparisons(verdicts: Verdicts) -> Iterator[str]:
    """Yield the number of comparisons, the smallest detectable slowdown, and the notes."""
    armed = verdicts.armed
    missing = sum(armed.unarmed.values())
    yield f"{plural(armed.compared, 'row')} compared, {armed.gated:,} gated; {missing:,} not compared"
    for reason, count in armed.unarmed.items():
        yield f"{_INDENT}{count:,} x {printable(reason)}"
    changes = sorted(row.smallest_seen for row in verdicts.rows if row.gated and row.smallest_seen is not None)
    if changes:
        least, typical, largest = map(_pct, (changes[0], statistics.median(changes), changes[-1]))
        span = largest if least == largest else f"{least.removesuffix(' %')} to {largest}"
        median = "" if len(changes) < 3 else f", median {typical}"  # noqa: PLR2004 - two values have no middle one
        yield f"smallest slowdown detected with {100 * POWER:.0f} % probability: {span}{median}"
    for note in notes(verdicts):
        yield textwrap.fill(f"note: {printable(note)}", WIDTH, subsequent_indent=_INDENT)


def _corrected(rows: Sequence[Row]) -> Iterator[str]:
    """Yield which rows have another verdict without the correction by Holm."""
    found: dict[tuple[MetricName, Verdict], list[str]] = {}
    for row in rows:
        if row.alone is not None:
            found.setdefault((row.metric, row.alone), []).append(row.id)
    parts = []
    for (metric, verdict), ids in found.items():
        more = f" and {plural(len(ids) - _MOST_NAMES, 'more case')}" if len(ids) > _MOST_NAMES else ""
        parts.append(f"{metric} of {', '.join(ids[:_MOST_NAMES])}{more} is {verdict}")
    if parts:
        yield f"without the correction for multiple comparisons (Holm) {'; '.join(parts)}"


def _pct(fraction: float) -> str:
    """Return a percentage with two digits at least and no exponent."""
    number = 100 * fraction
    return f"{number:.2g} %" if number < 99.5 else f"{number:,.0f} %"  # noqa: PLR2004 - three digits from here on
