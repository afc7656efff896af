"""The result of the gate in one sentence, and the next step: `decide` returns the data, `describe` words them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pytest_llmgpu.gate import cause
from pytest_llmgpu.gate.classify import TIMES, ExitStatus, exit_status, fails
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.times import PRACTICAL_LAUNCHES
from pytest_llmgpu.report.metrics import spec_of
from pytest_llmgpu.report.text import FACTORS_FROM, listed, plural, signed_percent, slowdown
from pytest_llmgpu.report.verdicts import (
    DIFFERS,
    NEITHER,
    ONLY_CANDIDATE,
    SEVERITY,
    Row,
    SessionState,
    Verdicts,
    worst_first,
)

_REASONS = 2
"""Most reasons why nothing was compared that are named."""

_DIFFERENCES = 3
"""Most differences of the environment that are named."""

_STATES: dict[SessionState, str] = {
    "interrupted": "was interrupted",
    "incomplete": "is incomplete",
    "failed": "has failed tests",
    "dirty": "has uncommitted changes",
}

_NEXT_STEPS = {
    "MISSING": "Measure it again, or set allow_missing in the policy if it was removed on purpose.",
    "NOT_COMPARABLE": "Measure both with the same settings, or make this report the baseline.",
    "UNDECIDED": "Measure again.",
    "NEW": "Make this report the baseline: llmgpu promote.",
}
"""The next step of the verdicts without a comparison; for the others it is in the table of metrics."""

_WITHOUT_WORK = {NEITHER: "both reports", ONLY_CANDIDATE: "the baseline"}
"""Why device time was not compared, to the reports without it."""


class Headline(NamedTuple):
    """The data of the sentence."""

    status: ExitStatus
    """The exit status of the gate."""
    worst: Sequence[Row]
    """The rows that decide the status, the worst first; empty if no row does."""
    cases: int
    """The number of cases that were compared."""
    device_time: float | None
    """The slowdown of device time from which one would have been seen in each case, as a fraction; None without one."""
    time: float | None
    """The same of wall time, over the cases whose wall time shows the `largest_unseen_slowdown` of the policy."""
    host_unseen: int | None
    """The number of launches, if the wall time of a case is too noisy to show that slowdown; else None."""
    known: int
    """The number of rows that a `known` entry of the policy accepts."""
    unarmed: dict[str, int]
    """The reasons why rows were not compared, with their number: where some were, of the gated rows."""
    has_baseline: bool
    """False if the gate had no baseline."""
    limit: float
    """The `largest_unseen_slowdown` of the policy."""
    states: Sequence[SessionState]
    """What is wrong with the candidate's session or source."""
    undecided: Row | None
    """The largest slowdown, if there is not enough data to decide it; None if a decided one is as large."""
    differences: Sequence[str]
    """The differences of the environment, if a row is worse or slower."""


class NextSteps(NamedTuple):
    """What to run next."""

    worst: Row | None
    """The worst row that fails the gate, else the worst gated one that is INVALID; None if there is none."""
    commits: tuple[str, str] | None
    """The commits between which a regression began; None if they are equal or not known, or files were changed."""
    undecided: Undecided
    """The gated rows with not enough data."""


class Undecided(NamedTuple):
    """What decides rows with not enough data."""

    rows: int
    """The number of rows that launches decide."""
    launches: int | None
    """The launches in each report that decide at least half of them; None if that are more than is practical."""
    decided: int
    """The number of rows that this number of launches decides."""
    steps: Sequence[str]
    """The next steps of the other rows, and the one that measures device time where a report lacks it."""
    in_turn: bool = False
    """True if the launches of both reports alternated."""
    calibrated: bool = False
    """True if a calibration was used."""


def decide(verdicts: Verdicts, policy: Policy) -> Headline:
    """Return the data of the headline."""
    status = exit_status(verdicts, policy)
    failing = worst_first(row for row in verdicts.rows if fails(row, policy))
    compared = [row for row in verdicts.rows if row.compared]
    deciding = {
        ExitStatus.REGRESSED: _with_numbers_first(row for row in failing if row.verdict in {"REGRESSED", "MISSING"}),
        ExitStatus.NOT_JUDGED: [row for row in failing if row.verdict == "NOT_COMPARABLE"] or failing,
    }
    limit = policy.largest_unseen_slowdown
    seen = {metric: _smallest_seen(compared, metric) for metric in ("device_time", "time")}
    hidden = [row.n or 1 for row in compared if row.metric == "time" and row.gated and (row.smallest_seen or 0) > limit]
    states = verdicts.head.states if verdicts.head is not None else []
    slower = sorted(
        (row for row in compared if row.gated and is_slower(row)), key=lambda row: -round(row.ratio or 0.0, 9)
    )
    worst = deciding.get(status, [])
    return Headline(
        status=status,
        worst=worst,
        cases=len({(row.key, row.id) for row in compared if spec_of(row.metric).scope == "case"}),
        device_time=max(seen["device_time"], default=None),
        time=max((value for value in seen["time"] if value <= limit), default=None),
        host_unseen=min(hidden, default=None),
        known=sum(row.known is not None for row in verdicts.rows),
        unarmed=verdicts.armed.gaps if compared and verdicts.armed.gaps else verdicts.armed.unarmed,
        has_baseline=verdicts.baseline is not None,
        limit=limit,
        # Items of the gate fail tests themselves: where the gate fails, failed tests state nothing new.
        states=[state for state in states if state != "failed" or status is ExitStatus.PASSED],
        undecided=slower[0] if slower and slower[0].verdict == "UNDECIDED" and slower[0] not in worst[:1] else None,
        differences=differences(verdicts) if slower or any(row.worse for row in worst) else [],
    )


