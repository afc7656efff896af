"""Promotion of a report to the baseline. The report keeps its verdicts against the baseline that it replaces."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pytest_llmgpu.gate import judge
from pytest_llmgpu.gate.calibration import Calibration
from pytest_llmgpu.gate.classify import TIMES, fails
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report import disturbances, file
from pytest_llmgpu.report.metrics import spec_of
from pytest_llmgpu.report.options import check_name_is_free
from pytest_llmgpu.report.report import SCHEMA_VERSION, Promotion, Report
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.text import listed
from pytest_llmgpu.report.verdicts import Baseline, Row, Verdicts, worst_first
from pytest_llmgpu.store import references
from pytest_llmgpu.store import store as storage
from pytest_llmgpu.store.store import Stored

NAME = references.BASELINE
"""Name of the baseline in the store."""

_BAD = frozenset(("timeout", "crashed", "error", "interrupted"))
_TIMES = frozenset(("device_time", "time"))
_TESTS_FAILED = 1
"""pytest's exit status of a run in which tests failed, or items of the gate."""
NAMED = 3
"""Most cases that an objection lists."""

_Kind = Literal[
    "no commit",
    "dirty",
    "not complete",
    "exit status",
    "nothing completed",
    "failed cases",
    "wrong answers",
    "disturbed",
    "few launches",
]

_TEXTS: dict[_Kind, str] = {
    "no commit": "nameless: the report does not record its commit",
    "dirty": "dirty: files were changed after the commit",
    "not complete": "failed: the run did not complete",
    "exit status": "failed: pytest ended with exit status {}",
    "nothing completed": "failed: no case completed",
    "failed cases": "failed: {}",
    "wrong answers": "failed: wrong answers of {}",
    "disturbed": "invalid: {}",
    "few launches": "fewer launches than `min_launches` of the policy: {}",
}


class Objection(NamedTuple):
    """A reason why a report cannot be a baseline."""

    kind: _Kind
    """The kind of the reason."""
    values: Sequence[str] = ()
    """The exit status, or the cases with what is wrong with them."""


class Trial(NamedTuple):
    """The comparison of a report with the baseline that it would replace."""

    verdicts: Verdicts
    """The verdicts against that baseline."""
    failing: list[Row]
    """The rows that prevent the promotion."""
    nothing_compared: bool
    """True if no gated row could be compared, which prevents the promotion too."""
    measure_noise: bool
    """True if there is not enough data about a time and no calibration, which could help."""
    begin_again: bool
    """True if the report measured something else, so that no measurement of it can replace the baseline."""


def unfit(candidate: Report, policy: Policy) -> list[Objection]:
    """Return why a report cannot be a baseline, independent of a previous one; empty if it can."""
    session, found = candidate.session, []
    if candidate.commit.sha is None:
        found.append(Objection("no commit"))
    if candidate.commit.dirty:
        found.append(Objection("dirty"))
    if not session.complete or session.interrupted:
        found.append(Objection("not complete"))
    elif session.exit_status and not (session.exit_status == _TESTS_FAILED and session.failed_tests == 0):
        found.append(Objection("exit status", [str(session.exit_status)]))
    if not any(result.outcome == "completed" for result in candidate.cases):
        found.append(Objection("nothing completed"))
    cases: dict[_Kind, list[str]] = {
        "failed cases": [f"{result.id} {result.outcome}" for result in candidate.cases if result.outcome in _BAD],
        "wrong answers": [one.id for one in candidate.cases if one.has_wrong_answers],
        "disturbed": [
            f"{one.id} ({cause})"
            for one in candidate.cases
            if (cause := _disturbed(one, timed=_gates_times(one, policy))) is not None
        ],
        "few launches": [
            f"{one.id} has {count} of {policy.min_launches}"
            for one in candidate.cases
            if one.outcome == "completed"
            and 0 < (count := _launches(one, timed=_gates_times(one, policy))) < policy.min_launches
        ],
    }
    return found + [Objection(kind, values) for kind, values in cases.items() if values]


def disturbed_times(candidate: Report) -> list[str]:
    """Return the cases whose times alone were disturbed, each with the reason: no objection if none is gated."""
    return [
        f"{one.id} ({cause})"
        for one in candidate.cases
        if _disturbed(one, timed=False) is None and (cause := _disturbed(one, timed=True)) is not None
    ]


def describe(objection: Objection) -> str:
    """Return an objection as text."""
    return _TEXTS[objection.kind].format(listed(objection.values, NAMED))


