from __future__ import annotations

import math

import pytest
from support.verdict_factory import BATCHES, with_latencies, with_launches

from pytest_llmgpu.gate.policy import TimeRule
from pytest_llmgpu.gate.stats.intervals import launches_needed
from pytest_llmgpu.gate.timing.pairing import FEWEST, TYPICAL, Timed, launches_asked, launches_for, timed
from pytest_llmgpu.report.result import CaseResult


def _compared(base: CaseResult, head: CaseResult, sd: float | None = 0.001, session_sd: float = 0.0) -> Timed:
    found = timed(base, head, TimeRule(), sd, session_sd)
    assert isinstance(found, Timed), found
    return found


def test_the_noise_of_one_launch_is_the_known_one_or_the_one_seen() -> None:
    """Whichever is larger; the launches that it takes are for that one, rounded up."""
    quiet, loud = with_launches([1.0, 1.0]), with_launches([0.9, 1.1])
    assert _compared(quiet, quiet, sd=0.0101).noise == 0.0101
    assert _compared(loud, loud).noise == pytest.approx(0.142, abs=0.001)
    known = _compared(quiet, quiet, sd=0.0101)
    assert launches_for(known, 0.05, 0.95, 3) == launches_asked(0.05, 0.02, 0.011, 0.95, 3)


def test_one_short_launch_may_have_met_a_stall() -> None:
    """A machine stalls for 0.03 s now and then, whatever the noise: of 0.3 s that is 10 %, of a minute nothing."""
    short, long = (
        _compared(with_latencies([[seconds] * BATCHES]), with_latencies([[1.1 * seconds] * BATCHES]))
        for seconds in (0.3 / BATCHES, 60 / BATCHES)
    )
    assert short.change.noise_error == short.total.noise_error == pytest.approx(0.0912 * 2**0.5, rel=0.05)
    assert long.change.noise_error < 0.003
    two = [[0.3 / BATCHES] * BATCHES] * 2
    assert _compared(with_latencies(two), with_latencies(two)).change.noise_error < 0.002, "two show their spread"
    for alone_s, others_s, stall in ((0.3, 0.6, 0.1), (0.6, 0.3, 0.05)):
        one, both = (
            with_latencies([[seconds / BATCHES] * BATCHES] * launches)
            for seconds, launches in ((alone_s, 1), (others_s, 2))
        )
        for sides in ((one, both), (both, one)):
            found = _compared(*sides)
            assert found.change.noise_error == pytest.approx(math.log1p(stall), rel=0.01), "that side's alone"
            assert found.total.noise_error == pytest.approx(math.log1p(stall), rel=0.01)


def test_launches_asked_for_count_both_tests() -> None:
    """The typical batch is a test of the family by its weight, and one launch alone may be an outlier."""
    assert launches_asked(0.04, 0.02, 0.01, 0.95, 7) == launches_needed(0.04, 0.02, 0.01, 0.95, 7 / TYPICAL)
    assert launches_needed(0.04, 0.02, 0.002, 0.95, 1 / TYPICAL) == 1
    assert launches_asked(0.04, 0.02, 0.002, 0.95, 1) == FEWEST
    assert launches_asked(0.04, 0.02, 0.5, 0.95, 1) is None


def test_noise_between_sessions_counts_once_for_each_side() -> None:
    """For the typical batch and for the sum."""
    found = _compared(with_launches([1.0] * 4), with_launches([1.0] * 4), sd=0.0, session_sd=0.01)
    assert found.change.noise_error == found.total.noise_error == pytest.approx(0.01 * 2**0.5)
