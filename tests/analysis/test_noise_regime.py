from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from support.report_factory import known, make_result, make_work
from support.verdict_factory import make_invalid

from pytest_llmgpu.analysis.noise_regime import PRIORS, Prior, noisiest, of_gpu, of_time, prior_of_time
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


@pytest.mark.parametrize(
    ("latency_s", "launch_s", "numbers", "regime"),
    [
        ([1.0, 4.0], [0.9, 3.5], {1}, "eager_device"),
        ([1.1, 4.0], [1.0, 3.5], {1}, "eager_host"),
        ([1.0, 4.0], [0.9, 3.6], set(), "eager_host"),
        ([1.0, 4.0], [0.5, 2.0], {0, 1}, "eager_device"),
    ],
)
def test_batches_show_what_limits_them(
    latency_s: list[float], launch_s: list[float], numbers: set[int], regime: str
) -> None:
    """The GPU, where launching takes less than 90 % in every launch; and the case, where such batches take 80 %.

    Launches that were disturbed show nothing. Neither do forwards that wait for the GPU, and batches of a GPU that no
    pass shows busy.
    """
    result, quick, disturbed = _busy(0.1), *_busy(0.9).launches, *make_result().launches
    make_invalid(disturbed, "processes of other programs")
    for launch, parts in ((result.launches[0], launch_s), (quick, [0.1, 0.1]), (disturbed, latency_s)):
        launch.batches.latency_s, launch.batches.launch_s = latency_s, parts
    result.launches += [quick, disturbed, make_result().launches[0]]
    cold, warm = (known(launch.work).ranks[0] for launch in (result.launches[0], quick))
    for syncs, busy, shown in (
        (2, 0.9, numbers),
        (2, 0.7, None if numbers else numbers),
        (3, 0.9, None),
        (None, 0.9, None),
    ):
        for launch, rank, part in ((result.launches[0], cold, 0.1), (quick, warm, busy)):
            ranks = [msgspec.structs.replace(rank, host_syncs=syncs, busy=part)]
            launch.work = msgspec.structs.replace(known(launch.work), ranks=ranks)
        assert of_gpu(result) == shown
        assert of_time(result) == (regime if shown == numbers else "eager_host")


_EAGER, _WAITING, _REPLAYED = _busy(0.9), _busy(0.5), _busy(execution="cuda_graphs")


@pytest.mark.parametrize(
    ("results", "regime", "s0"),
    [
        ([_EAGER, _REPLAYED], "eager_device", 0.01),
        ([_EAGER, _WAITING], "eager_host", 0.1),
        ([_REPLAYED], "replayed", math.hypot(0.003, 0.01)),
    ],
)
def test_the_noisier_of_two_reports_decides_the_prior(results: list[CaseResult], regime: str, s0: float) -> None:
    """The order of the regimes is their order of noise; between replayed graphs the noise of the host is added."""
    assert noisiest(*results) == noisiest(*results[::-1]) == regime
    assert prior_of_time(noisiest(*results), seconds=1.0, batches=100).s0 == pytest.approx(s0)


@pytest.mark.parametrize(("seconds", "batches", "s0"), [(1.0, 2000, 0.05), (1.0, 10, 0.001), (4.0, 400, 0.005)])
def test_the_host_adds_the_same_time_to_each_replayed_batch(seconds: float, batches: int, s0: float) -> None:
    """It drifts within seconds, which longer launches average. Eager forwards have no part of the host apart."""
    found = prior_of_time("replayed", seconds=seconds, batches=batches)
    assert found.s0 == pytest.approx(math.hypot(0.003, s0))
    assert 4 <= found.df0 <= 24, "hosts differ: their part has few degrees of freedom"
    assert prior_of_time("eager_device", seconds=seconds, batches=batches) == PRIORS["eager_device"]


def test_launches_are_added_to_the_prior_by_their_degrees_of_freedom() -> None:
    """One launch of each report shows no noise. The deviation is that around the mean of each report."""
    prior = Prior(s0=0.01, df0=4.0)
    assert prior.updated([[1.0], [2.0]]) == prior
    updated = prior.updated([[1.0, 1.08], [7.0], [10.0, 10.0]])
    assert (updated.s0, updated.df0) == pytest.approx((math.sqrt((4 * 0.01**2 + 2 * 0.04**2) / 6), 6.0))
