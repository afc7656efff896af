"""DeepSpeed's inference engine with a model that is filled layer by layer: kernel injection or AutoTP.

`deepspeed.init_inference` needs the whole model in memory on every rank. `inject` does the same with two steps of the
engine changed: see the class inside it.

A process has one workspace. DeepSpeed shrinks it to the free memory and does not compare it with the sequences
(`InferenceContext::GenWorkSpace` in `csrc/transformer/inference/includes/inference_context.h`, DeepSpeed 0.19.8). For
its functions, `layers` are DeepSpeed's injected layers, of which the first owns it, and `least` and `most` are
tokens per sequence: with less than `least` DeepSpeed raises, and it never allocates more than `most`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pytest_llmgpu.inference import weights
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.strategies import process_group
from pytest_llmgpu.strategies.protocol import Loaded

if TYPE_CHECKING:
    import torch

_PROBE_TOKENS = 2  # The kernels take a single token as the continuation of a text.


def inject(
    case: Case, source: ModelSource, *, on_layer: Callable[[torch.nn.Module], None] = lambda _: None, **settings: Any
) -> Loaded:
    """Load a model into DeepSpeed's engine, with further arguments of `deepspeed.init_inference`.

    `on_layer` is called with each layer before DeepSpeed replaces it or its parts.
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
    model = weights.skeleton(source, dtype)
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


def allocate_workspace(layers: Sequence[Any], rows: int, tokens: int, *, least: int, most: int) -> int:
    """Make DeepSpeed allocate its workspace again; return the tokens per sequence that it holds."""
    import torch

    first = layers[0]
    for layer in layers:
        layer.config.min_out_tokens, layer.config.max_out_tokens = least, most
        # These are views into the workspace, which is freed below.
        layer.layer_past = None
    # DeepSpeed enlarges a workspace, but never shrinks it.
    if first.workspace.is_allocated():
        first.workspace.release_workspace()
    first._should_allocate_workspace = True  # noqa: SLF001 - the only way to a second allocation
    first.allocate_workspace((rows, tokens))
    # The distance of two heads in the kernel's view of its keys is the number of tokens that the workspace holds. Only
    # the attention is run, without the all-reduce after it: the ranks may hold different numbers of tokens.
    weight = first.attention.attn_qkvw
    qkv_BSH = torch.zeros(1, _PROBE_TOKENS, weight.shape[1], dtype=weight.dtype, device=weight.device)
    others = dict.fromkeys(("input_mask", "layer_past", "alibi", "token_idx", "position_ids"))
    _, keys, _ = first.attention.compute_attention(qkv_out=(qkv_BSH,), is_prompt=True, **others)
    return int(keys.stride(1)) // int(keys.shape[-1])


def workspace_bytes(layers: Sequence[Any], rows: int, granted: int, most: int) -> tuple[int, int]:
    """Return the bytes of a workspace for keys and values, and the others (`InferenceContext::GenWorkSpace`)."""
    config = layers[0].config
    head_dim: int = config.hidden_size // config.heads
    width = config.heads * next((size for size in (32, 64, 128) if head_dim <= size), head_dim)
    keys_and_values = len(layers) * rows * (width // config.mp_size) * 2
    softmax = rows * (config.heads // config.mp_size) * most
    scale = granted * int(config.dtype.itemsize)
    return keys_and_values * scale, (10 * width * rows + softmax) * scale
