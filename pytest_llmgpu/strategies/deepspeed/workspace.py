"""DeepSpeed's workspace: allocate it for a batch size, and read how many tokens it holds. A process has one.

DeepSpeed shrinks the workspace to the free memory and does not compare it with the sequences
(`InferenceContext::GenWorkSpace` in `csrc/transformer/inference/includes/inference_context.h`, DeepSpeed 0.19.8).

In all functions, `layers` are DeepSpeed's injected layers, of which the first owns the workspace. `least` and `most`
are tokens per sequence: with less than `least` DeepSpeed raises, and it never allocates more than `most`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PROBE_TOKENS = 2  # The kernels take a single token as the continuation of a text.


def allocate(layers: Sequence[Any], rows: int, tokens: int, *, least: int, most: int) -> int:
    """Make DeepSpeed allocate its workspace again; return the tokens per sequence that it holds."""
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
    return _granted(first)


def grantable(layers: Sequence[Any], rows: int, tokens: int, *, most: int) -> int:
    """Return how many tokens a workspace would hold; 0 if none can be allocated."""
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
    # Only the attention, without the all-reduce after it: the ranks may hold different numbers of tokens.
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
    """Return the bytes that DeepSpeed allocates for a workspace (`InferenceContext::GenWorkSpace`)."""
    import torch

    config = layers[0].config
    activations = 10 * config.heads * _padded_head_dim(config) * rows
    softmax = rows * (config.heads // config.mp_size) * most
    element_bytes: int = torch.empty(0, dtype=config.dtype).element_size()
    size: int = (activations + softmax) * granted * element_bytes
    return size + cache_bytes(layers, rows, granted)


def cache_bytes(layers: Sequence[Any], rows: int, granted: int) -> int:
    """Return the bytes of a workspace that are for keys and values."""
    import torch

    config = layers[0].config
    element_bytes: int = torch.empty(0, dtype=config.dtype).element_size()
    numbers: int = len(layers) * rows * (config.heads * _padded_head_dim(config) // config.mp_size) * 2
    return numbers * granted * element_bytes


def _padded_head_dim(config: Any) -> int:
    head_dim: int = config.hidden_size // config.heads
    return next((size for size in (32, 64, 128) if head_dim <= size), head_dim)
