from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import make_result, make_work

from pytest_llmgpu.gate.policy import AmountRule, ExactRule, Rules
from pytest_llmgpu.gate.work import work_rows
from pytest_llmgpu.report.result import CaseResult
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


def _rows(
    base: CaseResult | Work | None = None, head: CaseResult | Work | None = None, rules: Rules | None = None
) -> dict[str, Row]:
    """Return the row of each metric that has one."""
    base, head = (
        side if isinstance(side, CaseResult) else _result(make_work() if side is None else side)
        for side in (base, head)
    )
    found = work_rows(base, head, rules or Rules())
    return {one.metric: one.row for one in found if isinstance(one.row, Row)}


def _reasons(base: CaseResult, head: CaseResult, rules: Rules | None = None) -> dict[str, tuple[str, bool]]:
    """Return the reason of each metric that has no row, and True if that is a gap."""
    found = work_rows(base, head, rules or Rules())
    return {one.metric: (one.row, one.gap) for one in found if isinstance(one.row, str)}


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
    assert _rows(head=_with(flops=flops), rules=Rules(flops=AmountRule(margin=0.02)))["flops"].verdict == "OK"


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
    """Other batches of the plan, or another plan; that is a gap where the policy gates the metric."""
    head = _result(make_work(batches=[0, 1]))
    assert _rows(head=head) == {}
    assert _reasons(_result(make_work()), head)["flops"][1]
    assert prose == _reasons(_result(make_work()), head)["flops"][0]
    other = _result(make_work())
    other.launches[0].plan_sha256 = "0" * 64
    assert _rows(head=other) == {}
    both = _result(make_work(batches=[0, 1]), _with(flops=2 * 10**12))
    assert _rows(head=both)["flops"].verdict == "REGRESSED", "the second launch ran the same batches"
    assert _rows(head=make_work(ranks=4)) == {}


def test_a_figure_that_a_report_lacks(prose: Prose) -> None:
    """It is MISSING if only the candidate lacks it, and no gap if both do."""
    why = {"flops": "fused kernels bypass the dispatcher"}
    ranks = [RankWork(uuids=[], flops=None, host_syncs=4, why=why)] * 2
    fused = _result(msgspec.structs.replace(make_work(), ranks=ranks))
    row = _rows(head=fused)["flops"]
    assert row.result == "MISSING"
    assert prose == row.reason
    assert _reasons(fused, fused) == {"flops": ("neither report has it", False)}
    assert _reasons(fused, _result(make_work())) == {"flops": ("only the candidate has it", True)}
    nothing = _result(None)
    assert _reasons(nothing, nothing)["host_syncs"] == ("neither report has it", False)
    assert set(_rows(head=nothing)) == {"flops", "host_syncs"}, "metrics that are only shown have no row"


def test_work_without_ranks_is_no_work() -> None:
    """A file can have an empty list of ranks."""
    empty = _result(make_work(ranks=0))
    assert _rows(empty, empty) == {}
    assert _reasons(empty, empty)["flops"] == ("neither report has it", False)
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
