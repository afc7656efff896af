"""The conclusion of a whole report: its status and its problems, worst first; rows of the gate as text and by cause."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

from pytest_llmgpu.gate import cause, headline
from pytest_llmgpu.gate.exact import NAMED
from pytest_llmgpu.gate.headline import SAME_ENVIRONMENT, differences, row_in_words, step_of
from pytest_llmgpu.gate.judge import TIMES, ExitStatus, exit_status, fails, level
from pytest_llmgpu.gate.policy import Policy, policy_of
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.metrics import spec_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, Finding
from pytest_llmgpu.report.text import duration, listed, plural, signed_percent, without_numbers
from pytest_llmgpu.report.verdicts import DIFFERS, NEITHER, SEVERITY, UNCLEAR, Row, Verdict, Verdicts, worst_first

Status = Literal["pass", "unclear", "fail"]
_Key = TypeVar("_Key", bound=Hashable)

_SEVERITIES = ("failure", "warning", "info")  # worst first
_OUTCOMES = {
    "oom": "out of memory",
    "skipped_after_oom": "not run after out of memory",
    "timeout": "timed out",
    "crashed": "crashed",
    "error": "ended with an error",
    "interrupted": "interrupted",
}


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of one kind, or verdicts with one cause."""

    severity: Literal["failure", "warning", "info"]
    verdict: Verdict | None = None
    """The worst verdict of a cause; None for findings."""
    label: str
    """The code of the finding (`wrong-answers`), or the largest change of the cause with its numbers."""
    texts: list[tuple[str, str]]
    """The id of each case, and the text about it."""
    next_step: str
    """The next step for the reader."""


class Conclusion(NamedTuple):
    """The status of a report and the reasons for it."""

    status: Status
    """`unclear` means that the run is incomplete or that too little was compared."""
    word: str
    """The status in a word: that of the gate where it decides."""
    sentence: str
    """Up to three sentences: the headline of the gate without the word, the cases, the worst problem."""
    problems: list[Problem]
    """The problems, worst first."""


def conclude(report: Report, verdicts: Verdicts | None = None, policy: Policy | None = None) -> Conclusion:
    """Return the conclusion of a report and the verdicts on it, by the policy given or that of the verdicts."""
    policy = policy or policy_of(verdicts)
    session = report.session
    found = finding_problems(report.cases)
    gate = ExitStatus.PASSED if verdicts is None else exit_status(verdicts, policy)
    completed = [result for result in report.cases if result.outcome == "completed"]
    disturbed = bool(completed) and all(map(disturbances.of_case, completed))
    status: Status = "pass"
    if gate is ExitStatus.REGRESSED or any(one.severity == "failure" for one in found) or session.exit_status == 1:
        status = "fail"
    elif gate or not session.complete or session.interrupted or session.exit_status or not completed or disturbed:
        status = "unclear"
    groups = [] if verdicts is None else by_cause(verdicts, policy)
    of_gate = [
        Problem(
            severity="failure",
            verdict=group.rows[0].verdict,
            label=row_in_words(group.rows[0]),
            texts=[(group.rows[0].id, "\n".join(group.lines))],
            next_step=group.next_step,
        )
        for group in groups
        if group.fails
    ]
    problems = sorted([*of_gate, *found], key=_order)
    unclear = "Disturbed" if disturbed and session.complete and not session.exit_status else "Not complete"
    word = {"pass": "Completed", "unclear": unclear, "fail": "Failed"}[status]
    worst = next((problem for problem in problems if problem.severity == "failure"), None)
    sentences = [cases_in_words(report, explained=worst is not None)]
    if verdicts is not None:
        decided = headline.headline(verdicts, policy)
        text = f"{decided.text}."
        if decided.status is not ExitStatus.PASSED or status == "pass":
            word, _, text = text.partition(": ")  # the gate decides
        sentences.insert(0, text)
    elif worst is not None:
        name, text = worst.texts[0]
        sentences.append(f"Worst: {name}: {text.splitlines()[0].partition('; ')[0].rstrip('.')}.")
    return Conclusion(status, word, " ".join(sentences), problems)


def finding_problems(cases: Iterable[CaseResult]) -> list[Problem]:
    """Return the findings of cases as problems, worst first: one per kind, next step and message of a failure."""
    kinds: dict[tuple[str, str, str, str], list[tuple[str, Finding]]] = {}
    for result in cases:
        for finding in result.findings:
            text = without_numbers(finding.text) if finding.severity == "failure" else ""
            kind = (finding.severity, finding.code, without_numbers(finding.next_step), text)
            kinds.setdefault(kind, []).append((result.id, finding))
    problems = []
    for found in kinds.values():
        first, texts = found[0][1], [(name, finding.text) for name, finding in found]
        problems.append(Problem(severity=first.severity, label=first.code, texts=texts, next_step=first.next_step))
    return sorted(problems, key=_order)


