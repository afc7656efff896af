from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import known, make_result, make_traffic, make_work

from pytest_llmgpu.gate.cause import host_calls_row
from pytest_llmgpu.gate.exact import execution_row, other_execution, path_row, traffic_row
from pytest_llmgpu.gate.policy import AmountRule
from pytest_llmgpu.gate.program import pairs_of
from pytest_llmgpu.report.result import CaseResult, Traffic
from pytest_llmgpu.report.work import WORK_OFF, WORK_ON, HostCalls, Work


def _result(*works: Work | None) -> CaseResult:
    """Return a result with one launch for each record of work."""
    result = make_result()
    result.launches = [msgspec.structs.replace(result.launches[0], work=work, why={}) for work in works]
    return result


def _calling(*python: int | None, version: str = "3.12", **fields: Any) -> Work:
    """Return a record of ranks with these numbers of Python calls in a forward."""
    work = make_work(len(python), **fields)
    ranks = [
        msgspec.structs.replace(
            rank,
            host_calls=None
            if calls is None
            else HostCalls(python=calls, c=1, by_file={"a.py": calls}, python_version=version),
            why={"host_calls": "it was not counted"} if calls is None else {},
        )
        for rank, calls in zip(work.ranks, python, strict=True)
    ]
    return msgspec.structs.replace(work, ranks=ranks)


def _found(base: CaseResult | Work | None = None, head: CaseResult | Work | None = None) -> Any:
    """Return the row on the calls of the host, or the reason why there is none."""
    then, now = (one if isinstance(one, CaseResult) else _result(one or _calling(4, 4)) for one in (base, head))
    return host_calls_row(then, now, pairs_of(then, now, ([], [])))


def test_one_more_call_is_a_regression(prose: Prose) -> None:
    """One launch decides, by the rank that has most more. One call less is an improvement."""
    more = _calling(4, 5)
    found, fewer, equal = _found(head=more), _found(more, _calling(4, 4)), _found(more, more)
    assert (found.verdict, found.base, found.head) == ("REGRESSED", 4, 5)
    assert (fewer.result, equal.result, equal.cause) == ("OK", "OK", None)
    assert _found(_calling(5, 5)).result == "IMPROVED"
    assert prose == found.reason


def test_one_launch_that_differs_has_no_more_calls() -> None:
    """The median of the launches is compared, as everything that the program calls."""
    assert _found(head=_result(*(_calling(4, calls) for calls in (4, 9, 4)))).result == "OK"
    assert _found(head=_result(*(_calling(4, calls) for calls in (4, 9, 9)))).result == "REGRESSED"


def test_work_of_other_batches_is_not_compared(prose: Prose) -> None:
    """Other batches of the plan, another plan, another version of Python, or other ranks."""
    head = _result(_calling(4, 4, eager_batches=[1]))
    assert prose == _found(head=head)
    other = _result(_calling(4, 4))
    other.launches[0].plan_sha256 = "0" * 64
    for one in (head, other, _calling(4, 4, version="3.13"), _calling(4, 4, 4), _calling(4, None)):
        assert isinstance(_found(head=one), str)


def test_a_figure_that_a_report_lacks(prose: Prose) -> None:
    """It is MISSING if only the candidate lacks it: a figure of a rank, the ranks, or the work passes."""
    lost = _result(_calling(None, None))
    for lacking in (lost, _result(make_work(ranks=0)), _result(None)):
        assert _found(head=lacking).verdict == "MISSING"
        assert _found(lacking) == "only the candidate has it"
        assert _found(lacking, lacking) == "neither report has it"
    assert prose == _found(head=lost).reason


def test_work_that_an_option_switched_off_is_missing() -> None:
    """The candidate lost what the gate judges. The next step names the option, which another reason does not."""
    head = _result(None)
    for why, next_step in ((WORK_OFF, WORK_ON), ("the work passes failed", "")):
        head.launches[0].why["work"] = why
        row = _found(head=head)
        assert (row.result, row.next_step) == ("MISSING", next_step)


