from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import kv_cache_faults, tiny_model
from support.request_factory import make_prompts
from support.texts import Texts, generated
from transformers import AutoConfig, AutoModelForCausalLM

from pytest_llmgpu.inference import batching, generation
from pytest_llmgpu.inference.batching import Requests, plan
from pytest_llmgpu.inference.generation import Generator, score_texts

_CPU = torch.device("cpu")
_VOCABULARY = 40  # of `tiny_model.random_model`
_PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11], [10, 11]]
_NEW = 6


@pytest.fixture(scope="module")
def model() -> Any:
    """A random LLaMA of two layers with grouped heads, whose attention decides its tokens."""
    return _model()


def _model(**fields: Any) -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_model.random_model(num_hidden_layers=2, initializer_range=0.3, **heads, **fields)


def _requests(prompts: list[list[int]] = _PROMPTS, new_tokens: int = _NEW) -> Requests:
    return make_prompts(prompts, max_length=8, new_tokens=new_tokens)


def _generate(model: Any, requests: Requests, batch_size: int, **options: bool) -> Texts:
    batches = plan(requests, batch_size, **options)
    with Generator(model, batches, input_device=_CPU, devices=(_CPU,)) as generator:
        generator.warm_up()
        return generated(generator)


@torch.inference_mode()
def _without_a_cache(model: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    ids, loglikelihoods = list(prompt), []
    for _ in range(new_tokens):
        logp = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
        ids.append(int(logp.argmax()))
        loglikelihoods.append(float(logp.max()))
    return ids[len(prompt) :], loglikelihoods


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_texts_are_those_of_forwards_without_a_cache(batch_size: int, attention: str) -> None:
    """Rows of unequal length in one batch, a last batch with fewer rows, and prompts that are equal."""
    model = _model(attn_implementation=attention)
    found = _generate(model, _requests(), batch_size)
    for number, prompt in enumerate(_PROMPTS):
        tokens, loglikelihoods = _without_a_cache(model, prompt, _NEW)
        assert found.tokens[number] == tokens
        assert found.loglikelihoods[number] == pytest.approx(loglikelihoods, abs=1e-4)
    assert sum(found.batches.sequences) == len(_PROMPTS), "equal prompts have rows of their own"
    assert len(found.record.first_token_s) == math.ceil(len(_PROMPTS) / batch_size)
    assert len(found.record.step_s) == len(found.record.first_token_s) * (_NEW - 1)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    prompts=st.lists(st.lists(st.integers(0, _VOCABULARY - 1), min_size=1, max_size=8), min_size=1, max_size=6),
    batch_size=st.integers(1, 6),
    new_tokens=st.integers(1, 4),
    few_shapes=st.booleans(),
    pack=st.booleans(),
)
def test_log_likelihoods_are_those_of_scoring(
    model: Any, prompts: list[list[int]], batch_size: int, new_tokens: int, few_shapes: bool, pack: bool
) -> None:
    """Whatever the prompts and the batches are, decode steps and a forward over prompt and text agree."""
    requests = _requests(prompts, new_tokens)
    size = min(batch_size, len(prompts))
    found = _generate(model, requests, size, few_shapes=few_shapes, pack=pack)
    again = score_texts(model, requests, found.tokens, size, input_device=_CPU, devices=(_CPU,))
    for values, expected in zip(found.loglikelihoods, again, strict=True):
        assert values == pytest.approx(expected, abs=1e-4)
    assert all(len(tokens) == new_tokens for tokens in found.tokens)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_window_is_that_of_forwards_without_a_cache(batch_size: int) -> None:
    """Prompts are shorter, as long and longer than the window; texts overwrite what has left it."""
    sizes = {**tiny_model.SIZES, "num_key_value_heads": 2, "vocab_size": _VOCABULARY}
    torch.manual_seed(0)
    config = AutoConfig.for_model("mistral", **sizes, sliding_window=3, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    found = _generate(model, _requests(), batch_size)
    for number, prompt in enumerate(_PROMPTS):
        assert found.tokens[number] == _without_a_cache(model, prompt, _NEW)[0]


_WINDOW = {"sliding_window": 5, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": _VOCABULARY}


@pytest.mark.parametrize(("line_tokens", "lines"), [(512, (1, 128)), (40, (4, 48))])
@pytest.mark.parametrize("kind", ["llama", "eager", "mistral", "gemma3_text"])
def test_prompts_that_share_lines_have_the_texts_of_prompts_that_do_not(
    kind: str, line_tokens: int, lines: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 1 to 30 tokens in one batch, also with a window in all layers, and in some of them."""
    monkeypatch.setattr(batching, "_LINE_TOKENS", line_tokens)
    torch.manual_seed(0)
    if kind in ("mistral", "gemma3_text"):
        config = AutoConfig.for_model(kind, **{**tiny_model.SIZES, **_WINDOW}, initializer_range=0.3)
        model = AutoModelForCausalLM.from_config(config).eval()
    else:
        model = _model(attn_implementation="eager" if kind == "eager" else "sdpa")
    sizes = (30, 3, 9, 12, 1, 7, 25, 4, 14, 8, 2, 11)
    requests = make_prompts(
        [torch.randint(_VOCABULARY, (size,)).tolist() for size in sizes], max_length=32, new_tokens=_NEW
    )
    assert generation.can_share_lines(model.config)
    expected, found = (_generate(model, requests, len(sizes), pack=pack) for pack in (False, True))
    assert (expected.batches.padded_tokens, found.batches.padded_tokens) == ([12 * 30], [math.prod(lines)])
    assert found.tokens == expected.tokens
    for values, others in zip(found.loglikelihoods, expected.loglikelihoods, strict=True):
        assert values == pytest.approx(others, abs=1e-5)


def test_there_may_be_more_lines_than_tokens_of_a_line(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """22 short prompts, whose only other numbers of equal lines are 1, 2 and 22."""
    monkeypatch.setattr(batching, "_LINE_TOKENS", 8)
    requests = _requests([[1, 2, 3, 4, 5], *([number, 6, 7] for number in range(21))])
    expected, found = (_generate(model, requests, 22, pack=pack) for pack in (False, True))
    assert found.batches.padded_tokens == [11 * 8]
    assert found.tokens == expected.tokens


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("gpt2", {}),
        ("llama", {"attn_implementation": "flash_attention_2"}),
        ("qwen3_next", {}),
        ("llama4_text", {}),
    ],
    ids=["positions that are learned", "no mask", "linear attention", "chunks"],
)
def test_other_models_have_a_line_for_each_prompt(kind: str, fields: dict[str, Any]) -> None:
    """Their prompts keep their padding."""
    assert not generation.can_share_lines(AutoConfig.for_model(kind, **fields))


def test_chunks_are_served_as_long_as_there_is_one() -> None:
    """A longer text is refused in one line, before a token is generated."""
    sizes = {**tiny_model.SIZES, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": _VOCABULARY}
    torch.manual_seed(0)
    fields = {"num_local_experts": 2, "intermediate_size_mlp": 48, "initializer_range": 0.3, "pad_token_id": 0}
    config = AutoConfig.for_model("llama4_text", **sizes | fields, attention_chunk_size=16)
    assert "chunked_attention" in config.layer_types
    model = AutoModelForCausalLM.from_config(config).eval()
    found = _generate(model, _requests(), 2)
    for number, prompt in enumerate(_PROMPTS):
        assert found.tokens[number] == _without_a_cache(model, prompt, _NEW)[0]
    with pytest.raises(ValueError, match="text of 25 tokens is not generated with layers of the kind chunked_att"):
        _generate(model, _requests(new_tokens=20), 2)


@pytest.mark.parametrize("fault", kv_cache_faults.FAULTS)
def test_a_fault_of_the_cache_shows_in_the_log_likelihoods(model: Any, fault: str) -> None:
    """Each fault makes a text more than 100 times as different as rounding does."""
    requests = _requests()
    with kv_cache_faults.injected(fault):
        found = _generate(model, requests, 2)
    again = score_texts(model, requests, found.tokens, 2, input_device=_CPU, devices=(_CPU,))
    pairs = zip(found.loglikelihoods, again, strict=True)
    assert max(abs(sum(values) - sum(expected)) / abs(sum(expected)) for values, expected in pairs) > 1e-3


def test_the_cache_has_the_size_of_the_formula(model: Any) -> None:
    """Two layers of two heads of eight numbers of four bytes, keys and values, for two rows of the longest prompt."""
    size = 2 * 2 * 2 * 8 * 4 * 2 * (5 + _NEW)
    assert generation.formula_bytes(model.config, rows=2, slots=5 + _NEW, number_bytes=4) == size
    with Generator(model, plan(_requests(), 2), input_device=_CPU, devices=(_CPU,)) as generator:
        assert generated(generator).record.kv_cache_bytes == size
    assert generator._cache.bytes == 0, "it is freed at the end"
    # Falcon's config has the heads elsewhere; latent attention keeps 512 numbers and a rotated key of 64.
    falcons: list[tuple[dict[str, Any], int]] = [
        ({"multi_query": True}, 1),
        ({"new_decoder_architecture": True, "num_kv_heads": 8}, 8),
    ]
    for fields, heads in falcons:
        config = AutoConfig.for_model("falcon", **fields)
        found = generation.formula_bytes(config, rows=1, slots=1, number_bytes=1)
        assert found == 2 * config.num_hidden_layers * heads * 64
    latent = AutoConfig.for_model("deepseek_v2")
    found = generation.formula_bytes(latent, rows=1, slots=1, number_bytes=1)
    assert found == latent.num_hidden_layers * (512 + 64)
    # Two of four layers read the keys and values of others; states of other shapes have no formula.
    shared = AutoConfig.for_model("gemma3n_text", num_hidden_layers=4, num_kv_shared_layers=2, sliding_window=4)
    kept = sum(4 if kind == "sliding_attention" else 26 for kind in shared.layer_types[:2])
    heads = 2 * shared.num_key_value_heads * shared.head_dim
    assert generation.formula_bytes(shared, rows=1, slots=26, number_bytes=1) == kept * heads
    assert generation.formula_bytes(AutoConfig.for_model("kimi_linear"), rows=1, slots=8, number_bytes=1) is None


def test_a_log_likelihood_that_is_not_finite_is_an_error() -> None:
    """The message names the batch."""
    model = _model()
    torch.nn.init.constant_(model.lm_head.weight, math.inf)
    with pytest.raises(ValueError, match=r"batch 1 of 3 \(2 rows of 5 tokens\).*log-likelihood nan"):
        _generate(model, _requests(), 2)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_attention_heads": 4}, None),
        ({"num_attention_heads": 4, "layer_types": ["full_attention", "linear_attention"]}, None),
        ({"num_attention_heads": 4, "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"num_attention_heads": 4, "mamba_d_state": 16}, "mamba_d_state"),
        ({"n_head": 4, "alibi": True}, "alibi"),
        ({"model_type": "minimax", "layer_types": ["full_attention"]}, "a KV cache of its own"),
    ],
)
def test_a_model_that_the_cache_cannot_serve_is_refused(fields: dict[str, Any], reason: str | None) -> None:
    """The config alone decides, before a model is loaded."""
    found = generation.reason_against(fields)
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_a_module_that_generates_no_text_is_named_with_all_that_it_lacks() -> None:
    """It is refused before anything is measured."""
    generation.check(_model(), _model().config)
    with pytest.raises(ValueError, match=r"^Identity cannot generate text, it has no arguments past_key_values") as got:
        generation.check(torch.nn.Identity(), None)
    assert str(got.value).endswith(
        "position_ids, attention_mask of forward, no get_output_embeddings(), no Loaded.config: score it "
        "(--llmgpu-workload=score), or use a causal language model of transformers"
    )
