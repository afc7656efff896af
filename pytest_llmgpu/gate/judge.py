"""Compare a report with a baseline: every metric of every case gets a verdict.

The outcome comes before the numbers: a case that no longer fits in memory is a regression even where every number
improved.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pytest_llmgpu.analysis.environments import software_differences
from pytest_llmgpu.gate import cases, policy_file
from pytest_llmgpu.gate.calibration import Calibration
from pytest_llmgpu.gate.classify import with_unseen
from pytest_llmgpu.gate.policy import Known, Policy, idle_overrides
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import guess, listed, plural
from pytest_llmgpu.report.verdicts import (
    DIFFERS,
    Armed,
    Baseline,
    Candidate,
    Row,
    SessionState,
    Verdicts,
)

_CHANGES_ONLY = frozenset(("outcome", "execution", "kernels", "ops", "runtime_calls"))
"""Metrics that a completed case may have no row of: the absence of a row means no change."""


def judge(
    base: Report | None,
    head: Report,
    policy: Policy,
    *,
    today: datetime.date,
    calibration: Calibration | None = None,
    baseline: Baseline | None = None,
    in_turn: bool = False,
) -> Verdicts:
    """Compare a report with a baseline. Equal arguments give equal verdicts, to the byte.

    Args:
        base: The baseline; None where there is none.
        head: The candidate.
        policy: Thresholds and known regressions.
        today: The day that decides whether a known regression expired.
        calibration: Noise between launches of this machine; None: the priors alone.
        baseline: Where `base` came from; None: only its commit is named.
        in_turn: True if launches of both reports alternated.
    """
    calibration = calibration or Calibration()
    judged = cases.Comparison(base, head, policy, calibration, in_turn=in_turn)
    results = [*(base.cases if base is not None else []), *head.cases]
    known, warnings = _known(judged.rows, policy, today)
    known = with_unseen(known, policy)
    if judged.copied:
        copied = plural(judged.copied, "case")
        warnings.insert(0, f"baseline and candidate are of the same run: {copied} with the same launches")
    warnings += idle_overrides(policy, results)
    if base is not None:
        warnings += unmatched(policy, results, known)
        baseline = baseline or Baseline(commit=base.commit.sha)
        soft = software_differences(base.environment, head.environment)
        if base.promotion is not None:
            objections = listed(base.promotion.objections, 1)
            warnings.append(f"the baseline was promoted by force ({base.promotion.reason}) in spite of: {objections}")
        if (head.created, head.commit.sha) in {(one.created, one.commit) for one in calibration.sessions}:
            warnings.append("the noise was calibrated from the candidate itself: calibrate from other launches")
        warnings = [*(f"{DIFFERS}{text}" for text in soft), *calibration.warnings, *warnings]
    unarmed = judged.unarmed + judged.left_out
    others = [row for row in known if not row.compared]
    unarmed.update(f"{row.metric}: {row.verdict}" for row in others)
    gaps = judged.gaps + Counter(f"{row.metric}: {row.verdict}" for row in others if row.gated)
    armed = Armed(
        compared=sum(row.compared for row in known),
        gated=sum(row.compared and row.gated for row in known),
        unarmed=dict(sorted(unarmed.items())),
        gaps=dict(sorted(gaps.items())),
        gated_unarmed=gaps.total(),
    )
    return Verdicts(
        baseline=baseline if base is not None else None,
        head=Candidate(created=head.created, commit=head.commit.sha, states=list(_states(head))),
        policy=policy_file.dump(policy),
        policy_sha256=policy_file.sha256(policy),
        calibration_sha256=calibration.sha256,
        in_turn=in_turn,
        armed=armed,
        warnings=warnings,
        rows=known,
    )


def _states(head: Report) -> Iterator[SessionState]:
    """Yield the reasons to doubt the candidate as a whole."""
    session = head.session
    if session.interrupted:
        yield "interrupted"
    elif not session.complete:
        yield "incomplete"
    elif session.exit_status and session.failed_tests != 0:
        yield "failed"
    if head.commit.dirty:
        yield "dirty"


def _known(rows: Sequence[Row], policy: Policy, today: datetime.date) -> tuple[list[Row], list[str]]:
    """Mark the rows that the policy accepts, and return a warning for each entry that expired or is not needed.

    A row with not enough data can be the known regression, hidden by noise.
    """
    warnings = []
    reasons: dict[tuple[str, str], str] = {}
    for entry in policy.known:
        name = f"known regression {entry.case} {entry.metric} ({entry.reason})"
        about = [row for row in rows if row.metric == entry.metric and entry.case in {*_names(row), *(row.cases or ())}]
        open_rows = [row for row in about if _may_be_known(row)]
        grown = max((row.ratio - 1 for row in open_rows if row.ratio is not None), default=0.0)
        if entry.expires < today:
            warnings.append(f"{name} expired on {entry.expires}: it counts again")
        elif entry.up_to is not None and grown > entry.up_to:
            warnings.append(
                f"{name} grew by {100 * grown:,.0f} %, more than its up_to of {100 * entry.up_to:.3g} %: it counts"
            )
        elif open_rows:
            reasons[entry.case, entry.metric] = entry.reason
        elif any(row.verdict == "OK" or row.improved for row in about or _of_completed(rows, entry)):
            # A case that was left out, or could not be compared, can still have it.
            warnings.append(f"{name} was not found: remove it from the policy")
    return [_marked(row, reasons) if _may_be_known(row) else row for row in rows], warnings


def _may_be_known(row: Row) -> bool:
    return row.worse or (row.verdict == "UNDECIDED" and row.compared)


def _marked(row: Row, reasons: Mapping[tuple[str, str], str]) -> Row:
    """Return the row with the reason why it is accepted: of its id, or of each case that it is about."""
    reason = next((text for name in _names(row) if (text := reasons.get((name, row.metric)))), None)
    of_cases = [reasons.get((case, row.metric)) for case in row.cases or ()]
    if reason is None and of_cases and None not in of_cases:
        reason = of_cases[0]
    return row if reason is None else msgspec.structs.replace(row, known=reason)


def _names(row: Row) -> tuple[str, str]:
    """Return the id of a row, and the strategy of one of several series of it."""
    return row.id, row.id.partition(" (")[0]


def _of_completed(rows: Sequence[Row], entry: Known) -> list[Row]:
    """Return all rows of a case for a metric that has a row only where it changed; else none."""
    return [row for row in rows if row.id == entry.case] if entry.metric in _CHANGES_ONLY else []


def unmatched(policy: Policy, cases: Sequence[CaseResult], rows: Sequence[Row] = ()) -> list[str]:
    """Return a line for each known regression whose case neither report has: its name may be misspelt."""
    names = {*(name for result in cases for name in (result.id, result.case.strategy))}
    names |= {row.id for row in rows}
    return [
        f"known regression {entry.case} {entry.metric} ({entry.reason}): no case of these reports has that name"
        + guess(entry.case, names)
        for entry in policy.known
        if entry.case not in names
    ]
