"""What transformers makes of a model, found out from its config in a child process before any rank starts.

`python -m pytest_llmgpu.inference.model_facts` is that process: pytest's own must not pay for the import of torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import Any

import msgspec

from pytest_llmgpu import processes
from pytest_llmgpu.inference.model_files import is_quantized
from pytest_llmgpu.inference.models import ModelSource

SPLIT_COUNTS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "intermediate_size": "columns of the feed-forward layers",
}
"""Counts of the decoder that tensor parallelism splits: the names that transformers gives them in every config."""

_OF_A_STEP = ("past_key_values", "position_ids")


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of transformers."""

    has_plan: bool
    """True if transformers can split the layers over devices by tensor parallelism."""
    has_sdpa: bool = True
    """True if transformers has attention by torch's `scaled_dot_product_attention`, which it then chooses."""
    without: str | None = None
    """An argument that decode steps with a KV cache need and the model does not take; None if it takes all of them."""
    counts: dict[str, int] = {}
    """Those of `SPLIT_COUNTS` that the decoder has, also where its config leaves them to its class."""
    refusal: str | None = None
    """The reason why the model cannot be loaded; None if its config is no such reason."""


def ask(source: ModelSource) -> ModelFacts:
    """Return the facts of a model.

    A LLaMA that is not quantised, such as the bundled model, needs no child process, which takes seconds.

    Raises:
        ValueError: transformers does not know the architecture, or the library of its quantisation is not installed.
    """
    is_llama = source.config.get("model_type", "llama") == "llama" and not is_quantized(source.config)
    if source.directory is None or is_llama:
        return ModelFacts(has_plan=True)
    found = _of_directory(source.directory)
    if found.refusal is not None:
        raise ValueError(f"--llmgpu-model={source.name}: transformers cannot load it: {found.refusal}")
    return found


@functools.cache
def _of_directory(directory: str) -> ModelFacts:
    answer = processes.ask("pytest_llmgpu.inference.model_facts", directory, library="transformers")
    return msgspec.json.decode(answer, type=ModelFacts)


def _facts(directory: str) -> ModelFacts:
    """Return the facts of the model in a directory. This runs in the child process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        decoder = config.get_text_config(decoder=True)
        quantization = getattr(config, "quantization_config", None) or getattr(decoder, "quantization_config", None)
        if quantization is not None:
            _check_quantization(quantization)
    except (ImportError, OSError, ValueError) as error:
        return ModelFacts(has_plan=False, refusal=" ".join(str(error).split())[:500])
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)  # noqa: SLF001 - no public look-up
    forward = getattr(model_class, "forward", None)
    taken = () if forward is None else inspect.signature(forward).parameters
    counts = {name: getattr(decoder, name, None) for name in SPLIT_COUNTS}
    return ModelFacts(
        # The plan of a class alone splits the output head and no layer.
        has_plan=bool(config.base_model_tp_plan or decoder.base_model_tp_plan),
        has_sdpa=bool(getattr(model_class, "_supports_sdpa", True)),
        without=next((name for name in _OF_A_STEP if taken and name not in taken), None),
        counts={name: count for name, count in counts.items() if isinstance(count, int)},
    )


def _check_quantization(settings: dict[str, Any]) -> None:
    """Raise ImportError if the library of a quantisation is not installed."""
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    if AutoHfQuantizer.supports_quant_method(settings):  # transformers loads others as if they were not quantised
        quantizer = AutoHfQuantizer.from_config(AutoQuantizationConfig.from_dict(settings), pre_quantized=True)
        with contextlib.suppress(RuntimeError, ValueError):  # on the devices, which are those of the ranks
            quantizer.validate_environment(device_map=None)


if __name__ == "__main__":
    print(msgspec.json.encode(_facts(sys.argv[1])).decode())
