from __future__ import annotations

import msgspec
import pytest
from support.report_factory import make_failed, make_result

from pytest_llmgpu.gate.noise_model import prior_of
from pytest_llmgpu.gate.policy import LoadTimeRule, Policy, Rules
from pytest_llmgpu.gate.series import Series, by_series, series_rows, settled, undecided_load_time
from pytest_llmgpu.gate.time import Timed, rows
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row

TEST = "benchmarks/test_a.py::test_b[mp-bs64]"


def _series(fits: list[int], fails: list[int]) -> list[CaseResult]:
    results = [make_result(batch_size=size, sequences=size) for size in fits]
    results += [make_failed(batch_size=size) for size in fails]
    for result in results:
        result.nodeid = TEST
    return results


def _loaded(batch_size: int, times_s: list[float]) -> CaseResult:
    """Return a case of which each launch took that long to load its model."""
    result = make_result(batch_size=batch_size)
    (launch,) = result.launches
    result.launches = [msgspec.structs.replace(launch, load_s=load_s) for load_s in times_s]
    return result


def _rows(base: Series, head: Series, rules: Rules) -> list[Row]:
    """Return the rows of a series as the gate shows them."""
    found = list(series_rows(base, head, rules, prior_of("load")))
    judged = rows([one for one in found if isinstance(one, Timed)], 0.99, "")
    return [row for row in (*(one for one in found if isinstance(one, Row)), *judged) if not undecided_load_time(row)]


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        (([32], [64]), ([32], [64]), "OK"),
        (([64], []), ([32], [64]), "CAPACITY_REGRESSED"),
        (([32, 49], [64, 50]), ([32, 48], [64, 49]), "CAPACITY_REGRESSED"),
        (([32], [64]), ([64], []), "CAPACITY_IMPROVED"),
        (([32, 64], [128]), ([32], []), "OK"),  # 64 was not run: that is no limit
        (([], [8]), ([4], [8]), "OK"),
    ],
)
def test_the_largest_batch_that_fits(
    base: tuple[list[int], list[int]], head: tuple[list[int], list[int]], verdict: str
) -> None:
    """Only what one side fitted and the other ran out of memory at is a change."""
    (then,), (now,) = by_series(_series(*base)).values(), by_series(_series(*head)).values()
    (row,) = (row for row in _rows(then, now, Policy()) if row.metric == "largest_batch")
    assert (row.verdict, row.metric, row.id) == (verdict, "largest_batch", "mp")
    assert row.key == now.result.case.series


def test_no_limit_no_row() -> None:
    """Where nothing was out of memory the largest batch is not known."""
    (then,), (now,) = by_series(_series([64], [])).values(), by_series(_series([32], [])).values()
    assert "largest_batch" not in {row.metric for row in _rows(then, now, Policy())}


def test_a_probe_needs_no_second_one() -> None:
    """A size between, that this run has settled in the same test; not one that is simply gone."""
    head = _series([32, 48], [64, 50])
    found = by_series(head)
    by_test = {TEST: {head[0].case.series_fields}}
    settles = {size: settled(_series([size], [])[0], found, by_test) for size in (40, 48, 49, 50, 56)}
    assert settles == {40: True, 48: True, 49: False, 50: True, 56: True}
    elsewhere = _series([40], [])[0]
    elsewhere.nodeid = "benchmarks/test_a.py::test_b[mp-bs40]"
    assert not settled(elsewhere, found, by_test)
    assert not settled(_series([40], [])[0], by_series(_series([32, 64], [])), by_test)


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        ([10.0] * 9, [10.0] * 9, "OK"),
        ([10.0] * 5, [20.0] * 5, "REGRESSED"),
        ([20.0] * 5, [10.0] * 5, "IMPROVED"),
        ([10.0] * 2, [11.0] * 2, "NOT_ENOUGH_DATA"),
        ([10.0], [1000.0], "REGRESSED"),
        ([10.0], [11.0], None),
    ],
)
def test_load_time_is_judged_once_per_series(base: list[float], head: list[float], verdict: str | None) -> None:
    """Batch sizes of one load are one row, which is shown and not gated; one launch decides large changes only."""

    def of(times: list[float]) -> list[CaseResult]:
        return [_loaded(size, times) for size in (1, 2)]

    (then,), (now,) = by_series(of(base)).values(), by_series(of(head)).values()
    rows = [row for row in _rows(then, now, Policy()) if row.metric == "load_time"]
    assert [row.verdict for row in rows] == ([verdict] if verdict else [])
    assert not any(row.gated for row in rows)


def test_a_gated_load_time_states_that_one_launch_decides_nothing() -> None:
    """Where the policy gates it, a lack of launches is a row of its own."""
    (then,), (now,) = by_series([_loaded(1, [10.0])]).values(), by_series([_loaded(1, [11.0])]).values()
    policy = Policy(load_time=LoadTimeRule(gate=True))
    assert [row.verdict for row in _rows(then, now, policy)] == ["NOT_ENOUGH_DATA"]
