"""Strategies with a fault that is switched on by a variable: what a gate has to see, and nothing else differs.

PYTHONPATH=benchmarks/gate LLMGPU_FAULT=0.1 pytest benchmarks --strategy=probes:SLOW
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies.iok import KernelInjection
from pytest_llmgpu.strategies.mp import LayerParallel
from pytest_llmgpu.strategies.protocol import Loaded
from pytest_llmgpu.strategies.tp import TensorParallel

if TYPE_CHECKING:
    import torch

__all__ = ["CHATTY", "SLOW", "STOCK"]


def fault() -> float:
    """Return how large the fault is; 0 for none."""
    return float(os.environ.get("LLMGPU_FAULT", "0"))


class Slow(LayerParallel):
    """mp that sleeps after every forward, for a fraction of what the forward took."""

    name = "slow"

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load the model; without a fault it waits for its devices as well, so that only the sleep differs."""
        import torch

        loaded = super().load(case, source)
        forward = loaded.model.forward

        def slower(*inputs: Any, **named: Any) -> Any:
            began = time.perf_counter()
            outputs = forward(*inputs, **named)
            if case.device == "cuda":
                torch.cuda.synchronize()
            time.sleep(fault() * (time.perf_counter() - began))
            return outputs

        loaded.model.forward = slower
        return loaded


class Chatty(TensorParallel):
    """tp with one all-reduce more per layer, of zeros: the numbers stay."""

    name = "chatty"

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load this rank's part, and hang the fault into its layers."""
        import torch
        import torch.distributed as dist

        loaded = super().load(case, source)

        def sum_nothing(_layer: torch.nn.Module, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            dist.all_reduce(torch.zeros_like(hidden))

        if fault():
            for layer in loaded.model.get_submodule("model.layers").children():
                layer.register_forward_hook(sum_nothing)
        return loaded


class Stock(KernelInjection):
    """iok that leaves DeepSpeed's residual sum as it is, which adds it twice."""

    name = "stock"

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load this rank's part, with the binding that the fault says."""
        options = case.strategy_options | {"stock": bool(fault())}
        return super().load(msgspec.structs.replace(case, strategy_options=options), source)


SLOW = Slow()
CHATTY = Chatty()
STOCK = Stock()
