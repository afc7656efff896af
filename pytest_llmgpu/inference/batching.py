"""What is run, and in which order: a dataset as tokens, laid out in batches.

Items are tokenised once (`encode`) and laid out for one batch size at a time (`plan`). The batches are the tensors that
lm-evaluation-harness 0.4.13 hands to the model (`_encode_pair` in `lm_eval/api/model.py`, `_loglikelihood_tokens` in
`lm_eval/models/huggingface.py`); a test holds the two side by side.

Shapes: B rows of a batch, S tokens of its longest row, N predicted tokens, R requests, L tokens of the longest ending.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.inference.tasks.protocol import Item, Task

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

__all__ = ["Batch", "Plan", "Request", "Requests", "encode", "plan"]


class Request(msgspec.Struct, frozen=True):
    """One ending given its context, in tokens."""

    tokens: tuple[int, ...]
    """Context and ending, untruncated."""
    ending: int
    """How many of the last tokens are the ending."""


class Requests(msgspec.Struct, frozen=True):
    """A tokenised dataset: all that does not depend on the batch size."""

    item_ids: tuple[str, ...]
    endings: tuple[int, ...]
    """Endings per item; the requests stand in this order."""
    requests: tuple[Request, ...]
    max_length: int
    """Longest input in tokens; longer ones lose their beginning."""


class Batch(msgspec.Struct):
    """One forward, ready to go: everything the device needs in one tensor, so that one copy takes it there."""

    packed: torch.Tensor
    """int64, flat: input ids [B, S] padded on the right with 0; then [N] each: hidden row, target, slot in [R, L].

    Slots are places in a table of one row per request, where a request's log-likelihoods are summed up.
    """
    rows: int
    """B"""
    width: int
    """S"""
    predicted: int
    """N"""
    requests: tuple[int, ...]
    """Numbers of the R requests answered by this batch: more than B where requests share a row."""
    longest: int
    """L"""
    tokens: int
    """Input tokens without padding."""

    @property
    def sizes(self) -> list[int]:
        """Lengths of the four parts of `packed`."""
        return [self.rows * self.width, self.predicted, self.predicted, self.predicted]

    @property
    def padded_tokens(self) -> int:
        """Rows times the longest row: what the devices compute."""
        return self.rows * self.width


class Plan(msgspec.Struct):
    """A dataset at one batch size, in the order it is run: longest rows first."""

    requests: Requests
    batches: list[Batch]
    sha256: str
    """Item ids, order and shapes of the batches."""

    @property
    def sequences(self) -> int:
        """Rows of all forwards."""
        return sum(batch.rows for batch in self.batches)

    @property
    def tokens(self) -> int:
        """Tokens of the longest row, padding included."""
        return max(batch.width for batch in self.batches)

    def pin(self) -> None:
        """Move the batches into page-locked memory, from which a copy to a CUDA device need not be staged."""
        import torch

        if self.batches[0].packed.is_pinned():
            return
        # One allocation for all of them: page-locking each batch by itself takes longer than small forwards do.
        sizes = [batch.packed.numel() for batch in self.batches]
        pinned = torch.cat([batch.packed for batch in self.batches]).pin_memory()
        for batch, packed in zip(self.batches, pinned.split(sizes), strict=True):
            batch.packed = packed


def encode(task: Task, items: Sequence[Item], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Requests:
    """Tokenise every request of every item.

    Context and ending are tokenised together and split where the context alone would end, so that a token may not span
    the border in the context only. The tokenizer's default special tokens are added, unless the text brings them.

    Raises:
        ValueError: An ending, or a context, that comes to no token; an ending longer than `max_length`.
    """
    of_items = [task.requests(item) for item in items]
    pairs = [_spaces_to_ending(*request) for requests in of_items for request in requests]
    tokens = _tokens({text for context, ending in pairs for text in (context, context + ending)}, tokenizer)
    requests = []
    for context, ending in pairs:
        if context:
            whole, border = tokens[context + ending], len(tokens[context])
        else:
            whole, border = _without_context(ending, tokenizer)
        request = Request(tokens=tuple(whole), ending=len(whole) - border)
        if border < 1 or not 1 <= request.ending <= max_length:
            raise ValueError(
                f"ending {ending!r} after {context[-40:]!r} is {request.ending} tokens after {border} of context: "
                f"1 to {max_length} (the model's maximum) after at least 1 are needed"
            )
        requests.append(request)
    return Requests(
        item_ids=tuple(item.id for item in items),
        endings=tuple(map(len, of_items)),
        requests=tuple(requests),
        max_length=max_length,
    )


def _spaces_to_ending(context: str, ending: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + ending


def _tokens(texts: set[str], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Return the tokens of each text, tokenised in two calls since a call for each takes ten times as long."""
    prefix = _prefix(tokenizer)
    start = None if prefix is None else str(tokenizer.decode([prefix]))
    tokens: dict[str, list[int]] = {}
    for has_start in (False, True):
        some = sorted(text for text in texts if (start is not None and text.startswith(start)) == has_start)
        # None of a tokenizer's own settings is touched where it is to add its special tokens.
        special: dict[str, Any] = {"add_special_tokens": False} if has_start else {}
        if some:
            tokens.update(zip(some, tokenizer(some, return_attention_mask=False, **special)["input_ids"], strict=True))
    return tokens


