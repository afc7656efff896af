from __future__ import annotations

from typing import Any

import msgspec
from support.report_factory import make_result, make_work

from pytest_llmgpu.analysis.noise_regime import REGIMES, forwards, largest_spread, noisiest, of_device_time, of_time
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.work import Bound


def _busy(*shares: float | None, seconds: float = 60.0, **fields: Any) -> CaseResult:
    """Return a result whose ranks were busy for these fractions of a pass."""
    result = make_result(seconds, **fields)
    rank = make_work(1).ranks[0]
    ranks = [msgspec.structs.replace(rank, busy=share) for share in shares]
    result.launches[0].work = msgspec.structs.replace(make_work(), ranks=ranks)
    return result


def test_the_bound_decides_the_regime_of_device_time() -> None:
    """Without a bound the noisier regime is assumed."""
    result = make_result()
    assert of_device_time(result) == "device_compute"
    regimes: dict[Any, str] = {"memory": "device_memory", "compute": "device_compute", "wire": "device_compute"}
    for limited_by, regime in regimes.items():
        result.bound = Bound(compute_s=1.0, memory_s=1.0, wire_s=1.0, bound_s=2.0, limited_by=limited_by, share=0.5)
        assert of_device_time(result) == regime


def test_the_rank_that_waits_most_decides_the_regime_of_eager_forwards() -> None:
    """Each rank is busy for 80 % of a pass in each launch that has work passes, or the host limits the case."""
    host: list[tuple[float | None, ...]] = [(0.79, 0.95), (0.9, None), ()]
    for shares, regime in ((0.8, 0.95), "eager_device"), *((shares, "eager_host") for shares in host):
        assert of_time(_busy(*shares)) == regime
        assert of_time(_busy(*shares, execution="cuda_graphs")) == "replayed"
        assert of_time(_busy(*shares, device="cpu")) == "cpu"
    busy = _busy(0.9)
    busy.launches.append(make_result().launches[0])
    assert of_time(busy) == "eager_device"
    busy.launches += _busy(0.5).launches
    assert of_time(busy) == "eager_host"


def test_a_regime_explains_a_spread_of_its_launches() -> None:
    """Launches that the host limits may be three times as slow as others, the others twice."""
    spreads = {regime: largest_spread(regime) for regime in REGIMES}
    assert spreads == {**dict.fromkeys(REGIMES, 2.0), "eager_host": 3.0, "cpu": 3.0}


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
