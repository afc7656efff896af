from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import GIB, make_failed, make_memory, make_result, make_traffic, make_work
from support.verdict_factory import make_invalid

from pytest_llmgpu.gate.exact import (
    by_series,
    exact_rows,
    execution_row,
    largest_batch_row,
    memory_row,
    other_execution,
    path_row,
    traffic_row,
    was_probed,
)
from pytest_llmgpu.gate.policy import AmountRule, ExactRule, MemoryRule, Rules
from pytest_llmgpu.report.result import CaseResult, Traffic
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.report.work import WORK_OFF, WORK_ON, RankWork, Work

STRICT = Rules(kernels=ExactRule(), ops=ExactRule(), runtime_calls=ExactRule())


def _result(*works: Work | None) -> CaseResult:
    """Return a result with one launch for each record of work."""
    result = make_result()
    result.launches = [msgspec.structs.replace(result.launches[0], work=work, why={}) for work in works]
    return result


def _with(work: Work | None = None, **fields: Any) -> Work:
    """Return the record with other fields on rank 1; the default record has two ranks."""
    work = work or make_work()
    first, second = work.ranks
    return msgspec.structs.replace(work, ranks=[first, msgspec.structs.replace(second, **fields)])


def _found(
    base: CaseResult | Work | None = None, head: CaseResult | Work | None = None, rules: Rules | None = None
) -> dict[str, Row | str]:
    """Return the row of each metric of work passes, or the reason why there is none."""
    base, head = (
        side if isinstance(side, CaseResult) else _result(make_work() if side is None else side)
        for side in (base, head)
    )
    found = exact_rows(base, head, rules or Rules())
    return {metric: row for metric, row in found if metric not in {"traffic", "path", "memory"}}


def _rows(*given: Any, **named: Any) -> dict[str, Row]:
    """Return the row of each metric that has one."""
    return {metric: row for metric, row in _found(*given, **named).items() if isinstance(row, Row)}


def test_equal_work_is_ok() -> None:
    """A metric that is only shown has a row where the policy gates it."""
    assert {name: row.result for name, row in _rows().items()} == {"flops": "OK", "host_syncs": "OK"}
    rows = _rows(rules=STRICT)
    assert {name: row.result for name, row in rows.items()} == dict.fromkeys(
        ("flops", "host_syncs", "kernels", "ops", "runtime_calls"), "OK"
    )
    assert (rows["flops"].base, rows["flops"].head, rows["flops"].n) == (1e12, 1e12, 1)


@pytest.mark.parametrize(
    ("flops", "verdict"),
    [
        (1_010_000_000_000, "REGRESSED"),
        (1_001_000_000_001, "REGRESSED"),
        (1_001_000_000_000, "OK"),
        (999_000_000_000, "OK"),
        (998_999_999_999, "IMPROVED"),
    ],
)
def test_flops_may_grow_by_a_thousandth_on_each_rank(flops: int, verdict: str) -> None:
    """The rank that changed decides, with its own figures."""
    row = _rows(head=_with(flops=flops))["flops"]
    assert (row.result, row.gated, row.threshold) == (verdict, True, 0.001)
    assert row.ratio == flops / 10**12
    assert _rows(head=_with(flops=flops), rules=Rules(flops=AmountRule(threshold=0.02)))["flops"].verdict == "OK"


def test_flops_that_move_between_ranks_are_a_regression() -> None:
    """The sum is equal, and the slowest rank takes longer."""
    work = _with(flops=10**12 + 10**10)
    first, second = work.ranks
    moved = msgspec.structs.replace(work, ranks=[msgspec.structs.replace(first, flops=10**12 - 10**10), second])
    row = _rows(head=moved)["flops"]
    assert (row.result, row.head) == ("REGRESSED", 1.01e12)


def _more(rank: RankWork, function: str) -> dict[str, int]:
    assert rank.runtime_calls is not None
    return {**rank.runtime_calls, function: rank.runtime_calls.get(function, 0) + 1}


