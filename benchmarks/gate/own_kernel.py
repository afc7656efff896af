"""Strategies for the reach of the gate: mp, whose layers call one more kernel of a known time, or a loop on the host.

    OWN_KERNEL_CYCLES=1:2161,8:3461 pytest benchmarks --strategy=own_kernel:OwnKernel  # PYTHONPATH=benchmarks/gate
    OWN_LOOP=1000 pytest benchmarks --strategy=own_kernel:OwnLoop

The first variable has the cycles of the kernel for each batch size. With other cycles the program is the same, and one
kernel is slower, as when somebody changes a kernel of their own. The second one has the iterations of a loop of Python
without a call: with more of them the program is the same, and the host is slower.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pytest_llmgpu.strategies.mp import LayerParallel

if TYPE_CHECKING:
    from pytest_llmgpu.inference.models import ModelSource
    from pytest_llmgpu.report.case import Case
    from pytest_llmgpu.strategies.protocol import Loaded


class OwnKernel(LayerParallel):
    """mp with a kernel after each layer that waits for a number of cycles of the SM."""

    name = "own_kernel"

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load the model, and add the kernel to its layers."""
        import torch

        pairs = [pair.split(":") for pair in os.environ["OWN_KERNEL_CYCLES"].split(",")]
        cycles = {int(rows): int(number) for rows, number in pairs}
        loaded = super().load(case, source)
        decoder: Any = loaded.model.get_decoder()  # type: ignore[operator]

        def after(_module: Any, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            torch.cuda._sleep(cycles.get(len(hidden), 0))  # noqa: SLF001 - the kernel that torch's own tests use

        for layer in decoder.layers:
            layer.register_forward_hook(after)
        return loaded


class OwnLoop(LayerParallel):
    """mp with a loop of Python after each layer, which costs time of the host alone."""

    name = "own_loop"

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load the model, and add the loop to its layers."""
        iterations = int(os.environ["OWN_LOOP"])
        loaded = super().load(case, source)
        decoder: Any = loaded.model.get_decoder()  # type: ignore[operator]

        def after(_module: Any, _inputs: Any, _output: Any) -> None:
            number = 0
            while number < iterations:
                number += 1

        for layer in decoder.layers:
            layer.register_forward_hook(after)
        return loaded
