from __future__ import annotations

import math
import re
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import tiny_model
from support.request_factory import MIXED, make_requests
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM

from pytest_llmgpu.inference import batching, scoring

CPU = torch.device("cpu")
VOCABULARY = 50
ONE_ROW = (((1, 2, 3, 4, 5, 6), 4), ((1, 2, 3, 4, 5, 7), 1), ((1, 2, 3, 4, 5, 8), 2))


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a small LLaMA with random weights, wide enough apart that its answers differ."""
    return _llama()


def _llama() -> Any:
    return tiny_model.random_model(num_hidden_layers=2, vocab_size=VOCABULARY, initializer_range=0.5)


def _from_full_logits(model: Any, tokens: tuple[int, ...], ending: int) -> float:
    """Return the log-likelihood from the full logits of one sequence."""
    with torch.no_grad():
        logp = model(torch.tensor([tokens[:-1]])).logits[0].double().log_softmax(-1)
    return float(sum(logp[place - 1, tokens[place]] for place in range(len(tokens) - ending, len(tokens))))


@pytest.mark.parametrize(
    ("pairs", "batch_size", "rows"), [(MIXED, 1, 5), (MIXED, 2, 5), (MIXED, 5, 5), (ONE_ROW, 1, 1)]
)
@pytest.mark.parametrize("logits", scoring.SCORINGS)
def test_scores_are_those_of_the_full_logits(model: Any, logits: str, pairs: Any, batch_size: int, rows: int) -> None:
    """Padding, order, batch size, the scoring, and endings that share a row do not change the log-likelihoods."""
    plan = batching.plan(make_requests(pairs), batch_size)
    assert sum(batch.rows for batch in plan.batches) == rows
    scores = scoring.score(model, plan, input_device=CPU, devices=(CPU,), logits=logits)
    assert [value for row in scores.loglikelihoods for value in row] == pytest.approx(
        [_from_full_logits(model, *pair) for pair in pairs], rel=1e-5
    )


class _Plain(torch.nn.Module):
    """A module that has nothing of transformers but the logits."""

    def __init__(self, model: Any, answer: Any) -> None:
        super().__init__()
        self.model, self.answer = model, answer

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.answer(self.model(input_ids).logits)


@pytest.mark.parametrize("logits", scoring.SCORINGS)
@pytest.mark.parametrize(
    "answer", [lambda logits: logits, lambda logits: SimpleNamespace(logits=logits)], ids=["tensor", "attribute"]
)
def test_a_module_without_an_output_head_is_scored_through_its_logits(model: Any, logits: str, answer: Any) -> None:
    """It needs no config, no argument use_cache and no get_output_embeddings."""
    plan = batching.plan(make_requests(), 2)
    scoring.check(_Plain(model, answer))
    found = scoring.score(_Plain(model, answer), plan, input_device=CPU, devices=(CPU,), logits=logits)
    expected = scoring.score(model, plan, input_device=CPU, devices=(CPU,))
    for values, others in zip(found.loglikelihoods, expected.loglikelihoods, strict=True):
        assert values == pytest.approx(others, rel=1e-5)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda logits: (logits,), "_Plain returned tuple: the logits [rows, tokens, vocabulary] are needed, or an"),
        (lambda logits: logits[0], "_Plain returned a tensor of 2 dimensions: the logits [rows, tokens, vocabulary]"),
        (lambda logits: logits[:, :-1], "_Plain does not return the logits of every position: their shape is"),
    ],
)
def test_a_module_that_returns_no_logits_is_named(model: Any, answer: Any, message: str) -> None:
    """The message has what it returned and what is needed."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        scoring.score(_Plain(model, answer), batching.plan(make_requests(), 2), input_device=CPU, devices=(CPU,))
    with pytest.raises(ValueError, match=r"^Identity.forward has no argument input_ids, which gets the tokens"):
        scoring.check(torch.nn.Identity())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_log_probabilities_are_those_of_float32(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int) -> None:
    """Chunks and the in-place computation give the values of float32."""
    values = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)).mul_(10).to(dtype)
    targets = torch.arange(rows) % VOCABULARY
    expected = torch.log_softmax(values.float(), dim=-1)[torch.arange(rows), targets]
    monkeypatch.setattr(scoring, "_MOST_BYTES", 4 * VOCABULARY * 5)
    assert torch.equal(scoring.log_probabilities(values, targets), expected)


