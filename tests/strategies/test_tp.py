from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import rank_functions as ranks
from support import tiny_model
from support.report_factory import known, make_case
from transformers import LlamaForCausalLM

from pytest_llmgpu.inference import models
from pytest_llmgpu.inference.models import ModelFacts, ModelSource
from pytest_llmgpu.ranks import registered, worker
from pytest_llmgpu.ranks.group import RankGroup
from pytest_llmgpu.report import file
from pytest_llmgpu.report.derived import decode
from pytest_llmgpu.strategies.mp import LayerParallel
from pytest_llmgpu.strategies.tp import TensorParallel, check_divisible

_PLACE = "support.rank_functions:UncompiledTensorParallel"
_CASE = make_case(strategy="tp", backend="transformers", model="bundled", dtype="float32", device="cpu", devices=2)
_VOCABULARY = 320
_HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
_NEEDS_DEEPSPEED = pytest.mark.skipif(not _HAS_DEEPSPEED, reason="needs the extra deepspeed")
_BACKENDS = ["transformers", pytest.param("deepspeed", marks=_NEEDS_DEEPSPEED)]


def _write(directory: Path, *, shard_size: str = "1GB", **fields: Any) -> ModelSource:
    torch.manual_seed(0)
    config = tiny_model.sensitive_config(**{"intermediate_size": 256, "vocab_size": _VOCABULARY} | fields)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            # With zeros, the initial values, adding a bias twice would not be detected.
            torch.nn.init.normal_(parameter)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return tiny_model.source(config.to_dict(), directory)


