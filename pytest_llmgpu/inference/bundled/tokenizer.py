"""Byte-level BPE tokenizers, trained on text at hand, that any UTF-8 text goes through and comes back from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

__all__ = ["BOS", "EOS", "save_tokenizer"]

BOS = "<|bos|>"
"""First token of every sequence, as LLaMA has it; id 0."""

EOS = "<|eos|>"
"""Id 1."""


def save_tokenizer(texts: Iterable[str], vocabulary_size: int, directory: Path) -> int:
    """Train a tokenizer and write it where `AutoTokenizer.from_pretrained(directory)` finds it.

    Args:
        texts: What to train on; equal texts in equal order give equal files.
        vocabulary_size: At most this many tokens, the 256 bytes and 2 special tokens included.
        directory: Existing directory for tokenizer.json and tokenizer_config.json.

    Returns:
        The number of tokens, fewer than asked for where the texts have no more pairs to merge.

    Raises:
        ValueError: The vocabulary cannot hold every byte.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + 2
    if vocabulary_size < smallest:
        raise ValueError(f"vocabulary size {vocabulary_size} cannot hold every byte: at least {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary_size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        # The class that reads tokenizer.json as it stands; LlamaTokenizer would put its own pre-tokenizer in.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return int(tokenizer.get_vocab_size())