@pytest.mark.parametrize(
    ("metric", "fields"),
    [
        ("host_syncs", lambda rank: {"host_syncs": 5, "runtime_calls": _more(rank, "cudaStreamSynchronize")}),
        ("kernels", lambda rank: {"kernels": rank.kernels + 1, "runtime_calls": _more(rank, "cudaLaunchKernel")}),
        ("ops", lambda _: {"ops": {"aten::mm": 399, "aten::add": 2}}),
        ("runtime_calls", lambda rank: {"runtime_calls": _more(rank, "cudaMemcpyAsync")}),
    ],
)
def test_one_more_call_is_a_regression(metric: str, fields: Callable[[RankWork], dict[str, Any]], prose: Prose) -> None:
    """One launch decides. The reason names the calls that changed; one call less is an improvement."""
    more = _with(**fields(make_work().ranks[1]))
    rows = _rows(head=more)
    assert rows[metric].verdict == ("REGRESSED" if metric == "host_syncs" else "CHANGED")
    assert rows[metric].gated == (metric == "host_syncs")
    assert _rows(head=more, rules=STRICT)[metric].gated
    assert prose == rows[metric].reason
    fewer = _rows(base=more)[metric]
    assert fewer.result == "IMPROVED"
    assert prose == fewer.reason


def test_the_reasons_of_flops(prose: Prose) -> None:
    """They name the rank, or all ranks, and the change in percent."""
    one = _with(flops=10**12 + 10**10, ops={"aten::mm": 404})
    assert prose == _rows(head=one)["flops"].reason
    all_ranks = msgspec.structs.replace(one, ranks=[one.ranks[1]] * 2)
    assert prose == _rows(head=all_ranks)["flops"].reason
    assert prose == _rows(head=_with(flops=10**12 + 10**8))["flops"].reason
    assert prose == _rows()["flops"].reason


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([4, 4], [5, 5], "REGRESSED"),
        ([4, 5], [5, 5], "UNDECIDED"),
        ([4, 4], [4, 5], "UNDECIDED"),
        ([5, 5], [4, 4], "IMPROVED"),
        ([4, 5], [4, 4], "OK"),
        ([4], [5, 5, 5], "REGRESSED"),
    ],
)
def test_launches_that_differ_have_to_differ_in_one_direction(
    before: Sequence[int], after: Sequence[int], verdict: str
) -> None:
    """Every launch of the candidate has to have more than every launch of the baseline."""
    base, head = (_result(*(_with(host_syncs=count) for count in counts)) for counts in (before, after))
    row = _rows(base, head)["host_syncs"]
    assert (row.result, row.n) == (verdict, min(len(before), len(after)))


def test_work_of_other_batches_is_not_compared(prose: Prose) -> None:
    """Other batches of the plan, or another plan."""
    head = _result(make_work(batches=[0, 1]))
    assert _rows(head=head) == {}
    assert prose == _found(head=head)["flops"]
    other = _result(make_work())
    other.launches[0].plan_sha256 = "0" * 64
    assert _rows(head=other) == {}
    both = _result(make_work(batches=[0, 1]), _with(flops=2 * 10**12))
    assert _rows(head=both)["flops"].verdict == "REGRESSED", "the second launch ran the same batches"
    assert _rows(head=make_work(ranks=4)) == {}


def test_a_figure_that_a_report_lacks(prose: Prose) -> None:
    """It is MISSING if only the candidate lacks it."""
    why = {"flops": "fused kernels bypass the dispatcher"}
    ranks = [RankWork(uuids=[], flops=None, host_syncs=4, why=why)] * 2
    fused = _result(msgspec.structs.replace(make_work(), ranks=ranks))
    row = _rows(head=fused)["flops"]
    assert row.result == "MISSING"
    assert prose == row.reason
    assert _found(fused, fused)["flops"] == "neither report has it"
    assert _found(fused)["flops"] == "only the candidate has it"
    nothing = _result(None)
    assert _found(nothing, nothing)["host_syncs"] == "neither report has it"
    assert set(_rows(head=nothing)) == {"flops", "host_syncs"}, "metrics that are only shown have no row"


