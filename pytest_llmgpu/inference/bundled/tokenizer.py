"""Byte-level BPE tokenizers that are trained on given texts. They encode and decode any UTF-8 text without loss."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

BOS = "<|bos|>"
"""The first token of every sequence, as in LLaMA; its id is 0."""

EOS = "<|eos|>"
"""The end-of-sequence token; its id is 1."""


def save_tokenizer(texts: Iterable[str], vocabulary_size: int, directory: Path) -> int:
    """Train a tokenizer and write it, so that `AutoTokenizer.from_pretrained(directory)` loads it.

    Args:
        texts: The training texts; equal texts in equal order give equal files.
        vocabulary_size: The maximum number of tokens, with the 256 bytes and 2 special tokens.
        directory: An existing directory for tokenizer.json and tokenizer_config.json.

    Returns:
        The number of tokens; below `vocabulary_size` if the texts have no more pairs to merge.

    Raises:
        ValueError: The vocabulary is too small for all bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + 2
    if vocabulary_size < smallest:
        raise ValueError(f"vocabulary size {vocabulary_size} is too small for all bytes: at least {smallest} is needed")
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
        # This class uses tokenizer.json unchanged; LlamaTokenizer would add its own pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return int(tokenizer.get_vocab_size())
