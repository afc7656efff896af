from __future__ import annotations

import math
import random
import statistics

import msgspec
import pytest
from support.report_factory import make_result, make_work

from pytest_llmgpu.analysis.noise_regime import REGIMES, noisiest
from pytest_llmgpu.gate.noise_model import (
    PRIORS,
    Deviation,
    NoiseRule,
    NoiseRules,
    Prior,
    critical_t,
    deviation,
    launches_needed,
    prior_of,
    prior_of_case,
    smallest_seen,
)

_PRIOR = Prior(s0=0.003, df0=8.0, source="test")


def test_every_regime_has_a_prior_with_its_source() -> None:
    """The policy has the same values, and a part of them can be replaced."""
    assert set(PRIORS) == set(REGIMES) == set(NoiseRules.__struct_fields__)
    for regime, prior in PRIORS.items():
        assert prior.s0 > 0
        assert prior.df0 > 0
        assert prior.source
        assert prior_of(regime, NoiseRules()) is prior
    rules = NoiseRules(replayed=NoiseRule(s0=0.02))
    assert prior_of("replayed", rules) == Prior(s0=0.02, df0=PRIORS["replayed"].df0, source="policy")


def test_launches_and_prior_are_weighted_by_their_degrees_of_freedom() -> None:
    """s² = (df0 s0² + df s²) / (df0 + df); without degrees of freedom the prior is unchanged."""
    updated = _PRIOR.updated(Deviation(sd=0.01, degrees=4))
    assert updated.s0 == pytest.approx(math.sqrt((8 * 9e-6 + 4 * 1e-4) / 12))
    assert updated.df0 == 12
    for nothing in (None, Deviation(sd=0.0, degrees=0)):
        assert _PRIOR.updated(nothing) is _PRIOR


def test_a_calibration_replaces_a_prior_that_it_contradicts() -> None:
    """Ten quiet launches lower a large prior to the 99 % limit of their deviation; two have hardly any effect."""
    large = Prior(s0=0.1, df0=2.0, source="test")
    calibrated = large.calibrated(Deviation(sd=0.003, degrees=9))
    assert 0.003 * math.sqrt(9 / 2.087901) <= calibrated.s0 < 0.0065  # the 1 % quantile of chi-squared
    assert calibrated.df0 == 11
    assert large.calibrated(Deviation(sd=0.003, degrees=1)).s0 == pytest.approx(0.1 * math.sqrt(2 / 3), rel=1e-3)
    assert _PRIOR.calibrated(Deviation(sd=0.01, degrees=4)) == _PRIOR.updated(Deviation(sd=0.01, degrees=4))
    assert large.calibrated(None) is large


def test_the_deviation_is_within_the_reports() -> None:
    """A difference between two reports is their change, not their noise."""
    one, other = [1.0, 1.2, 1.1], [5.0, 5.4]
    found = deviation([one, other])
    squares = 2 * statistics.variance(one) + statistics.variance(other)
    assert found.sd == pytest.approx(math.sqrt(squares / 3))
    assert found.degrees == 3
    assert deviation([[1.0], [2.0]]) == Deviation(sd=0.0, degrees=0)


@pytest.mark.parametrize(
    ("degrees", "family", "t"), [(10, 1, 2.763769), (10, 21, 4.6188), (2.5, 1, 5.4), (1000, 1, 2.33)]
)
def test_the_first_critical_value(degrees: float, family: int, t: float) -> None:
    """It is the quantile of Student's t at 1 - 0.01 / family."""
    assert critical_t(degrees, family, 0.99) == pytest.approx(t, rel=0.02)
    stats = pytest.importorskip("scipy.stats")
    assert critical_t(degrees, family, 0.99) == pytest.approx(stats.t.ppf(1 - 0.01 / family, degrees), rel=1e-6)


