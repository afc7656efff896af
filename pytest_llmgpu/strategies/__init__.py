"""Strategies: how a model is spread over devices and run. Each strategy is one file; `protocol` is the contract."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pytest_llmgpu.inference.registry import Registry
from pytest_llmgpu.strategies.protocol import Strategy

BUILT_IN = {
    "mp": "pytest_llmgpu.strategies.mp:LayerParallel",
    "tp": "pytest_llmgpu.strategies.tp:TensorParallel",
    "iok": "pytest_llmgpu.strategies.iok:KernelInjection",
}
"""Name to `module:attribute`: a strategy is imported only when it is chosen."""

_REGISTRY = Registry(
    kind="strategy",
    hook="pytest_llmgpu_strategies",
    protocol="pytest_llmgpu.strategies.protocol",
    members=("name", "backend", "check", "ranks", "build", "load", "prepare"),
    is_name=lambda text: re.fullmatch(r"[\w.-]+", text) is not None,
    allowed_names="letters, digits, _, . and - are needed",
)


def merge(registrations: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return one mapping of name to place from all registrations (see `Registry.merge`)."""
    return _REGISTRY.merge(registrations)


def find(name: str, known: Mapping[str, str] = BUILT_IN) -> str:
    """Return the place of a strategy, `module:attribute`, by its registered name or its place (see `Registry.find`)."""
    return _REGISTRY.find(name, known)


def make(place: str) -> Strategy:
    """Return a new object of the strategy at a place that `find` returned (see `Registry.make`)."""
    strategy: Strategy = _REGISTRY.make(place)
    return strategy
