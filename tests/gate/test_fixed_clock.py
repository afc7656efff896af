from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import msgspec
import pytest
from support.report_factory import known

from pytest_llmgpu.gate.fixed_clock import Pass, fit, log_clocks, of_passes, passes
from pytest_llmgpu.report.work import RankWork


def _launch(log_s: float, slope: float, mhz: Sequence[float], sd: float = 0.0) -> list[Pass]:
    """Return passes with this log time at 1,735 MHz, on a line or beside it."""
    return [Pass(_CHANCE.gauss(log_s + slope * math.log(one / 1735), sd), math.log(one / 1000)) for one in mhz]


_CHANCE = random.Random(1)
_FAST, _SLOW = (1735, 1700, 1771), (1590, 1560, 1620)


@pytest.mark.parametrize(
    ("base", "head", "slope", "fitted", "change", "sd"),
    [
        (_FAST, _SLOW, -0.8, -0.8, 0.01, 0.001),
        (_FAST, _SLOW, -0.2, -0.2, 0.01, 0.001),
        (_FAST, _SLOW, 0.5, 0.0, 0.01 - 0.5 * 0.0876, 0.012),
        (_FAST, _SLOW, -1.5, -1.0, 0.01 + 0.5 * 0.0876, 0.012),
        ([1735] * 3, [1590] * 3, -0.8, -0.5, 0.01 + 0.3 * 0.0873, 0.0178),
        ([1735] * 3, [1735] * 3, -0.8, -0.5, 0.01, 0.0004),
    ],
)
def test_times_are_those_at_the_clock_of_the_candidate(
    base: Sequence[float], head: Sequence[float], slope: float, fitted: float, change: float, sd: float
) -> None:
    """The passes show the slope, from -1 to 0; where their clocks hardly vary it is uncertain, and so is the change."""
    found = fit([_launch(0.0, slope, base)] * 2, [_launch(0.01, slope, head)])
    assert (found.slope, found.samples.change) == pytest.approx((fitted, change), abs=2e-3)
    assert (found.base_ghz, found.head_ghz) == pytest.approx((1.735, statistics.fmean(head) / 1000), rel=1e-3)
    assert found.sd == pytest.approx(sd, rel=0.2)


@pytest.mark.parametrize("width", [0.0, 0.002, 0.03])
def test_the_deviation_is_that_of_the_change(width: float) -> None:
    """In 500 pairs of reports whose slope is drawn from the prior, whatever the range of their clocks."""
    _CHANCE.seed(1)
    distances = []
    for _ in range(500):
        slope = min(0.0, max(-1.0, _CHANCE.gauss(-0.5, 0.25)))
        base, *head = ([mhz * (1 + _CHANCE.gauss(0, width)) for _ in range(12)] for mhz in (1735, 1600, 1620))
        found = fit([_launch(0.0, slope, base, 0.001)], [_launch(0.01, slope, of, 0.001) for of in head])
        distances.append((found.samples.change - 0.01) / (found.sd * math.sqrt(1 + 1 / 2)))
    assert 0.8 < statistics.pstdev(distances, 0.0) < 1.1


@pytest.mark.parametrize(
    ("time_s", "busy", "sd", "idle_sd"),
    [
        (0.1, (0.9, 0.9), 0.0004, 0.0),
        (0.1, (0.9, 0.5), 0.0004, 0.02),
        (0.1, (None, 0.5), 0.0004, 0.0),
        (0.01, (0.5, 0.5), 0.0021, 0.0),
        (1e-6, (1.0, 1.0), 0.05, 0.0),
        (0.0, (1.0, 1.0), 0.05, 0.0),
    ],
)
def test_the_clock_of_a_pass_is_not_quite_that_of_its_kernels(
    time_s: float, busy: tuple[float | None, float], sd: float, idle_sd: float
) -> None:
    """Where passes are short, and where the GPU idles for another part of them, device time is less certain."""
    alone = fit([_launch(0.0, -0.5, _FAST)], [_launch(0.0, -0.5, _SLOW)])
    base, head = (RankWork(uuids=[], device_time_s=[time_s, 2 * time_s], busy=one) for one in busy)
    found = of_passes(alone, [base, base], [head])
    ahead = [msgspec.structs.replace(one, launched_ahead=True) for one in (base, head)]
    assert of_passes(alone, ahead[:1], ahead[1:]).idle_sd == 0, "the host had launched the layers before"
    assert of_passes(alone, ahead[:1], [head]).idle_sd == pytest.approx(0.05 * (1 - known(head.busy)))
    assert found.samples == alone.samples
    assert math.sqrt(found.sd**2 - alone.sd**2) == pytest.approx(sd, abs=5e-5)
    assert found.idle_sd == pytest.approx(idle_sd)


@pytest.mark.parametrize(
    ("clock_ghz", "times_s", "ghz"),
    [
        ([[1.0, 2.0]], [0.5, 0.4], [1.0, 2.0]),
        ([[1.0, 2.0], [4.0, 2.0]], [0.5, 0.4], [2.0, 2.0]),
        (None, [0.5, 0.4], []),
        ([[1.0]], [0.5, 0.4], []),
        ([[0.0, 1.0]], [0.5, 0.4], []),
        ([[1.0, 1.0]], [0.5, 0.0], []),
        ([[1.0, 1.0]], None, []),
    ],
)
def test_a_pass_has_a_time_and_a_clock(
    clock_ghz: list[list[float]] | None, times_s: list[float] | None, ghz: list[float]
) -> None:
    """The clock of several GPUs is their mean; a rank with a pass whose clock is not known has none."""
    found = passes(log_clocks(clock_ghz), times_s)
    assert [math.exp(one.log_ghz) for one in found] == pytest.approx(ghz)
    assert [math.exp(one.log_s) for one in found] == pytest.approx(times_s if ghz else [])