def _without_context(ending: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Return the tokens of an ending after a beginning-of-sequence token, which is the context."""
    prefix = _prefix(tokenizer)
    tokens = tokenizer.encode(ending, add_special_tokens=False)
    if prefix is None:
        raise ValueError(f"ending {ending!r} has no context, and the tokenizer has no bos or eos token to stand for it")
    return (tokens if tokens[:1] == [prefix] else [prefix, *tokens]), 1


def _prefix(tokenizer: PreTrainedTokenizerBase) -> int | None:
    prefix: int | None = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return prefix


def plan(requests: Requests, batch_size: int, *, multiple: int = 1) -> Plan:
    """Lay the requests out in batches: longest first, requests with the same input on one row.

    Args:
        requests: What to run.
        batch_size: Rows of a batch, fewer in the last.
        multiple: Rows are padded to a multiple of so many tokens, up to the longest of the plan; 1 for no longer than
            the longest of their batch.

    Raises:
        ValueError: A batch size below 1 or above the number of requests.
    """
    if not 1 <= batch_size <= len(requests.requests):
        raise ValueError(
            f"batch size {batch_size} is not allowed: 1 to {len(requests.requests)}, the number of sequences"
        )
    shared: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests.requests):
        shared.setdefault(request.tokens[:-1], []).append(number)

    def order(row: list[int]) -> tuple[int, tuple[int, ...]]:
        # max keeps the first of the longest endings: which request leads a row decides its place among equals.
        tokens = max((requests.requests[number] for number in row), key=lambda request: request.ending).tokens
        return -len(tokens), tokens

    rows = sorted(shared.values(), key=order)
    starts = range(0, len(rows), batch_size)
    # No wider than the widest needs: the same number of shapes, and a dataset of one width is not padded at all.
    widest = min(max(map(len, shared)), requests.max_length)
    batches = [_batch(requests, rows[start : start + batch_size], multiple, widest) for start in starts]
    layout = [[batch.rows, batch.width, batch.predicted, batch.requests] for batch in batches]
    sha256 = hashlib.sha256(json.dumps([requests.item_ids, layout]).encode()).hexdigest()
    return Plan(requests=requests, batches=batches, sha256=sha256)


def _batch(requests: Requests, rows: list[list[int]], multiple: int, widest: int) -> Batch:
    import torch

    inputs = [requests.requests[row[0]].tokens[-(requests.max_length + 1) :][:-1] for row in rows]
    numbers = tuple(number for row in rows for number in row)
    longest_row = max(map(len, inputs))
    width = min(-(-longest_row // multiple) * multiple, widest)
    longest = max(requests.requests[number].ending for number in numbers)
    ids, hidden, targets, slots = array("q"), array("q"), array("q"), array("q")
    answered = 0
    for place, (row, tokens) in enumerate(zip(rows, inputs, strict=True)):
        ids.extend(tokens + (0,) * (width - len(tokens)))
        end = place * width + len(tokens)
        for request in map(requests.requests.__getitem__, row):
            hidden.extend(range(end - request.ending, end))
            targets.extend(request.tokens[-request.ending :])
            slots.extend(range(answered * longest, answered * longest + request.ending))
            answered += 1
    return Batch(
        packed=torch.frombuffer(ids + hidden + targets + slots, dtype=torch.int64),
        rows=len(rows),
        width=width,
        predicted=len(hidden),
        requests=numbers,
        longest=longest,
        tokens=sum(map(len, inputs)),
    )
