from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from support import tiny_model

from pytest_llmgpu.inference import batching, scoring, weights
from pytest_llmgpu.inference.batching import Plan, Request, Requests, cost
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.inference.tasks.protocol import Item

CPU = torch.device("cpu")
VOCABULARY = 50


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a small LLaMA with random weights, wide enough apart that its answers differ."""
    return _llama()


def _llama(**fields: Any) -> Any:
    config = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.5}
    source = tiny_model.source({**tiny_model.SIZES, **config, **fields})
    built = weights.skeleton(source, torch.float32)
    weights.materialise(built, lambda _: CPU, seed=0, dtype=torch.float32)
    return built


def _requests(*pairs: tuple[tuple[int, ...], int], max_length: int = 64) -> Requests:
    """Return items of one ending each."""
    return Requests(
        item_ids=tuple(str(number) for number in range(len(pairs))),
        endings=(1,) * len(pairs),
        requests=tuple(Request(tokens, ending) for tokens, ending in pairs),
        max_length=max_length,
    )


def _from_full_logits(model: Any, tokens: tuple[int, ...], ending: int) -> float:
    """Return the log-likelihood from the full logits of one sequence."""
    with torch.no_grad():
        logp = model(torch.tensor([tokens[:-1]])).logits[0].double().log_softmax(-1)
    return float(sum(logp[place - 1, tokens[place]] for place in range(len(tokens) - ending, len(tokens))))


MIXED = (((5, 6, 7, 8, 9), 2), ((5, 6, 7), 1), ((1, 2, 3, 4, 5, 6, 7, 8), 5), ((9, 8, 7, 6), 3), ((3, 4), 1))


ONE_ROW = (((1, 2, 3, 4, 5, 6), 4), ((1, 2, 3, 4, 5, 7), 1), ((1, 2, 3, 4, 5, 8), 2))


@pytest.mark.parametrize(
    ("pairs", "batch_size", "rows"), [(MIXED, 1, 5), (MIXED, 2, 5), (MIXED, 5, 5), (ONE_ROW, 1, 1)]
)
@pytest.mark.parametrize("logits", scoring.SCORINGS)
def test_loglikelihoods_are_those_of_the_full_logits(
    model: Any, logits: str, pairs: Any, batch_size: int, rows: int
) -> None:
    """Padding, order, batch size, the scoring, and endings that share a row do not change the log-likelihoods."""
    plan = batching.plan(_requests(*pairs), batch_size)
    assert sum(batch.rows for batch in plan.batches) == rows
    scores = scoring.score(model, plan, input_device=CPU, logits=logits)
    assert [value for row in scores.loglikelihoods for value in row] == pytest.approx(
        [_from_full_logits(model, *pair) for pair in pairs], rel=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_log_probabilities_are_those_of_float32(dtype: torch.dtype, rows: int) -> None:
    """Chunks and the in-place computation give the values of float32."""
    values = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows)).mul_(10).to(dtype)
    targets = torch.arange(rows) % VOCABULARY
    expected = torch.log_softmax(values.float(), dim=-1)[torch.arange(rows), targets]
    assert torch.equal(scoring.log_probabilities(values, targets, most_bytes=4 * VOCABULARY * 5), expected)


def test_logits_exist_only_where_an_ending_is_predicted(model: Any) -> None:
    """The output head computes one row per token of the endings."""
    shapes = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _, __, logits: shapes.append(tuple(logits.shape)))
    scoring.score(model, batching.plan(_requests(*MIXED), 5), input_device=CPU)
    hook.remove()
    assert shapes == [(1, 2 + 1 + 5 + 3 + 1, VOCABULARY)]


def test_what_comes_after_the_head_still_runs() -> None:
    """A model that caps its logits is scored with capped logits."""
    capping = {"num_key_value_heads": 2, "head_dim": 16, "final_logit_softcapping": 1.0, "initializer_range": 0.5}
    config = {**tiny_model.SIZES, **capping, "vocab_size": VOCABULARY}
    gemma = pytest.importorskip("transformers").Gemma2Config(**config)
    torch.manual_seed(0)
    capped = pytest.importorskip("transformers").Gemma2ForCausalLM(gemma).eval()
    scores = scoring.score(capped, batching.plan(_requests(*MIXED), 2), input_device=CPU)
    assert [row[0] for row in scores.loglikelihoods] == pytest.approx(
        [_from_full_logits(capped, *pair) for pair in MIXED], rel=1e-5
    )


def test_the_head_is_whole_again_after_scoring(model: Any) -> None:
    """A forward after a case has all logits, also after a failure."""
    head = scoring.EndingHead(model)
    with pytest.raises(KeyError), head:
        raise KeyError
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, VOCABULARY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_harness_way_computes_every_logit_beside_a_cache(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full logits use the memory of lm-evaluation-harness: [B, S, V] twice, and the KV cache of all layers."""
    model = _llama().to(dtype)
    seen: list[tuple[Any, ...]] = []
    caches: list[Any] = []
    log_softmax = torch.log_softmax

    def spy(logits: Any, *arguments: Any, **named: Any) -> Any:
        alive = sum(ref() is not None for ref in caches)
        answer = log_softmax(logits, *arguments, **named)
        seen.append((tuple(logits.shape), logits.dtype, tuple(answer.shape), answer.dtype, alive))
        return answer

    def at_the_end(_: Any, __: Any, out: Any) -> None:
        keys = [layer.keys for layer in out.past_key_values.layers]
        assert [tuple(key.shape) for key in keys] == [(5, 2, 7, 16)] * 2
        caches.append(weakref.ref(out.past_key_values))

    monkeypatch.setattr(torch, "log_softmax", spy)
    model.register_forward_hook(at_the_end)
    plan = batching.plan(_requests(*MIXED), 5)
    scoring.score(model, plan, input_device=CPU, logits=scoring.HARNESS)
    full = (5, 7, VOCABULARY)
    assert seen == [(full, dtype, full, dtype, 0)], "as HFLM, which lets the cache go before the log-softmax"
    assert len(caches) == 1


