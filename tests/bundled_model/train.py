"""Train the bundled model and its tokenizer: `tox -e train -- OUT_DIR`, or `python -m bundled_model.train OUT_DIR`.

All random numbers come from seeds, but sums of floats differ between machines and versions of torch. A rebuilt model
is as accurate as the committed one and not bit-identical. After a rebuild, copy the hash and the accuracy from the JSON
that this script prints to `tests/inference/bundled/test_bundled.py` and `pytest_llmgpu.inference.bundled`.

The task needs two attention heads in sequence: one copies its predecessor to each token, the next goes from a name to
the token whose predecessor is that name. Without help a model stays at chance for thousands of steps before it learns
both. A loss on the attention of half the heads therefore guides them; a few hundred steps are then enough.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bundled_model.dataset import Item, training_items
from bundled_model.evaluate import evaluate
from pytest_llmgpu.inference.bundled import save_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

_NONE = -100
"""The target that torch's cross entropy ignores."""

_TINY = 1e-9
"""Added to an attention of 0, so that its logarithm is finite."""


SEED = 1
STEPS = 400
ROWS = 32
"""The sequences per step."""
_VOCABULARY = 896
_TOKENIZER_ITEMS = 4000
_LEARNING_RATE = 2e-3
_WARMUP_STEPS = 30
_TEXT_WEIGHT = 0.1
"""The weight of the loss on every token; the loss on the answers has weight 1."""
_ATTENTION_WEIGHT = 0.1
"""The weight of the loss on the attention of the guided heads."""
_GUIDED_HEADS = 4
"""The guided heads per layer, of 8."""


def _text(item: Item, rng: random.Random) -> str:
    """Return the item with its right ending, then the other three facts as further questions and answers."""
    others = rng.sample([fact for fact in item.facts if fact is not item.asked], len(item.facts) - 1)
    return " ".join([f"{item.prompt} {item.endings[item.label]}", *(f"{fact}." for fact in others)])


def _encode(item: Item, text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the token ids of a text, and the position in the list of each token of an answer (-100 for others)."""
    ids, sources = [tokenizer.bos_token_id], [_NONE]
    things = "|".join(f" {fact.thing}" for fact in item.facts)
    listed: dict[str, int] = {}
    # Each piece begins with its space, so that its tokens are equal to those in the whole text.
    for piece in re.split(f"({things})(?=[,.])", text):
        if not piece:
            continue
        tokens = tokenizer(piece, add_special_tokens=False)["input_ids"]
        if piece in listed:
            sources += range(listed[piece], listed[piece] + len(tokens))
        else:
            listed[piece] = len(ids)
            sources += [_NONE] * len(tokens)
        ids += tokens
    return ids, sources


def batches(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield the batches of the training, one per step, padded on the right.

    A batch has input ids [B, S], the next tokens, and the positions of these in the list; -100 is for no next token,
    and for one that is not part of an answer.
    """
    import torch

    items, rng = training_items(SEED), random.Random(SEED)
    for _ in range(STEPS):
        rows = [_encode(item, _text(item, rng), tokenizer) for item in itertools.islice(items, ROWS)]
        ids_BT, sources_BT = (
            torch.tensor(list(itertools.zip_longest(*column, fillvalue=_NONE))).T for column in zip(*rows, strict=True)
        )
        yield ids_BT[:, :-1].clamp(min=0), ids_BT[:, 1:], sources_BT[:, 1:]


def _new_model() -> LlamaForCausalLM:
    """Return a model with random weights. Heads, head size and vocabulary are multiples of 8, as tp needs."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    # Only this implementation returns its attention.
    model: LlamaForCausalLM = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model


def _losses(
    model: LlamaForCausalLM, input_ids_BS: torch.Tensor, next_ids_BS: torch.Tensor, sources_BS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean losses on the answers, on every token, and on the attention of the guided heads."""
    from torch.nn.functional import cross_entropy

    output = model(input_ids_BS, use_cache=False, output_attentions=True)
    losses_BS = cross_entropy(output.logits.transpose(1, 2), next_ids_BS, reduction="none", ignore_index=_NONE)
    first_BHSS, second_BHSS = (attention[:, :_GUIDED_HEADS] for attention in output.attentions)
    row, position = (sources_BS != _NONE).nonzero(as_tuple=True)
    source = sources_BS[row, position]
    to_predecessor = first_BHSS.diagonal(offset=-1, dim1=2, dim2=3)
    to_source = second_BHSS[row, :, position, source]
    attention_loss = -(to_predecessor + _TINY).log().mean() - (to_source + _TINY).log().mean()
    return losses_BS[row, position].mean(), losses_BS[next_ids_BS != _NONE].mean(), attention_loss


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Train a model in place, and print the losses on stderr every 20 steps."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)

    def rate(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
        return min((step + 1) / _WARMUP_STEPS, cosine)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step, batch in enumerate(batches(tokenizer)):
        answer, text, attention_loss = _losses(model, *batch)
        optimizer.zero_grad()
        (answer + _TEXT_WEIGHT * text + _ATTENTION_WEIGHT * attention_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == STEPS - 1:
            losses = f"answer {answer.item():.3f}, text {text.item():.3f}, attention {attention_loss.item():.3f}"
            print(f"step {step} of {STEPS}: {losses}", file=sys.stderr, flush=True)


def main(directory: Path) -> dict[str, object]:
    """Write the tokenizer and the model, in float16, to a directory; return the values to register."""
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    directory.mkdir(parents=True, exist_ok=True)
    texts = [item.prompt for item in itertools.islice(training_items(SEED), _TOKENIZER_ITEMS)]
    save_tokenizer(texts, _VOCABULARY, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = _new_model()
    train(model, tokenizer)
    model.half().save_pretrained(directory)
    model_sha256 = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    return {"model_sha256": model_sha256, **evaluate(directory, write=True)}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bundled_model.train OUT_DIR")
    print(json.dumps(main(Path(sys.argv[1])), indent=2))
