"""Architectures by name, for random weights: the shapes of the published LLaMA models, with nothing to download."""

from __future__ import annotations

__all__ = ["PRESETS"]

_LLAMA: dict[str, object] = {
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

PRESETS: dict[str, dict[str, object]] = {
    "llama-7b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    # 32.5 billion parameters, published as 33B and named 30b in its first release.
    "llama-30b": {
        **_LLAMA,
        "hidden_size": 6656,
        "intermediate_size": 17_920,
        "num_hidden_layers": 60,
        "num_attention_heads": 52,
        "num_key_value_heads": 52,
    },
}
"""Preset's name to fields of `transformers.LlamaConfig`.

Source: table 2 of "LLaMA: Open and Efficient Foundation Language Models", and the configurations published with it.
"""
