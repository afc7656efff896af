"""Compare attentions of a decode step, one query in each row and head, on a GPU; prints JSON lines.

`triton` is a kernel that no strategy uses yet: it reads no key that the mask hides and no copies of keys for each query
head, in programs of one warp. The others are those of torch. Microseconds are medians.

    python benchmarks/overhead/decode_attention.py --rows 1,8,64 --slots 160
"""

# ruff: noqa: ANN001, ANN202 - triton has types of its own for the arguments of a kernel

import argparse
import json
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

_KEYS = 16  # keys that a program reads at a time; with more it is no faster


@triton.jit
def _attention_of_one_query(
    query, key, value, mask, out, scale, slots,
    query_row, query_head, key_row, key_head, key_slot, value_row, value_head, value_slot, mask_row, mask_slot,
    heads: tl.constexpr, repeats: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    place_D = tl.arange(0, padded)
    is_place_D = place_D < size
    query_D = tl.load(query + row * query_row + head * query_head + place_D, mask=is_place_D, other=0).to(tl.float32)
    query_D *= scale
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
    tl.store(out + tl.program_id(0) * size + place_D, (sum_D / total).to(out.dtype.element_ty), mask=is_place_D)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the attention [B, H, 1, D] of queries [B, H, 1, D].

    Keys and values are [B, G, T, D], one head of them for each H / G query heads, and contiguous in D. The mask
    [B, 1, 1, T] is true where a key is attended to, which is so for one key of each row at least.
    """
    rows, heads, _, size = query.shape
    out = query.new_empty(rows, heads, 1, size)
    _attention_of_one_query[(rows * heads,)](
        query, key, value, mask, out, size**-0.5, key.shape[2],
        *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], mask.stride(0), mask.stride(3),
        heads=heads, repeats=heads // key.shape[1], size=size, padded=triton.next_power_of_2(size), keys=_KEYS,
        num_warps=1,
    )  # fmt: skip
    return out


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    def shown(score, row, _, query_slot, slot):
        return torch.where(mask[row, 0, query_slot, slot], score, -float("inf"))

    return flex_attention(query, key, value, score_mod=shown, enable_gqa=True)


def _of_torch(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [*map(int, text.split(","))], default=[1, 8, 16, 64])
    parser.add_argument("--slots", type=int, default=160)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128)
    arguments = parser.parse_args()
    arms = {
        "triton": attention,
        "cudnn": _of_torch(SDPBackend.CUDNN_ATTENTION),
        "efficient": _of_torch(SDPBackend.EFFICIENT_ATTENTION),
        "flex": torch.compile(_flex, dynamic=False),
    }
    torch.manual_seed(0)
    for rows in arguments.rows:
        shape = rows, arguments.heads, arguments.slots, arguments.size
        key, value = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(2))
        query = torch.randn(rows, arguments.heads, 1, arguments.size, device="cuda", dtype=torch.float16)
        lengths_B = torch.randint(arguments.slots // 2, arguments.slots + 1, (rows,), device="cuda")
        mask = (torch.arange(arguments.slots, device="cuda") < lengths_B[:, None])[:, None, None]
        right = scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=mask)
        found = {"gpu": torch.cuda.get_device_name(), "rows": rows, "slots": arguments.slots}
        for name, run in arms.items():
            with torch.inference_mode():
                difference = (run(query, key, value, mask).float() - right).abs().max().item()
                timed = triton.testing.do_bench(lambda: run(query, key, value, mask), return_mode="median")  # noqa: B023
            found[name] = {"us": 1e3 * timed, "largest_difference": difference}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
