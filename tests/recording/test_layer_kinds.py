"""Implementations and routing of small random models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny_model
from support.report_factory import known
from transformers import AutoConfig, AutoModelForCausalLM

from pytest_llmgpu.recording import layer_kinds, op_counts
from pytest_llmgpu.report.work import RankWork, Routing


def _counted(model_type: str, experts: str | None = None, attention: str | None = None) -> RankWork:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**tiny_model.architecture(model_type))
    config._experts_implementation = experts
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.inference_mode():
        ids_BS = torch.arange(20).view(2, 10)
        found = op_counts.count_ops(lambda: model(input_ids=ids_BS, use_cache=False), model, RankWork(uuids=[]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return found


@pytest.mark.parametrize(
    ("model_type", "experts", "attention", "found"),
    [
        ("llama", None, None, {"attention": "sdpa (flash)"}),
        ("llama", None, "eager", {"attention": "eager"}),
        ("mixtral", "eager", None, {"attention": "sdpa (flash)", "experts": "eager (mm)"}),
        ("mixtral", "batched_mm", "eager", {"attention": "eager", "experts": "batched_mm (bmm)"}),
        ("deepseek_v3", "grouped_mm", None, {"attention": "sdpa (flash)", "experts": "grouped_mm (_grouped_mm)"}),
        ("gemma3_text", None, None, {"full attention": "sdpa (flash)", "sliding attention": "sdpa (flash)"}),
        ("qwen3_next", "eager", "eager", {"attention": "eager", "experts": "eager (mm)", "linear attention": "torch"}),
    ],
)
def test_each_kind_of_layer_has_what_ran(
    model_type: str, experts: str | None, attention: str | None, found: dict[str, str]
) -> None:
    """Implementations are those of the config, kernels those that torch dispatched in the layers of the kind."""
    assert _counted(model_type, experts, attention).implementations == found


def test_layers_that_do_not_attend_have_the_packages_that_ran() -> None:
    """A package that is installed may be unused."""
    ran = {"attention": "sdpa", "linear attention": "torch"}
    files = ["torch/nn/modules/linear.py", "fla/ops/chunk.py", "contextlib.py"]
    assert layer_kinds.with_packages(ran, files) == {"attention": "sdpa", "linear attention": "fla"}
    assert layer_kinds.with_packages(ran, files[:1]) == ran


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_the_experts_of_each_token_are_counted(experts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that chooses experts 0 and 1 for every token touches two of four; each has all 20 tokens."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter as Router

    counted = _counted("mixtral", experts)
    assert counted.flops == _counted("mixtral", "eager").flops
    free = known(counted.routing)
    assert (free.experts, free.tokens) == (4, 20)
    assert all(2 <= number <= 4 for number in free.touched)
    assert all(10 <= number <= 20 for number in free.busiest), "40 choices of 4 experts"
    forward = Router.forward

    def first_two(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, weights, chosen = forward(self, hidden)
        return logits, weights, torch.arange(2).expand_as(chosen)

    monkeypatch.setattr(Router, "forward", first_two)
    found = _counted("mixtral", experts).routing
    assert found == Routing(experts=4, tokens=20, touched=[2, 2], busiest=[20, 20])
    assert _counted("llama").routing is None
