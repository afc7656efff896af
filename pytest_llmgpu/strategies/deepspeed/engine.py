"""DeepSpeed's inference engine over a model that is filled layer by layer: its injected kernels, or its AutoTP.

`deepspeed.init_inference` wants the whole model in memory on every rank. What is done here is the same with two steps
of the engine changed: see the class inside `inject`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_llmgpu.inference import models, weights
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies import process_group
from pytest_llmgpu.strategies.protocol import Loaded

if TYPE_CHECKING:
    import torch

__all__ = ["inject"]


def inject(
    case: Case, source: ModelSource, *, on_layer: Callable[[torch.nn.Module], None] = lambda _: None, **settings: Any
) -> Loaded:
    """Load a model and hand it to DeepSpeed.

    Args:
        case: What to load and on which devices.
        source: Where from.
        on_layer: Called with each layer before DeepSpeed replaces it or its parts.
        settings: Of `deepspeed.init_inference`, but dtype and tensor parallelism.
    """
    import torch

    if case.device == "cpu":
        # Without them its import warns, and its collectives on a CPU divide by zero.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device, rank, world_size = process_group.join(case)
    import deepspeed
    from deepspeed.inference.config import DeepSpeedInferenceConfig
    from deepspeed.inference.engine import InferenceEngine
    from deepspeed.module_inject import replace_module

    if world_size > 1:
        deepspeed.init_distributed()
    dtype = getattr(torch, case.dtype)
    model = models.skeleton(source, dtype)
    read = weights.reader(model, source, device, seed=case.seed)

    class LayerwiseEngine(InferenceEngine):  # type: ignore[misc]  # DeepSpeed has no types
        def _convert_to_dtype(self, config: object) -> None:
            """Do nothing: the weights have their dtype, and the rotary frequencies must keep theirs."""

        def _apply_injection_policy(self, *arguments: Any) -> None:
            with weights.filled_in_turn(self.module, read, device, on_layer):
                super()._apply_injection_policy(*arguments)

    parallel = {"tp_size": world_size}
    engine = LayerwiseEngine(model, DeepSpeedInferenceConfig(dtype=dtype, tensor_parallel=parallel, **settings))
    # DeepSpeed remembers its first layer, unsharded, for checkpoints that it loads itself.
    replace_module.container_g = None
    empty = [name for name, parameter in engine.module.named_parameters() if parameter.is_meta]
    assert not empty, f"{empty[0]} was never filled"
    return Loaded(
        model=engine.module.eval(),
        config=model.config,
        input_device=device,
        devices=(device,),
        rank=rank,
        world_size=world_size,
        dispatched=not settings.get("replace_with_kernel_inject"),
    )
