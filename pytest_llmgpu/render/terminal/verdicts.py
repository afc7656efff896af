"""The verdicts of the gate as text: a table by case, worst first, then the reasons and the number of comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tabulate import tabulate

from pytest_llmgpu.gate import headline
from pytest_llmgpu.gate.judge import ExitStatus
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.render.summary import by_case, by_reason, counts, figures, mark, verdict, was_and_now
from pytest_llmgpu.render.terminal.report import Painter, filled, painter
from pytest_llmgpu.report.metrics import place_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.text import listed, plural, printable
from pytest_llmgpu.report.verdicts import UNCLEAR, Row, Verdicts

MOST_CASES = 50
"""The default limit on the cases of a table, and on its reasons."""

_RED, _GREEN, _YELLOW, _DIM = "31", "32", "33", "2"
_STYLES = {"failure": _RED, "warning": _YELLOW, "changed": _DIM, "ok": _GREEN}
_INDENT = " " * 4
_SAME_TIME = 0.005
"""Times of one baseline that differ by less, at the speeds of several reports, are shown as one."""
_MOST_NAMES = 3  # cases that a note names


def conclusion(verdicts: Verdicts, policy: Policy, color: bool = False) -> str:
    """Return the headline of the gate, with its colour."""
    found = headline.headline(verdicts, policy)
    unclear = any(row.gated and row.verdict in UNCLEAR for row in verdicts.rows)
    style = _RED if found.status else _YELLOW if unclear or found.states else _GREEN
    return painter(color)(printable(found.text), style)


def table(verdicts: Verdicts, policy: Policy, color: bool = False, most: int | None = MOST_CASES) -> str:
    """Return the table of the rows that are not OK, their reasons by cause, what to run next, and what was compared.

    A gate that passes has undecided rows as a number only. The worst case comes first. `most` limits cases and reasons;
    None is for no limit, and for all rows.
    """
    paint = painter(color)
    rows = [row for row in verdicts.rows if most is None or not row.unchanged]
    undecided = [row for row in rows if row.verdict == "UNDECIDED"]
    if most is not None and headline.headline(verdicts, policy).status is ExitStatus.PASSED:
        rows = [row for row in rows if row.verdict != "UNDECIDED"]
    cases = _by_case(rows)
    body = []
    for case in cases[:most]:
        for number, row in enumerate(case):
            name = printable(row.id) if number == 0 else ""
            metric = row.metric if row.part is None else f"{row.metric} ({row.part})"
            body.append((name, metric, _verdict(row, paint), *figures(row)))
    titles = ("case", "metric", "verdict", "was", "now", "change", "interval")
    used = [n for n, title in enumerate(titles) if title in titles[:3] or any(line[n] for line in body)]
    align = ["left" if n < len(titles[:3]) else "right" for n in used]
    cells = [[line[n] for n in used] for line in body]
    parts = [tabulate(cells, [titles[n] for n in used], colalign=align, disable_numparse=True)] if body else []
    if left := cases[len(cases[:most]) :]:
        parts.append(f"and {plural(len(left), 'more case')}; their worst verdict is {left[0][0].word}")
    parts.append("\n".join(_reasons(verdicts.rows if most is None else rows, paint, most)))
    ends = [headline.next_steps(verdicts, policy), printable(counts(verdicts))]
    if undecided and not any(row.verdict == "UNDECIDED" for row in rows):
        metrics = ", ".join(dict.fromkeys(row.metric.replace("_", " ") for row in undecided))
        ends.insert(0, f"{plural(len(undecided), 'row')} UNDECIDED ({metrics}): `llmgpu gate` with --all lists them.")
    ends += [f"note: {printable(note)}" for note in verdicts.warnings]
    parts.append("\n".join(filled(line, _INDENT) for line in ends if line))
    return "\n\n".join(filter(None, parts))


def side_by_side(
    compared: Sequence[tuple[Report | None, Verdicts, Report]], color: bool = False, most: int | None = MOST_CASES
) -> str:
    """Return one table of reports that were compared with one baseline: a column for each, by its number.

    It has a time of every case, and the rows that are not OK. Times are at the speed of each report's GPU and host:
    beside another value of the baseline than the one that is shown there is the change alone.
    """
    paint = painter(color)
    found, rows = [], list[Row]()
    for base, verdicts, report in compared:
        shown = {(row.key, row.id, row.metric): (row, figures(row)) for row in verdicts.rows}
        times = was_and_now(verdicts, report, base)
        found.append(shown | {(row.key, row.id, row.metric): (row, numbers) for row, numbers in times})
        rows += [row for row, _ in times] + [row for row in verdicts.rows if most is None or not row.unchanged]
    body = []
    cases = _by_case(rows)
    for case in cases[:most]:
        for number, row in enumerate({one.metric: one for one in case}.values()):
            alike = [of_report.get((row.key, row.id, row.metric)) for of_report in found]
            first = next((one[0].base for one in alike if one is not None and one[0].base), 1.0)
            was = next((one[1].was for one in alike if one is not None and one[1].was), "")
            cells = []
            for one in alike:
                word = "" if one is None or one[0].unchanged else _verdict(one[0], paint)
                now = "" if one is None or abs((one[0].base or first) / first - 1) > _SAME_TIME else one[1].now
                cells.append("" if one is None else " ".join(filter(None, [now, one[1].change, word])) or "OK")
            body.append([printable(row.id) if number == 0 else "", row.metric, was, *cells])
    left = len(cases) - len(cases[:most])
    text = tabulate(body, ["case", "metric", "was", *range(1, len(compared) + 1)], disable_numparse=True)
    return "\n".join([*([text] if body else []), *([f"and {plural(left, 'more case')}"] if left else [])])


def _by_case(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each case in the order of the metrics; the worst case comes first."""
    return [sorted(case, key=lambda row: place_of(row.metric)) for case in by_case(rows)]


def _verdict(row: Row, paint: Painter) -> str:
    return verdict(row).replace(row.word, paint(row.word, _STYLES[mark(row.verdict)]))


def _reasons(rows: Sequence[Row], paint: Painter, most: int | None) -> Iterator[str]:
    """Yield the reasons of the rows that are not OK by cause, the worst first; the row with the worst change has it."""
    found = by_reason(row for row in rows if not row.unchanged)
    for number, group in enumerate(found):
        if number == most:
            yield f"and {plural(len(found) - number, 'more reason')}"
            return
        worst = group[0]
        ids = listed(map(printable, dict.fromkeys(row.id for row in group)), _MOST_NAMES)
        yield f"{paint(worst.word, _STYLES[mark(worst.verdict)])}  {worst.metric}: {ids}"
        allowed = [f"Allowed: {worst.allowed}"] if worst.allowed is not None else []
        for line in [*worst.reason.splitlines(), *allowed]:
            yield f"{_INDENT}{filled(printable(line), _INDENT, len(_INDENT))}"
