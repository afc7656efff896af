"""Policies and calibrations with a given noise of times, for tests that must not depend on the built-in priors."""

from __future__ import annotations

import msgspec

from pytest_llmgpu.analysis.noise_regime import REGIMES
from pytest_llmgpu.gate.calibration import Measured, Noise
from pytest_llmgpu.gate.noise_model import Deviation, NoiseRule, NoiseRules
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report.result import CaseResult


def with_noise(s0: float = 0.001, policy: Policy | None = None, *, df0: float = 1000) -> Policy:
    """Return a policy in which every regime but `load` has this deviation between launches, well known by default."""
    noise = NoiseRules(**{regime: NoiseRule(s0=s0, df0=df0) for regime in REGIMES if regime != "load"})
    return msgspec.structs.replace(policy or Policy(), noise=noise)


def calibrated(machine: str, *cases: CaseResult, sd: float = 0.001, launches: int = 10_000) -> Measured:
    """Return a calibration in which the times of these cases have this deviation."""
    deviation = Deviation(sd=sd, degrees=launches - 1)
    noise = {
        result.key: Noise(id=result.id, launches=launches, time=deviation, device_time=deviation) for result in cases
    }
    return Measured(machine=machine, cases=noise)