def test_work_without_ranks_is_no_work() -> None:
    """A file can have an empty list of ranks."""
    empty = _result(make_work(ranks=0))
    assert _rows(empty, empty) == {}
    assert _found(empty, empty)["flops"] == "neither report has it"
    assert _rows(head=empty)["flops"].verdict == "MISSING"


def test_work_that_an_option_switched_off_is_missing() -> None:
    """The candidate lost what the gate judges. The next step names the option, which another reason does not."""
    head = _result(None)
    head.launches[0].why["work"] = WORK_OFF
    rows = _rows(head=head)
    assert {(row.metric, row.result) for row in rows.values()} == {("flops", "MISSING"), ("host_syncs", "MISSING")}
    assert {row.next_step for row in rows.values()} == {WORK_ON}
    head.launches[0].why["work"] = "the work passes failed"
    assert {row.next_step for row in _rows(head=head).values()} == {""}


def _sending(traffic: Traffic | None) -> CaseResult:
    result = make_result(strategy="tp")
    result.traffic = traffic
    return result


def _row(found: Row | str | None) -> Row:
    assert isinstance(found, Row), found
    return found


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
    row = _row(traffic_row(_sending(make_traffic(64)), _sending(head), AmountRule()))
    assert row.result == verdict
    assert prose == row.reason
    sent = float(sum(entry.wire_bytes for rank in head.ranks for entry in rank))
    assert (row.base, row.head) == (2.0 * 64 * 1024, sent)
    assert row.ratio == sent / (2 * 64 * 1024)


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
    row = _row(traffic_row(base, _collectives(*calls), AmountRule()))
    assert (row.result, row.threshold) == (verdict, 0.001)
    assert _row(traffic_row(base, _collectives(*calls), AmountRule(threshold=0.01))).verdict == "OK"


def test_forwards_that_ran_in_another_way_are_not_compared() -> None:
    """Where the run chooses graphs, it may choose otherwise the next time: rows are padded for them, memory is kept."""
    base, head = _sending(make_traffic(64)), _sending(make_traffic(65))
    for result, memory in ((base, 16.0), (head, 17.0)):
        result.launches[0].memory = make_memory(peak=memory * GIB)
    head.case = msgspec.structs.replace(head.case, execution="cuda_graphs")
    words = "--llmgpu-cuda-graphs"
    assert _row(traffic_row(base, head, AmountRule())).verdict == "REGRESSED", "the batches are the same"
    head.launches[0].plan_sha256 = "0" * 64
    rows = [_row(traffic_row(base, head, AmountRule())), _row(memory_row(base, head, MemoryRule()))]
    assert [row.result for row in rows] == ["NOT_COMPARABLE"] * 2
    assert all(words in row.reason for row in rows)
    head.traffic = base.traffic
    assert _row(traffic_row(base, head, AmountRule())).verdict == "OK"
    head.case = base.case
    assert _row(memory_row(base, head, MemoryRule())).verdict == "REGRESSED"


def test_work_that_moves_between_ranks_is_a_change(prose: Prose) -> None:
    """The sums are equal and a rank sends more; the order of a rank's entries says nothing."""
    one, two = make_traffic(64), make_traffic(32)
    moved = Traffic(ranks=[make_traffic(96).ranks[0], two.ranks[0]], wire_bytes_per_sequence=1.0)
    row = _row(traffic_row(_sending(one), _sending(moved), AmountRule()))
    assert row.result == "REGRESSED"
    assert prose == row.reason
    both = [*one.ranks[0], *make_traffic(1, kind="broadcast").ranks[0]]
    there, back = (Traffic(ranks=[kinds], wire_bytes_per_sequence=1.0) for kinds in (both, both[::-1]))
    assert _row(traffic_row(_sending(there), _sending(back), AmountRule())).verdict == "OK"


