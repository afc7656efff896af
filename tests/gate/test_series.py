from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from support.report_factory import make_failed, make_profile, make_result, make_work

from pytest_llmgpu.gate.noise_model import prior_of
from pytest_llmgpu.gate.policy import Policy, Rules, ShownRule
from pytest_llmgpu.gate.series import Series, by_series, series_rows, settled, undecided_amount
from pytest_llmgpu.gate.time import Timed, rows
from pytest_llmgpu.report.result import CaseResult, DeviceProfile, Launch
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.report.work import CollectiveWork

TEST = "benchmarks/test_a.py::test_b[mp-bs64]"


def _series(fits: list[int], fails: list[int]) -> list[CaseResult]:
    results = [make_result(batch_size=size, sequences=size) for size in fits]
    results += [make_failed(batch_size=size) for size in fails]
    for result in results:
        result.nodeid = TEST
    return results


_LAUNCHED: dict[str, Callable[[float], Launch]] = {
    "load_time": lambda amount: Launch(load_s=amount),
    "warmup_time": lambda amount: Launch(warmup_s=amount),
    "transfer_time": lambda amount: Launch(
        work=make_work(
            collectives=[
                CollectiveWork(collective=name, calls=1, transfer_s=[amount / 2] * 3, wait_s=[9.0] * 3)
                for name in ("all_reduce", "all_gather")
            ]
        )
    ),
    "energy": lambda amount: Launch(
        profile=make_profile(
            devices=[DeviceProfile(index=gpu, uuid=f"GPU-{gpu}", energy_j=amount / 2) for gpu in (0, 1)]
        )
    ),
}
"""Metric to a launch that has this amount of it."""


def _launched(metric: str, batch_size: int, amounts: list[float]) -> CaseResult:
    """Return a case with an amount of a metric in each launch."""
    result = make_result(batch_size=batch_size)
    result.launches = list(map(_LAUNCHED[metric], amounts))
    return result


def _rows(base: Series, head: Series, rules: Rules) -> list[Row]:
    """Return the rows of a series as the gate shows them."""
    found = list(series_rows(base, head, rules, prior_of("load")))
    judged = rows([one for one in found if isinstance(one, Timed)], 0.99, "")
    return [row for row in (*(one for one in found if isinstance(one, Row)), *judged) if not undecided_amount(row)]


def _judged(base: CaseResult, head: CaseResult) -> list[Row]:
    (then,), (now,) = by_series([base]).values(), by_series([head]).values()
    return _rows(then, now, Policy())


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
    (row,) = (row for row in _rows(then, now, Policy()) if row.metric == "largest_batch")
    assert (row.result, row.metric, row.id) == (verdict, "largest_batch", "mp")
    assert row.key == now.result.case.series


def test_no_limit_no_row() -> None:
    """Where nothing was out of memory the largest batch is not known."""
    (then,), (now,) = by_series(_series([64], [])).values(), by_series(_series([32], [])).values()
    assert "largest_batch" not in {row.metric for row in _rows(then, now, Policy())}


def test_a_probe_needs_no_second_one() -> None:
    """A size between, that this run has settled in the same test; not one that is simply gone."""
    head = _series([32, 48], [64, 50])
    found = by_series(head)
    by_test = {TEST: {head[0].case.series}}
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
        ([10.0] * 5, [20.0] * 5, "CHANGED"),
        ([20.0] * 5, [10.0] * 5, "IMPROVED"),
        ([10.0] * 2, [11.0] * 2, "UNDECIDED"),
        ([10.0], [1000.0], "CHANGED"),
        ([10.0], [12.0], None),
    ],
)
@pytest.mark.parametrize("metric", _LAUNCHED)
def test_an_amount_is_judged_once_per_series(
    base: list[float], head: list[float], verdict: str | None, metric: str
) -> None:
    """All batch sizes are one row, which is shown and not gated; one launch decides large changes only."""

    def of(amounts: list[float]) -> list[CaseResult]:
        return [_launched(metric, size, [size * amount for amount in amounts]) for size in (1, 4)]

    (then,), (now,) = by_series(of(base)).values(), by_series(of(head)).values()
    found = _rows(then, now, Policy())
    assert [(row.metric, row.result) for row in found] == ([(metric, verdict)] if verdict else [])
    assert not any(row.gated for row in found)
    assert [row.base for row in found] == [pytest.approx(2 * base[0])] * len(found)  # the mean of log amounts


@pytest.mark.parametrize("lacking", [[], [0.0], [10.0, 0.0]])
def test_a_batch_size_of_which_a_launch_lacks_the_amount_is_left_out(lacking: list[float]) -> None:
    """So is one that a report lacks. Without any other there is no row."""
    both, new = _launched("energy", 1, [10.0] * 9), _launched("energy", 4, [90.0] * 9)
    without = _launched("energy", 2, lacking)
    (then,), (now,) = by_series([both, without]).values(), by_series([both, without, new]).values()
    (row,) = _rows(then, now, Policy())
    assert row.metric == "energy"
    assert row.base == pytest.approx(10.0)
    (then,) = by_series([without]).values()
    assert _rows(then, now, Policy()) == []


def test_the_energy_of_disturbed_launches_is_left_out() -> None:
    """That of another program would be a regression of this one."""
    base, head = _launched("energy", 1, [10.0] * 9), _launched("energy", 1, [30.0] * 9)
    assert [row.result for row in _judged(base, head)] == ["CHANGED"]
    profile = head.launches[0].profile
    assert profile is not None
    head.launches[0].profile = msgspec.structs.replace(profile, invalid=["processes of other programs: GPU 0 has 2"])
    assert _judged(base, head) == []


def test_the_first_warm_up_of_a_machine_is_no_regression() -> None:
    """With empty caches it took 1.8 times as long as another one (LLaMA-7B as CUDA graphs on an H200)."""
    assert _judged(*(_launched("warmup_time", 1, [amount]) for amount in (1.132, 2.016))) == []


@pytest.mark.parametrize(
    ("energy_j", "text"), [(210.0, "210.0 J"), (999.96, "1,000 J"), (3164.4, "3,164 J"), (287_654.0, "287,700 J")]
)
def test_an_amount_has_four_digits_and_no_exponent(energy_j: float, text: str) -> None:
    """A run of many minutes on several GPUs takes hundreds of kilojoules."""
    result = _launched("energy", 1, [energy_j] * 9)
    (row,) = _judged(result, result)
    assert f": {text}, was {text}, mean over 1 case." in row.reason


def test_a_gated_amount_states_that_one_launch_decides_nothing() -> None:
    """Where the policy gates it, a lack of launches is a row of its own."""
    (then,), (now,) = (by_series([_launched("load_time", 1, [amount])]).values() for amount in (10.0, 11.0))
    policy = Policy(load_time=ShownRule(gate=True))
    assert [row.result for row in _rows(then, now, policy)] == ["UNDECIDED"]