def cases_in_words(report: Report, *, explained: bool) -> str:
    """Return how many cases completed in which time, what is wrong, and the exit status of pytest if not explained."""
    outcomes = collections.Counter(result.outcome for result in report.cases)
    total, completed = outcomes.total(), outcomes["completed"]
    if not total:
        return "No case was measured."
    text = f"All {total} cases completed" if total > 1 else "The case completed"
    if completed < total:
        failed = [f"{count} {_OUTCOMES[name]}" for name, count in outcomes.items() if name != "completed"]
        text = ", ".join([f"{completed} of {total} cases completed", *failed])
    if (seconds := report.session.duration_s) is not None:
        text += f", after {duration(seconds)}" if completed < total else f" in {duration(seconds)}"
    if wrong := sum(result.has_wrong_answers for result in report.cases):
        text += f"; {wrong} with wrong answers"
    if disturbed := sum(disturbances.of_case(result) is not None for result in report.cases):
        text += f"; {disturbed} disturbed"
    if report.session.exit_status and not explained:
        text += f"; pytest ended with exit status {report.session.exit_status}"
    ended = "was interrupted" if report.session.interrupted else "is incomplete"
    left = report.session.collected - len({result.nodeid for result in report.cases})
    ended += f" before {plural(left, 'more test')}" * (left > 0 and report.session.interrupted)
    return f"{text}." if report.session.complete else f"{text}; the run {ended}."


def _order(problem: Problem) -> tuple[int, bool]:
    """Return the sort key: by severity, and regressions before missing or undecided comparisons."""
    return (_SEVERITIES.index(problem.severity), problem.verdict in UNCLEAR)


def outcome(result: CaseResult) -> str:
    """Return the outcome of a case, and what is wrong with a completed one: `completed, disturbed`."""
    wrong = ["wrong answers"] * result.has_wrong_answers + ["disturbed"] * (disturbances.of_case(result) is not None)
    return ", ".join([result.outcome.replace("_", " "), *wrong])


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
    spec = row.spec
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
    same = row.base is not None and row.base == row.head
    return Figures(was, now, "same" if same else signed_percent(row.ratio - 1), interval)


class Group(NamedTuple):
    """Rows with one cause.

    It is the module that the work passes name; the other worse rows of these cases belong to it. Without a module it is
    the difference of the environment for rows that were compared, else reasons that differ in their numbers alone.
    """

    rows: list[Row]
    """The rows, the worst first."""
    fails: bool
    differences: Sequence[str]
    """The differences of the environment that may be the cause; empty if another cause is known, or none."""

    @property
    def next_step(self) -> str:
        """The next step for the reader of the cause."""
        return SAME_ENVIRONMENT if self.differences else step_of(*self.rows)

    @property
    def lines(self) -> list[str]:
        """The cause, the cases by metric and verdict, and the lines of the reason of the worst row."""
        worst = self.rows[0]
        named, reason = row_in_words(worst), worst.reason.splitlines()
        text = [line for line in reason if line.removeprefix(cause.PREFIX).rstrip(".") not in named]
        parts: dict[str, list[str]] = {}
        for row in self.rows:
            parts.setdefault(f"{row.metric.replace('_', ' ')} {row.verdict}", []).append(row.id)
        if self.differences:
            text.insert(0, f"{DIFFERS.capitalize()}{'; '.join(self.differences)}.")
        if worst.allowed is not None:
            text.append(f"Allowed: {worst.allowed}")
        if len(self.rows) > 1:
            text += [f"{name}: {listed(ids, NAMED)}." for name, ids in parts.items()]
        return text


def by_cause(verdicts: Verdicts, policy: Policy) -> list[Group]:
    """Return the rows that are worse or unclear by cause; the causes that fail the gate come first."""
    differing = tuple(differences(verdicts))
    rows = [row for row in worst_first(verdicts.rows) if level(row, policy) != "info"]
    new = {row.id for row in verdicts.rows if row.verdict == "NEW"}
    found: dict[Hashable, list[Row]] = {}
    of_case: dict[str, Hashable] = {}  # the cause of the first worse row of each case
    with_module = [(row, None if row.cause is None else cause.module_of(row.cause)) for row in rows]
    for row, module in sorted(with_module, key=lambda one: one[1] is None):
        name = _reason(row)
        if row.worse and row.allowed is None:
            environment = () if row.id in new else differing
            name = of_case.setdefault(row.id, module or environment or name)
            name = module or name
        elif row.verdict == "NOT_COMPARABLE":  # what made the case worse also prevents the comparison
            name = of_case.get(row.id, name)
        found.setdefault(name, []).append(row)
    groups = [
        Group(
            rows=worst_first(of_cause),
            fails=any(fails(row, policy) for row in of_cause),
            differences=differing if name == differing else (),
        )
        for name, of_cause in found.items()
    ]
    return sorted(groups, key=lambda one: not one.fails)