@pytest.mark.parametrize("logits", scoring.SCORINGS)
def test_the_warm_up_runs_every_shape_once(model: Any, logits: str) -> None:
    """It runs the forwards of the measured scoring: no measured batch is the first of its shape."""
    shapes: list[tuple[int, ...]] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, __, logits: shapes.append(tuple(logits.shape)))
    plan = batching.plan(_requests(((1, 2, 3, 4), 2), ((5, 6, 7, 8), 2), ((9, 8, 7, 6), 2), ((1, 2), 1)), 1)
    scoring.warm_up(model, plan, input_device=CPU, logits=logits)
    warm_up = shapes[:]
    scoring.score(model, plan, input_device=CPU, logits=logits)
    hook.remove()
    assert len(warm_up) == 2
    assert warm_up == list(dict.fromkeys(shapes[2:]))


def test_broken_numbers_are_an_error_not_a_choice() -> None:
    """NaN in the weights is an error with the batch."""
    broken = _llama()
    with torch.no_grad():
        broken.get_output_embeddings().weight[9].fill_(math.nan)
    with pytest.raises(ValueError, match=r"batch 1 of 3 \(2 rows of 7 tokens\): log-likelihood nan"):
        scoring.score(broken, batching.plan(_requests(*MIXED), 2), input_device=CPU)


@pytest.mark.parametrize(
    ("logits", "positions", "message"),
    [
        (scoring.HARNESS, 1, "does not return the logits of every position"),
        (scoring.LEAN, 7, "does not call its output head"),
    ],
)
def test_a_model_with_other_logits_is_refused(model: Any, logits: str, positions: int, message: str) -> None:
    """Logits of another shape are refused, and so is a model that does not call its output head."""

    class Other(torch.nn.Module):
        get_output_embeddings = model.get_output_embeddings

        def forward(self, input_ids: Any, **_: Any) -> Any:
            return type("Output", (), {"logits": torch.zeros(len(input_ids), positions, VOCABULARY)})

    with pytest.raises(ValueError, match=f"Other {message}"):
        scoring.score(Other(), batching.plan(_requests(*MIXED), 2), input_device=CPU, logits=logits)