def test_a_figure_that_is_gone_is_missing(prose: Prose) -> None:
    """What the baseline knew and the candidate does not is said with its reason; the reverse is new."""
    head = _sending(None)
    head.why["traffic"] = "counting was switched off"
    row = _row(traffic_row(_sending(make_traffic()), head, AmountRule()))
    assert row.result == "MISSING"
    assert prose == row.reason
    assert traffic_row(head, _sending(make_traffic()), AmountRule()) == "only the candidate has it"
    assert traffic_row(head, head, AmountRule()) == "neither report has it"


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
def test_a_slower_link_is_a_row_of_its_own(base: str, head: str | None, verdict: str) -> None:
    """The same bytes over PCIe are another machine, and some of them there another path."""
    row = _row(path_row(_sending(make_traffic(link=base)), _sending(make_traffic(link=head)), gated=True))
    assert (row.metric, row.result) == ("path", verdict)


def test_a_path_that_moved_is_told_with_its_figures(prose: Prose) -> None:
    """Both links by name, and what was counted then and now."""
    sides = []
    for link, counted in (("nvlink", 131072.0), ("pcie", 0.0)):
        traffic = make_traffic(link=link)
        assert traffic.path is not None
        path = msgspec.structs.replace(traffic.path, nvlink_bytes=counted)
        sides.append(_sending(msgspec.structs.replace(traffic, path=path)))
    base, head = sides
    row = _row(path_row(base, head, gated=True))
    assert prose == row.reason
    row = _row(path_row(head, head, gated=True))
    assert prose == row.reason


def test_what_a_rank_receives_is_not_sent_again() -> None:
    """A pipeline's bytes on the wire are counted where they are sent."""
    there = make_traffic(64, kind="send").ranks[0], make_traffic(64, kind="recv").ranks[0]
    traffic = Traffic(ranks=list(there), wire_bytes_per_sequence=1.0)
    row = _row(traffic_row(_sending(traffic), _sending(traffic), AmountRule()))
    assert (row.base, row.head) == (64 * 1024, 64 * 1024)


def test_what_sends_nothing_has_no_path() -> None:
    """Traffic that is gone has not moved to another link."""
    quiet = _sending(make_traffic(0))
    assert path_row(_sending(make_traffic(link="nvlink")), quiet, gated=True) == "nothing is sent"


def _using(*peaks: float, workspace: int = 0) -> CaseResult:
    result = make_result(memory=make_memory(peak=peaks[0] * GIB))
    first = result.launches[0]
    result.launches = []
    for peak in peaks:
        launch = make_result(memory=make_memory(peak=peak * GIB)).launches[0]
        if workspace:
            launch.memory = [
                type(d)(index=d.index, peak_allocated_bytes=d.peak_allocated_bytes, workspace_bytes=workspace)
                for d in launch.memory
            ]
        result.launches.append(launch)
    assert first.memory
    return result


@pytest.mark.parametrize(
    ("head", "verdict"), [(16.0, "OK"), (16.08, "OK"), (16.1, "REGRESSED"), (15.9, "IMPROVED"), (17.0, "REGRESSED")]
)
def test_the_fullest_device_decides(head: float, verdict: str) -> None:
    """0.5 % of 17 GiB are 87 MiB: the fourth device has a GiB more than the others."""
    row = _row(memory_row(_using(16.0), _using(head), MemoryRule()))
    assert (row.result, row.base) == (verdict, 17 * GIB)
    assert row.head == pytest.approx((head + 1) * GIB, abs=1)


def test_bytes_may_be_allowed_where_the_margin_is_less(prose: Prose) -> None:
    """And the reason has both in MiB."""
    rule = MemoryRule(absolute_bytes=2 * GIB)
    row = _row(memory_row(_using(16.0), _using(17.0), rule))
    assert row.result == "OK"
    assert prose == row.reason


