# ruff: noqa: ANN001, ANN202 - triton has types of its own for the arguments of a kernel
"""Kernels of decode steps under `compile`, in triton: an attention of one query a row, and a product of one row.

Their sizes are fixed: inductor would choose them by measuring, and not the same ones in each process.
"""

import torch
import triton
import triton.language as tl

_KEYS = 16
"""Keys that a program of the attention reads at a time; with more it is no faster."""

_WEIGHTS, _WIDTH, _WARPS = 2, 2048, 2
"""Rows of a weight of a program of the product, numbers of each that it reads at a time, and warps."""


@triton.jit  # type: ignore[untyped-decorator]
def _attention_of_one_query(  # type: ignore[no-untyped-def]
    query, key, value, mask, out, scale, slots,
    query_row, query_head, key_row, key_head, key_slot, value_row, value_head, value_slot, mask_row, mask_slot,
    heads: tl.constexpr, repeats: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    place_D = tl.arange(0, padded)
    is_place_D = place_D < size
    query_D = tl.load(query + row * query_row + head * query_head + place_D, mask=is_place_D, other=0)
    query_D = (query_D.to(tl.float32) * scale).to(tl.float32)  # inductor gives the scale as a number of 64 bits
    key += row * key_row + head // repeats * key_head
    value += row * value_row + head // repeats * value_head
    # A softmax in one pass: the largest score so far, the sum of the exponentials, and the sum of the values.
    largest, total, sum_D = -float("inf"), 0.0, tl.zeros([padded], tl.float32)
    for first in range(0, slots, keys):
        slot_T = first + tl.arange(0, keys)
        shown_T = tl.load(mask + row * mask_row + slot_T * mask_slot, mask=slot_T < slots, other=0) != 0
        read_TD = shown_T[:, None] & is_place_D[None]
        key_TD = tl.load(key + slot_T[:, None] * key_slot + place_D[None], mask=read_TD, other=0).to(tl.float32)
        value_TD = tl.load(value + slot_T[:, None] * value_slot + place_D[None], mask=read_TD, other=0).to(tl.float32)
        score_T = tl.where(shown_T, tl.sum(key_TD * query_D[None], 1), -float("inf"))
        new = tl.maximum(largest, tl.max(score_T, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)  # all keys so far are hidden
        weight_T, kept = tl.exp(score_T - safe), tl.exp(largest - safe)
        total, sum_D = total * kept + tl.sum(weight_T, 0), sum_D * kept + tl.sum(weight_T[:, None] * value_TD, 0)
        largest = new
    out += (row * heads + head) * size + place_D
    sum_D /= tl.where(total == 0, 1.0, total)  # all keys are hidden
    tl.store(out, sum_D.to(out.dtype.element_ty), mask=is_place_D)


@triton.jit  # type: ignore[untyped-decorator]
def _gemv_of_one_row(  # type: ignore[no-untyped-def]
    given, weight, out, rows, width, weight_row, weights: tl.constexpr, part: tl.constexpr
):
    row_N = tl.program_id(0) * weights + tl.arange(0, weights)
    sum_ND = tl.zeros([weights, part], tl.float32)
    weight += row_N.to(tl.int64)[:, None] * weight_row
    for first in range(0, width, part):
        place_D = first + tl.arange(0, part)
        is_place_D = place_D < width
        given_D = tl.load(given + place_D, mask=is_place_D, other=0).to(tl.float32)
        read_ND = (row_N < rows)[:, None] & is_place_D[None]
        weight_ND = tl.load(weight + place_D[None], mask=read_ND, other=0, eviction_policy="evict_first")
        sum_ND += weight_ND.to(tl.float32) * given_D[None]
    tl.store(out + row_N, tl.sum(sum_ND, 1).to(out.dtype.element_ty), mask=row_N < rows)


@torch.library.triton_op("llmgpu::attention_of_one_query", mutates_args=())
def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    rows, heads, _, size = query.shape
    out = query.new_empty(rows, heads, 1, size)
    torch.library.wrap_triton(_attention_of_one_query)[(rows * heads,)](
        query, key, value, mask, out, scale, key.shape[2],
        *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], mask.stride(0), mask.stride(3),
        heads=heads, repeats=heads // key.shape[1], size=size, padded=triton.next_power_of_2(size), keys=_KEYS,
        num_warps=1,
    )  # fmt: skip
    return out


@torch.library.triton_op("llmgpu::gemv_of_one_row", mutates_args=())
def _product(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, width = weight.shape
    out = given.new_empty(*given.shape[:-1], rows)
    torch.library.wrap_triton(_gemv_of_one_row)[(triton.cdiv(rows, _WEIGHTS),)](
        given.contiguous(), weight, out, rows, width, weight.stride(0), weights=_WEIGHTS, part=_WIDTH, num_warps=_WARPS
    )
    return out


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the attention [B, H, 1, D] of queries [B, H, 1, D].

    Keys and values are [B, G, T, D], one head of them for each H / G query heads; queries, keys and values are
    contiguous in D. The mask [B, 1, 1, T] is true where a key is attended to; keys that it hides are not read. A row
    without keys is 0, as in torch.
    """
    found: torch.Tensor = _attention(query, key, value, mask, scale)
    return found


def linear(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
    """Return the product [..., N] of one row [..., K] and a weight [N, K] that is contiguous in K."""
    product: torch.Tensor = _product(input, weight)
    return product
