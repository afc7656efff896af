from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.report_factory import (
    known,
    make_answers,
    make_check,
    make_failed,
    make_finding,
    make_report,
    make_result,
    make_traffic,
    make_work,
)
from support.verdict_factory import with_launches

from pytest_llmgpu.analysis.merging import extend, merge, merge_results
from pytest_llmgpu.report.file import encode, parse
from pytest_llmgpu.report.report import Commit, Report, Session
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.work import Bound


def _seconds(result: CaseResult) -> list[float]:
    return [launch.batches.latency_s[0] for launch in result.launches]


def _measured(*cases: CaseResult, sha: str | None = "a" * 40, gpus: int = 4, **session: Any) -> Report:
    report = make_report(cases, gpus)
    report.commit = Commit(sha=sha)
    report.session = Session(**{"complete": True, "exit_status": 0, **session})
    return report


def _second(result: CaseResult) -> CaseResult:
    return msgspec.structs.replace(result, id="mp-bs1#2")


def test_launches_of_a_case_become_its_launches() -> None:
    """They keep their order, derived figures are over all of them, and the reports are not changed."""
    reports = [
        _measured(with_launches([level], sequences=20), with_launches([2 * level], sequences=40, batch_size=2))
        for level in (1.0, 3.0, 1.1)
    ]
    bound = Bound(compute_s=21.0, memory_s=1.0, wire_s=0.0, bound_s=21.0, limited_by="compute", share=0.1)
    for report in reports:  # the bound itself depends on the case and the machine alone
        report.cases[0].bound = bound
    merged = merge(reports)
    assert [result.id for result in merged.cases] == ["mp-bs1", "mp-bs2"]
    assert [_seconds(result) for result in merged.cases] == [[1.0, 3.0, 1.1], [2.0, 6.0, 2.2]]
    assert merged.cases[0].inference_s == pytest.approx(1.1 * 210)
    assert known(merged.cases[0].bound).share == pytest.approx(21.0 / (1.1 * 210))
    assert [len(result.launches) for report in reports for result in report.cases] == [1] * 6
    assert parse(encode(merged, compressed=False), "merged") == merged
    # The second measurement of a case is merged with the second of the other reports.
    twice = [_measured(with_launches([a]), _second(with_launches([b]))) for a, b in ((1.0, 5.0), (1.1, 5.1))]
    assert [_seconds(result) for result in merge(twice).cases] == [[1.0, 1.1], [5.0, 5.1]]


def test_kernels_of_several_reports_share_one_list_of_names() -> None:
    """Each report numbers its kernels itself; in the merged one equal names have equal numbers."""
    reports = []
    for names in (["gemm", "add"], ["mul", "gemm"]):
        report = _measured(with_launches([1.0]))
        report.environment.kernel_names = names
        launch = report.cases[0].launches[0]
        launch.work, launch.prefill_work = make_work(1), make_work(1)
        reports.append(report)
    for merged in (merge(reports), extend(reports[0], reports[1], [reports[0].cases[0].key])):
        assert merged.environment.kernel_names == ["gemm", "add", "mul"]
        names = merged.environment.kernel_names
        for passes in ("work", "prefill_work"):
            of_launches = [getattr(launch, passes).ranks[0].rows for launch in merged.cases[0].launches]
            shown = [[None if row.kernel is None else names[row.kernel] for row in rows] for rows in of_launches]
            assert shown == [["gemm", "add", "gemm", None], ["mul", "gemm", "mul", None]]
    assert reports[1].cases[0].launches[0].work == make_work(1)


def test_one_report_alone_stays_the_same() -> None:
    """Only its verdicts are dropped: they are about one launch."""
    report = _measured(with_launches([1.0], traffic=make_traffic(), accuracy=make_answers([True] * 4)))
    derived = merge([report])
    assert derived.cases[0].launches == report.cases[0].launches
    assert (derived.session, derived.commit, derived.created) == (report.session, report.commit, report.created)
    assert merge([derived]) == derived
    assert merge([_measured(with_launches([1.0, 9.0]))]).cases[0].findings == []


@pytest.mark.parametrize(
    ("outcomes", "worst"),
    [
        (["completed", "oom", "completed"], "oom"),
        (["oom", "crashed"], "crashed"),
        (["completed", "skipped_after_oom"], "skipped_after_oom"),
        (["interrupted", "completed"], "interrupted"),
        (["interrupted", "oom"], "oom"),
        (["timeout", "error"], "error"),
    ],
)
def test_the_worst_outcome_counts(outcomes: Sequence[Any], worst: str) -> None:
    """Out of memory in one launch is out of memory; finished batches stay, without a total."""
    results = [make_result() if outcome == "completed" else make_failed(outcome) for outcome in outcomes]
    merged = merge_results(results)
    assert merged.outcome == worst
    assert merged.inference_s is None
    assert sum(bool(launch.batches.latency_s) for launch in merged.launches) == outcomes.count("completed")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (_measured(make_result(batch_size=2)), "2 measured different cases .*: only launch 1 has mp-bs1; only"),
        (_measured(make_result(), _second(make_result())), "only launch 2 has mp-bs1#2$"),
        (_measured(make_result(), sha="b" * 40), f"launch 2 measured commit {'b' * 40} and launch 1 commit {'a' * 40}"),
        (_measured(make_result(), gpus=1), "launch 2 ran on another machine than launch 1: GPUs 4 -> 1;"),
    ],
)
def test_launches_of_other_cases_commits_or_machines_are_refused(other: Report, message: str) -> None:
    """They are no replicates; an unknown commit is accepted."""
    with pytest.raises(ValueError, match=message):
        merge([_measured(make_result()), other])
    assert merge([_measured(make_result()), _measured(make_result(), sha=None)]).commit.sha == "a" * 40


