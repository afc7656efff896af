from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import tiny_model
from torch.utils.flop_counter import FlopCounterMode

from pytest_llmgpu.recording import op_counts
from pytest_llmgpu.report.work import RankWork


@pytest.mark.parametrize(
    ("module", "prefix", "folded"),
    [
        ("model.layers.31.mlp.down_proj", "model", "layers.*.mlp.down_proj"),
        ("model.layers.0", "model", "layers.*"),
        ("transformer.h.3.attn.0.c", "transformer", "h.*.attn.*.c"),
        ("lm_head", "model", "lm_head"),
        ("model.norm", "model", "norm"),
        ("model", "model", "model"),
        ("", "model", "model"),
        ("layers.1", "", "layers.*"),
        ("model.norm1", "model", "norm1"),
    ],
)
def test_layer_numbers_are_folded(module: str, prefix: str, folded: str) -> None:
    """All layers share a row."""
    assert op_counts.folded(module, prefix) == folded


_LINEAR = {f"layers.*.self_attn.{name}_proj" for name in "qkvo"} | {
    f"layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_ops_and_flops_of_a_forward_are_counted(mode: Callable[[], Any]) -> None:
    """Composite ops are split into their parts; FLOPs are torch's plus attention, by the innermost modules."""
    model = tiny_model.random_model()
    ids_BS = torch.zeros(2, 8, dtype=torch.int64)
    with mode():
        found = op_counts.count_ops(lambda: model(input_ids=ids_BS, use_cache=False), model, RankWork(uuids=["GPU-1"]))
    with mode(), FlopCounterMode(display=False) as torchs:
        model(input_ids=ids_BS, use_cache=False)
    # Two products of 8 x 8 x 16 for 2 rows of 2 heads: torch's table has no entry for the CPU.
    attention = 2 * 2 * (2 * 8 * 8 * 16) * 2
    assert found.flops == torchs.get_total_flops() + attention
    ops, ops_by_module, flops_by_module = found.ops or {}, found.ops_by_module or {}, found.flops_by_module or {}
    assert ops["aten::mm"] == 8
    assert not {"aten::linear", "aten::matmul", "aten::scaled_dot_product_attention"} & set(ops)
    assert list(ops) == sorted(ops)
    assert ops_by_module["layers.*.mlp.down_proj"]["aten::mm"] == 1
    assert sum((Counter(calls) for calls in ops_by_module.values()), Counter()) == Counter(ops)
    assert set(flops_by_module) >= {*_LINEAR, "layers.*.self_attn", "lm_head"}
    assert flops_by_module["layers.*.mlp.down_proj"] == 2 * 16 * 32 * 48
    assert sum(flops_by_module.values()) == found.flops
    assert found.uuids == ["GPU-1"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_attention_with_fewer_heads_of_keys_has_the_flops_of_all_queries() -> None:
    """Each head of the queries has products of its own, whatever it shares."""
    query, key = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8)

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)

    with torch.inference_mode():
        found = op_counts.count_ops(attend, None, RankWork(uuids=[]))
    assert found.flops == 2 * 2 * (2 * 4) * 5 * 7 * 8


def test_calls_of_a_forward_are_exact() -> None:
    """They are equal for every number of rows above 1, and a hook is one more call of its source file."""
    model = tiny_model.random_model()

    def forward(rows: int) -> None:
        with torch.inference_mode():
            model(input_ids=torch.zeros(rows, 8, dtype=torch.int64), use_cache=False)

    forward(2)
    first = op_counts.count_calls(partial(forward, 2))
    assert op_counts.count_calls(partial(forward, 4)) == first
    assert first.python == sum(first.by_file.values()) > 100
    assert first.c > 100
    assert first.by_file["torch/nn/modules/linear.py"] == 8
    assert first.python_version == f"{sys.version_info.major}.{sys.version_info.minor}"
    handle = model.register_forward_hook(lambda *_: None)
    more = op_counts.count_calls(partial(forward, 2))
    handle.remove()
    assert more.by_file["recording/test_op_counts.py"] == first.by_file["recording/test_op_counts.py"] + 1


class _Key:
    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return len([repr(self), repr(other)]) == 1


@pytest.mark.parametrize("keys", [1, 2])
def test_comparisons_are_not_counted(keys: int) -> None:
    """A lookup compares with the keys of an equal hash, whose number depends on addresses."""
    table = {_Key(): number for number in range(keys)}

    def look_up() -> None:
        table.get(_Key())

    found = op_counts.count_calls(look_up)
    assert (found.python, found.c) == (2, 1), "the function and the hash; the lookup"


def test_the_profiler_and_the_garbage_collector_are_restored() -> None:
    """Calls of C are counted without the one that ends the counting; the collector is off while they are counted."""
    before = sys.getprofile()
    collecting: list[bool] = []
    found = op_counts.count_calls(lambda: collecting.append(gc.isenabled()))
    assert (found.python, found.c, collecting) == (1, 2, [False])
    assert (sys.getprofile(), gc.isenabled()) == (before, True)
