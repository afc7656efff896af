from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import pytest
from support.report_factory import make_result, make_work

from pytest_llmgpu.analysis.noise_regime import REGIMES, forwards, largest_spread, noisiest, of_device_time, of_time
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.work import Bound


def _busy(*shares: float | None, seconds: float = 60.0, **fields: Any) -> CaseResult:
    """Return a result whose ranks were busy for these fractions of a pass."""
    result = make_result(seconds, **fields)
    ranks = [
        msgspec.structs.replace(rank, busy=share)
        for rank, share in zip(make_work(len(shares)).ranks, shares, strict=True)
    ]
    result.launches[0].work = msgspec.structs.replace(make_work(), ranks=ranks)
    return result


@pytest.mark.parametrize(
    ("limited_by", "regime"),
    [("memory", "device_memory"), ("compute", "device_compute"), ("wire", "device_compute"), (None, "device_compute")],
)
def test_the_bound_decides_the_regime_of_device_time(
    limited_by: Literal["compute", "memory", "wire"] | None, regime: str
) -> None:
    """Without a bound the noisier regime is assumed."""
    result = make_result()
    if limited_by is not None:
        result.bound = Bound(compute_s=1.0, memory_s=1.0, wire_s=1.0, bound_s=2.0, limited_by=limited_by, share=0.5)
    assert of_device_time(result) == regime


@pytest.mark.parametrize(
    ("shares", "regime"),
    [((0.8, 0.95), "eager_device"), ((0.79, 0.95), "eager_host"), ((0.9, None), "eager_host"), ((), "eager_host")],
)
def test_the_rank_that_waits_most_decides_the_regime_of_eager_forwards(
    shares: Sequence[float | None], regime: str
) -> None:
    """Each rank is busy for 80 % of a pass, or the host limits the case."""
    assert of_time(_busy(*shares)) == regime
    assert of_time(_busy(*shares, execution="cuda_graphs")) == "replayed"
    assert of_time(_busy(*shares, device="cpu")) == "cpu"


def test_every_launch_with_work_passes_counts() -> None:
    """A launch without them has no weight; one that waited makes the case noisy."""
    busy, waiting = _busy(0.9), _busy(0.5)
    busy.launches.append(make_result().launches[0])
    assert of_time(busy) == "eager_device"
    busy.launches += waiting.launches
    assert of_time(busy) == "eager_host"


def test_a_regime_explains_a_spread_of_its_launches() -> None:
    """Launches that the host limits may be three times as slow as others, the others twice."""
    assert {regime: largest_spread(regime) for regime in REGIMES if largest_spread(regime) != 2.0} == {
        "eager_host": 3.0,
        "cpu": 3.0,
    }


def test_the_noisier_regime_of_two_reports_counts() -> None:
    """The order of the regimes is their order of noise."""
    replayed, eager, waiting = make_result(execution="cuda_graphs"), _busy(0.9), _busy(0.5)
    assert noisiest("time", replayed, waiting) == "eager_host"
    assert noisiest("time", eager, replayed) == "eager_device"
    memory = make_result()
    memory.bound = Bound(compute_s=1, memory_s=2, wire_s=0, bound_s=2, limited_by="memory", share=0.5)
    assert noisiest("device_time", replayed, memory) == "device_compute"


def test_the_forwards_that_a_launch_measures() -> None:
    """Those of all work passes for device time, the timed batches for replayed graphs; the fewest of any launch."""
    few, many = make_result(1.0), make_result(1.0)
    few.launches[0].work = make_work(batches=[0, 2], passes=12)
    many.launches[0].work = make_work(batches=[0, 2, 5], passes=12)
    many.launches[0].batches.latency_s = [0.1] * 30
    assert forwards("device_compute", few, many) == 24
    assert forwards("replayed", many) == 30
    assert forwards("device_memory", few) is None
    assert forwards("device_compute", make_result(1.0)) is None
