"""Merges reports of the same cases into one report with several launches per case.

A launch of the processes is the replicate: a case that N runs of pytest measured becomes one case with N launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import get_args

import msgspec

from pytest_llmgpu.analysis import capacity
from pytest_llmgpu.analysis.environments import hardware_differences
from pytest_llmgpu.analysis.findings import disagreements, first_of_each_code
from pytest_llmgpu.analysis.traffic_path import FASTEST_FIRST
from pytest_llmgpu.report.derived import derive
from pytest_llmgpu.report.report import Report, Session
from pytest_llmgpu.report.result import CaseResult, Outcome
from pytest_llmgpu.report.text import listed
from pytest_llmgpu.report.work import renumbered

_WORST_FIRST: Sequence[Outcome]
_WORST_FIRST = ("error", "crashed", "timeout", "oom", "skipped_after_oom", "interrupted", "completed")
assert set(_WORST_FIRST) == set(get_args(Outcome))
_NAMED = 3
"""The largest number of cases or differences that an error names."""


def merge(reports: Sequence[Report], names: Sequence[str] | None = None) -> Report:
    """Return one report of several that measured the same cases of one commit on one kind of machine.

    Each report has one or more launches of every case; `names` are for messages, None for `launch 1`, `launch 2` and so
    on. Time, arguments and environment are those of the first one. If launches differ although they should be equal,
    their case has a finding. ValueError if the reports differ in their cases, their commit or their machine.
    """
    called = names or [f"launch {number + 1}" for number in range(len(reports))]
    reports = _with_common_kernel_names(reports)
    named = [_by_name(report) for report in reports]
    first = named[0]
    for report, results, name in zip(reports[1:], named[1:], called[1:], strict=True):
        _refuse_other_source(reports[0], report, called[0], name)
        gone = [result.id for key, result in first.items() if key not in results]
        new = [result.id for key, result in results.items() if key not in first]
        if gone or new:
            parts = [f"only {one} has {listed(ids, _NAMED)}" for one, ids in ((called[0], gone), (name, new)) if ids]
            both = f"{called[0]} and {name} measured different cases"
            raise ValueError(f"{both} and cannot be merged: {'; '.join(parts)}")
    return _merged(reports, [_compared([results[name] for results in named]) for name in first])


def extend(report: Report, again: Report, keys: Collection[str]) -> Report:
    """Return a report with further launches of some cases, which a later run measured again.

    ValueError if that is of another commit or machine.
    """
    _refuse_other_source(report, again, "the report", "the later run")
    report, again = _with_common_kernel_names([report, again])
    found = {name: result for name, result in _by_name(again).items() if name[0] in keys}
    cases = [_compared([result, found[name]]) if name in found else result for name, result in _by_name(report).items()]
    return _merged([report, again], cases, again_in_part=True)


def merge_results(results: Sequence[CaseResult]) -> CaseResult:
    """Return one result with the launches of several results of one case.

    The worst outcome counts: out of memory in any launch is out of memory. The first failed check of the answers
    counts, and the slowest path that a launch took. Traffic is exact: if launches differ in it, the merged result has
    none, with the reason in `why`.
    """
    first = results[0]
    worst = min(results, key=lambda result: _WORST_FIRST.index(result.outcome))
    why = {name: text for result in reversed(results) for name, text in result.why.items()}
    known = [result.traffic for result in results if result.traffic is not None]
    order = (None, *FASTEST_FIRST)  # a link that is unknown comes first
    traffic = max(known, key=lambda one: order.index(one.path.link if one.path is not None else None), default=None)
    if (other := next((one for one in known if one.ranks != known[0].ranks), None)) is not None:
        traffic = None
        sent = f"{known[0].sent_bytes:,} and {other.sent_bytes:,}"
        why["traffic"] = f"launches of this case sent {sent} bytes on the wire"
    checks = [result.accuracy_check for result in results if result.accuracy_check is not None]
    merged = msgspec.structs.replace(
        first,
        outcome=worst.outcome,
        failure=worst.failure,
        launches=[launch for result in results for launch in result.launches],
        accuracy_check=next((check for check in checks if check.ok is False), checks[0] if checks else None),
        comparison=next((result.comparison for result in results if result.comparison is not None), None),
        traffic=traffic,
        findings=first_of_each_code(finding for result in results for finding in result.findings),
        why=why,
    )
    derive(merged)
    merged.why = {name: text for name, text in merged.why.items() if getattr(merged, name, None) is None}
    if merged.bound is not None and merged.inference_s:
        merged.bound = msgspec.structs.replace(merged.bound, share=merged.bound.bound_s / merged.inference_s)
    return merged


def _with_common_kernel_names(reports: Sequence[Report]) -> list[Report]:
    """Return reports whose rows of kernels refer to one list of names: that of the first, extended."""
    names: dict[str, int] = {}
    found = []
    for report in reports:
        numbers = [names.setdefault(name, len(names)) for name in report.environment.kernel_names]
        cases = []
        for result in report.cases:
            launches = []
            for launch in result.launches:
                passes = (launch.work, launch.prefill_work)
                work, prefill = (None if one is None else renumbered(one, numbers) for one in passes)
                launches.append(msgspec.structs.replace(launch, work=work, prefill_work=prefill))
            cases.append(msgspec.structs.replace(result, launches=launches))
        found.append(msgspec.structs.replace(report, cases=cases))
    environment = msgspec.structs.replace(found[0].environment, kernel_names=list(names))
    return [msgspec.structs.replace(found[0], environment=environment), *found[1:]]


def _compared(results: Sequence[CaseResult]) -> CaseResult:
    """Return one result of several, with findings on how all its launches differ in place of those of a report."""
    merged = merge_results(results)
    if len(results) > 1:
        new = disagreements([launch for result in results for launch in by_launch(result)])
        codes = {finding.code for finding in new}
        merged.findings = [*(finding for finding in merged.findings if finding.code not in codes), *new]
    return merged


def by_launch(result: CaseResult) -> list[CaseResult]:
    """Return a result for each launch of a result; a result without launches counts as one launch that failed."""
    return [msgspec.structs.replace(result, launches=[launch]) for launch in result.launches] or [result]


def _merged(reports: Sequence[Report], cases: list[CaseResult], *, again_in_part: bool = False) -> Report:
    first, sessions = reports[0], [report.session for report in reports]
    whole = sessions[:1] if again_in_part else sessions
    dirty = [report.commit.dirty for report in reports]
    failed = [session.failed_tests for session in sessions]
    return msgspec.structs.replace(
        first,
        session=Session(
            complete=all(session.complete for session in whole),
            interrupted=any(session.interrupted for session in whole),
            exit_status=next(filter(None, (session.exit_status for session in sessions)), sessions[0].exit_status),
            failed_tests=None if None in failed else sum(count or 0 for count in failed),
            collected=first.session.collected,
            deselected=list(dict.fromkeys(entry for session in whole for entry in session.deselected)),
        ),
        commit=msgspec.structs.replace(
            first.commit,
            dirty=True if True in dirty else first.commit.dirty,
            imported_from={name: path for one in reports for name, path in one.commit.imported_from.items()},
        ),
        cases=cases,
        capacity=capacity.capacities(cases),
        verdicts=None,
    )


def _by_name(report: Report) -> dict[tuple[str, int], CaseResult]:
    """Return the results by key and number: a second result of the same key has the number 1."""
    counts: Counter[str] = Counter()
    found = {}
    for result in report.cases:
        found[result.key, counts[result.key]] = result
        counts[result.key] += 1
    return found


def _refuse_other_source(first: Report, other: Report, first_name: str, name: str) -> None:
    shas = first.commit.sha, other.commit.sha
    if None not in shas and shas[0] != shas[1]:
        needed = "only launches of the same commit can be merged"
        raise ValueError(f"{name} measured commit {shas[1]} and {first_name} commit {shas[0]}: {needed}")
    devices = sorted({"cpu" if result.case.device == "cpu" else "cuda" for result in (*first.cases, *other.cases)})
    for device in devices:
        if differing := hardware_differences(first.environment, other.environment, device):
            needed = f"{'; '.join(differing[:_NAMED])}; only launches of the same machine can be merged"
            raise ValueError(f"{name} ran on another machine than {first_name}: {needed}")
