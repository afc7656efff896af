from __future__ import annotations

from itertools import product
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch
from support.request_factory import MIXED, make_prompts, make_requests
from transformers import AutoTokenizer

from pytest_llmgpu.inference import batching
from pytest_llmgpu.inference.batching import Requests, cost
from pytest_llmgpu.inference.bundled import save_tokenizer
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.inference.tasks.protocol import Item

_INPUTS = [[[1, 2, 3, 4, 5, 6, 7], [5, 6, 7, 8]], [[9, 8, 7], [5, 6]], [[3]]]


@pytest.mark.parametrize(("few_shapes", "widths"), [(False, [7, 3, 1]), (True, [7, 7, 1])])
def test_a_plan_runs_the_longest_first_and_pads_on_the_right_with_zero(few_shapes: bool, widths: list[int]) -> None:
    """The largest batch runs first; padding to few shapes follows the tokens and changes neither rows nor order."""
    batches = batching.plan(make_requests(), 2, few_shapes=few_shapes).batches
    assert [batch.width for batch in batches] == widths
    assert [batch.requests for batch in batches] == [(2, 0), (3, 1), (4,)]
    for batch, inputs in zip(batches, _INPUTS, strict=True):
        ids_BS = batch.packed.split(batch.sizes)[0].view(batch.rows, batch.width).tolist()
        assert ids_BS == [row + [0] * (batch.width - len(row)) for row in inputs]
    assert (batches[0].tokens, batches[0].padded_tokens) == (11, 14)
    (cut,) = batching.plan(make_requests([(range(20), 2)], max_length=4), 1).batches
    assert cut.packed.split(cut.sizes)[0].tolist() == [15, 16, 17, 18], "a long context loses its beginning"


@pytest.mark.parametrize(("longest", "lines"), [(512, (3, 712)), (513, None)])
def test_long_prompts_share_no_line(longest: int, lines: tuple[int, int] | None) -> None:
    """Their attention would compute more hidden scores, with a mask of gigabytes."""
    plan = batching.plan(make_prompts([range(longest), *[range(200)] * 5], max_length=600, new_tokens=2), 6, pack=True)
    assert plan.batches[0].lines == lines


def test_plans_differ_by_items_order_and_shapes_only() -> None:
    """The hash is equal for equal batches only."""
    requests = make_requests()
    plans = [
        *(batching.plan(requests, 2, few_shapes=few_shapes) for few_shapes in (False, True)),
        batching.plan(requests, 3),
        batching.plan(make_requests((*MIXED[1:], MIXED[0])), 2),
        batching.plan(msgspec.structs.replace(requests, item_ids=("a", "b", "c", "d", "e")), 2),
    ]
    assert len({plan.sha256 for plan in plans}) == len(plans)
    assert batching.plan(make_requests(), 2).sha256 == plans[0].sha256
    even = make_requests([(range(17), 2), (range(1, 18), 2)])
    assert batching.plan(even, 1, few_shapes=True).sha256 == batching.plan(even, 1).sha256


def _of_widths(widths: list[int]) -> Requests:
    """Return a request for each width, all of them different."""
    return make_requests([((number, *range(width)), 1) for number, width in enumerate(widths)], max_length=1000)


@pytest.mark.parametrize(
    ("widths", "batch_size", "padded"),
    [
        ([110, 100, 88], 1, [110, 110, 88]),
        ([110, 100, 100, 88], 1, [110, 100, 100, 100]),
        ([40, 39, 38, 37], 1, [40, 40, 40, 40]),
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
    batch_size = random.randint(1, min(2, len(widths)))
    own, found = (
        [(batch.rows, batch.width) for batch in batching.plan(_of_widths(widths), batch_size, few_shapes=few).batches]
        for few in (False, True)
    )
    full = [width for rows, width in own if rows == batch_size]
    ways = []
    for kept in product((True, False), repeat=len(full) - 1):
        wider = list(full)
        for place, own_width in enumerate(kept, start=1):
            if not own_width:
                wider[place] = wider[place - 1]
        shapes = [(batch_size, width) for width in wider] + own[len(full) :]
        if cost(shapes) <= 1.02 * cost(own):
            ways.append((len(set(shapes)), cost(shapes)))
    assert (len(set(found)), cost(found)) == min(ways)


def test_what_cannot_be_encoded_is_refused(tmp_path: Path) -> None:
    """An ending above the maximum length, with its text, and an empty context without a token to stand for it."""
    save_tokenizer(["a man runs"], 260, tmp_path)  # byte-level, with its first token before every text
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    items = [Item("0", "a man", ("x" * 10, "runs"), 0)]
    assert batching.encode(HellaSwag(), items, tokenizer, 11).requests[0].ending == 11
    with pytest.raises(ValueError, match=r"ending ' xxxxxxxxxx' .* is 11 tokens .* 1 to 10"):
        batching.encode(HellaSwag(), items, tokenizer, 10)
    items = [Item("0", "", ("runs", "man"), 0)]
    request = batching.encode(HellaSwag(), items, tokenizer, 64).requests[0]
    assert request.tokens[: -request.ending] == (tokenizer.bos_token_id,)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no context, and the tokenizer has no bos or eos"):
        batching.encode(HellaSwag(), items, tokenizer, 64)


def test_pinning_moves_all_batches_in_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning keeps the content, uses one allocation, and a second call does nothing."""
    pinned: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: bool(pinned))
    plan = batching.plan(make_requests(), 2)
    before = [batch.packed.tolist() for batch in plan.batches]
    for _ in range(2):
        plan.pin(torch.device("cuda"))
    assert [batch.packed.tolist() for batch in plan.batches] == before
    storages = {batch.packed.untyped_storage().data_ptr() for batch in plan.batches}
    assert storages == {one.untyped_storage().data_ptr() for one in pinned}
    assert len(pinned) == 1