def describe(headline: Headline) -> str:
    """Return the headline: one sentence that begins with the word for the exit status."""
    if headline.worst:
        text = _of_rows(headline.worst, headline.limit)
    elif headline.status is ExitStatus.PASSED:
        text = f"PASSED: {_of_pass(headline)}"
    else:
        often = sorted(headline.unarmed.items(), key=lambda pair: -pair[1])
        reasons = listed([f"{count:,} x {reason}" for reason, count in often], _REASONS)
        why = reasons or "the reports share no case" if headline.has_baseline else "there is no baseline"
        if headline.cases:
            why = f"the policy requires every gated row (require_armed): {why}"
        text = f"NOTHING COMPARED: {why}"
    if headline.undecided is not None:
        text += f"; not enough data to decide {row_in_words(headline.undecided)}"
    if headline.differences:
        text += f"; {DIFFERS}{listed(headline.differences, _DIFFERENCES)}"
    if headline.states:
        text += f"; the candidate {' and '.join(_STATES[state] for state in headline.states)}"
    return text


def differences(verdicts: Verdicts) -> list[str]:
    """Return the differences between the environments of both reports."""
    return [text.removeprefix(DIFFERS) for text in verdicts.warnings if text.startswith(DIFFERS)]


def is_slower(row: Row) -> bool:
    """Return whether a time is longer than the baseline's, also if the threshold is larger than what was measured."""
    if row.metric not in TIMES or row.ratio is None or row.ratio <= 1:
        return False
    return row.worse or (row.verdict == "UNDECIDED" and row.low is not None and row.low > 1)


def is_disturbed(row: Row) -> bool:
    """Return whether disturbed launches are the reason why a row is undecided."""
    return row.verdict == "UNDECIDED" and not row.compared


def row_in_words(row: Row, limit: float | None = None) -> str:
    """Return one row in a few words: `tp-bs8 device time +4.1 % (0.0672 s, was 0.0646 s): 93 % in mlp.down_proj`.

    Args:
        row: The row.
        limit: The `largest_unseen_slowdown` that a row with `unseen` exceeds.
    """
    spec = spec_of(row.metric)
    name = row.id if row.metric == "outcome" else f"{row.id} {_metric(row)}"
    if row.unseen and limit is not None and row.smallest_seen is not None:
        seen = f"only slowdowns from {slowdown(row.smallest_seen)} would"
        if row.smallest_seen > FACTORS_FROM:
            seen = f"not even a slowdown by a factor of {FACTORS_FROM:g} would"
        return f"{name}: {seen} have been seen, allowed is {slowdown(limit)}"
    if not row.compared or row.base is None or row.head is None or not (spec.points or row.ratio):
        return f"{name}: {row.reason.splitlines()[0].rstrip('.')}" if row.reason else name
    change = f"{100 * (row.head - row.base):+.2f} pt" if spec.points else signed_percent((row.ratio or 1.0) - 1)
    why = f": {cause.describe(row.cause)}" if row.cause is not None else ""
    return f"{name} {change} ({spec.written(row.head)}, was {spec.written(row.base)}){why}"


def next_steps(verdicts: Verdicts, policy: Policy) -> NextSteps:
    """Return what to run next."""
    failing = worst_first(row for row in verdicts.rows if fails(row, policy))
    undecided = [
        row for row in verdicts.rows if row.verdict == "UNDECIDED" and row.compared and row.gated and row.known is None
    ]
    worst = failing or worst_first(row for row in verdicts.rows if is_disturbed(row) and row.gated)
    base = verdicts.baseline.commit if verdicts.baseline is not None else None
    candidate = verdicts.head
    # A regression of uncommitted changes is between no two commits.
    head = candidate.commit if candidate is not None and "dirty" not in candidate.states else None
    lacks = next((who for why, who in _WITHOUT_WORK.items() if f"device_time: {why}" in verdicts.armed.unarmed), None)
    return NextSteps(
        worst=worst[0] if worst else None,
        commits=(base, head) if base and head and base != head else None,
        undecided=_decide_undecided(undecided, lacks)._replace(
            in_turn=verdicts.in_turn, calibrated=verdicts.calibration_sha256 is not None
        ),
    )


