"""Strategies: how a model is spread over devices and run. Each strategy is one file; `protocol` is the contract."""

from __future__ import annotations

import re

from pytest_llmgpu.inference.registry import Registry
from pytest_llmgpu.strategies.protocol import Strategy

BUILT_IN = {
    "mp": "pytest_llmgpu.strategies.mp:LayerParallel",
    "tp": "pytest_llmgpu.strategies.tp:TensorParallel",
    "iok": "pytest_llmgpu.strategies.iok:KernelInjection",
    "compile": "pytest_llmgpu.strategies.compile:Compiled",
}
"""Name to `module:attribute`: a strategy is imported only when it is chosen."""

_REGISTRY: Registry[Strategy] = Registry(
    kind="strategy",
    built_in=BUILT_IN,
    hook="pytest_llmgpu_strategies",
    protocol="pytest_llmgpu.strategies.protocol",
    members=("name", "backend", "check", "ranks", "build", "load", "prepare"),
    is_name=lambda text: re.fullmatch(r"[\w.-]+", text) is not None,
    allowed_names="letters, digits, _, . and - are needed",
)

merge, find, make = _REGISTRY.merge, _REGISTRY.find, _REGISTRY.make
