"""The script of benchmarks/gate that simulates bisections: its results for given noise, and that it can fail."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_llmgpu.analysis.launch_merging import merge
from pytest_llmgpu.report.report import Report

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bisection(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import bisection.py."""
    monkeypatch.syspath_prepend(BENCHMARKS / "gate")
    return importlib.import_module("bisection")


@pytest.fixture
def study(bisection: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return a function that runs two trials over seven commits."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")

    def run(draw: object, **changed: Any) -> dict[str, Any]:
        given = {"commits": 7, "slowdown": 0.03, "max_launches": 16, "trials": 2, "seed": 0}
        found: dict[str, Any] = bisection.study([draw], **{**given, **changed})
        return found

    return run


def _launches(bisection: ModuleType, sd: float, count: int = 12) -> Report:
    """Return a report with launches of this deviation."""
    chance = random.Random(1)
    return merge([bisection.synthetic("device_compute", 1 + chance.gauss(0, sd)) for _ in range(count)])


def test_priors_find_the_commit(bisection: ModuleType, study: Callable[..., dict[str, Any]]) -> None:
    """Seven commits take two launches of the ends and three at most of the commits between them."""
    found = study(bisection.drawn("device_memory"))
    assert found["results"] == {"right": 2}
    assert 4 <= found["launches"]["most"] <= 5
    assert found["right_within_10_launches"] == 1
    assert found["by_case"]["device_memory"]["trials"] == 2
    assert found["ok"]


def test_recorded_launches_are_drawn_from(bisection: ModuleType, study: Callable[..., dict[str, Any]]) -> None:
    """Quiet recordings find the commit as well."""
    found = study(bisection.recorded(_launches(bisection, 0.001)))
    assert found["results"] == {"right": 2}
    assert found["ok"]


def test_noise_that_hides_the_change_is_a_failure(bisection: ModuleType, study: Callable[..., dict[str, Any]]) -> None:
    """Recordings that differ by more than the change do not find it; nor is anything found where nothing changed."""
    noisy = study(bisection.recorded(_launches(bisection, 0.1)))
    assert not noisy["ok"]
    assert noisy["results"].get("right", 0) == 0
    assert study(bisection.drawn("device_memory"), slowdown=0.0)["results"] == {"no difference": 2}