def _loglikelihoods(logits_BSV: torch.Tensor, ids_BS: torch.Tensor) -> torch.Tensor:
    """Return the log-likelihood of each token except the first."""
    return logits_BSV[:, :-1].log_softmax(-1).gather(-1, ids_BS[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize(
    "fields",
    [
        {"num_key_value_heads": 2},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"shard_size": "100KB"},
        None,
    ],
    ids=["grouped heads", "tied embeddings", "biases", "several files", "random weights"],
)
def test_a_split_model_computes_the_numbers_of_the_plain_model(
    gloo_pair: RankGroup, bundled: ModelSource, tmp_path: Path, backend: str, fields: dict[str, Any] | None
) -> None:
    """The log-likelihoods are the same on every rank, which holds half of every layer, also of random weights."""
    source = msgspec.structs.replace(bundled, load_format="dummy")
    if fields is not None:
        source = _write(tmp_path, **fields)
        assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == ("shard_size" in fields)
    case = msgspec.structs.replace(_CASE, load_format=source.load_format, backend=backend)
    gloo_pair.ask(worker.load, case, source, _PLACE, phase="load", timeout_s=300)

    def run(fn: Callable[..., Any], *args: Any) -> list[Any]:
        return gloo_pair.ask(worker.call, fn, args, phase="forward", timeout_s=300)

    ids_BS = torch.randint(0, _VOCABULARY, (4, 40), generator=torch.Generator().manual_seed(1))
    plain = LayerParallel().load(msgspec.structs.replace(case, strategy="mp", devices=1), source)
    first, second = (_loglikelihoods(one, ids_BS) for one in run(ranks.logits, ids_BS))
    right = _loglikelihoods(ranks.logits(plain, ids_BS), ids_BS)
    torch.testing.assert_close(first, right, atol=1e-5, rtol=1e-5)
    assert torch.equal(first, second)
    whole = ranks.parts(plain)
    projections = [name for name in whole if name.endswith("_proj.weight")]
    assert len(projections) == 2 * 7
    for parts in run(ranks.parts):
        for name in projections:
            rows, columns = whole[name]
            # The input of these two is the output of the others, split over the ranks.
            ends_block = "o_proj" in name or "down_proj" in name
            assert parts[name] == ((rows, columns // 2) if ends_block else (rows // 2, columns)), name


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_every_item_has_the_answer_of_mp(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategy mp runs first in any order of strategies, and no item flips with transformers or DeepSpeed."""
    monkeypatch.setitem(registered.BUILT_IN, "tp", _PLACE)
    pytester.makepyfile(
        test_it=f"""
        import pytest
        from support import rank_functions as ranks

        @pytest.mark.llmgpu(strategy=["tp", "mp"], batch_sizes=[1, 8])
        def test_hellaswag(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)
            if llm.strategy == "tp":
                assert len(set(llm.run(ranks.identity))) == 2

        @pytest.mark.skipif({not _HAS_DEEPSPEED}, reason="needs the extra deepspeed")
        @pytest.mark.llmgpu(strategy=["tp"], tp_backend="deepspeed", batch_sizes=[8])
        def test_the_other_library(llm, hellaswag, batch_size, measure):
            measure(llm, hellaswag, batch_size)
        """
    )
    cpu = ("--llmgpu-device=cpu", "--llmgpu-devices=2", "--llmgpu-limit=10")
    assert pytester.runpytest_inprocess("-p", "no:cacheprovider", *cpu).ret == 0
    cases = file.load(pytester.path / ".llmgpu" / "last.json").cases
    ran = [("mp", 1), ("mp", 8), ("tp", 1), ("tp", 8), *([("tp", 8)] if _HAS_DEEPSPEED else [])]
    assert [(case.case.strategy, case.case.batch_size) for case in cases] == ran
    assert [case.case.backend for case in cases[2:]] == ["transformers", "transformers", "deepspeed"][: len(cases) - 2]
    of_size = {case.case.batch_size: case for case in cases[:2]}
    for shared in cases[2:]:
        plain = of_size[shared.case.batch_size]
        expected, answered = (known(one.launches[0].accuracy) for one in (plain, shared))
        assert answered.predictions == expected.predictions
        assert answered.predictions_norm == expected.predictions_norm
        assert decode(answered.loglikelihoods) == pytest.approx(decode(expected.loglikelihoods), abs=1e-4)
        comparison = known(shared.comparison)
        assert (comparison.reference, comparison.flipped) == (plain.id, [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"devices": 1, "device": "cuda"}, "--llmgpu-devices=1: strategy tp needs at least 2 devices"),
        ({"devices": 1}, "--llmgpu-devices=2 starts two processes"),
        ({"backend": "deepspeed", "dtype": "float16"}, "--llmgpu-dtype=float16: "),
        ({"devices": 3}, "--llmgpu-devices=3: strategy tp cannot split the 8 attention heads of bundled"),
        ({}, None),
        (
            {"backend": "deepspeed", "quantization": "int8"},
            "deepspeed: it does not split int8 weights: use transformers",
        ),
        ({"quantization": "int8"}, None),
        ({"quantization": "torchao-checkpoint"}, "--llmgpu-model=bundled: tp splits no torchao-checkpoint: use mp"),
        ({"quantization": "mxfp4-checkpoint"}, None),
        ({"backend": "deepspeed"}, None),
        ({"backend": "deepspeed", "dtype": "bfloat16"}, None),
        ({"dtype": "float16"}, None),
        ({"backend": "deepspeed", "dtype": "float16", "device": "cuda"}, None),
        ({"devices": 8}, None),
    ],
)
def test_an_impossible_case_is_refused(bundled: ModelSource, fields: dict[str, Any], message: str | None) -> None:
    """The check runs before a process starts; cases next to the refused ones are accepted."""
    refused = nullcontext() if message is None else pytest.raises(ValueError, match=re.escape(message))
    with refused:
        TensorParallel().check(msgspec.structs.replace(_CASE, **fields), bundled)


@pytest.mark.parametrize(
    ("spread", "fields", "message"),
    [
        (None, {"has_plan": True}, None),
        (None, {}, "no tensor-parallel plan .*: use --llmgpu-tp-expert-parallel=all_reduce, --llmgpu-tp-backend=deeps"),
        (None, {"ways": ()}, "no tensor-parallel plan .*: use --llmgpu-tp-backend=deepspeed or another strategy"),
        ("all_reduce", {}, None),
        (
            "all_to_all",
            {},
            "expert-parallel=all_to_all: transformers does not have it for .*: allowed: off, all_reduce",
        ),
        ("all_reduce", {"ways": ()}, "transformers does not have it for dense .*: allowed: off$"),
        ("all_reduce", {"backend": "deepspeed"}, "deepspeed does not have it for .*: allowed: off$"),
        ("all_reduce", {"experts": 5}, "devices=2: .* cannot split the 5 experts of .* evenly: allowed: 5"),
    ],
)
def test_whole_experts_are_refused_where_they_cannot_run(
    monkeypatch: pytest.MonkeyPatch, spread: str | None, fields: dict[str, Any], message: str | None
) -> None:
    """A model without a plan of tp runs with whole experts; heads need no split there."""
    facts = ModelFacts(has_plan=fields.get("has_plan", False), expert_parallel=fields.get("ways", ("all_reduce",)))
    monkeypatch.setattr(models, "facts", lambda _: facts)
    options = {"strategy_options": {"expert_parallel": spread}} if spread else {}
    case = msgspec.structs.replace(_CASE, backend=fields.get("backend", "transformers"), **options)
    config = {"num_experts": fields.get("experts", 4), "num_attention_heads": 4 if fields.get("has_plan") else 3}
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        TensorParallel().check(case, tiny_model.source(config, name="dense"))


_LLAMA_2_70B = {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28_672}


@pytest.mark.parametrize(
    ("fields", "devices", "least", "message"),
    [
        ({"num_attention_heads": 52}, 8, 2, "the 52 attention heads; 2, 4"),
        ({"num_key_value_heads": 2}, 4, 2, "the 2 key and value heads; 2"),
        ({"num_attention_heads": 3}, 2, 2, "the 3 attention heads; no number from 2 to 64"),
        ({"intermediate_size": 28_674}, 8, 2, "the 28674 columns of the feed-forward layers; 2"),
        ({"num_attention_heads": 12}, 8, 1, "the 12 attention heads; 1, 2, 4"),
        ({}, 8, 2, None),
        ({}, 1, 2, None),
        ({"num_attention_heads": None, "num_key_value_heads": None, "intermediate_size": None}, 7, 2, None),
    ],
)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "text_config"])
def test_an_indivisible_count_is_refused(
    fields: dict[str, int], devices: int, least: int, message: str | None, nested: bool
) -> None:
    """The message has the flag, the count and the numbers of devices that divide all counts."""
    config = _LLAMA_2_70B | fields
    # The outer fields describe another part of the model, such as a vision encoder.
    given = {"text_config": config, "num_attention_heads": 7} if nested else config
    case = msgspec.structs.replace(_CASE, devices=devices)
    count, _, allowed = (message or "").partition("; ")
    text = f"--llmgpu-devices={devices}: strategy tp cannot split {count} of llama evenly: allowed: {allowed}"
    with nullcontext() if message is None else pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        check_divisible(case, tiny_model.source(given, name="llama"), least=least)
