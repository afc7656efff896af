"""A tiny model and dataset, for tests that do not depend on the model's answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_llmgpu.inference.bundled import save_tokenizer
from pytest_llmgpu.inference.models import ModelSource

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
"""Those of a small LLaMA."""
ITEMS = 6
SEQUENCES = 4 * ITEMS


def write_dataset(path: Path) -> None:
    """Write six items in HellaSwag's format."""
    records = [
        {
            "ind": number,
            "activity_label": "Counting",
            "ctx": f"Someone counts to {number} and says the number {number}. Then they",
            "endings": ["stop.", "go on counting upwards.", f"say {number} again, louder.", "leave the room"],
            "label": str(number % 4),
        }
        for number in range(ITEMS)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_model(directory: Path) -> None:
    """Write a random one-layer LLaMA with its tokenizer."""
    directory.mkdir()
    save_tokenizer(["Someone counts and says the number. Then they stop."], 300, directory)
    random_model(vocab_size=300, max_position_embeddings=256).save_pretrained(directory)


def source(config: dict[str, Any], directory: Path | None = None, **fields: Any) -> ModelSource:
    """Return the source of a model: of the weights in a directory, or of random weights."""
    given: dict[str, Any] = {
        "name": "random" if directory is None else directory.name,
        "directory": None if directory is None else str(directory),
        "config": config,
        "revision": None,
        "load_format": "dummy" if directory is None else "auto",
        "tokenizer_directory": "",
        "tokenizer_sha256": "",
    }
    return ModelSource(**given | fields)


def sensitive_config(**fields: Any) -> LlamaConfig:
    """Return a small LLaMA whose attention matters with random weights."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(**sizes | {"vocab_size": 300, "initializer_range": 0.12} | fields)


def random_model(**fields: Any) -> LlamaForCausalLM:
    """Return a random LLaMA, of one layer and with a vocabulary of 40 unless fields of its config have others."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1, "vocab_size": 40, **fields})
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model
