from __future__ import annotations

from typing import Any

import msgspec
from support.report_factory import make_result, make_work

from pytest_llmgpu.analysis.noise_regime import REGIMES, largest_spread, noisiest, of_time
from pytest_llmgpu.report.result import CaseResult


def _busy(*shares: float | None, seconds: float = 60.0, **fields: Any) -> CaseResult:
    """Return a result whose ranks were busy for these fractions of a pass."""
    result = make_result(seconds, **fields)
    rank = make_work(1).ranks[0]
    ranks = [msgspec.structs.replace(rank, busy=share) for share in shares]
    result.launches[0].work = msgspec.structs.replace(make_work(), ranks=ranks)
    return result


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
    assert noisiest(replayed, waiting) == "eager_host"
    assert noisiest(eager, replayed) == "eager_device"
