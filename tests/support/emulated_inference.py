"""An emulation of DeepSpeed's transformer_inference extension on the CPU: kernel injection of a LLaMA without a GPU.

Put an `EmulatedInference` at `deepspeed.ops.transformer.inference.op_binding.base.BaseOp.inference_module` before the
injection. Offsets, strides and the order of the steps are those of DeepSpeed 0.19.8 (csrc/transformer/inference:
includes/inference_context.h, csrc/pt_binding.cpp, softmax.cu, rms_norm.cu, apply_rotary_pos_emb.cu), mistakes included:
one flat workspace, in which too many tokens or sequences overwrite each other without a word. Where threads of a GPU
race, the one whose block starts last wins. What the GPU would read or write outside the workspace raises.

Shapes: B sequences, S tokens of the input, T tokens seen so far, N heads of this rank, D head size, H = N * D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

_MIB, _GIB = 2**20, 2**30
_HIDDEN = -10000.0  # softmax.cu's minus_infinity: finite, so that a row that is hidden throughout still has a mean
_GATED_SILU = 4
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_BY_DTYPE = ("allocate_workspace", "rms_qkv_gemm", "softmax_context", "vector_matmul", "rms_mlp_gemm")
_CANNOT = "Workspace can't be allocated"


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

    def __init__(self, free_bytes: int = 64 * _GIB, *, capacity_bytes: int | None = None) -> None:
        """Start in the state of a new process."""
        self.free_bytes = free_bytes
        """What cudaMemGetInfo calls free; asked once, so that setting it later changes nothing."""
        self.capacity_bytes = capacity_bytes
        """Largest workspace that cudaMalloc gives; None for any."""
        self.max_tokens = 0
        """The tokens granted per sequence, also if they were then refused as too few."""
        self.batch_size = 0
        """The sequences of the forward of the last request for a workspace."""
        self.mallocs = 0
        """The number of calls of cudaMalloc."""
        self._free_bytes_read = 0
        self._block: torch.Tensor | None = None
        self._size_bytes = 0
        self._scores_byte = 0
        self._tokens = 1
        for suffix, dtype in _DTYPES.items():
            for name in _BY_DTYPE:
                setattr(self, f"{name}_{suffix}", partial(getattr(self, f"_{name}"), dtype))

    @property
    def workspace_bytes(self) -> int:
        """The allocated bytes, which may be more than the last forward requested."""
        return 0 if self._block is None else self._block.numel()

    def release_workspace(self) -> None:
        """Free the workspace."""
        self._block = None

    def retake_workspace(self) -> bool:
        """Allocate the size before, and return whether a workspace exists."""
        if self._block is None and self._size_bytes:
            self._malloc(self._size_bytes)
            return self._block is not None
        return True

    def reset_cache(self) -> None:
        """Forget the sequences before: the next input of one token begins new ones."""
        self._tokens = 1

    def rms_norm(self, input_BSH: torch.Tensor, gamma_H: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Normalise; the factor is rounded to the dtype before it is applied."""
        variance = input_BSH.float().square().mean(-1, keepdim=True)
        return input_BSH * torch.rsqrt(variance + epsilon).to(input_BSH.dtype) * gamma_H

    def pre_rms_norm(
        self, input_BSH: torch.Tensor, residual_BSH: torch.Tensor, gamma_H: torch.Tensor, epsilon: float
    ) -> list[torch.Tensor]:
        """Return the normalised sum and the sum."""
        sum_BSH = input_BSH + residual_BSH
        return [self.rms_norm(sum_BSH, gamma_H, epsilon), sum_BSH]

    def _vector_add(self, first: torch.Tensor, second: torch.Tensor, gamma: float) -> torch.Tensor:
        return first.copy_(gamma * first.float() + second.float())

    def _allocate_workspace(
        self,
        dtype: torch.dtype,
        hidden: int,
        heads: int,
        _prompt: int,
        batch: int,
        layers: int,
        tp: int,
        external_cache: bool,
        rank: int,
        max_out: int,
        min_out: int,
    ) -> None:
        self.batch_size = batch
        self._free_bytes_read = free = self._free_bytes_read or self.free_bytes
        shape = {"layers": layers, "heads": heads, "hidden": hidden, "batch": batch, "tp": tp, "max_out": max_out}
        activations, scores, cache = workspace_elements(**shape)
        granted = granted_tokens(free, **shape, element_bytes=dtype.itemsize)
        if granted < 0:
            print(f"Requested:\t{_reserve(free, scores)}\nFree:\t{free}\nTotal:\t{free}", flush=True)
            raise RuntimeError(f"{_CANNOT}, no enough memory.")
        self.max_tokens = granted
        token_bytes = (activations + scores + (0 if external_cache else cache)) * dtype.itemsize
        size = token_bytes * granted
        if granted < min_out:
            print(
                f"Allocatable workspace available ({granted} tokens) is less than minimum requested workspace "
                f"({min_out} tokens)",
                flush=True,
            )
            raise RuntimeError(f"{_CANNOT}, not enough memory")
        if self._block is None or self._size_bytes < size:
            self._malloc(size)
        if rank == 0 and (self._block is None or self._size_bytes < size):
            print(f"Requested memory: {size / _GIB:f} (GigaBytes) \nFree memory : {free / _GIB:f} (GigaBytes)  ")
            print(f"Setting maximum total tokens (input + output) to {granted} ", flush=True)
        if self._block is None:
            raise RuntimeError("Workspace is null.")
        # A smaller request keeps the block and forgets its size: the next larger one allocates again even if it fits.
        self._size_bytes = size
        self._scores_byte = size - scores * granted * dtype.itemsize

    def _malloc(self, size_bytes: int) -> None:
        self.mallocs += 1
        self._block = None
        if 0 < size_bytes <= (math.inf if self.capacity_bytes is None else self.capacity_bytes):
            # A tensor of inference mode could not be written to outside that mode.
            with torch.inference_mode(mode=False):
                self._block = torch.zeros(size_bytes, dtype=torch.uint8)

    def _view(
        self, dtype: torch.dtype, offset: int, shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return elements of the workspace, which begin `offset` elements after its start."""
        strides = strides or [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        end = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        there = self.workspace_bytes // dtype.itemsize
        if self._block is None or end > there:
            raise RuntimeError(f"CUDA error: an illegal memory access was encountered (element {end} of {there})")
        return self._block.view(dtype).as_strided(shape, strides, offset)

    def _rms_qkv_gemm(
        self,
        dtype: torch.dtype,
        input_BSH: torch.Tensor,
        weight: torch.Tensor,
        _scale: torch.Tensor,
        gamma_H: torch.Tensor,
        epsilon: float,
        quantized: bool,
        transposed: bool,
    ) -> list[torch.Tensor]:
        assert not quantized, "int8 is not emulated"
        weight = weight.t() if transposed else weight
        norm_BSH = self._view(dtype, 3 * input_BSH.numel(), input_BSH.shape)
        output = self._view(dtype, 0, (*input_BSH.shape[:2], weight.shape[1]))
        norm_BSH.copy_(self.rms_norm(input_BSH, gamma_H, epsilon))
        output.copy_(_gemm(norm_BSH, weight))
        return [output, norm_BSH]

    def _vector_matmul(
        self,
        dtype: torch.dtype,
        input_BSH: torch.Tensor,
        weight: torch.Tensor,
        _async_op: bool,
        _scale: torch.Tensor,
        quantized: bool,
        transposed: bool,
    ) -> torch.Tensor:
        assert not quantized, "int8 is not emulated"
        weight = weight.t() if transposed else weight
        output = self._view(dtype, 0, (*input_BSH.shape[:2], weight.shape[1]))
        return output.copy_(_gemm(input_BSH, weight))

    def _rms_mlp_gemm(
        self,
        dtype: torch.dtype,
        input_BSH: torch.Tensor,
        residual_BSH: torch.Tensor,
        weight_in: torch.Tensor,
        weight_out: torch.Tensor,
        gamma_H: torch.Tensor,
        epsilon: float,
        _scale_in: torch.Tensor,
        _scale_out: torch.Tensor,
        quantized: bool,
        activation: int,
        transposed: bool,
    ) -> list[torch.Tensor]:
        assert not quantized, "int8 is not emulated"
        assert int(activation) == _GATED_SILU, f"activation {activation} is not emulated"
        if transposed:
            weight_in, weight_out = weight_in.t(), weight_out.t()
        size, shape = input_BSH.numel(), input_BSH.shape
        output_BSH, norm_BSH = self._view(dtype, size, shape), self._view(dtype, 2 * size, shape)
        between = self._view(dtype, 3 * size, (*shape[:2], weight_in.shape[1]))
        norm, total = self.pre_rms_norm(input_BSH, residual_BSH, gamma_H, epsilon)
        residual_BSH.copy_(total)  # in place: what the binding since 0.15.2 does not know, and adds once more
        norm_BSH.copy_(norm)
        between.copy_(_gemm(norm_BSH, weight_in))
        up, gate = between.chunk(2, -1)
        up.copy_(up * torch.nn.functional.silu(gate.float()).to(dtype))
        output_BSH.copy_(_gemm(up, weight_out))
        return [output_BSH, residual_BSH]

    def _softmax_context(
        self,
        dtype: torch.dtype,
        qkv: torch.Tensor,
        mask: torch.Tensor,
        rotary_dim: int,
        rotate_half: bool,
        rotate_every_two: bool,
        heads: int,
        kv_heads: int,
        norm_factor: float,
        triangular: bool,
        local_attention: bool,
        _window: int,
        _no_masking: bool,
        layer: int,
        layers: int,
        alibi: torch.Tensor,
        rope_theta: float,
        _is_prompt: bool,
        _token_idx: torch.Tensor | None,
        _position_ids: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        assert not local_attention, "local attention is not emulated"
        assert not rotate_every_two, "rotating every two is not emulated"
        assert alibi.dim() == 1, "alibi is not emulated"
        assert kv_heads <= 0, "grouped heads are not emulated: DeepSpeed refuses them for LLaMA"
        B, S, width = qkv.shape
        D = width // (3 * heads)
        H, R = heads * D, B * heads
        # Only the length identifies a prompt: one token continues the sequences before.
        first = 0 if S > 1 else self._tokens - 1
        T = self._tokens = S if S > 1 else self._tokens
        room, buffer = self.max_tokens, B * S * H
        keys_at = (10 + 2 * layer) * H * self.batch_size * room
        values_at = keys_at + H * self.batch_size * room

        q, k, v = qkv.view(B, S, 3, heads, D).permute(2, 0, 3, 1, 4).reshape(3, R, S, D)
        query_RSD = self._view(dtype, 5 * buffer, (R, S, D))
        query_RSD.copy_(q)
        self._store(k, keys_at + first * D, by_token=True)
        self._store(v, values_at + first * D, by_token=True)
        if rotary_dim > 0 and rotate_half:
            turn = partial(_rotate, first=first, dim=rotary_dim, theta=rope_theta)
            strides = (D * room, D, 1)
            query_RSD.copy_(turn(query_RSD))
            turned = turn(self._view(dtype, keys_at + first * D, (R, S, D), strides))
            self._store(turned, keys_at + first * D, by_token=False)

        seen, strides_seen = (B, heads, T, D), (H * room, D * room, D, 1)
        keys, values = (self._view(dtype, at, seen, strides_seen) for at in (keys_at, values_at))
        query = query_RSD.view(B, heads, S, D)
        scores = self._view(dtype, self._scores_byte // dtype.itemsize, (B, heads, S, T))
        scores.copy_(query.float() @ keys.float().mT * norm_factor**2)
        scores.copy_(_softmax(scores.float(), _mask(mask, dtype, (B, heads, S, T)), causal=triangular and S > 1))
        query.copy_(scores.float() @ values.float())  # the context takes the place of the query
        output = self._view(dtype, 4 * buffer, (B, S, H))
        output.copy_(query.transpose(1, 2).reshape(B, S, H))
        if layer == layers - 1:
            self._tokens += 1
        return [output, keys, values]

    def _store(self, rows_RSD: torch.Tensor, offset: int, *, by_token: bool) -> None:
        """Write the tokens of each head at the start of its part of the cache, without a bounds check.

        Where two heads write to one place, that of the later token wins, or that of the later head: the order in which
        the blocks of the kernel start.
        """
        R, S, D = rows_RSD.shape
        room, dtype = self.max_tokens, rows_RSD.dtype
        if room >= S:
            self._view(dtype, offset, (R, S, D), (room * D, D, 1)).copy_(rows_RSD)
            return
        place = torch.arange((R - 1) * room + S)
        row = ((place - S + room) // room).clamp_min(0) if by_token else (place // room).clamp_max(R - 1)
        self._view(dtype, offset, (len(place), D)).copy_(rows_RSD[row, place - row * room])


def _gemm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # cuBLAS sums in float32 and rounds once.
    return (left.float() @ right.float()).to(left.dtype)


def _rotate(rows_RSD: torch.Tensor, *, first: int, dim: int, theta: float) -> torch.Tensor:
    S = rows_RSD.shape[1]
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.arange(first, first + S, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    turned = rows_RSD.float()
    low, high = turned[..., : dim // 2], turned[..., dim // 2 : dim]
    turned = torch.cat((turned[..., :dim] * cos + torch.cat((-high, low), -1) * sin, turned[..., dim:]), -1)
    return turned.to(rows_RSD.dtype)


def _mask(mask: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> torch.Tensor | None:
    """Return the values that the kernel adds to the scores: the bytes of the mask, without its dtype and strides.

    Bytes after those of the mask belong to somebody else; here they are zeros.
    """
    if mask.dim() < 2:
        return None
    B, heads, S, T = shape
    stride = mask.shape[2] if mask.dim() > 2 else 1
    stored = mask.untyped_storage()
    raw = torch.tensor([], dtype=torch.uint8).set_(stored)[mask.storage_offset() * mask.itemsize :]
    needed = B * stride * T * dtype.itemsize
    values = torch.nn.functional.pad(raw, (0, max(0, needed - len(raw))))[:needed].view(dtype)
    row = torch.arange(B * heads * S).view(B, heads, S)
    start = torch.arange(B)[:, None, None] * stride + row % stride
    if stride == S:  # every head reads the same rows
        start = start[:, :1]
    return values.view(-1, T)[start].float()


def _softmax(scores: torch.Tensor, mask: torch.Tensor | None, *, causal: bool) -> torch.Tensor:
    S, T = scores.shape[-2:]
    scores = scores if mask is None else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(S, T, dtype=torch.bool).triu(1), _HIDDEN)
    largest = scores.amax(-1, keepdim=True).clamp_min(_HIDDEN)
    weights = (scores - largest).exp_()
    # Threads without a score count as masked scores.
    idle = 4 * max(32, 1 << (math.ceil(T / 4) - 1).bit_length()) - T
    return weights.div_(weights.sum(-1, keepdim=True) + idle * (_HIDDEN - largest).exp_() + 1e-6)
