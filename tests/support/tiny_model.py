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


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
_LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 24}
_MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "phi3": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS},
    "deepseek_v3": {**_EXPERTS, **_LATENT, **_GROUPS},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **_MIXED},
    "gemma3_text": _MIXED,
    "qwen3_next": {"num_experts": 4, **_EXPERTS, **_LINEAR, "layer_types": ["linear_attention", "full_attention"]},
}
"""The type of each model to fields of its config, of which the attention and the experts decide the tokens."""


def architecture(model_type: str) -> dict[str, Any]:
    """Return the config of a model of two layers, of one of `ARCHITECTURES`."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    own = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 2048, "initializer_range": 0.3}
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 256}
    return {"model_type": model_type, **sizes, **own, **tokens, **ARCHITECTURES[model_type]}


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