def by_reason(rows: Iterable[Row]) -> list[list[Row]]:
    """Return rows in groups with one metric, verdict and reason but for its numbers; the worst come first."""
    return list(_grouped(rows, _reason).values())


def by_case(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each case, the worst first."""
    return list(_grouped(rows, lambda row: (row.key, row.id)).values())


def by_id(verdicts: Verdicts | None) -> dict[str, list[Row]]:
    """Return the rows by id of their case, worst first."""
    return _grouped(() if verdicts is None else verdicts.rows, lambda row: row.id)


def _grouped(rows: Iterable[Row], key: Callable[[Row], _Key]) -> dict[_Key, list[Row]]:
    found: dict[_Key, list[Row]] = {}
    for row in worst_first(rows):
        found.setdefault(key(row), []).append(row)
    return found


def _reason(row: Row) -> Hashable:
    return row.verdict, row.metric, without_numbers(row.reason.replace(f"Calls of {row.id}:", "")), row.allowed


def verdict(row: Row) -> str:
    """Return the verdict of a row, with a sign if the candidate is better or the change is known."""
    why = "improved" if row.improved else "allowed" if row.allowed is not None else ""
    return f"{row.word} ({why})" if why else row.word


def mark(verdict: Verdict) -> Literal["failure", "warning", "changed", "ok"]:
    """Return the kind of a verdict, by which it is coloured wherever it is shown: CHANGED is grey."""
    if verdict in {"REGRESSED", "MISSING"}:
        return "failure"
    return "warning" if verdict in UNCLEAR else "changed" if verdict == "CHANGED" else "ok"


def counts(verdicts: Verdicts) -> str:
    """Return how many rows were compared, their verdicts, and why the others were not compared."""
    compared = [row for row in verdicts.rows if row.compared]
    found = [f"{count:,} {word}" for word, count in collections.Counter(map(verdict, compared)).most_common()]
    text = f"{plural(len(compared), 'row')} compared"
    if compared:
        text += f": {', '.join(found)}; {sum(row.gated for row in compared):,} of them gated"
    missing = [
        f"{reason.removesuffix(NEITHER)}{'not recorded' if reason.endswith(NEITHER) else ''} ({plural(count, 'case')})"
        for reason, count in verdicts.not_compared.items()
    ]
    return f"{text}; not compared: {'; '.join(missing)}" if missing else text


def cases(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each case: wrong answers without a baseline, its outcome if that changed, else its time.

    Cases whose outcome changed come first, by severity, then the largest slowdown; those without numbers come last.
    """
    found = [min(of_case, key=_rank) for of_case in by_case(rows)]
    return sorted(found, key=lambda row: (_rank(row) > 0, -round(row.ratio or 0.0, 9), SEVERITY.index(row.verdict)))


def was_and_now(verdicts: Verdicts, report: Report, baseline: Report | None) -> list[tuple[Row, Figures]]:
    """Return every regressed row, the largest change first, then a row of each other case, with their numbers.

    A row without numbers has what is worse in both reports (executions, accuracies, FLOPs), else their times.
    """
    results = [{result.id: result for result in (() if one is None else one.cases)} for one in (baseline, report)]
    regressed = [row for row in worst_first(verdicts.rows) if row.verdict == "REGRESSED"]
    named = {row.id for row in regressed}
    rows = sorted(regressed, key=lambda row: -round(row.ratio or 0.0, 9))
    found = []
    for row in [*rows, *(one for one in cases(verdicts.rows) if one.id not in named)]:
        shown = figures(row)
        if not shown.was and not shown.now:
            kept = row.metric in {"execution", "accuracy", "program"}
            row = row if kept else msgspec.structs.replace(row, metric="time")  # noqa: PLW2901 - the row as it is shown
            was, now = (_figure_of(row, of_report.get(row.id)) for of_report in results)
            shown = shown._replace(was=was, now=now)
        found.append((row, shown))
    return found


def _figure_of(row: Row, result: CaseResult | None) -> str:
    """Return what a case has of the metric of a row as text; of the program its FLOPs."""
    if result is None:
        return "-"
    if row.metric == "execution":
        return result.case.execution.removeprefix("cuda_")  # the column is narrow
    spec = spec_of("flops" if row.metric == "program" else row.metric)
    figure = spec.of(result)
    return result.outcome.replace("_", " ") if figure is None else spec.written(figure.value)


def _rank(row: Row) -> int:
    """Return the rank of a row among those of its case."""
    if row.metric == "accuracy" and row.worse:
        return -1
    if row.metric == "outcome" and not row.unchanged:
        return 0
    return 1 + TIMES.index(row.metric) if row.metric in TIMES and row.ratio is not None else 1 + len(TIMES)