def test_batches_are_reported_as_they_finish(model: Any) -> None:
    """The listener gets the figures of each batch."""
    heard: list[tuple[float, int, int, int]] = []
    plan = batching.plan(_requests(*MIXED), 2)
    batches = scoring.score(model, plan, on_batch=lambda *row: heard.append(row), input_device=CPU).batches
    assert heard == list(zip(batches.latency_s, batches.sequences, batches.tokens, batches.padded_tokens, strict=True))
    assert [row[1:] for row in heard] == [(2, 7 + 4, 14), (2, 3 + 2, 6), (1, 1, 1)]
    assert all(latency_s > 0 for latency_s in batches.latency_s)


def test_nothing_of_a_batch_outlives_it(model: Any) -> None:
    """Logits are freed before the next batch, so that memory does not grow with the dataset."""
    alive: list[weakref.ref[Any]] = []
    kept: list[int] = []

    def watch(_: Any, __: Any, logits: Any) -> None:
        kept.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(logits))

    hook = model.get_output_embeddings().register_forward_hook(watch)
    scoring.score(model, batching.plan(_requests(*MIXED), 1), input_device=CPU)
    hook.remove()
    assert kept == [0] * len(MIXED)


def test_a_plan_runs_the_longest_first_and_pads_on_the_right_with_zero() -> None:
    """The largest batch runs first, and padding follows the scored tokens."""
    plan = batching.plan(_requests(*MIXED), 2)
    first = plan.batches[0]
    assert [batch.width for batch in plan.batches] == [7, 3, 1]
    assert first.packed.split(first.sizes)[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 0, 0, 0]
    assert sum(batch.rows for batch in plan.batches) == 5
    assert (first.tokens, first.padded_tokens) == (11, 14)


def test_a_long_context_loses_its_beginning() -> None:
    """Truncation keeps the last tokens with the ending."""
    batch = batching.plan(_requests((tuple(range(20)), 2), max_length=4), 1).batches[0]
    assert batch.packed.split(batch.sizes)[0].tolist() == [15, 16, 17, 18]


def test_plans_differ_by_items_order_and_shapes_only() -> None:
    """The hash is equal for equal batches only."""
    same = batching.plan(_requests(*MIXED), 2).sha256
    assert batching.plan(_requests(*MIXED), 2).sha256 == same
    others = [batching.plan(_requests(*MIXED), 3), batching.plan(_requests(*MIXED[1:], MIXED[0]), 2)]
    assert len({same, *(other.sha256 for other in others)}) == 3


def _of_widths(widths: Sequence[int], max_length: int = 1000) -> Requests:
    """Return a request for each width, all of them different."""
    return _requests(
        *(((number, *range(1, width + 1)), 1) for number, width in enumerate(widths)), max_length=max_length
    )


def _shapes(plan: Plan) -> list[tuple[int, int]]:
    return [(batch.rows, batch.width) for batch in plan.batches]


@pytest.mark.parametrize(
    ("widths", "batch_size", "padded"),
    [
        ([100] * 3, 1, [100, 100, 100]),
        ([110, 100, 88], 1, [110, 110, 88]),
        ([110, 100, 100, 88], 1, [110, 100, 100, 100]),
        ([40, 39, 38, 37], 1, [40, 40, 40, 40]),
        ([400, 300, 200, 100], 1, [400, 300, 200, 100]),
        # The last batch has fewer rows: its shape is its own, and padding it would save none.
        ([101, 101, 100, 100, 98], 2, [101, 101, 98]),
    ],
)
def test_batches_share_few_shapes(widths: list[int], batch_size: int, padded: list[int]) -> None:
    """Batches are padded where that costs at most 2 %, and where it saves a shape."""
    plan = batching.plan(_of_widths(widths), batch_size, few_shapes=True)
    assert [batch.width for batch in plan.batches] == padded
    assert sum(batch.tokens for batch in plan.batches) == sum(widths), "padding is no input"
    assert plan.tokens == max(widths)


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_has_fewer_shapes_or_costs_less(seed: int) -> None:
    """Every way to pad the batches is tried."""
    random = Random(seed)
    widths = random.choices(range(1, random.choice([20, 60, 300])), k=random.randint(1, 11))
    requests, batch_size = _of_widths(widths), random.randint(1, min(2, len(widths)))
    own, found = (_shapes(batching.plan(requests, batch_size, few_shapes=few)) for few in (False, True))
    allowed = 1.02 * cost(own)
    full = [width for rows, width in own if rows == batch_size]
    ways = []
    for kept in product((True, False), repeat=len(full) - 1):
        wider = list(full)
        for place, own_width in enumerate(kept, start=1):
            if not own_width:
                wider[place] = wider[place - 1]
        shapes = [(batch_size, width) for width in wider] + own[len(full) :]
        if cost(shapes) <= allowed:
            ways.append((len(set(shapes)), cost(shapes)))
    assert (len(set(found)), cost(found)) == min(ways)


