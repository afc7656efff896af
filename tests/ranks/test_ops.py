from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from support import tiny_model, work_functions
from support.report_factory import make_case
from torch.utils.flop_counter import FlopCounterMode

from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.ranks import work, worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.strategies.mp import LayerParallel

_TP = "support.rank_functions:UncompiledTensorParallel"
_CASE = make_case(strategy="tp", backend="transformers", model="bundled", dtype="float32", device="cpu", devices=2)
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_ops_and_flops_of_a_forward_are_counted(mode: Callable[[], Any]) -> None:
    """Composite ops are counted as what they are made of, and FLOPs are those of torch's own counter plus attention."""
    model = tiny_model.random_model()
    ids_BS = torch.zeros(2, 8, dtype=torch.int64)
    with mode():
        found = work.count_ops(lambda: model(input_ids=ids_BS, use_cache=False))
    with mode(), FlopCounterMode(display=False) as torchs:
        model(input_ids=ids_BS, use_cache=False)
    # Two products of 8 x 8 x 16 for 2 rows of 2 heads: torch's table has no entry for the CPU.
    attention = 2 * 2 * (2 * 8 * 8 * 16) * 2
    assert found.flops == torchs.get_total_flops() + attention
    assert found.ops["aten::mm"] == 8
    assert not {"aten::linear", "aten::matmul", "aten::scaled_dot_product_attention"} & set(found.ops)
    assert list(found.ops) == sorted(found.ops)
    assert found.flops_by_module == {"other": found.flops}


def test_flops_are_split_over_the_modules_that_compute_them() -> None:
    """Layer numbers are folded, each op belongs to its innermost module, and the forward computes the same."""
    model = tiny_model.random_model()
    ids_BS = torch.zeros(2, 8, dtype=torch.int64)
    plain = work.count_ops(lambda: model(input_ids=ids_BS))
    found = work.count_ops(lambda: model(input_ids=ids_BS), model)
    assert (found.flops, found.ops) == (plain.flops, plain.ops)
    assert sum(found.flops_by_module.values()) == found.flops
    names = {f"layers.*.self_attn.{name}" for name in _LINEAR[:4]} | {f"layers.*.mlp.{name}" for name in _LINEAR[4:]}
    assert set(found.flops_by_module) >= {*names, "layers.*.self_attn", "lm_head"}
    assert found.flops_by_module["layers.*.mlp.down_proj"] == 2 * 16 * 32 * 48
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_same_forward_has_the_same_ops() -> None:
    """The numbers are exact."""
    model = tiny_model.random_model()
    counts = [work.count_ops(lambda: model(input_ids=torch.zeros(1, 5, dtype=torch.int64))) for _ in range(2)]
    assert counts[0] == counts[1]


def test_a_forward_that_computes_more_has_more_flops() -> None:
    """A product of a matrix more is found by its FLOPs."""
    weight = torch.ones(4, 5)
    once = work.count_ops(lambda: torch.ones(3, 4) @ weight)
    twice = work.count_ops(lambda: (torch.ones(3, 4) @ weight, torch.ones(3, 4) @ weight))
    assert once.flops == 2 * 3 * 4 * 5
    assert twice.flops == 2 * once.flops
    assert twice.ops["aten::mm"] == 2


@pytest.mark.slow
def test_each_rank_of_tp_has_half_of_every_linear_layer(gloo_pair: RankGroup, bundled: ModelSource) -> None:
    """FLOPs are counted on local tensors: a counter above DTensor would report the whole model on every rank."""
    whole = LayerParallel().load(msgspec.structs.replace(_CASE, strategy="mp", devices=1), bundled)
    gloo_pair.ask(worker.load, _CASE, bundled, _TP, phase="load", timeout_s=300)
    first, second = gloo_pair.ask(worker.call, work_functions.flops_of_modules, (), phase="forward", timeout_s=300)
    alone = work_functions.flops_of_modules(whole)
    linear = [name for name in alone if name.endswith(_LINEAR)]
    assert len(linear) == 7 * bundled.config["num_hidden_layers"]
    for name in linear:
        assert alone[name] > 0, name
        assert first[name] == second[name] == alone[name] / 2, name