def test_what_comes_after_the_head_still_runs() -> None:
    """A model that caps its logits is scored with capped logits."""
    capping = {"num_key_value_heads": 2, "head_dim": 16, "final_logit_softcapping": 1.0, "initializer_range": 0.5}
    torch.manual_seed(0)
    capped: Any = Gemma2ForCausalLM(Gemma2Config(**{**tiny_model.SIZES, **capping, "vocab_size": VOCABULARY})).eval()
    scores = scoring.score(capped, batching.plan(make_requests(), 2), input_device=CPU, devices=(CPU,))
    assert [row[0] for row in scores.loglikelihoods] == pytest.approx(
        [_from_full_logits(capped, *pair) for pair in MIXED], rel=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_harness_way_keeps_every_logit_and_a_cache(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full logits use the memory of lm-evaluation-harness: [B, S, V] twice, and the KV cache of all layers."""
    model = _llama().to(dtype)
    seen: list[Any] = []
    caches: list[Any] = []
    log_softmax = torch.log_softmax

    def at_the_end(_: Any, __: Any, out: Any) -> None:
        caches.append(weakref.ref(out.past_key_values))
        seen.append([layer.keys.shape for layer in out.past_key_values.layers])

    def spy(logits: Any, *arguments: Any, **named: Any) -> Any:
        assert caches.pop()() is None, "as HFLM, which lets the cache go before the log-softmax"
        answer = log_softmax(logits, *arguments, **named)
        seen.append([(one.shape, one.dtype) for one in (logits, answer)])
        return answer

    monkeypatch.setattr(torch, "log_softmax", spy)
    model.register_forward_hook(at_the_end)
    scoring.score(model, batching.plan(make_requests(), 5), input_device=CPU, devices=(CPU,), logits=scoring.HARNESS)
    assert seen == [[(5, 2, 7, 16)] * 2, [((5, 7, VOCABULARY), dtype)] * 2]


@pytest.mark.parametrize("logits", scoring.SCORINGS)
def test_the_warm_up_runs_every_shape_once(model: Any, logits: str) -> None:
    """It runs the forwards of the measured scoring: no measured batch is the first of its shape."""
    shapes: list[tuple[int, ...]] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, __, logits: shapes.append(tuple(logits.shape)))
    plan = batching.plan(make_requests([((1, 2, 3, 4), 2), ((5, 6, 7, 8), 2), ((9, 8, 7, 6), 2), ((1, 2), 1)]), 1)
    scoring.warm_up(model, plan, input_device=CPU, devices=(CPU,), logits=logits)
    warm_up = shapes[:]
    scoring.score(model, plan, input_device=CPU, devices=(CPU,), logits=logits)
    hook.remove()
    assert len(warm_up) == 2
    assert warm_up == list(dict.fromkeys(shapes[2:]))


def test_broken_numbers_are_an_error_not_a_choice() -> None:
    """NaN in the weights is an error with the batch; after it, a forward has all logits again."""
    broken = _llama()
    with torch.no_grad():
        broken.get_output_embeddings().weight[9].fill_(math.nan)
    with pytest.raises(ValueError, match=r"batch 1 of 3 \(2 rows of 7 tokens\): log-likelihood nan"):
        scoring.score(broken, batching.plan(make_requests(), 2), input_device=CPU, devices=(CPU,))
    assert broken(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, VOCABULARY)


def test_a_model_that_does_not_call_its_output_head_is_refused(model: Any) -> None:
    """The logits of the predicted tokens alone could not be computed."""
    other: Any = _Plain(model, lambda logits: logits)
    other.get_output_embeddings = lambda: torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="_Plain does not call its output head"):
        scoring.score(other, batching.plan(make_requests(), 2), input_device=CPU, devices=(CPU,))


def test_batches_are_reported_as_they_finish(model: Any) -> None:
    """The listener gets the figures of each batch."""
    heard: list[tuple[float, int, int, int]] = []
    plan = batching.plan(make_requests(), 2)
    batches = scoring.score(
        model, plan, on_batch=lambda *row: heard.append(row), input_device=CPU, devices=(CPU,)
    ).batches
    assert heard == list(zip(batches.latency_s, batches.sequences, batches.tokens, batches.padded_tokens, strict=True))
    assert [row[1:] for row in heard] == [(2, 7 + 4, 14), (2, 3 + 2, 6), (1, 1, 1)]
    assert all(latency_s > 0 for latency_s in batches.latency_s)


def test_what_runs_beside_batches_is_called_between_them(model: Any) -> None:
    """Each batch has the mean of the times before and after it, and the part of its time until it is launched."""
    times_s = [1.0, 3.0, 7.0, 8.0]
    plan = batching.plan(make_requests(), 2)
    batches = scoring.score(model, plan, beside=lambda: times_s.pop(0), input_device=CPU, devices=(CPU,)).batches
    assert (batches.reference_s, times_s) == ([2.0, 5.0, 7.5], [])
    assert all(0 < launch_s < s for launch_s, s in zip(batches.launch_s, batches.latency_s, strict=True))
    alone = scoring.score(model, plan, input_device=CPU, devices=(CPU,)).batches
    assert (alone.launch_s, alone.reference_s) == ([], [])


def test_nothing_of_a_batch_outlives_it(model: Any) -> None:
    """Logits are freed before the next batch, so that memory does not grow with the dataset."""
    alive: list[weakref.ref[Any]] = []
    kept: list[int] = []

    def watch(_: Any, __: Any, logits: Any) -> None:
        kept.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(logits))

    hook = model.get_output_embeddings().register_forward_hook(watch)
    scoring.score(model, batching.plan(make_requests(), 1), input_device=CPU, devices=(CPU,))
    hook.remove()
    assert kept == [0] * len(MIXED)
