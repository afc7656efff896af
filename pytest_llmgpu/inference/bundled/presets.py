"""Architectures by name, for random weights: the shapes of the published LLaMA models, without a download."""

from __future__ import annotations

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
    "llama-13b": {
        **_LLAMA,
        "hidden_size": 5120,
        "intermediate_size": 13_824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    # It has 32.5 billion parameters. The paper names it 33B, its first release 30b.
    "llama-30b": {
        **_LLAMA,
        "hidden_size": 6656,
        "intermediate_size": 17_920,
        "num_hidden_layers": 60,
        "num_attention_heads": 52,
        "num_key_value_heads": 52,
    },
    "llama-65b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 22_016,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "rms_norm_eps": 1e-5,
    },
    # Four query heads share a key and value head.
    "llama-3-8b": {
        **_LLAMA,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
}
"""The name of each preset to its fields of `transformers.LlamaConfig`.

Source: table 2 of "LLaMA: Open and Efficient Foundation Language Models"; for llama-3-8b, table 3 of "The Llama 3 Herd
of Models"; and the configurations published with them.
"""
