"""DeepSpeed's workspace, one per process: how it is made for a batch size, and how many tokens it then holds.

It is cut to the memory that is free, and never compared with the sequences that come (`InferenceContext::GenWorkSpace`
in `csrc/transformer/inference/includes/inference_context.h`, DeepSpeed 0.19.8).

`layers` are DeepSpeed's injected ones, of which the first owns the workspace; `least` and `most` are the tokens per
sequence below which it raises and above which it does not go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["allocate", "grantable", "size_bytes"]

_PROBE_TOKENS = 2  # one alone would count as the continuation of a text


def allocate(layers: Sequence[Any], rows: int, tokens: int, *, least: int, most: int) -> int:
    """Have DeepSpeed allocate its workspace anew; return the tokens per sequence it holds."""
    first = layers[0]
    for layer in layers:
        layer.config.min_out_tokens, layer.config.max_out_tokens = least, most
        # Views into a workspace that is about to be freed.
        layer.layer_past = None
    # It grows by itself and never shrinks.
    if first.workspace.is_allocated():
        first.workspace.release_workspace()
    first._should_allocate_workspace = True  # noqa: SLF001 - the only way to a second allocation
    first.allocate_workspace((rows, tokens))
    return _granted(first)


def grantable(layers: Sequence[Any], rows: int, tokens: int, *, most: int) -> int:
    """Return how many tokens it would have held, 0 where it cannot be allocated at all."""
    try:
        granted = allocate(layers, rows, tokens, least=1, most=most)
    except RuntimeError:
        return 0
    layers[0].workspace.release_workspace()
    return min(granted, tokens - 1)


def _granted(layer: Any) -> int:
    """Return the tokens that the workspace holds: the distance of two heads in the kernel's view of its keys."""
    import torch

    attention = layer.attention
    weight = attention.attn_qkvw
    qkv_BSH = torch.zeros(1, _PROBE_TOKENS, weight.shape[1], dtype=weight.dtype, device=weight.device)
    # Attention alone, without the all-reduce that comes after it: ranks may differ in what they are granted.
    _, keys, _ = attention.compute_attention(
        qkv_out=(qkv_BSH,),
        input_mask=None,
        layer_past=None,
        alibi=None,
        is_prompt=True,
        token_idx=None,
        position_ids=None,
    )
    return int(keys.stride(1)) // int(keys.shape[-1])


def size_bytes(layers: Sequence[Any], rows: int, granted: int, most: int) -> int:
    """Return what DeepSpeed allocates for a workspace (`InferenceContext::GenWorkSpace`)."""
    import torch

    config = layers[0].config
    head_dim = config.hidden_size // config.heads
    padded = next((size for size in (32, 64, 128) if head_dim <= size), head_dim)
    local = config.heads // config.mp_size
    activations = 10 * config.heads * padded * rows
    softmax = rows * local * most
    cache = len(layers) * rows * (config.heads * padded // config.mp_size) * 2
    element_bytes: int = torch.empty(0, dtype=config.dtype).element_size()
    size: int = (activations + softmax + cache) * granted * element_bytes
    return size
