"""Calibrations with a given noise of times, for tests that must not depend on the built-in priors."""

from __future__ import annotations

from pytest_llmgpu.gate.calibration import Calibration, Measured, Noise
from pytest_llmgpu.gate.times import Deviation
from pytest_llmgpu.report.result import CaseResult


def with_noise(*results: CaseResult, sd: float = 0.001) -> Calibration:
    """Return the noise of cases whose times have this deviation between launches, well known."""
    return Calibration(cases=calibrated("", *results, sd=sd, launches=10**9).cases)


def calibrated(machine: str, *cases: CaseResult, sd: float = 0.001, launches: int = 10_000) -> Measured:
    """Return a calibration in which the times of these cases have this deviation."""
    deviation = Deviation(sd=sd, degrees=launches - 1)
    noise = {
        result.key: Noise(id=result.id, launches=launches, time=deviation, device_time=deviation) for result in cases
    }
    return Measured(machine=machine, cases=noise)
