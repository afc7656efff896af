"""Accuracy of the bundled model on the bundled items, as JSON: `python -m bundled_model.evaluate [MODEL_DIR]`.

This reference is separate from the scoring that the plugin measures, and as simple as possible: all logits, padding
on the right with id 0, no attention mask.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bundled_model.dataset import Item, evaluation_items
from pytest_llmgpu.inference.bundled import MODEL_DIRECTORY

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

_ROWS = 64
"""The sequences of a forward; an item is 4."""
TRUNCATED_TOKENS = 23
"""The context length in tokens at which the accuracy falls to chance."""


class Score(NamedTuple):
    """The accuracy of a model on some items."""

    acc: float
    """The fraction of items whose right ending has the largest log-likelihood."""
    acc_norm: float
    """The fraction of items whose right ending has the largest log-likelihood per character."""
    margins: list[float]
    """The log-likelihood of the right ending minus that of the best wrong one [items]."""
    loglikelihoods: list[float]
    """The log-likelihood of every ending [items * 4]."""


def load(directory: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return the model, in float32, and the tokenizer of a directory, without the network."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = LlamaForCausalLM.from_pretrained(directory, local_files_only=True, dtype="float32")
    return model.eval(), tokenizer


def score(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, items: list[Item], context_tokens: int | None = None
) -> Score:
    """Score items as HellaSwag is scored.

    Args:
        model: On the CPU.
        tokenizer: Its default special tokens are used.
        items: At least one.
        context_tokens: Keep only this many last tokens of each context; None keeps all.
    """
    requests = []
    for item in items:
        context = tokenizer(item.prompt)["input_ids"]
        kept = context if context_tokens is None else context[-context_tokens:]
        for ending in item.endings:
            whole = tokenizer(f"{item.prompt} {ending}")["input_ids"]
            requests.append((kept, whole[len(context) :]))
    loglikelihoods: list[float] = []
    for start in range(0, len(requests), _ROWS):
        loglikelihoods += _loglikelihoods(model, requests[start : start + _ROWS])
    hits, hits_norm, margins = 0, 0, []
    for number, item in enumerate(items):
        values = loglikelihoods[4 * number : 4 * number + 4]
        by_character = [value / len(ending) for value, ending in zip(values, item.endings, strict=True)]
        hits += values.index(max(values)) == item.label
        hits_norm += by_character.index(max(by_character)) == item.label
        right = values.pop(item.label)
        margins.append(right - max(values))
    return Score(hits / len(items), hits_norm / len(items), margins, loglikelihoods)


def _loglikelihoods(model: LlamaForCausalLM, requests: list[tuple[list[int], list[int]]]) -> list[float]:
    """Return the log-likelihood of each continuation given its context, from one forward."""
    import torch

    rows = [context + continuation[:-1] for context, continuation in requests]
    longest = max(map(len, rows))
    input_ids_BS = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    with torch.inference_mode():
        logprobs_BSV = model(input_ids_BS, use_cache=False).logits.log_softmax(-1)
    return [
        logprobs_SV[len(context) - 1 : len(row)].gather(1, torch.tensor(continuation)[:, None]).sum().item()
        for logprobs_SV, row, (context, continuation) in zip(logprobs_BSV, rows, requests, strict=True)
    ]


def evaluate(directory: Path, *, write: bool = False) -> dict[str, object]:
    """Return the accuracies of a model on the evaluation items, with the whole and with a truncated context.

    With `write` the log-likelihoods are written as little-endian float32 to the directory of the model.
    """
    model, tokenizer = load(directory)
    items = evaluation_items()
    full = score(model, tokenizer, items)
    if write:
        values = struct.pack(f"<{len(full.loglikelihoods)}f", *full.loglikelihoods)
        (directory / "loglikelihoods.f32").write_bytes(values)
    truncated = score(model, tokenizer, items, context_tokens=TRUNCATED_TOKENS)
    return {
        "items": len(items),
        "acc": full.acc,
        "acc_norm": full.acc_norm,
        "smallest_margin": min(map(abs, full.margins)),
        "truncated": {"tokens": TRUNCATED_TOKENS, "acc": truncated.acc, "acc_norm": truncated.acc_norm},
    }


if __name__ == "__main__":
    print(json.dumps(evaluate(Path(sys.argv[1]) if sys.argv[1:] else MODEL_DIRECTORY), indent=2))
