"""Compare the kernels of decode steps under `compile` with those of torch, on a GPU; prints JSON lines.

An attention of one query in each row and head, whose rows have other numbers of keys, and the products of one row of a
layer of LLaMA-7B, of more weights than the GPU caches. Microseconds are medians.

    python benchmarks/overhead/decode_kernels.py --rows 1,8,64 --slots 160
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import linear, scaled_dot_product_attention

from pytest_llmgpu.inference import decode_kernels

_SHAPES = {"q, k, v": (12_288, 4096), "o": (4096, 4096), "gate, up": (22_016, 4096), "down": (4096, 11_008)}
_WEIGHTS_BYTES = 600_000_000


def _kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return decode_kernels.attention(query, key, value, mask, query.shape[-1] ** -0.5)


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    def shown(
        score: torch.Tensor, row: torch.Tensor, _: torch.Tensor, query_slot: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        return torch.where(mask[row, 0, query_slot, slot], score, -float("inf"))

    found: torch.Tensor = flex_attention(query, key, value, score_mod=shown, enable_gqa=True)
    return found


def _of_torch(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return run


def _median_us(run: Callable[[], object]) -> float:
    return round(1e3 * triton.testing.do_bench(run, return_mode="median"), 2)


def _attentions(rows: int, arguments: argparse.Namespace) -> dict[str, object]:
    arms = {
        "triton": _kernel,
        "cudnn": _of_torch(SDPBackend.CUDNN_ATTENTION),
        "efficient": _of_torch(SDPBackend.EFFICIENT_ATTENTION),
        "flex": torch.compile(_flex, dynamic=False),
    }
    shape = rows, arguments.heads, arguments.slots, arguments.size
    key, value = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(2))
    query = torch.randn(rows, arguments.heads, 1, arguments.size, device="cuda", dtype=torch.float16)
    lengths_B = torch.randint(arguments.slots // 2, arguments.slots + 1, (rows,), device="cuda")
    mask = (torch.arange(arguments.slots, device="cuda") < lengths_B[:, None])[:, None, None]
    right = scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=mask)
    found: dict[str, object] = {"rows": rows, "slots": arguments.slots}
    for name, run in arms.items():
        difference = (run(query, key, value, mask).float() - right).abs().max().item()
        found[name] = {
            "us": _median_us(lambda: run(query, key, value, mask)),  # noqa: B023 - called here
            "largest_difference": difference,
        }
    return found


def _products(rows: int, width: int) -> dict[str, float]:
    """Return the microseconds of a product of one row, weights that are read once each replay."""
    number = _WEIGHTS_BYTES // (2 * rows * width)
    weights = [torch.randn(rows, width, device="cuda", dtype=torch.float16) for _ in range(number)]
    given = torch.randn(1, width, device="cuda", dtype=torch.float16)
    arms = {"triton": decode_kernels.linear, "cublas": linear}
    found = {}
    for name, run in arms.items():
        graph = torch.cuda.CUDAGraph()
        run(given, weights[0])
        with torch.cuda.graph(graph):
            for weight in weights:
                run(given, weight)
        found[name] = round(_median_us(graph.replay) / number, 2)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [*map(int, text.split(","))], default=[1, 8, 16, 64])
    parser.add_argument("--slots", type=int, default=160)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    with torch.inference_mode():
        for rows in arguments.rows:
            print(json.dumps(_attentions(rows, arguments)), flush=True)
        for name, shape in _SHAPES.items():
            print(json.dumps({"product": name, "us": _products(*shape)}), flush=True)


if __name__ == "__main__":
    main()