@pytest.mark.parametrize("launches", [(1, 1), (3, 3), (2, 5)])
@pytest.mark.parametrize("threshold", [0.01, 0.04])
def test_the_smallest_slowdown_is_seen_with_its_probability(launches: tuple[int, int], threshold: float) -> None:
    """In a simulation with the deviation of the prior it is found in 95 % of the comparisons, half of it rarely."""
    n_base, n_head = launches
    least = smallest_seen(_PRIOR, n_base=n_base, n_head=n_head, threshold=threshold, family=21)
    chance = random.Random(5)

    def found(slowdown: float) -> float:
        hits = 0
        for _ in range(600):
            base = [chance.gauss(0, _PRIOR.s0) for _ in range(n_base)]
            head = [chance.gauss(math.log1p(slowdown), _PRIOR.s0) for _ in range(n_head)]
            noise = _PRIOR.updated(deviation([base, head]))
            change = statistics.fmean(head) - statistics.fmean(base)
            error = noise.s0 * math.sqrt(1 / n_base + 1 / n_head)
            significant = change / error >= critical_t(noise.df0, 21, 0.99)
            hits += significant and change > math.log1p(threshold)
        return hits / 600

    assert found(least) >= 0.93
    assert found(least / 2) < 0.5


def test_the_launches_needed_are_the_fewest_that_show_a_slowdown() -> None:
    """One launch fewer does not show it, and a slowdown up to the threshold is never shown."""
    needed = launches_needed(PRIORS["eager_device"], slowdown=0.05, threshold=0.04, family=21)
    assert needed is not None
    rounded = msgspec.structs.replace(PRIORS["eager_device"])
    seen = [smallest_seen(rounded, n_base=n, n_head=n, threshold=0.04, family=21) for n in (needed - 1, needed)]
    assert seen[1] <= 0.05 < seen[0]
    assert launches_needed(PRIORS["device_memory"], slowdown=0.02, threshold=0.01, family=21) == 1
    assert launches_needed(PRIORS["device_memory"], slowdown=0.01, threshold=0.01) is None
    assert launches_needed(Prior(s0=1.0, df0=2.0, source="test"), slowdown=0.05, threshold=0.04) is None


def test_fewer_forwards_have_more_noise() -> None:
    """The deviation of a mean of forwards falls with the square root of their number, down to that of 200."""
    compute = PRIORS["device_compute"].s0
    assert prior_of("device_compute", forwards=24).s0 == pytest.approx(compute)
    assert prior_of("device_compute", forwards=6).s0 == pytest.approx(2 * compute)
    assert prior_of("device_compute", forwards=10**6) == prior_of("device_compute", forwards=200)
    rules = NoiseRules(device_compute=NoiseRule(s0=0.01, df0=3.0))
    assert prior_of("device_compute", rules, forwards=96) == Prior(s0=0.005, df0=3.0, source="policy")


def test_the_prior_of_a_case_is_that_of_its_noisier_report() -> None:
    """Fewer forwards in one of two reports, or an eager execution, count for both."""
    few, many = make_result(1.0, execution="cuda_graphs"), make_result(1.0, execution="cuda_graphs")
    few.launches[0].work = make_work(batches=[0, 2], passes=3)
    many.launches[0].work = make_work(batches=[0, 2], passes=12)
    assert prior_of_case(noisiest("device_time", few, many), None, few, many) == prior_of("device_compute", forwards=6)
    timed = len(few.launches[0].batches.latency_s)
    assert prior_of_case(noisiest("time", few, many), None, few, many) == prior_of(
        "replayed", idle=1 - 0.67, forwards=timed
    )
    eager = make_result(1.0)
    assert prior_of_case(noisiest("time", many, eager), None, many, eager).s0 == PRIORS["eager_host"].s0


def test_replayed_graphs_have_the_noise_of_the_host_in_their_idle_time() -> None:
    """The noise of the host counts with the fraction of the time in which the GPU waits for it; rules apply to both."""
    replayed, host = PRIORS["replayed"].s0, PRIORS["eager_host"].s0
    assert prior_of("replayed", idle=0.15).s0 == pytest.approx(math.hypot(replayed, 0.15 * host))
    assert prior_of("device_memory", idle=0.15) == PRIORS["device_memory"]
    quiet = NoiseRules(eager_host=NoiseRule(s0=0.001))
    assert prior_of("replayed", quiet, idle=0.15).s0 == pytest.approx(replayed, rel=0.01)
