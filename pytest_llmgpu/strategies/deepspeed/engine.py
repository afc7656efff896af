"""DeepSpeed's inference engine with a model that is filled layer by layer: kernel injection or AutoTP.

`deepspeed.init_inference` needs the whole model in memory on every rank. `inject` does the same with two steps of the
engine changed: see the class inside it.
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


def inject(
    case: Case, source: ModelSource, *, on_layer: Callable[[torch.nn.Module], None] = lambda _: None, **settings: Any
) -> Loaded:
    """Load a model into DeepSpeed's engine.

    Args:
        case: The case, which names the device and the dtype.
        source: The files of the model.
        on_layer: Called with each layer before DeepSpeed replaces it or its parts.
        settings: Arguments of `deepspeed.init_inference`, except dtype and tensor parallelism.
    """
    import torch

    if case.device == "cpu":
        # Without these variables the import warns, and the collectives on a CPU divide by zero.
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
            """Do nothing: the weights have the dtype of the case, and the rotary frequencies must keep float32."""

        def _apply_injection_policy(self, *arguments: Any) -> None:
            with weights.filled_in_turn(self.module, read, device, on_layer):
                super()._apply_injection_policy(*arguments)

    parallel = {"tp_size": world_size}
    engine = LayerwiseEngine(model, DeepSpeedInferenceConfig(dtype=dtype, tensor_parallel=parallel, **settings))
    # DeepSpeed keeps the first layer, unsplit, for checkpoints that it loads itself.
    replace_module.container_g = None
    empty = [name for name, parameter in engine.module.named_parameters() if parameter.is_meta]
    assert not empty, f"{empty[0]} was not filled"
    return Loaded(
        model=engine.module.eval(),
        config=model.config,
        input_device=device,
        devices=(device,),
        rank=rank,
        world_size=world_size,
        own_kv_cache=bool(settings.get("replace_with_kernel_inject")),
        dispatched=not settings.get("replace_with_kernel_inject"),
    )