@pytest.mark.parametrize(
    ("used", "verdict"),
    [(18.0, "OK"), (10.0, "OK"), (19.9, "OK"), (20.1, "REGRESSED"), (None, "OK")],
)
def test_memory_outside_live_tensors_has_a_bar_of_its_own(used: float | None, verdict: str) -> None:
    """Buffers of NCCL or a cache that grows take the room of the next batch; a tenth of it may be a new library."""
    base, head = _using(16.0), _using(16.0)
    for result, gib in ((base, 18.2), (head, used)):
        seen = None if gib is None else int(gib * GIB)
        (launch,) = result.launches
        launch.memory = [msgspec.structs.replace(device, nvml_used_max_bytes=seen) for device in launch.memory]
    row = _row(memory_row(base, head, MemoryRule()))
    assert row.result == verdict
    if verdict == "REGRESSED":
        assert (row.base, row.head, row.threshold) == (int(18.2 * GIB), int(20.1 * GIB), 0.1)
        assert row.ratio == row.low == row.high == pytest.approx(20.1 / 18.2)
    assert _row(memory_row(base, head, MemoryRule(used_threshold=0.5))).verdict == "OK"
    make_invalid(head.launches[0], "programs of others at work: GPU 0")
    assert _row(memory_row(base, head, MemoryRule())).verdict == "OK", "it is somebody else's"


def _grown(result: CaseResult, *gib: float, field: str = "peak_allocated_bytes") -> CaseResult:
    """Add this much to a figure of each device of a result."""
    for launch in result.launches:
        launch.memory = [
            msgspec.structs.replace(device, **{field: getattr(device, field) + int(more * GIB)})
            for device, more in zip(launch.memory, gib, strict=True)
        ]
    return result


@pytest.mark.parametrize(
    ("gib", "verdict", "where"),
    [
        ((0, 0, 0.5, 0), "REGRESSED", "device 2"),
        ((0.05, 0.05, 0.05, 0), "OK", "the fullest device"),
        ((0, 0, -0.5, 0), "IMPROVED", "device 2"),
        ((0, 0.3, 0.5, 0.2), "REGRESSED", "the fullest device"),
        ((0.5, 0, 0, -0.5), "IMPROVED", "the fullest device"),
    ],
)
def test_every_device_is_compared(gib: tuple[float, ...], verdict: str, where: str) -> None:
    """A device that is not the fullest can grow unseen; memory that moved to emptier devices leaves more space."""
    row = _row(memory_row(_using(16.0), _grown(_using(16.0), *gib), MemoryRule()))
    assert row.result == verdict
    assert f" on {where}, was " in row.reason


@pytest.mark.parametrize(("gib", "verdict"), [(1.5, "OK"), (1.8, "REGRESSED")])
@pytest.mark.parametrize("field", ["peak_reserved_bytes", "nvml_used_max_bytes"])
def test_memory_outside_live_tensors_is_compared_on_every_device(
    gib: float, verdict: str, field: str, prose: Prose
) -> None:
    """The emptiest of four devices: 10 % of its 16 to 18 GiB are allowed."""
    row = _row(
        memory_row(
            _using(16.0), _grown(_using(16.0), 0, gib + 0.1 * ("nvml" in field), 0, 0, field=field), MemoryRule()
        )
    )
    assert row.result == verdict
    assert prose == row.reason


def test_devices_that_a_launch_lacks_are_not_compared() -> None:
    """Then the fullest device alone decides."""
    fewer = _using(16.0)
    fewer.launches[0].memory = fewer.launches[0].memory[1:]
    assert _row(memory_row(_using(16.0), fewer, MemoryRule())).verdict == "OK"


def test_workspace_outside_torch_counts() -> None:
    """Memory that moves there is still used."""
    assert _row(memory_row(_using(16.0), _using(16.0, workspace=GIB), MemoryRule())).verdict == "REGRESSED"


def test_launches_that_differ_have_not_enough_data() -> None:
    """One of two grew: the range has the threshold inside."""
    row = _row(memory_row(_using(16.0, 16.0), _using(16.0, 17.0), MemoryRule()))
    assert (row.result, row.n) == ("UNDECIDED", 2)
    assert memory_row(make_result(), make_result(), MemoryRule()) == "neither report has it"