def test_padding_changes_the_hash_and_no_batch() -> None:
    """Padding to few shapes keeps the order of the requests and changes the hash."""
    narrow, wide = (batching.plan(_requests(*MIXED), 2, few_shapes=few) for few in (False, True))
    assert [(batch.rows, batch.requests) for batch in wide.batches] == [
        (batch.rows, batch.requests) for batch in narrow.batches
    ]
    assert [batch.width for batch in wide.batches] == [7, 7, 1]
    assert wide.sha256 != narrow.sha256
    first = wide.batches[1]
    assert first.packed[: 2 * 7].view(2, -1).tolist() == [[9, 8, 7, 0, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0]]
    # Where every row has one width, the two are one plan.
    even = _requests((tuple(range(17)), 2), (tuple(range(1, 18)), 2))
    assert batching.plan(even, 1, few_shapes=True).sha256 == batching.plan(even, 1).sha256


@pytest.mark.parametrize("batch_size", [0, -1, 6])
def test_a_batch_size_out_of_range_is_refused(batch_size: int) -> None:
    """A batch size of 0 or above the number of sequences is refused."""
    with pytest.raises(ValueError, match=f"batch size {batch_size} is not allowed: 1 to 5"):
        batching.plan(_requests(*MIXED), batch_size)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a byte-level tokenizer that puts its first token before every text."""
    from transformers import AutoTokenizer

    from pytest_llmgpu.inference.bundled import save_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(["a man runs"], 260, directory)
    return AutoTokenizer.from_pretrained(directory)


def test_an_ending_longer_than_the_model_is_refused(tokenizer: Any) -> None:
    """An ending above the maximum length is refused with its text."""
    with pytest.raises(ValueError, match=r"ending ' xxxxxxxxxx' .* 1 to 8"):
        batching.encode(HellaSwag(), [Item("0", "a man", ("x" * 10, "runs"), 0)], tokenizer, 8)


def test_no_context_needs_a_token_to_stand_for_it(tokenizer: Any) -> None:
    """Without bos and eos an empty context is an error, with bos it is that token."""
    items = [Item("0", "", ("runs", "man"), 0)]
    request = batching.encode(HellaSwag(), items, tokenizer, 64).requests[0]
    assert request.tokens[: -request.ending] == (tokenizer.bos_token_id,)
    bare = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    bare.bos_token = bare.eos_token = None
    with pytest.raises(ValueError, match="no context, and the tokenizer has no bos or eos"):
        batching.encode(HellaSwag(), items, bare, 64)


def test_pinning_moves_all_batches_in_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning keeps the content, uses one allocation, and a second call does nothing."""
    pinned: list[Any] = []

    def pin_memory(tensor: Any) -> Any:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(
        torch.Tensor,
        "is_pinned",
        lambda tensor: any(tensor.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in pinned),
    )
    plan = batching.plan(_requests(*MIXED), 2)
    before = [batch.packed.tolist() for batch in plan.batches]
    plan.pin(torch.device("cuda"))
    plan.pin(torch.device("cuda"))
    assert [batch.packed.tolist() for batch in plan.batches] == before
    assert all(batch.packed.is_pinned() for batch in plan.batches)
    assert len(pinned) == 1