def trial(
    base: Report,
    candidate: Report,
    policy: Policy,
    *,
    today: datetime.date,
    calibration: Calibration | None,
    baseline: Baseline,
) -> Trial:
    """Compare a report with the baseline that it would replace.

    This is stricter than the gate. Rows with not enough data and invalid rows fail, and so does a case that was
    deselected, because later reports would not be compared with it. Not enough data about a time is no objection to a
    report with more launches than the baseline, or a noisy baseline could never be replaced.
    """
    strict = msgspec.structs.replace(policy, on_inconclusive="fail")
    session = msgspec.structs.replace(candidate.session, deselected=[])
    whole = msgspec.structs.replace(candidate, session=session)
    verdicts = judge.judge(base, whole, policy, today=today, calibration=calibration, baseline=baseline)
    launches = {one.key: _launches(one) for one in base.cases}
    more = {one.key for one in candidate.cases if _launches(one) > launches.get(one.key, 0)}
    failing = worst_first(
        row
        for row in verdicts.rows
        if fails(row, strict)
        and not (row.verdict == "UNDECIDED" and row.compared and row.metric in _TIMES and row.key in more)
    )
    nothing_compared = not failing and not verdicts.armed.gated
    undecided = any(row.metric in TIMES and row.verdict == "UNDECIDED" and row.compared for row in failing)
    other = {row.verdict for row in failing} <= {"MISSING", "NOT_COMPARABLE"}
    return Trial(
        verdicts,
        failing,
        nothing_compared,
        measure_noise=calibration is None and undecided,
        begin_again=other and (bool(failing) or nothing_compared),
    )


def describe_trial(trial: Trial) -> list[str]:
    """Return why a report may not replace the baseline, one line for each reason; empty if it may."""
    lines = [f"{row.verdict}: {row.id} {row.metric}: {row.reason}" for row in trial.failing]
    return lines + ["nothing could be compared with the present baseline"] * trial.nothing_compared


def is_same(candidate: Report, base: Report) -> bool:
    """Return whether two reports have the same measurement: they differ at most in their verdicts."""
    # A copy of a report of an older version has the version of its writer.
    plain = {"verdicts": None, "schema_version": SCHEMA_VERSION, "promotion": None}
    return msgspec.structs.replace(candidate, **plain) == msgspec.structs.replace(base, **plain)


def current_in(store: Path, machine: str) -> Stored | None:
    """Return the newest baseline of a machine in the store; None if there is none."""
    return max(_named(store, machine), key=lambda one: one.number, default=None)


def keep(
    candidate: Report,
    verdicts: Verdicts | None,
    *,
    path: Path | None,
    store: Path,
    promotion: Promotion | None = None,
) -> Path:
    """Write a report as the baseline and return its file.

    Args:
        candidate: The report.
        verdicts: The verdicts against the baseline that it replaces; None if it is the first.
        path: The file to write, such as one that git tracks; None: the store, under the name `baseline`. The previous
            baseline stays in the store with its number only.
        store: The folder of the store.
        promotion: The objections that the user overruled; None if there were none.

    Raises:
        ValueError: The name or the path is not allowed.
        OSError: The file cannot be written.
    """
    promoted = msgspec.structs.replace(candidate, verdicts=verdicts, promotion=promotion)
    if path is not None:
        file.check_writable(path)
        file.dump(promoted, path)
        return path
    before = _named(store, storage.hardware(candidate))
    check_name_is_free(NAME)
    kept = storage.save(promoted, store, NAME)
    # The new file is written first: an interruption then leaves two baselines, which is refused, and never none.
    for one in before:
        one.path.rename(storage.unnamed(one))
    return kept


def counted(verdicts: Verdicts) -> str:
    """Return the number of rows of each verdict: `12 OK, 3 IMPROVED`."""
    counts = Counter(row.verdict for row in worst_first(verdicts.rows))
    return ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items())


def _named(store: Path, machine: str) -> list[Stored]:
    return [one for one in storage.stored(store) if one.machine == machine and one.name == NAME]


def _gates_times(result: CaseResult, policy: Policy) -> bool:
    """Return whether the policy gates a time that a case has."""
    rules = policy.rules(result)
    figures = [spec_of(name).figure for name in TIMES if getattr(rules, name).gate]
    return any(figure is not None and figure(result) is not None for figure in figures)


def _launches(result: CaseResult, *, timed: bool = True) -> int:
    """Return the number of undisturbed launches of a case; copies of one launch are one launch."""
    return len({tuple(one.batches.latency_s) for one in result.launches if _disturbance(one, timed=timed) is None})


def _disturbed(result: CaseResult, *, timed: bool) -> str | None:
    """Return the first disturbance of a completed case if all its launches were disturbed; else None."""
    found = [_disturbance(one, timed=timed) for one in result.launches]
    return found[0] if result.outcome == "completed" and found and None not in found else None


def _disturbance(launch: Launch, *, timed: bool) -> str | None:
    """Return the first disturbance of a launch; one of times alone only if `timed` is true."""
    if timed:
        return disturbances.untimed(launch)
    return None if launch.profile is None else disturbances.disturbed(launch.profile)
