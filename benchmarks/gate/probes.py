"""Strategies with a fault that an environment variable switches on; nothing else differs.

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


def fault() -> float:
    """Return the size of the fault; 0 for none."""
    return float(os.environ.get("LLMGPU_FAULT", "0"))


class Slow(LayerParallel):
    """mp that sleeps after every forward, for a fraction of the forward's time."""

    name = "slow"

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load the model. It waits for its devices without a fault too, so that only the sleep differs."""
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
    """tp with one more all-reduce per layer, of zeros: the answers do not change."""

    name = "chatty"

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load this rank's part, and add the fault to its layers."""
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
    """iok with DeepSpeed's own binding, which adds the residual twice."""

    name = "stock"

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load this rank's part, with DeepSpeed's own binding if there is a fault."""
        options = case.strategy_options | {"stock": bool(fault())}
        return super().load(msgspec.structs.replace(case, strategy_options=options), source)


SLOW = Slow()
CHATTY = Chatty()
STOCK = Stock()
