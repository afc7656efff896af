"""How a model is spread over devices and run; one file per strategy, see `protocol`."""

from __future__ import annotations

import importlib

from pytest_llmgpu.strategies.protocol import Strategy

__all__ = ["BUILT_IN", "find"]

BUILT_IN = {"mp": "pytest_llmgpu.strategies.mp:LayerParallel"}
"""Name to `module:class`, so that a strategy costs nothing until it is chosen."""


def find(name: str) -> Strategy:
    """Return a strategy by its name.

    Raises:
        ValueError: There is no such strategy.
    """
    if name not in BUILT_IN:
        raise ValueError(f"{name!r} is no strategy: allowed are {', '.join(sorted(BUILT_IN))}")
    module, attribute = BUILT_IN[name].split(":")
    strategy: Strategy = getattr(importlib.import_module(module), attribute)()
    return strategy
