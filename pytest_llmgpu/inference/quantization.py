"""Quantised weights: what the names of `--llmgpu-quantization` stand for, and the real bytes of such weights.

transformers quantises a checkpoint while it is loaded, by torchao; random weights are quantised by the same calls. Its
rules decide what is quantised: weights of linear layers, not embeddings, the output head and experts in one tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, TorchAoConfig

# By default torchao turns on inductor's search by coordinate descent for the whole process: under `compile` LLaMA-7B in
# fp8 did not warm up within 90 s on an H200.
_PLAIN: dict[str, Any] = {"set_inductor_config": False}

CONFIGS: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "int8": lambda ao: ao.Int8WeightOnlyConfig(**_PLAIN),
    "int8-dynamic": lambda ao: ao.Int8DynamicActivationInt8WeightConfig(**_PLAIN),
    # The default packing needs a library more; this one needs torch alone.
    "int4": lambda ao: ao.Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d", **_PLAIN),
    "fp8-weight": lambda ao: ao.Float8WeightOnlyConfig(**_PLAIN),
    # One scale for each token: with one for all of a batch, the answers would depend on the batch.
    "fp8": lambda ao: ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow(), **_PLAIN),
}
"""Name to what returns the settings; its argument is torchao.quantization."""

_TRIED = "_hf_quantized_needs_local_tp"
"""transformers sets it on each module whose weights are quantised, since tensor parallelism needs it."""


def of_checkpoint(fields: dict[str, Any]) -> str | None:
    """Return the quantisation that a config.json describes, such as `fp8-checkpoint`; None for plain weights."""
    for part in (fields, fields.get("text_config")):
        found = part.get("quantization_config") if isinstance(part, dict) else None
        if found:
            # Old files of bitsandbytes name no method.
            method = found.get("quant_method") if isinstance(found, dict) else None
            return f"{method or 'bitsandbytes'}-checkpoint"
    return None


def settings(name: str | None) -> TorchAoConfig | None:
    """Return what `from_pretrained` of transformers takes; None for plain weights and for those of a checkpoint."""
    if name not in CONFIGS:
        return None
    import torchao.quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(CONFIGS[name](torchao.quantization))


def attempt(device: str, dtype: str, name: str) -> None:
    """Quantise a small layer and run it. It raises whatever torchao or a kernel raises."""
    import torch
    import torchao.quantization

    layer = torch.nn.Linear(256, 256, bias=False, dtype=getattr(torch, dtype), device=device)
    if (config := CONFIGS[name](torchao.quantization)) is not None:
        torchao.quantization.quantize_(layer, config)
    with torch.inference_mode():
        layer(torch.ones(32, 256, dtype=getattr(torch, dtype), device=device))


def prepare(model: PreTrainedModel, name: str | None) -> None:
    """Let `convert` quantise a model without weights, by the calls of transformers' `from_pretrained`."""
    chosen = settings(name)
    if chosen is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer: Any = AutoHfQuantizer.from_config(chosen, pre_quantized=False)
    quantizer.validate_environment(device_map=None)
    quantizer.preprocess_model(model)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer


def convert(model: torch.nn.Module, name: str) -> bool:
    """Quantise a parameter of a prepared model once it is set; return whether it is one that is quantised."""
    from torch.distributed.tensor import DTensor

    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None or not quantizer.param_needs_quantization(model, name):
        return False
    values: Any = model.get_parameter(name).data
    if isinstance(values, DTensor):  # each rank quantises its own part
        values = values.to_local()
    quantizer.get_quantize_ops().convert({name: values}, model=model, full_layer_name=name, missing_keys=set())
    return True


def stored(model: Any, world_size: int) -> dict[str, tuple[str, int]] | None:
    """Return name to kind and bytes of each tensor of a quantised decoder; None for a model of plain weights.

    They are those that a checkpoint would have, also scales that are no parameters, of all ranks together, without
    input embeddings and output head. A kind is the class of a quantised tensor, or a dtype. ValueError if weights are
    plain that should be quantised: torchao leaves those whose shape does not allow it.
    """
    from torch.distributed.tensor import DTensor

    if getattr(model, "hf_quantizer", None) is None:
        return None
    apart = {id(part) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    found = {}
    for path, module in model.named_modules():
        tensors: dict[str, Any] = {}
        if id(module) not in apart:
            # bitsandbytes adds its scales, which are attributes of its weights.
            module._save_to_state_dict(tensors, f"{path}.", keep_vars=True)  # noqa: SLF001 - not those of submodules
        for name, tensor in tensors.items():
            is_plain = isinstance(tensor, DTensor) or not hasattr(tensor, "__tensor_flatten__")
            split = getattr(module, _TRIED, False)
            if split and is_plain and name == f"{path}.weight" and tensor.is_floating_point() and tensor.itemsize > 1:
                shape = " x ".join(map(str, tensor.shape))
                raise ValueError(f"{name} ({shape}) was not quantised: choose another --llmgpu-quantization")
            kind = str(tensor.dtype).removeprefix("torch.") if is_plain else type(tensor).__name__
            # A rank has a part of each quantised weight, and such a part is no DTensor, which has the size of all.
            parts = world_size if split and not isinstance(tensor, DTensor) else 1
            found[name] = kind, parts * (tensor.numel() * tensor.element_size() if is_plain else _bytes(tensor))
    return found


def _bytes(tensor: torch.Tensor) -> int:
    """Return the real size of a tensor: `nbytes` of torchao's tensors is that of the plain one."""
    parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return sum(_bytes(getattr(tensor, part)) for part in parts) or tensor.numel() * tensor.element_size()


def describe(stored: dict[str, tuple[str, int]] | None) -> dict[str, str]:
    """Return how much of the bytes of `stored` each kind has, `quantization: Int8Tensor 99 %, bfloat16 1 %`."""
    sizes: Counter[str] = Counter()
    for kind, size in (stored or {}).values():
        sizes[kind] += size
    shares = [f"{kind} {100 * size / sizes.total():.0f} %" for kind, size in sizes.most_common()]
    return {"quantization": ", ".join(shares)} if shares else {}
