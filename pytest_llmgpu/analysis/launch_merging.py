"""Launches of the same cases, each with a report of its own, as one report with several launches a case.

A process launch is the replicate: what is measured N times in N runs of pytest is judged as one measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple, get_args

import msgspec

from pytest_llmgpu.analysis import capacity
from pytest_llmgpu.analysis.environment_differences import hardware_differences
from pytest_llmgpu.analysis.launch_findings import disagreements
from pytest_llmgpu.analysis.traffic_path import FASTEST_FIRST
from pytest_llmgpu.report.derived import derive
from pytest_llmgpu.report.report import Report, Session
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult, Finding, Outcome, Traffic

__all__ = ["extend", "merge", "merge_results"]

_WORST_FIRST: tuple[Outcome, ...] = (
    *("error", "crashed", "timeout"),
    *("oom", "skipped_after_oom"),
    *("interrupted", "completed"),
)
assert set(_WORST_FIRST) == set(get_args(Outcome))

_NAMED = 3
"""Most cases or differences that an error names."""


class _Name(NamedTuple):
    """Which result of a report: the second of a key is another one than the first."""

    key: str
    number: int


def merge(reports: Sequence[Report], names: Sequence[str] | None = None) -> Report:
    """Return one report of several that measured the same cases of one commit on one kind of machine.

    What is said of a run as a whole (time, arguments, environment) is the first report's. In what launches of several
    reports differ though it should be equal is a finding of their case.

    Args:
        reports: one at least, each with one launch or more of every case.
        names: of the reports, for messages; None: `launch 1` and so on.

    Raises:
        ValueError: none was given, or they differ in their cases, their commit or their machine; one line names what.
    """
    if not reports:
        raise ValueError("launches are merged from one report at least")
    called = names or [f"launch {number + 1}" for number in range(len(reports))]
    first = _by_name(reports[0])
    for report, name in zip(reports[1:], called[1:], strict=True):
        _refuse_other_source(reports[0], report, called[0], name)
        _refuse_other_cases(first, _by_name(report), called[0], name)
    sides = [_by_name(report) for report in reports]
    return _merged(reports, [_compared([side[name] for side in sides]) for name in first])


def extend(report: Report, again: Report, keys: Collection[str]) -> Report:
    """Return a report to which another adds its launches of some cases: those that were measured again.

    Args:
        report: every case.
        again: a later run; what else it holds, or does not, changes nothing.
        keys: of the cases whose launches are added.

    Raises:
        ValueError: the later run is of another commit or machine.
    """
    _refuse_other_source(report, again, "the report", "what was measured again")
    found = {name: result for name, result in _by_name(again).items() if name.key in keys}
    cases = [_compared([result, found[name]]) if name in found else result for name, result in _by_name(report).items()]
    return _merged([report, again], cases, again_in_part=True)


def merge_results(results: Sequence[CaseResult]) -> CaseResult:
    """Return one result with the launches of several of one case.

    The worst outcome counts: out of memory in any launch is out of memory. So does the first check of the answers that
    failed, and the slowest path that a launch took. Traffic is exact: launches that differ in it have none, with the
    reason in `why`.

    Args:
        results: one at least.
    """
    first = results[0]
    worst = min(results, key=lambda result: _WORST_FIRST.index(result.outcome))
    traffic, reason = _traffic(results)
    why = {name: text for result in reversed(results) for name, text in result.why.items()}
    merged = msgspec.structs.replace(
        first,
        outcome=worst.outcome,
        failure=worst.failure,
        launches=[launch for result in results for launch in result.launches],
        inference_s=None,
        sequences_per_s=None,
        tokens_per_s=None,
        acc=None,
        acc_norm=None,
        accuracy_check=_check(results),
        comparison=next((result.comparison for result in results if result.comparison is not None), None),
        traffic=traffic,
        findings=_findings(results),
        why=why if reason is None else {**why, "traffic": reason},
    )
    merged.why = {name: text for name, text in merged.why.items() if getattr(merged, name, None) is None}
    derive(merged)
    return merged


def _compared(results: Sequence[CaseResult]) -> CaseResult:
    """Return one result of several, with findings of what differs from launch to launch.

    They are of all launches, and stand for what a report says of its own.
    """
    merged = merge_results(results)
    if len(results) > 1:
        told = disagreements([launch for result in results for launch in _launches(result)])
        codes = {finding.code for finding in told}
        merged.findings = [*(finding for finding in merged.findings if finding.code not in codes), *told]
    return merged


def _launches(result: CaseResult) -> list[CaseResult]:
    """Return a result for each launch; where there is none itself, which counts as one that failed."""
    return [msgspec.structs.replace(result, launches=[launch]) for launch in result.launches] or [result]


def _merged(reports: Sequence[Report], cases: list[CaseResult], *, again_in_part: bool = False) -> Report:
    first, sessions = reports[0], [report.session for report in reports]
    whole = sessions[:1] if again_in_part else sessions
    dirty = [report.commit.dirty for report in reports]
    return msgspec.structs.replace(
        first,
        session=Session(
            complete=all(session.complete for session in whole),
            interrupted=any(session.interrupted for session in whole),
            exit_status=next(
                (session.exit_status for session in sessions if session.exit_status), sessions[0].exit_status
            ),
            collected=first.session.collected,
            deselected=list(dict.fromkeys(entry for session in whole for entry in session.deselected)),
        ),
        commit=msgspec.structs.replace(first.commit, dirty=True if True in dirty else first.commit.dirty),
        cases=cases,
        capacity=capacity.capacities(cases, first.environment.gpus),
        verdicts=None,
    )


def _by_name(report: Report) -> dict[_Name, CaseResult]:
    counts: Counter[str] = Counter()
    found = {}
    for result in report.cases:
        found[_Name(result.key, counts[result.key])] = result
        counts[result.key] += 1
    return found


def _refuse_other_source(first: Report, other: Report, first_name: str, name: str) -> None:
    shas = first.commit.sha, other.commit.sha
    if None not in shas and shas[0] != shas[1]:
        raise ValueError(
            f"{name} measured commit {shas[1]} and {first_name} {shas[0]}: they are no launches of one thing"
        )
    devices = sorted({"cpu" if result.case.device == "cpu" else "cuda" for result in (*first.cases, *other.cases)})
    for device in devices:
        if differing := hardware_differences(first.environment, other.environment, device):
            text = "; ".join(differing[:_NAMED])
            raise ValueError(f"{name} ran on another machine than {first_name}: {text}")


def _refuse_other_cases(
    first: dict[_Name, CaseResult], other: dict[_Name, CaseResult], first_name: str, name: str
) -> None:
    gone = [result.id for key, result in first.items() if key not in other]
    new = [result.id for key, result in other.items() if key not in first]
    if gone or new:
        parts = [f"{first_name} alone has {_listed(gone)}"] * bool(gone)
        parts += [f"{name} alone has {_listed(new)}"] * bool(new)
        raise ValueError(
            f"{first_name} and {name} measured other cases, so that they cannot be merged: {'; '.join(parts)}"
        )


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return ", ".join(ids[:_NAMED]) + more


def _traffic(results: Sequence[CaseResult]) -> tuple[Traffic | None, str | None]:
    """Return the traffic of all launches, from the one with the slowest path that is known; or why there is none."""
    known = [result.traffic for result in results if result.traffic is not None]
    other = next((traffic for traffic in known if traffic.ranks != known[0].ranks), None)
    if other is not None:
        sent = known[0].sent_bytes, other.sent_bytes
        return None, f"launches of the same thing sent {sent[0]:,} and {sent[1]:,} bytes on the wire"
    return max(known, key=_slowness, default=None), None


def _slowness(traffic: Traffic) -> int:
    """Return the place of its link among those from the fastest to the slowest; -1 where it is not known."""
    return -1 if traffic.path is None or traffic.path.link is None else FASTEST_FIRST.index(traffic.path.link)


def _check(results: Sequence[CaseResult]) -> AccuracyCheck | None:
    checks = [result.accuracy_check for result in results if result.accuracy_check is not None]
    return next((check for check in checks if check.ok is False), checks[0] if checks else None)


def _findings(results: Sequence[CaseResult]) -> list[Finding]:
    """Return the first finding of each code: launches word the same thing with other figures."""
    found: dict[str, Finding] = {}
    for finding in (finding for result in results for finding in result.findings):
        found.setdefault(finding.code, finding)
    return list(found.values())