def _sending(traffic: Traffic | None) -> CaseResult:
    result = make_result(strategy="tp")
    result.traffic = traffic
    return result


def _traffic(base: CaseResult, head: CaseResult, **rule: Any) -> Any:
    return traffic_row(base, head, AmountRule(**rule))


@pytest.mark.parametrize(
    ("head", "verdict"),
    [
        (make_traffic(64), "OK"),
        (make_traffic(65), "REGRESSED"),
        (make_traffic(63), "IMPROVED"),
        (make_traffic(64, kind="all_gather"), "OK"),
    ],
    ids=["equal", "more", "less", "another collective"],
)
def test_one_launch_decides_on_traffic(head: Traffic, verdict: str, prose: Prose) -> None:
    """One call in 64 more or less counts. A shift to another collective of the same size is OK, with the figures."""
    row = _traffic(_sending(make_traffic(64)), _sending(head))
    assert row.result == verdict
    assert prose == row.reason
    sent = float(sum(entry.wire_bytes for rank in head.ranks for entry in rank))
    assert (row.base, row.head, row.ratio) == (2.0 * 64 * 1024, sent, sent / (2 * 64 * 1024))


def _collectives(*calls: tuple[str, int]) -> CaseResult:
    """Return a result in which each of two ranks has calls of several kinds, of 1 KiB each."""
    rank = [entry for kind, number in calls for entry in make_traffic(number, 1, kind=kind).ranks[0]]
    return _sending(Traffic(ranks=[rank] * 2, wire_bytes_per_sequence=1.0))


@pytest.mark.parametrize(
    ("calls", "verdict"),
    [
        ([("all_reduce", 9_999), ("all_gather", 1_001)], "OK"),
        ([("all_reduce", 10_011), ("all_gather", 1_000)], "OK"),
        ([("all_reduce", 10_012), ("all_gather", 1_000)], "REGRESSED"),
        ([("all_reduce", 9_000), ("all_gather", 2_012)], "REGRESSED"),
        ([("all_reduce", 9_989), ("all_gather", 1_000)], "OK"),
        ([("all_reduce", 9_988), ("all_gather", 1_000)], "IMPROVED"),
    ],
)
def test_the_traffic_of_a_rank_may_grow_by_a_thousandth(calls: list[tuple[str, int]], verdict: str) -> None:
    """All collectives of a rank are summed: 11 of 11,000 calls are allowed, and 12 are not."""
    base = _collectives(("all_reduce", 10_000), ("all_gather", 1_000))
    row = _traffic(base, _collectives(*calls))
    assert (row.result, row.threshold) == (verdict, 0.001)
    assert _traffic(base, _collectives(*calls), threshold=0.01).verdict == "OK"


def test_traffic_of_forwards_that_ran_in_another_way_is_not_compared() -> None:
    """Where the run chooses graphs, it may choose differently the next time: rows are padded for them."""
    base, head = _sending(make_traffic(64)), _sending(make_traffic(65))
    head.case = msgspec.structs.replace(head.case, execution="cuda_graphs")
    assert _traffic(base, head).verdict == "REGRESSED", "the batches are the same"
    head.launches[0].plan_sha256 = "0" * 64
    row = _traffic(base, head)
    assert row.result == "NOT_COMPARABLE"
    assert "--llmgpu-cuda-graphs" in row.reason
    head.traffic = base.traffic
    assert _traffic(base, head).verdict == "OK"


