"""Tiny random models of other architectures, scored and continued under every strategy, on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import kv_cache_faults, tiny_model
from support.report_factory import known, make_case

from pytest_llmgpu.analysis.answers import check_texts
from pytest_llmgpu.inference import tasks
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.inference.tasks.protocol import Dataset
from pytest_llmgpu.ranks import worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.ranks.worker import RankState, ReferenceTexts
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, decode, typical_difference
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.strategies.tp import TensorParallel

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
_LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 24}
_MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "phi3": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS},
    "deepseek_v3": {**_EXPERTS, **_LATENT, **_GROUPS},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **_MIXED},
    "gemma3_text": _MIXED,
    "qwen3_next": {"num_experts": 4, **_EXPERTS, **_LINEAR, "layer_types": ["linear_attention", "full_attention"]},
}
"""The type of each model to fields of its config, of which the attention and the experts decide the tokens."""

_PLACES = {
    "mp": "pytest_llmgpu.strategies.mp:LayerParallel",
    "tp": "support.rank_functions:UncompiledTensorParallel",
    "compile": "support.rank_functions:Traced",
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path, bundled: ModelSource) -> Iterator[ModelSource]:
    """The source of a model of two layers with random weights."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    own = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 2048, "initializer_range": 0.3}
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 256}
    fields = {"model_type": request.param, **sizes, **own, **tokens, **ARCHITECTURES[request.param]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    yield tiny_model.source(
        fields, tmp_path, load_format="dummy", tokenizer_directory=bundled.tokenizer_directory, name=request.param
    )
    torch.compiler.reset()


def _items(task: str) -> Dataset:
    """Return four items with contexts of unequal length."""
    items = tasks.make(tasks.BUILT_IN[task]).load("bundled", rootdir=Path.cwd(), limit=4).items
    return Dataset.of(
        "custom", [msgspec.structs.replace(one, context=one.context[: 9 + 12 * n]) for n, one in enumerate(items)]
    )


def _measured(
    ask: Callable[..., Any], source: ModelSource, strategy: str, devices: int, mp: CaseResult | None = None
) -> tuple[Launch, CaseResult]:
    """Return the launch of a case that scores, and the result of one that generates and whose texts are right."""
    hellaswag, prompts = _items("hellaswag"), _items("prompts")
    common: dict[str, Any] = {"model": source.name, "load_format": "dummy", "dtype": "float32", "device": "cpu"}
    common |= {"strategy": strategy, "devices": devices, "batch_size": 2}
    scored = make_case(**common, dataset_sha256=hellaswag.sha256)
    lengths = {"prompt_tokens": 20, "new_tokens": 6}
    generated = make_case(**common, workload="generate", dataset_sha256=prompts.sha256, **lengths)
    ask(worker.load, scored, source, _PLACES[strategy])
    for items in (hellaswag, prompts):
        ask(worker.give, items.sha256, items.items, tasks.BUILT_IN[items.task])
    launch = ask(worker.score, scored)
    texts = None if mp is None else ReferenceTexts(key=mp.key, tokens=known(mp.launches[0].generation).tokens)
    result = kv_cache_faults.result(generated, ask(kv_cache_faults.generate, generated, None, texts))
    check, _ = check_texts(result, mp)
    assert check.ok is True, check.text
    return launch, result


@pytest.mark.parametrize(
    ("source", "strategies"),
    [("gpt_oss", ()), ("qwen3_next", ())]
    + [pytest.param(name, ("tp", "compile"), marks=pytest.mark.slow) for name in ARCHITECTURES],
    indirect=["source"],
)
def test_an_architecture_scores_and_generates(
    source: ModelSource, strategies: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """Decode steps equal a forward without a cache, and both workloads equal those of mp; gpt-oss has no plan of tp."""
    state = RankState(lambda _: None)

    def here(fn: Callable[..., Any], *arguments: Any) -> Any:
        return fn(state, *arguments)

    def pair(fn: Callable[..., Any], *arguments: Any) -> Any:
        group: RankGroup = request.getfixturevalue("gloo_pair")
        return group.ask(fn, *arguments, phase="forward", timeout_s=300)[0]

    scored, generated = _measured(here, source, "mp", 1)
    texts = known(generated.launches[0].generation)
    assert texts.kv_cache_bytes == texts.kv_cache_formula_bytes
    for strategy in strategies:
        if (strategy, source.name) == ("tp", "gpt_oss"):
            with pytest.raises(ValueError, match=r"no tensor-parallel plan for its architecture \(gpt_oss\)"):
                TensorParallel().check(make_case(strategy="tp", backend="transformers", devices=2), source)
            continue
        ask, devices = (pair, 2) if strategy == "tp" else (here, 1)
        other, result = _measured(ask, source, strategy, devices, generated)
        found, expected = (decode(known(launch.accuracy).loglikelihoods) for launch in (other, scored))
        assert typical_difference(found, expected) < LOGLIKELIHOOD_TOLERANCES["float32"]
        assert known(result.launches[0].generation).tokens == texts.tokens
