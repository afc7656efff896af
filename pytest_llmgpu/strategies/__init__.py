"""How a model is spread over devices and run; one file per strategy, see `protocol`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from pytest_llmgpu.strategies.protocol import Strategy

__all__ = ["BUILT_IN", "find", "make"]

BUILT_IN = {
    "mp": "pytest_llmgpu.strategies.mp:LayerParallel",
    "tp": "pytest_llmgpu.strategies.tp:TensorParallel",
    "iok": "pytest_llmgpu.strategies.iok:KernelInjection",
}
"""Name to `module:attribute`, so that a strategy costs nothing until it is chosen."""


def find(name: str, known: Mapping[str, str] = BUILT_IN) -> str:
    """Return where a strategy is: `module:attribute`.

    Args:
        name: A registered name, or itself `module:attribute`.
        known: Registered names to places, as `pytest_llmgpu_strategies` gives them.

    Raises:
        ValueError: There is no such strategy.
    """
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        raise ValueError(
            f"{name!r} is no strategy: allowed are {', '.join(sorted(known))}, or package.module:attribute"
        )
    return name


def make(place: str) -> Strategy:
    """Return a new object of the strategy at a place that `find` gave.

    Raises:
        ValueError: It does not import, or is no strategy.
    """
    module, _, attribute = place.partition(":")
    try:
        found: object = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
        strategy = found() if callable(found) else found
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"strategy {place} cannot be had: {error}") from error
    lacking = [name for name in _MEMBERS if not hasattr(strategy, name)]
    if lacking:
        raise ValueError(f"strategy {place} lacks {', '.join(lacking)} (see pytest_llmgpu.strategies.protocol)")
    return strategy  # type: ignore[return-value]  # its members were checked


_MEMBERS = ("name", "backend", "check", "ranks", "build", "load", "prepare")