def test_traffic_that_differs_between_launches_is_unknown() -> None:
    """The reason has the bytes of both. The slowest path of all launches counts."""
    same = [with_launches([1.0], traffic=traffic) for traffic in (None, make_traffic(), make_traffic(link="nvlink"))]
    assert merge_results(same).traffic == make_traffic(link="nvlink")
    ways = [with_launches([1.0], traffic=make_traffic(link=link)) for link in ("nvlink", "pcie", "mixed", "nvlink")]
    assert merge_results(ways).traffic == make_traffic(link="pcie"), "the slowest, wherever it stands"
    differing = merge_results([with_launches([1.0], traffic=make_traffic(calls)) for calls in (64, 65)])
    assert differing.traffic is None
    assert "131,072 and 133,120 bytes" in differing.why["traffic"]


def test_checks_findings_and_reasons_of_launches_are_joined() -> None:
    """A failed check counts, a code occurs once, and a known figure has no reason."""
    first, second = make_result(), make_result(traffic=make_traffic())
    first.accuracy_check, second.accuracy_check = make_check(ok=None), make_check()
    first.findings = [make_finding(code="a", text="1 %")]
    second.findings = [make_finding(code=code, text="2 %") for code in "ab"]
    first.why = {"traffic": "no", "comparison": "first"}
    second.why = {"comparison": "second"}
    merged = merge_results([first, second])
    assert merged.accuracy_check == make_check()
    assert [(finding.code, finding.text) for finding in merged.findings] == [("a", "1 %"), ("b", "2 %")]
    assert merged.why["comparison"] == "first"


def _slowest(report: Report) -> list[str]:
    """Return the factor and the slowest launch in the findings on the times of the first case."""
    texts = [finding.text for finding in report.cases[0].findings if finding.code == "times-far-apart"]
    return [text.partition(" was the slowest")[0].partition("by a factor of ")[2] for text in texts]


def test_findings_on_launches_are_those_of_all_reports() -> None:
    """A finding of one report on its launches is replaced by one on all launches, of the case whose launches differ."""
    quiet = make_result(batch_size=2)
    reports = [_measured(make_result(seconds), quiet) for seconds in (1.0, 3.0)]
    two = merge(reports)
    assert _slowest(two) == ["3.0: launch 2 of 2"]
    assert [result.findings for report in (*reports, merge(reports[:1])) for result in report.cases] == [[]] * 6
    assert two.cases[1].findings == []
    assert _slowest(merge([two, _measured(make_result(0.5), quiet)])) == ["6.0: launch 2 of 3"]
    assert _slowest(extend(two, _measured(make_result(9.0)), {two.cases[0].key})) == ["9.0: launch 3 of 3"]
    assert merge([two]) == two
    failed = merge([two, _measured(make_failed("skipped_after_oom"), quiet)])
    assert _slowest(failed) == ["3.0: launch 2 of 3"], "a failed launch has a number, too"
    # Traffic that differed is not in the merged report, but its finding is.
    sent = merge([_measured(with_launches([1.0], traffic=make_traffic(calls=calls))) for calls in (64, 65)])
    known = merge([sent, _measured(with_launches([1.0], traffic=make_traffic()))])
    assert [finding.code for finding in known.cases[0].findings] == ["launches-differ"]


def test_the_session_is_as_whole_as_its_launches() -> None:
    """One launch that is incomplete, interrupted, failed or dirty makes the whole report so."""
    last = _measured(make_result(), complete=False, interrupted=True, exit_status=1, deselected=["a", "b"])
    last.commit = Commit(sha="a" * 40, dirty=True)
    session = merge([_measured(make_result(), deselected=["a"]), last])
    assert session.session == Session(complete=False, interrupted=True, exit_status=1, deselected=["a", "b"])
    assert session.commit.dirty is True
    sizes = [make_result(batch_size=1), make_result(batch_size=2)]
    merged = merge([_measured(*sizes), _measured(sizes[0], make_failed(batch_size=2))])
    assert [(one.largest_fit, one.smallest_oom) for one in merged.capacity] == [(1, 2)], "what failed once is the limit"


def test_cases_measured_again_add_their_launches() -> None:
    """Only the named cases get launches; the rest of the report and its session stay the same."""
    cases = [with_launches([1.0, 1.2], batch_size=size) for size in (1, 2, 4)]
    report = _measured(*cases, exit_status=0)
    later = [with_launches([9.0], batch_size=size) for size in (2, 4, 8)]
    again = _measured(*later, complete=False, deselected=["t[mp-bs1]"])
    extended = extend(report, again, {cases[1].key})
    assert [_seconds(result) for result in extended.cases] == [[1.0, 1.2], [1.0, 1.2, 9.0], [1.0, 1.2]]
    assert extended.session == report.session
    again.commit = Commit(sha="b" * 40)
    with pytest.raises(ValueError, match="the later run measured commit b"):
        extend(report, again, set())