def test_work_that_moves_between_ranks_is_a_change(prose: Prose) -> None:
    """The sums are equal and a rank sends more; the order of a rank's entries says nothing."""
    one, two = make_traffic(64), make_traffic(32)
    moved = Traffic(ranks=[make_traffic(96).ranks[0], two.ranks[0]], wire_bytes_per_sequence=1.0)
    row = _traffic(_sending(one), _sending(moved))
    assert row.result == "REGRESSED"
    assert prose == row.reason
    both = [*one.ranks[0], *make_traffic(1, kind="broadcast").ranks[0]]
    there, back = (Traffic(ranks=[kinds], wire_bytes_per_sequence=1.0) for kinds in (both, both[::-1]))
    assert _traffic(_sending(there), _sending(back)).verdict == "OK"


def test_traffic_that_is_gone_is_missing(prose: Prose) -> None:
    """The reason is the candidate's; where only the candidate has it, there is nothing to compare with."""
    head = _sending(None)
    head.why["traffic"] = "counting was switched off"
    row = _traffic(_sending(make_traffic()), head)
    assert row.result == "MISSING"
    assert prose == row.reason
    assert _traffic(head, _sending(make_traffic())) == "only the candidate has it"
    assert _traffic(head, head) == "neither report has it"


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        ("nvlink", "nvlink", "OK"),
        ("nvlink", "pcie", "REGRESSED"),
        ("nvlink", "mixed", "REGRESSED"),
        ("pcie", "mixed", "IMPROVED"),
        ("pcie", "host", "REGRESSED"),
        ("host", "nvlink", "IMPROVED"),
        ("nvlink", None, "MISSING"),
    ],
)
def test_a_slower_link_is_a_row_of_its_own(base: str, head: str | None, verdict: str, prose: Prose) -> None:
    """The same bytes over PCIe are another machine, and some of them there another path; no traffic has no path."""
    row: Any = path_row(_sending(make_traffic(link=base)), _sending(make_traffic(link=head)), gated=True)
    assert (row.metric, row.result) == ("path", verdict)
    assert prose == row.reason
    assert path_row(_sending(make_traffic(link=base)), _sending(make_traffic(0)), gated=True) == "nothing is sent"


def test_what_a_rank_receives_is_not_sent_again() -> None:
    """A pipeline's bytes on the wire are counted where they are sent."""
    there = make_traffic(64, kind="send").ranks[0], make_traffic(64, kind="recv").ranks[0]
    traffic = Traffic(ranks=list(there), wire_bytes_per_sequence=1.0)
    row = _traffic(_sending(traffic), _sending(traffic))
    assert (row.base, row.head) == (64 * 1024, 64 * 1024)


def _ran(execution: str, requested: str = "auto", choice: str | None = None) -> CaseResult:
    result = make_result(execution=execution, cuda_graphs=requested)
    result.launches[0].execution_choice = choice
    return result


@pytest.mark.parametrize(
    ("was", "now", "requested", "verdict"),
    [
        ("cuda_graphs", "eager", "auto", "REGRESSED"),
        ("cuda_graphs", "eager", "off", None),
        ("compile", "eager", "auto", "REGRESSED"),
        ("eager", "cuda_graphs", "auto", "IMPROVED"),
        ("eager", "eager", "auto", None),
        ("cuda_graphs", "cuda_graphs", "auto", None),
        ("cuda_graphs", "compile", "auto", None),
    ],
)
def test_recorded_forwards_that_become_eager_are_a_regression(
    was: str, now: str, requested: str, verdict: str | None
) -> None:
    """The reverse is an improvement. An unchanged execution has no row, nor has one that the user asked for."""
    row = execution_row(_ran(was), _ran(now, requested), gated=True)
    assert (row.result if row is not None else None) == verdict
    assert (other_execution(_ran(was), _ran(now)) is None) == (was == now)


def test_the_row_has_the_reason_of_the_execution(prose: Prose) -> None:
    """It is the reason that the ranks of the candidate recorded."""
    head = _ran("eager", choice="Recording failed: aten::item reads from the GPU.")
    row = known(execution_row(_ran("cuda_graphs"), head, gated=False))
    assert not row.gated
    assert prose == row.reason
