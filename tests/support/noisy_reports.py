"""Reports with launches that differ by chance, for the tests of the noise estimate."""

from __future__ import annotations

import math
import random
from typing import Any

from pytest_llmgpu.report.report import Commit, Environment, Report
from pytest_llmgpu.report.result import CaseResult
from support.stored_reports import gpus
from support.verdict_factory import with_launches


def on_h200(*cases: CaseResult, seen: str = "NVIDIA H200") -> Report:
    """Return a report of these cases, measured on four H200 by default."""
    machine = Environment(python="3.12", platform="Linux", gpus=gpus(*[seen] * 4))
    return Report(
        created="2026-01-02T03:04:05Z",
        plugin_version=None,
        environment=machine,
        commit=Commit(sha="a" * 40),
        cases=list(cases),
    )


def noisy(sd: float, launches: int = 10, seed: int = 1, **fields: Any) -> CaseResult:
    """Return a completed result whose launches have this standard deviation between their log times."""
    chance = random.Random(seed)
    return with_launches([math.exp(chance.gauss(0, sd)) for _ in range(launches)], **fields)
