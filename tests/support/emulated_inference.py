"""An emulation of DeepSpeed's transformer_inference extension on the CPU: kernel injection of a LLaMA without a GPU.

Put an `EmulatedInference` at `deepspeed.ops.transformer.inference.op_binding.base.BaseOp.inference_module` before the
injection. Arguments, offsets, strides and the order of the steps are those of DeepSpeed 0.19.8
(csrc/transformer/inference: includes/inference_context.h, csrc/pt_binding.cpp, softmax.cu, rms_norm.cu,
apply_rotary_pos_emb.cu) for float32, mistakes included: one flat workspace, in which too many tokens or sequences
overwrite each other without a word. Where threads of a GPU race, the one whose block starts last wins. What the GPU
would read or write outside the workspace raises.

Shapes: B sequences, S tokens of the input, T tokens seen so far, N heads of this rank, D head size, H = N * D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

_MIB, _GIB = 2**20, 2**30
_ELEMENT_BYTES = 4
_HIDDEN = -10000.0  # softmax.cu's minus_infinity: finite, so that a row that is hidden throughout still has a mean


def workspace_elements(
    *, layers: int, heads: int, hidden: int, batch: int, tp: int = 1, max_out: int
) -> tuple[int, int, int]:
    """Return the elements per token of the workspace: activations, attention scores, and keys and values.

    Heads and hidden size are those of all `tp` ranks together; `batch` is that of the forward that makes the workspace.
    """
    head = hidden // heads
    padded = head if head > 128 else 32 if head <= 32 else 64 if head <= 64 else 128
    return 10 * heads * padded * batch, batch * (heads // tp) * max_out, layers * batch * (heads * padded // tp) * 2


def granted_tokens(free_bytes: int, *, max_out: int = 1024, element_bytes: int = 2, **shape: int) -> int:
    """Return the tokens per sequence that DeepSpeed allocates; -1 if the memory is below its reserve.

    `free_bytes` are free when the first workspace of the process is made; `shape` goes to `workspace_elements`.
    """
    elements = workspace_elements(max_out=max_out, **shape)
    spare = free_bytes - _reserve(free_bytes, elements[1])
    return -1 if spare < 0 else min(max_out, spare // element_bytes // sum(elements))


def free_bytes_granting(tokens: int, *, max_out: int = 1024, element_bytes: int = 2, **shape: int) -> int:
    """Return the smallest free memory for which `granted_tokens` returns this number; the arguments are as there."""
    elements = workspace_elements(max_out=max_out, **shape)
    size = tokens * sum(elements) * element_bytes
    free_bytes = size + _reserve(0, elements[1])
    return free_bytes if free_bytes <= _GIB else size + _reserve(_GIB + 1, elements[1])


def _reserve(free_bytes: int, scores: int) -> int:
    # GenWorkSpace adds the elements of the scores as if they were bytes.
    return scores + (500 if free_bytes > _GIB else 100) * _MIB


class EmulatedInference:
    """The extension's functions, and the state that the extension keeps for the process (`InferenceContext`)."""

    def __init__(self, free_bytes: int = 64 * _GIB) -> None:
        """Start in the state of a new process; `free_bytes` is what cudaMemGetInfo calls free."""
        self._free_bytes = free_bytes
        self.capacity_bytes: int | None = None
        """Largest workspace that cudaMalloc gives; None for any."""
        self.batch_size = 0
        """The sequences of the forward of the last request for a workspace."""
        self._block: Tensor | None = None
        self._granted = 0
        self._size_bytes = 0
        self._scores = 0
        self._tokens = 1

    @property
    def workspace_bytes(self) -> int:
        """The allocated bytes, which may be more than the last forward requested."""
        return 0 if self._block is None else self._block.numel() * _ELEMENT_BYTES

    def release_workspace(self) -> None:
        """Free the workspace."""
        self._block = None

    def retake_workspace(self) -> bool:
        """Return whether a workspace exists: inference does not free one between forwards."""
        return self._block is not None

    def reset_cache(self) -> None:
        """Forget the sequences before: the next input of one token begins new ones."""
        self._tokens = 1

    def rms_norm(self, input_BSH: Tensor, gamma_H: Tensor, epsilon: float) -> Tensor:
        """Normalise."""
        return input_BSH * torch.rsqrt(input_BSH.square().mean(-1, keepdim=True) + epsilon) * gamma_H

    def pre_rms_norm(self, input_BSH: Tensor, residual_BSH: Tensor, gamma_H: Tensor, epsilon: float) -> list[Tensor]:
        """Return the normalised sum and the sum."""
        sum_BSH = input_BSH + residual_BSH
        return [self.rms_norm(sum_BSH, gamma_H, epsilon), sum_BSH]

    def _vector_add(self, first: Tensor, second: Tensor, gamma: float) -> Tensor:
        return first.copy_(gamma * first + second)

    def allocate_workspace_fp32(self, hidden: int, heads: int, _prompt: int, batch: int, *given: int) -> None:
        """Allocate the workspace if there is none or if it is too small."""
        layers, tp, _external_cache, _rank, max_out, min_out = given
        self.batch_size = batch
        shape = {"layers": layers, "heads": heads, "hidden": hidden, "batch": batch, "tp": tp, "max_out": max_out}
        self._granted = granted_tokens(self._free_bytes, **shape, element_bytes=_ELEMENT_BYTES)
        if self._granted < min_out:
            raise RuntimeError("Workspace can't be allocated, not enough memory")
        activations, scores, cache = (self._granted * each for each in workspace_elements(**shape))
        size_bytes = _ELEMENT_BYTES * (activations + scores + cache)
        if self._block is None or self._size_bytes < size_bytes:
            self._block = None
            if self.capacity_bytes is not None and size_bytes > self.capacity_bytes:
                raise RuntimeError("Workspace is null.")
            # A tensor of inference mode could not be written to outside that mode.
            with torch.inference_mode(mode=False):
                self._block = torch.zeros(size_bytes // _ELEMENT_BYTES)
        # A smaller request keeps the block and forgets its size: the next larger one allocates again even if it fits.
        self._size_bytes = size_bytes
        self._scores = activations + cache

    def _view(self, offset: int, shape: Sequence[int], strides: Sequence[int] | None = None) -> Tensor:
        """Return elements of the workspace, which begin `offset` elements after its start."""
        assert self._block is not None
        strides = strides or [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        return self._block.as_strided(shape, strides, offset)

    def rms_qkv_gemm_fp32(
        self, input_BSH: Tensor, weight: Tensor, _scale: Tensor, gamma_H: Tensor, *given: Any
    ) -> list[Tensor]:
        """Return queries, keys and values, and the normalised input."""
        epsilon, _quantized, transposed = given
        norm_BSH = self._view(3 * input_BSH.numel(), input_BSH.shape)
        norm_BSH.copy_(self.rms_norm(input_BSH, gamma_H, epsilon))
        return [self._product(norm_BSH, weight, transposed), norm_BSH]

    def vector_matmul_fp32(self, input_BSH: Tensor, weight: Tensor, *given: Any) -> Tensor:
        """Return the projected context."""
        _async_op, _scale, _quantized, transposed = given
        return self._product(input_BSH, weight, transposed)

    def _product(self, input_BSH: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        weight = weight.t() if transposed else weight
        return self._view(0, (*input_BSH.shape[:2], weight.shape[1])).copy_(input_BSH @ weight)

    def rms_mlp_gemm_fp32(self, input_BSH: Tensor, residual_BSH: Tensor, *given: Any) -> list[Tensor]:
        """Return the output of the gated layer, and the residual, to which the input was added."""
        weight_in, weight_out, gamma_H, epsilon, _scale_in, _scale_out, _quantized, _activation, transposed = given
        if transposed:
            weight_in, weight_out = weight_in.t(), weight_out.t()
        size, shape = input_BSH.numel(), input_BSH.shape
        output_BSH, norm_BSH = self._view(size, shape), self._view(2 * size, shape)
        between = self._view(3 * size, (*shape[:2], weight_in.shape[1]))
        norm, total = self.pre_rms_norm(input_BSH, residual_BSH, gamma_H, epsilon)
        residual_BSH.copy_(total)  # in place: what the binding since 0.15.2 does not know, and adds once more
        norm_BSH.copy_(norm)
        between.copy_(norm_BSH @ weight_in)
        up, gate = between.chunk(2, -1)
        up.copy_(up * torch.nn.functional.silu(gate))
        output_BSH.copy_(up @ weight_out)
        return [output_BSH, residual_BSH]

    def softmax_context_fp32(
        self, qkv: Tensor, mask: Tensor, rotary_dim: int, rotate_half: bool, *given: Any
    ) -> list[Tensor]:
        """Return the context, and the keys and values of all tokens seen so far."""
        _every_two, heads, _kv_heads, norm_factor, triangular, _local, _window, _no_masking, layer, layers, *_ = given
        B, S, width = qkv.shape
        D = width // (3 * heads)
        H, R = heads * D, B * heads
        # Only the length identifies a prompt: one token continues the sequences before.
        first = 0 if S > 1 else self._tokens - 1
        T = self._tokens = S if S > 1 else self._tokens
        room, buffer = self._granted, B * S * H
        keys_at = (10 + 2 * layer) * H * self.batch_size * room
        values_at = keys_at + H * self.batch_size * room

        q, k, v = qkv.view(B, S, 3, heads, D).permute(2, 0, 3, 1, 4).reshape(3, R, S, D)
        query_RSD = self._view(5 * buffer, (R, S, D))
        query_RSD.copy_(q)
        self._store(k, keys_at + first * D, by_token=True)
        self._store(v, values_at + first * D, by_token=True)
        if rotary_dim > 0 and rotate_half:
            _alibi, rope_theta = given[10:12]
            turn = partial(_rotate, first=first, dim=rotary_dim, theta=rope_theta)
            query_RSD.copy_(turn(query_RSD))
            turned = turn(self._view(keys_at + first * D, (R, S, D), (D * room, D, 1)))
            self._store(turned, keys_at + first * D, by_token=False)

        seen, strides_seen = (B, heads, T, D), (H * room, D * room, D, 1)
        keys, values = (self._view(at, seen, strides_seen) for at in (keys_at, values_at))
        query = query_RSD.view(B, heads, S, D)
        scores = self._view(self._scores, (B, heads, S, T))
        scores.copy_(query @ keys.mT * norm_factor**2)
        scores.copy_(_softmax(scores, _mask(mask, (B, heads, S, T)), causal=triangular and S > 1))
        query.copy_(scores @ values)  # the context takes the place of the query
        output = self._view(4 * buffer, (B, S, H))
        output.copy_(query.transpose(1, 2).reshape(B, S, H))
        if layer == layers - 1:
            self._tokens += 1
        return [output, keys, values]

    def _store(self, rows_RSD: Tensor, offset: int, *, by_token: bool) -> None:
        """Write the tokens of each head to its part of the cache, without a check: of two, the later block wins."""
        R, S, D = rows_RSD.shape
        room = self._granted
        if room >= S:
            self._view(offset, (R, S, D), (room * D, D, 1)).copy_(rows_RSD)
            return
        place = torch.arange((R - 1) * room + S)
        row = ((place - S + room) // room).clamp_min(0) if by_token else (place // room).clamp_max(R - 1)
        self._view(offset, (len(place), D)).copy_(rows_RSD[row, place - row * room])


def _rotate(rows_RSD: Tensor, *, first: int, dim: int, theta: float) -> Tensor:
    S = rows_RSD.shape[1]
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(first, first + S, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    low, high = rows_RSD[..., : dim // 2], rows_RSD[..., dim // 2 : dim]
    return torch.cat((rows_RSD[..., :dim] * cos + torch.cat((-high, low), -1) * sin, rows_RSD[..., dim:]), -1)


def _mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor | None:
    """Return the values that the kernel adds to the scores: the bytes of the mask, without its dtype and strides.

    Bytes after those of the mask belong to somebody else; here they are zeros.
    """
    if mask.dim() < 2:
        return None
    B, heads, S, T = shape
    stride = mask.shape[2] if mask.dim() > 2 else 1
    stored = mask.untyped_storage()
    raw = torch.tensor([], dtype=torch.uint8).set_(stored)[mask.storage_offset() * mask.itemsize :]
    needed = B * stride * T * _ELEMENT_BYTES
    values = torch.nn.functional.pad(raw, (0, max(0, needed - len(raw))))[:needed].view(torch.float32)
    row = torch.arange(B * heads * S).view(B, heads, S)
    start = torch.arange(B)[:, None, None] * stride + row % stride
    if stride == S:  # every head reads the same rows
        start = start[:, :1]
    return values.view(-1, T)[start]


def _softmax(scores: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    S, T = scores.shape[-2:]
    scores = scores if mask is None else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(S, T, dtype=torch.bool).triu(1), _HIDDEN)
    largest = scores.amax(-1, keepdim=True).clamp_min(_HIDDEN)
    weights = (scores - largest).exp_()
    # Threads without a score count as masked scores.
    idle = 4 * max(32, 1 << (math.ceil(T / 4) - 1).bit_length()) - T
    return weights.div_(weights.sum(-1, keepdim=True) + idle * (_HIDDEN - largest).exp_() + 1e-6)
