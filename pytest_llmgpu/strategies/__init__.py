"""Strategies: how a model is spread over devices and run. Each strategy is one file; `protocol` is the contract."""

from __future__ import annotations

BUILT_IN = {
    "mp": "pytest_llmgpu.strategies.mp:LayerParallel",
    "tp": "pytest_llmgpu.strategies.tp:TensorParallel",
    "iok": "pytest_llmgpu.strategies.iok:KernelInjection",
    "compile": "pytest_llmgpu.strategies.compile:Compiled",
}
"""Name to `module:attribute`: a strategy is imported only when it is chosen."""
