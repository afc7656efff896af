from __future__ import annotations

from collections.abc import Sequence

import msgspec
from support import verdict_factory
from support.prose import Prose
from support.report_factory import make_answers, make_failed, make_result, make_traffic, make_work

from pytest_llmgpu.analysis.launch_findings import disagreements, far_apart
from pytest_llmgpu.report.result import CaseResult


def _only(results: Sequence[CaseResult]) -> str:
    """Return code and text of the only finding."""
    (found,) = disagreements(results)
    return f"{found.code}: {found.text}"


def _codes(results: Sequence[CaseResult]) -> list[str]:
    return [finding.code for finding in disagreements(results)]


def test_launches_that_answer_differently_are_a_finding() -> None:
    """An item counts if any launch answers it differently."""
    answers = [[True, True, True], [True, True, True], [True, False, True]]
    results = [make_result(1.0, make_answers(right)) for right in answers]
    assert "otherwise: 3 launches of this case answer 1 of 3 items differently (acc_norm)" in _only(results)


def test_launches_that_send_differently_are_a_finding() -> None:
    """A later launch that sends as much as the first changes nothing."""
    results = [make_result(1.0, traffic=make_traffic(ranks)) for ranks in (4, 2, 4)]
    assert "launches-send-otherwise: 3 launches" in _only(results)
    assert _codes([results[0], results[2]]) == []


def test_a_launch_that_failed_is_not_compared() -> None:
    """A failed launch has no answers, but it has a number."""
    completed = make_result(1.0, make_answers([True]))
    assert disagreements([completed, make_failed("crashed")]) == []
    text = _only([make_result(1.0), make_failed("crashed"), make_result(4.0)])
    assert "launch 3 of 3 was the slowest with 4 s, launch 1 the fastest" in text


def test_launches_of_other_batches_or_executions_are_findings() -> None:
    """Their times are not compared."""
    one, two = make_result(1.0), make_result(9.0, execution="cuda_graphs")
    assert _codes([one, two]) == ["launches-run-otherwise"]
    two.launches[0].plan_sha256 = "0" * 64
    assert _codes([one, two]) == ["launches-run-other-batches", "launches-run-otherwise"]


def test_launches_that_take_other_links_are_a_finding() -> None:
    """The launches are counted by link, fastest first; an unknown link does not count."""
    links = ["pcie", "nvlink", None, "nvlink", "mixed"]
    results = [make_result(1.0, traffic=verdict_factory.make_traffic(link=link)) for link in links]
    assert _only(results).endswith("2 over NVLink, 1 over NVLink and PCIe, 1 over PCIe.")
    assert _codes([results[1], results[2], results[3]]) == []


def test_launches_whose_times_are_far_apart_are_a_finding() -> None:
    """A factor of 3 is far apart, a factor of 2.8 is noise."""
    results = [make_result(seconds) for seconds in (1.2, 1.0, 3.1)]
    assert "in time by a factor of 3.1: launch 3 of 3 was the slowest with 3.1 s, launch 2 the fastest" in _only(
        results
    )
    assert _codes([make_result(1.0), make_result(2.8)]) == []


def test_launches_whose_device_times_are_far_apart_are_a_finding() -> None:
    """Wall time hides it where the host decides. Kernels of equal launches never differ by a factor of 2."""

    def launch(device_s: float) -> CaseResult:
        result = make_result(1.0)
        work = make_work(ranks=1)
        rank = msgspec.structs.replace(work.ranks[0], device_time_s=[device_s] * 3)
        result.launches[0].work = msgspec.structs.replace(work, ranks=[rank])
        return result

    text = _only([launch(0.1), launch(0.21), launch(0.15)])
    assert "in device time by a factor of 2.1: launch 2 of 3 was the slowest with 0.21 s, launch 1 the fastest" in text
    assert _codes([launch(0.1), launch(0.19)]) == []


def test_cases_far_apart_are_named_in_one_line() -> None:
    """At most three are named."""
    cases = [make_result(batch_size=size) for size in (1, 2, 4, 8)]
    assert far_apart(cases) == ""
    for case in cases:
        case.findings = disagreements([make_result(1.0), make_result(3.0)])
    assert "mp-bs1, mp-bs2, mp-bs4 and 1 more" in far_apart(cases)


def test_findings_on_launches_read_as(prose: Prose) -> None:
    """Each finding has its text and its next step."""
    answers = [
        make_result(1.0, make_answers(right), traffic=verdict_factory.make_traffic(calls, link=link))
        for right, calls, link in (([True, True], 64, "nvlink"), ([True, False], 65, "pcie"))
    ]
    other = make_result(9.0, execution="cuda_graphs")
    other.launches[0].plan_sha256 = "0" * 64
    found = [
        *disagreements(answers),
        *disagreements([make_result(1.0), other]),
        *disagreements([make_result(1.0), make_result(9.0)]),
    ]
    assert prose == "\n".join(f"{finding.code}: {finding.text} {finding.next_step}" for finding in found)
