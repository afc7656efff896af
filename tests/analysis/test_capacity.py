from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from support.prose import Prose
from support.report_factory import GIB, make_failed, make_memory, make_result

from pytest_llmgpu.analysis.capacity import capacities, next_probe, search
from pytest_llmgpu.report.report import Capacity, Gpu
from pytest_llmgpu.report.result import CaseResult, Failure

_GPUS = [Gpu(index=index, uuid=f"GPU-{index}", name="H", memory_bytes=32 * GIB) for index in range(4)]
_LOADING = Failure(phase="load", message="CUDA out of memory")


def _fits(size: int, **fields: Any) -> CaseResult:
    # The last of 4 devices has 1 GiB more: 16 GiB of live tensors and 2 GiB besides, 1/4 GiB per sequence; 52 fit.
    memory = make_memory(peak=16 * GIB + size * GIB // 4, used=18 * GIB + size * GIB // 4)
    return make_result(60.0, memory=memory, batch_size=size, **fields)


def _oom(size: int, failure: Failure | None = None) -> CaseResult:
    return make_failed("oom", failure, batch_size=size)


def _capacity(*results: CaseResult, gpus: Sequence[Gpu] = _GPUS) -> Capacity:
    (found,) = capacities(results, gpus)
    return found


def test_a_capacity_has_the_measured_and_the_predicted_limit(prose: Prose) -> None:
    """The text has both, and the device that is full first."""
    found = _capacity(*map(_fits, (1, 2, 4, 8)), _oom(64))
    assert (found.largest_fit, found.smallest_oom, found.strategy) == (8, 64, "mp")
    assert found.prediction is not None
    assert (found.prediction.max_batch_size, found.prediction.device_index) == (52, 3)
    assert prose == found.text
    assert found.series == _fits(1).case.series


def test_a_prediction_uses_only_cases_before_the_first_out_of_memory() -> None:
    """Later cases searched the limit: a line through them would be no prediction."""
    before = _capacity(*map(_fits, (1, 2, 4)), _oom(64))
    after = _capacity(*map(_fits, (1, 2, 4)), _oom(64), _fits(52), _oom(53))
    assert after.prediction == before.prediction
    assert (after.largest_fit, after.smallest_oom) == (52, 53)


def test_a_measured_limit_is_one_sentence(prose: Prose) -> None:
    """Without a prediction the reason is recorded."""
    series = [
        [_fits(32), _oom(33)],
        [_fits(32)],
        [_oom(8), make_failed("skipped_after_oom", batch_size=16)],
        [_oom(8, _LOADING)],
        [make_failed("crashed")],
        [_oom(8), _fits(32)],
    ]
    found = [_capacity(*results) for results in series]
    assert [(one.largest_fit, one.smallest_oom) for one in found] == [
        (32, 33),
        (32, None),
        (None, 8),
        (None, 8),
        (None, None),
        (32, 8),
    ]
    assert all(one.prediction is None and one.why["prediction"] for one in found)
    assert prose == "\n".join(one.text for one in found)


def test_each_series_has_its_own_largest_batch_size() -> None:
    """Strategies and models are not mixed; the series keep the order in which they ran."""
    found = capacities([_fits(1), _fits(1, strategy="tp"), _oom(2)], _GPUS)
    assert [(each.strategy, each.largest_fit, each.smallest_oom) for each in found] == [("mp", 1, 2), ("tp", 1, None)]


def _probed(low: int, high: int, predicted: int | None, limit: int) -> tuple[list[int], int]:
    tried: list[int] = []
    while (size := next_probe(low, high, predicted)) is not None:
        assert low < size < high
        tried.append(size)
        low, high = (size, high) if size <= limit else (low, size)
    return tried, low


def test_the_limit_is_found_with_any_prediction() -> None:
    """A wrong prediction costs probes, at worst a little more than twice those of halving."""
    for low, high in ((0, 1), (0, 7), (32, 64), (512, 1024)):
        allowed = 2 * math.log2(high - low) + 3
        for limit in range(low, high, max(1, (high - low) // 16)):
            for predicted in (None, 0, low, limit - 1, limit, limit + 3, high, 5 * high):
                tried, found = _probed(low, high, predicted, limit)
                assert found == limit
                assert len(tried) <= allowed, (low, high, limit, predicted, tried)


def test_a_prediction_that_is_a_little_off_takes_fewer_probes_than_halving() -> None:
    """Fragmentation makes predictions too large by about 1 %."""
    with_it, found = _probed(512, 1024, 900, limit=893)
    assert found == 893
    assert len(with_it) < len(_probed(512, 1024, None, limit=893)[0])


class _Prober:
    """A probe under which sizes up to a limit fit."""

    def __init__(self, limit: int, broken: dict[int, CaseResult | None] | None = None) -> None:
        self.limit = limit
        self.broken = broken or {}
        self.tried: list[int] = []

    def __call__(self, size: int) -> CaseResult | None:
        self.tried.append(size)
        if size in self.broken:
            return self.broken[size]
        return _fits(size) if size <= self.limit else _oom(size)


def test_a_search_tries_the_prediction_first() -> None:
    """With a right prediction two probes suffice."""
    prober = _Prober(52)
    search([*map(_fits, (1, 2, 4, 8)), _oom(64)], _GPUS, prober)
    assert prober.tried == [52, 53]


def test_a_search_without_a_prediction_halves() -> None:
    """There is no prediction on a CPU, or if fewer than two sizes completed."""
    prober = _Prober(5)
    search([_oom(8)], [], prober)
    assert prober.tried == [4, 6, 5]


def test_a_search_starts_below_the_smallest_that_is_out_of_memory() -> None:
    """Larger sizes that completed, and skipped ones, do not count."""
    prober = _Prober(3)
    search([_fits(2), _fits(16), _oom(8), make_failed("skipped_after_oom", batch_size=12), _oom(5)], [], prober)
    assert prober.tried == [3, 4]


def test_neighbours_need_no_search() -> None:
    """The measured sizes show the limit already."""
    prober = _Prober(7)
    search([_fits(7), _oom(8)], _GPUS, prober)
    assert prober.tried == []


def test_a_model_that_does_not_fit_is_not_searched() -> None:
    """It would run out of memory at every batch size."""
    prober = _Prober(0)
    search([_oom(8, _LOADING)], _GPUS, prober)
    assert prober.tried == []


@pytest.mark.parametrize("ending", [make_failed("timeout"), make_failed("skipped_after_oom"), _oom(4, _LOADING), None])
def test_a_probe_that_ends_in_another_way_ends_the_search(ending: CaseResult | None) -> None:
    """A time limit, a crash or a model that no longer loads is no information on the limit."""
    prober = _Prober(5, {4: ending})
    search([_oom(8)], [], prober)
    assert prober.tried == [4]