def _decide_undecided(rows: Sequence[Row], without_work: str | None = None) -> Undecided:
    noisy = [row for row in rows if not row.next_step]
    needed = sorted(
        row.launches_needed
        for row in noisy
        if row.launches_needed is not None and (row.n or 0) < row.launches_needed <= PRACTICAL_LAUNCHES
    )
    steps = [row.next_step for row in rows if row.next_step]
    if without_work is not None and any(row.metric in TIMES for row in noisy):
        steps.insert(0, f"Measure {without_work} with --llmgpu-work=on: one launch decides device time.")
    return Undecided(
        rows=len(noisy),
        launches=needed[-1] if 2 * len(needed) >= len(noisy) and needed else None,
        decided=len(needed),
        steps=list(dict.fromkeys(steps)),
    )


def describe_next(steps: NextSteps) -> str:
    """Return the next steps in one line; empty if there is nothing to do."""
    parts = []
    if steps.worst is not None and (steps.worst.verdict != "UNDECIDED" or is_disturbed(steps.worst)):
        if steps.worst.worse and steps.commits is not None and not steps.worst.next_step:
            good, bad = (commit[:8] for commit in steps.commits)
            names = f"--metric {steps.worst.metric} --case {shlex.quote(steps.worst.id)}"
            parts.append(f"llmgpu bisect {good} {bad} {names} -- pytest ... finds the commit, if several are possible.")
        else:
            parts.append(step_of(steps.worst))
    parts += _describe_undecided(steps.undecided)
    return f"Next: {' '.join(parts)}" if parts else ""


def _describe_undecided(found: Undecided) -> list[str]:
    parts = list(found.steps)
    rows = plural(found.rows, "undecided row")
    if found.launches is not None:
        parts.append(f"--llmgpu-launches={found.launches} in both reports decides {found.decided:,} of {rows}.")
    elif found.rows:
        ways = [
            *["llmgpu ab BASE HEAD -- pytest ... launches both in turn"] * (not found.in_turn),
            *["llmgpu calibrate measures the noise of this machine"] * (not found.calibrated),
        ] or ["measure on a quieter machine"]
        parts.append(
            f"More than {PRACTICAL_LAUNCHES} launches are not practical for {rows}: {', '.join(ways)}. FLOPs, ops and "
            "traffic are decided by one launch."
        )
    return parts


def step_of(row: Row, *others: Row) -> str:
    """Return the next step for the reader of a row, the worst one, and of others with the same cause."""
    if row.verdict == "UNDECIDED" and row.compared:
        return " ".join(_describe_undecided(_decide_undecided([row, *others])))
    return row.next_step or _NEXT_STEPS.get(row.verdict) or spec_of(row.metric).next_step


def _with_numbers_first(rows: Iterable[Row]) -> list[Row]:
    """Return rows of each verdict with outcomes and those first that have a number."""
    return sorted(rows, key=lambda row: (SEVERITY.index(row.verdict), row.ratio is None and row.metric != "outcome"))


def _of_rows(rows: Sequence[Row], limit: float) -> str:
    """Return the worst row, and the number of cases that the others are of."""
    worst, *others = rows
    word = worst.verdict.replace("_", " ")
    counts: dict[str, set[str]] = {}
    limited = any(row.metric == "outcome" and row.verdict == "REGRESSED" for row in rows)
    for row in others:
        # The largest batch size is no case: one of its series is out of memory.
        if not (limited and row.metric == "largest_batch"):
            counts.setdefault(row.verdict.replace("_", " "), set()).update(_cases(row) - _cases(worst))
    more = [f"{plural(len(cases), 'more case')} {verdict}" for verdict, cases in counts.items() if cases]
    if worst.verdict == "UNDECIDED" and not worst.unseen and worst.metric != "outcome":
        more.append('the policy has on_inconclusive = "fail"')
    return "; ".join([f"{word}: {row_in_words(worst, limit)}", *more])


def _cases(row: Row) -> set[str]:
    return set(row.cases or [row.id])


def _of_pass(headline: Headline) -> str:
    if not headline.has_baseline:
        return "there is no baseline to compare with"
    parts = [plural(headline.cases, "case")]
    seen = [
        f"{slowdown(value)} of {name}"
        for name, value in (("device time", headline.device_time), ("wall time", headline.time))
        if value is not None
    ]
    if seen:
        parts.append(f"slowdowns from {' and '.join(seen)} would have been seen")
    elif headline.host_unseen is None:
        parts.append("no gated time was compared")
    if headline.host_unseen is not None:
        host = "slowdowns of the host alone are" if headline.device_time is not None else "smaller slowdowns are"
        parts.append(f"{host} not seen with {plural(headline.host_unseen, 'launch')}")
    if headline.known:
        parts.append(f"{plural(headline.known, 'known regression')}")
    return "; ".join(parts)


def _smallest_seen(rows: Sequence[Row], metric: str) -> list[float]:
    found = [row.smallest_seen for row in rows if row.metric == metric and row.gated and row.known is None]
    return [value for value in found if value is not None]


def _metric(row: Row) -> str:
    name = "wall time" if row.metric == "time" else row.metric.replace("_", " ")
    return f"{name} of the prefill" if row.prefill else name
