"""Batches of token ids: a dataset is tokenised once (`encode`) and split into batches per batch size (`plan`).

The batches are the tensors that lm-evaluation-harness 0.4.13 passes to the model (`_encode_pair` in
`lm_eval/api/model.py`, `_loglikelihood_tokens` in `lm_eval/models/huggingface.py`); a test compares the two.

Shapes: B rows of a batch, S tokens of its longest row, N predicted tokens, R requests, L tokens of the longest ending.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_llmgpu.inference.tasks.protocol import Item, Task

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_MOST_PADDING = 0.02
"""Padding to few shapes may add this fraction to the cost of a plan."""

_WEIGHTS_TOKENS = 160
"""To read the weights takes as long as to compute this many tokens: 660 TFLOP/s over 4.1 TB/s (measured on H200), at 2
bytes and 2 FLOPs for each parameter."""

_LINE_TOKENS = 512
"""Prompts share a line up to about so many tokens, and longer ones share none: the attention computes all scores of a
line, and its mask has the square of the length."""

_LEAST_SAVED = 0.1
"""Prompts share lines where that leaves out this fraction of the tokens that a batch has with padding."""


class Request(msgspec.Struct, frozen=True):
    """The tokens of one context and its ending."""

    tokens: tuple[int, ...]
    """The tokens of the context, then those of the ending, not truncated. A tokenizer may merge letters over the border
    of both texts: then these are not the tokens of the joined text (see `encode`)."""
    ending: int
    """The number of tokens of the ending, which are the last ones."""


class Requests(msgspec.Struct, frozen=True):
    """A tokenised dataset, without anything that depends on the batch size."""

    item_ids: tuple[str, ...]
    """The ids of the items in the order of the dataset."""
    endings: tuple[int, ...]
    """The number of requests per item, in the order of `item_ids`."""
    requests: tuple[Request, ...]
    """The requests of all items, item by item."""
    max_length: int
    """The maximum input length in tokens; longer inputs lose their first tokens."""
    new_tokens: int = 0
    """The number of tokens that are generated after each request; 0 if requests are scored."""


class Batch(msgspec.Struct):
    """The data of one forward, in one tensor, so that one copy moves it to the device."""

    packed: torch.Tensor
    """A flat int64 tensor: input ids [B, S], padded on the right with 0, then three parts [N]: rows, targets, slots.

    A row is an index into the hidden states [B * S], a target is a token id. A slot is an index into a table [R * L],
    in which the log-probabilities of each request are summed.
    """
    rows: int
    """The number of rows, B."""
    width: int
    """The number of tokens of the longest row, S."""
    predicted: int
    """The number of predicted tokens, N."""
    requests: tuple[int, ...]
    """The indices of the R requests in this batch: more than B if requests share a row."""
    longest: int
    """The number of tokens of the longest ending, L."""
    tokens: int
    """The number of input tokens without padding."""
    lines: tuple[int, int] | None = None
    """The number of lines in which the forward has the rows, one after the other, and the tokens of a line; None for a
    line for each row."""

    @property
    def sizes(self) -> list[int]:
        """The lengths of the four parts of `packed`."""
        return [self.rows * self.width, self.predicted, self.predicted, self.predicted]

    @property
    def shape(self) -> tuple[int, int]:
        """The lines of the forward, and the tokens of each."""
        return self.lines or (self.rows, self.width)

    @property
    def padded_tokens(self) -> int:
        """The number of input tokens with padding: the devices compute all of them."""
        return math.prod(self.shape)


class Plan(msgspec.Struct):
    """The batches of a dataset at one batch size, in the order in which they run: longest rows first."""

    requests: Requests
    """The requests of the dataset."""
    batches: list[Batch]
    """The batches in order."""
    sha256: str
    """A hash of the item ids and of the order and shapes of the batches."""

    @property
    def tokens(self) -> int:
        """The number of tokens of the longest row, with padding and with the tokens that are generated."""
        return max(batch.width for batch in self.batches) + self.requests.new_tokens

    def pin(self, device: torch.device) -> None:
        """Move the batches to page-locked memory, from which a copy to a CUDA device needs no staging buffer."""
        import torch

        if device.type != "cuda" or self.batches[0].packed.is_pinned():
            return
        # One allocation for all batches: page-locking each batch takes longer than a small forward.
        sizes = [batch.packed.numel() for batch in self.batches]
        pinned = torch.cat([batch.packed for batch in self.batches]).pin_memory()
        for batch, packed in zip(self.batches, pinned.split(sizes), strict=True):
            batch.packed = packed


def encode(
    task: Task,
    items: Sequence[Item],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    add_bos: bool | None = None,
) -> Requests:
    """Tokenise every request of every item.

    As in lm-evaluation-harness, the input is the context's own tokens, then the tokens of the joined text from that
    number on. The tokenizer adds its default special tokens, unless the text begins with one.

    With `add_bos` texts begin with the tokenizer's special tokens, and with None by its own setting; it is loaded with
    the same value. ValueError if a context or an ending has no token, or an ending more than `max_length` tokens.
    """
    of_items = [task.requests(item) for item in items]
    pairs = []
    for context, ending in (request for requests in of_items for request in requests):
        kept = context.rstrip()
        pairs.append((kept, context[len(kept) :] + ending))  # spaces between them belong to the ending
    tokens = _tokens({text for context, ending in pairs for text in (context, context + ending)}, tokenizer, add_bos)
    requests = []
    for context, ending in pairs:
        if context:
            given = tokens[context]
            asked = tokens[context + ending][len(given) :]
        else:
            prefix = _prefix(tokenizer)  # stands for the empty context
            if prefix is None:
                lacking = "and the tokenizer has no bos or eos token to stand for it"
                raise ValueError(f"ending {ending!r} has no context, {lacking}")
            given, asked = [prefix], tokenizer.encode(ending, add_special_tokens=False)
            asked = asked[1:] if asked[:1] == given else asked
        if not given or not 1 <= len(asked) <= max_length:
            found = f"{len(asked)} tokens after {len(given)} of context"
            needed = f"1 to {max_length} (the model's maximum) after at least 1 are needed"
            raise ValueError(f"ending {ending!r} after {context[-40:]!r} is {found}: {needed}")
        requests.append(Request(tokens=(*given, *asked), ending=len(asked)))
    return Requests(
        item_ids=tuple(item.id for item in items),
        endings=tuple(map(len, of_items)),
        requests=tuple(requests),
        max_length=max_length,
    )


def encode_prompts(
    items: Sequence[Item],
    tokenizer: PreTrainedTokenizerBase,
    *,
    most_tokens: int,
    new_tokens: int,
    add_bos: bool | None = None,
) -> Requests:
    """Tokenise the context of every item and keep its last tokens, `most_tokens` at most (see `encode`).

    A request has one more token in the place of an ending, whose value has no effect: its row of the hidden states is
    the one that predicts the first new token. ValueError if a prompt has no token.
    """
    tokens = _tokens({item.context for item in items}, tokenizer, add_bos)
    empty = next((item for item in items if not tokens[item.context]), None)
    if empty is not None:
        raise ValueError(f"prompt {empty.id!r} has no token: at least 1 is needed")
    return Requests(
        item_ids=tuple(item.id for item in items),
        endings=(1,) * len(items),
        requests=tuple(Request(tokens=(*tokens[item.context][-most_tokens:], 0), ending=1) for item in items),
        max_length=most_tokens,
        new_tokens=new_tokens,
    )


def _tokens(texts: set[str], tokenizer: PreTrainedTokenizerBase, add_bos: bool | None) -> dict[str, list[int]]:
    """Return the tokens of each text. Two calls tokenise all of them: one call per text takes ten times as long."""
    prefix = _prefix(tokenizer)
    start = None if prefix is None else str(tokenizer.decode([prefix]))
    tokens: dict[str, list[int]] = {}
    for has_start in (False, True):
        some = sorted(text for text in texts if (start is not None and text.startswith(start)) == has_start)
        # Without the argument the tokenizer adds its special tokens by its own settings.
        added = False if has_start else add_bos
        special: dict[str, Any] = {} if added is None else {"add_special_tokens": added}
        if some:
            tokens.update(zip(some, tokenizer(some, return_attention_mask=False, **special)["input_ids"], strict=True))
    return tokens


def _prefix(tokenizer: PreTrainedTokenizerBase) -> int | None:
    prefix: int | None = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return prefix


def plan(
    requests: Requests, batch_size: int, *, few_shapes: bool = False, share: bool = True, pack: bool = False
) -> Plan:
    """Split the requests into batches: longest first, scored requests with the same input on one row if they may share.

    The last batch may have fewer rows. Rows are padded to the longest one of their batch. With `few_shapes` some are
    padded further, so that the forwards have as few shapes as 2 % more time allow: each shape is warmed up, or recorded
    as a CUDA graph. With `pack` several rows may share a line in place of the padding (see `Batch.lines`).
    """
    shared: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests.requests):
        key = request.tokens[:-1] if share and not requests.new_tokens else (number,)
        shared.setdefault(key, []).append(number)

    def order(row: list[int]) -> tuple[int, tuple[int, ...]]:
        # max returns the first request with the longest ending; it decides the order of rows of equal length.
        tokens = max((requests.requests[number] for number in row), key=lambda request: request.ending).tokens
        return -len(tokens), tokens

    rows = sorted(shared.values(), key=order)
    chunks = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    widths = [min(len(requests.requests[chunk[0][0]].tokens) - 1, requests.max_length) for chunk in chunks]
    if few_shapes:
        # A last batch with fewer rows keeps its width: its shape is its own.
        alike = [width for chunk, width in zip(chunks, widths, strict=True) if len(chunk) == len(chunks[0])]
        allowed = _MOST_PADDING * cost(zip(map(len, chunks), widths, strict=True)) / len(chunks[0])
        groups = _fewest_groups(sorted(Counter(alike).items(), reverse=True), int(allowed))
        padded = {width: group[0] for group in groups for width in group}
        widths = [padded[width] for width in alike] + widths[len(alike) :]
    batches = [_batch(requests, chunk, width) for chunk, width in zip(chunks, widths, strict=True)]
    for shape in {(batch.rows, batch.width) for batch in batches} if pack else ():
        _pack(requests, [batch for batch in batches if (batch.rows, batch.width) == shape])
    layout = [[one.rows, one.width, one.predicted, one.requests, *(one.lines or ())] for one in batches]
    generated = [requests.new_tokens] if requests.new_tokens else []
    sha256 = hashlib.sha256(json.dumps([requests.item_ids, layout, *generated]).encode()).hexdigest()
    return Plan(requests=requests, batches=batches, sha256=sha256)


def cost(shapes: Iterable[tuple[int, int]]) -> int:
    """Return the time of forwards in tokens, from the rows and tokens per row of each.

    The weights are read once per forward.
    """
    return sum(rows * width + _WEIGHTS_TOKENS for rows, width in shapes)


def _pack(requests: Requests, batches: Sequence[Batch]) -> None:
    """Give the batches of one shape their lines, all of one length, where these save enough."""
    import torch

    rows, width, most = batches[0].rows, batches[0].width, max(batch.tokens for batch in batches)
    if width > _LINE_TOKENS:
        return
    least = most / _LINE_TOKENS
    lines = next(lines for lines in range(1, rows + 1) if rows % lines == 0 and lines >= least)
    tokens = [[len(requests.requests[number].tokens) - 1 for number in batch.requests] for batch in batches]
    lengths_of_lines = torch.tensor(tokens).clamp(max=width)[:, rows_of_lines(torch.arange(rows), lines)].sum(-1)
    length = -(-int(lengths_of_lines.max()) // 8) * 8  # fast kernels of attention take masks of such widths alone
    if lines * length <= (1 - _LEAST_SAVED) * rows * width:
        for batch in batches:
            batch.lines = lines, length


def rows_of_lines(rows_B: torch.Tensor, lines: int) -> torch.Tensor:
    """Return which rows each line has, [lines, rows of a line]: to and fro, since the longest rows come first."""
    turns = rows_B.view(-1, lines).clone()
    turns[1::2] = turns[1::2].flip(1)
    return turns.t()


def _fewest_groups(counts: Sequence[tuple[int, int]], most: int) -> list[list[int]]:
    """Split widths into as few groups as possible, each padded to its first width, by at most `most` tokens in all.

    Of splits into equally many groups, that with the fewest tokens, by an exact dynamic programme: one pass over the
    widths for each group. `counts` has the number of batches of each width, in descending order.
    """
    numbers = list(accumulate((count for _, count in counts), initial=0))
    tokens = list(accumulate((width * count for width, count in counts), initial=0))

    def padded(begin: int, end: int) -> int:
        """Return the tokens of the widths before `end` where those from `begin` on are the last group."""
        return least[begin] + counts[begin][0] * (numbers[end] - numbers[begin])

    def last_win(one: int, later: int) -> int:
        """Return the most batches at the end for which a begin needs no more tokens than a later one."""
        return (padded(later, 0) - padded(one, 0)) // (counts[one][0] - counts[later][0])

    # The fewest tokens of the widths before each end, in so many groups as `begins` has lists.
    least = [counts[0][0] * number for number in numbers]
    begins = [[0] * (len(counts) + 1)]
    while least[-1] - tokens[-1] > most:
        longer, begin_of = least[:], begins[-1][:]
        best: deque[int] = deque()  # begins of the last group, each of which is the best one for some ends from here on
        for end in range(len(begins) + 1, len(counts) + 1):
            while len(best) > 1 and last_win(best[-2], best[-1]) >= last_win(best[-1], end - 1):
                best.pop()
            best.append(end - 1)
            while len(best) > 1 and padded(best[1], end) < padded(best[0], end):
                best.popleft()
            longer[end], begin_of[end] = padded(best[0], end), best[0]
        least = longer
        begins.append(begin_of)
    groups, end = [], len(counts)
    for begin_of in reversed(begins):
        groups.append([width for width, _ in counts[begin_of[end] : end]])
        end = begin_of[end]
    return groups


def _batch(requests: Requests, rows: list[list[int]], width: int) -> Batch:
    import torch

    inputs = [requests.requests[row[0]].tokens[-(requests.max_length + 1) :][:-1] for row in rows]
    numbers = tuple(number for row in rows for number in row)
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