def _ran(execution: str, requested: str = "auto", choice: str | None = None) -> CaseResult:
    result = make_result(execution=execution, cuda_graphs=requested)
    result.launches[0].execution_choice = choice
    return result


@pytest.mark.parametrize(
    ("was", "now", "verdict"),
    [
        ("cuda_graphs", "eager", "REGRESSED"),
        ("compile", "eager", "REGRESSED"),
        ("eager", "cuda_graphs", "IMPROVED"),
        ("eager", "eager", None),
        ("cuda_graphs", "cuda_graphs", None),
        ("cuda_graphs", "compile", None),
    ],
)
def test_recorded_forwards_that_become_eager_are_a_regression(was: str, now: str, verdict: str | None) -> None:
    """The reverse is an improvement, and an unchanged execution has no row."""
    row = execution_row(_ran(was), _ran(now), gated=True)
    assert (row.result if row is not None else None) == verdict
    assert (other_execution(_ran(was), _ran(now)) is None) == (was == now)


def test_the_row_has_the_reason_of_the_execution(prose: Prose) -> None:
    """It is the reason that the ranks of the candidate recorded."""
    head = _ran("eager", choice="Recording failed: aten::item reads from the GPU.")
    row = execution_row(_ran("cuda_graphs"), head, gated=False)
    assert isinstance(row, Row)
    assert not row.gated
    assert prose == row.reason


def test_an_execution_that_was_asked_for_is_no_regression() -> None:
    """The user of the candidate switched the graphs off."""
    assert execution_row(_ran("cuda_graphs"), _ran("eager", "off"), gated=True) is None


TEST = "benchmarks/test_a.py::test_b[mp-bs64]"


def _series(fits: list[int], fails: list[int]) -> list[CaseResult]:
    results = [make_result(batch_size=size, sequences=size) for size in fits]
    results += [make_failed(batch_size=size) for size in fails]
    for result in results:
        result.nodeid = TEST
    return results


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        (([32], [64]), ([32], [64]), "OK"),
        (([64], []), ([32], [64]), "REGRESSED"),
        (([32, 49], [64, 50]), ([32, 48], [64, 49]), "REGRESSED"),
        (([32], [64]), ([64], []), "IMPROVED"),
        (([32, 64], [128]), ([32], []), "OK"),  # 64 was not run: that is no limit
        (([], [8]), ([4], [8]), "OK"),
    ],
)
def test_the_largest_batch_that_fits(
    base: tuple[list[int], list[int]], head: tuple[list[int], list[int]], verdict: str
) -> None:
    """Only what one side fitted and the other ran out of memory at is a change."""
    (then,), (now,) = by_series(_series(*base)).values(), by_series(_series(*head)).values()
    row = largest_batch_row(then, now, gated=True)
    assert row is not None
    assert (row.result, row.metric, row.id) == (verdict, "largest_batch", "mp")
    assert row.key == now.result.case.series


def test_no_limit_no_row() -> None:
    """Where nothing was out of memory the largest batch is not known."""
    (then,), (now,) = by_series(_series([64], [])).values(), by_series(_series([32], [])).values()
    assert largest_batch_row(then, now, gated=True) is None


def test_a_probe_needs_no_second_one() -> None:
    """A size between, that this run has a result for in the same test; not one that is gone."""
    head = _series([32, 48], [64, 50])
    found = by_series(head)
    probed = {size: was_probed(_series([size], [])[0], found, head) for size in (40, 48, 49, 50, 56)}
    assert probed == {40: True, 48: True, 49: False, 50: True, 56: True}
    elsewhere = _series([40], [])[0]
    elsewhere.nodeid = "benchmarks/test_a.py::test_b[mp-bs40]"
    assert not was_probed(elsewhere, found, head)
    all_fit = _series([32, 64], [])
    assert not was_probed(_series([40], [])[0], by_series(all_fit), all_fit)
