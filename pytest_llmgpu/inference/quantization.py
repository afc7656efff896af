"""Quantised weights: what the names of `--llmgpu-quantization` stand for, and the real bytes of such weights.

transformers quantises a checkpoint while it is loaded, by torchao; random weights are quantised by the same calls. Its
rules decide what is quantised: the weights of linear layers, not the embeddings, the output head and experts in one
tensor. `python -m pytest_llmgpu.inference.quantization` is the child process that tries the names on a device.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_llmgpu import processes
from pytest_llmgpu.report.text import first_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, TorchAoConfig

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("Int8WeightOnlyConfig", {}),
    "int8-dynamic": ("Int8DynamicActivationInt8WeightConfig", {}),
    # The default packing needs a library more; this one needs torch alone.
    "int4": ("Int4WeightOnlyConfig", {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}),
    "fp8-weight": ("Float8WeightOnlyConfig", {}),
    # One scale for each token: with one for all of a batch, the answers would depend on the batch.
    "fp8": ("Float8DynamicActivationFloat8WeightConfig", {"granularity": "PerRow"}),
}
"""Name to a class of torchao.quantization and its arguments."""

_IN_CHECKPOINT = "-checkpoint"
_TRIED = "_hf_quantized_needs_local_tp"
"""transformers sets it on each module whose weights are quantised, since tensor parallelism needs it."""


def of_checkpoint(fields: dict[str, Any]) -> str | None:
    """Return the quantisation that a config.json describes, such as `fp8-checkpoint`; None for plain weights."""
    for part in (fields, fields.get("text_config")):
        found = part.get("quantization_config") if isinstance(part, dict) else None
        if found:
            # Old files of bitsandbytes name no method.
            method = found.get("quant_method") if isinstance(found, dict) else None
            return f"{method or 'bitsandbytes'}{_IN_CHECKPOINT}"
    return None


def check(name: str | None, device: str, dtype: str) -> None:
    """Refuse a quantisation of the option whose library is missing or that cannot run on this device in this dtype.

    Raises:
        ValueError: The message has the reason, and the names that are possible or the command that installs.
    """
    if name not in CONFIGS:
        return
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(f"--llmgpu-quantization={name} needs torchao: pip install 'pytest-llmgpu[torchao]'")
    reasons = _reasons(device, dtype)
    if name in reasons:
        allowed = ", ".join(["none", *(other for other in CONFIGS if other not in reasons)])
        raise ValueError(
            f"--llmgpu-quantization={name}: {reasons[name]}: allowed here for {dtype} on {device}: {allowed}"
        )


@functools.cache
def _reasons(device: str, dtype: str) -> dict[str, str]:
    answer = processes.ask("pytest_llmgpu.inference.quantization", device, dtype, library="torchao")
    return dict(json.loads(answer))


def reasons_here(device: str, dtype: str) -> dict[str, str]:
    """Return why quantisations cannot run here, by name; those that can are left out. This runs in the child process.

    Each quantises a small layer and runs it.
    """
    import torch
    from torchao.quantization import quantize_

    found = {}
    for name in CONFIGS:
        try:
            layer = torch.nn.Linear(256, 256, bias=False, dtype=getattr(torch, dtype), device=device)
            quantize_(layer, _config(name))
            with torch.inference_mode():
                layer(torch.ones(32, 256, dtype=getattr(torch, dtype), device=device))
        except Exception as error:  # noqa: BLE001 - whatever torchao or a kernel raises
            found[name] = first_line(error).rstrip(".")
    return found


def settings(name: str | None) -> TorchAoConfig | None:
    """Return what `from_pretrained` of transformers takes; None for plain weights and for those of a checkpoint."""
    from transformers import TorchAoConfig

    return TorchAoConfig(_config(name)) if name in CONFIGS else None


def _config(name: str) -> Any:
    import torchao.quantization

    kind, given = CONFIGS[name]
    if "granularity" in given:
        given = {**given, "granularity": getattr(torchao.quantization, given["granularity"])()}
    return getattr(torchao.quantization, kind)(**given)


def converter(model: PreTrainedModel, name: str) -> Callable[[torch.nn.Module, str], bool]:
    """Prepare a model without weights; return what quantises a parameter of a module, by its full name, once it is set.

    It returns whether the parameter is one that is quantised. These are the calls of transformers' `from_pretrained`.
    """
    from torch.distributed.tensor import DTensor
    from transformers import TorchAoConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer: Any = AutoHfQuantizer.from_config(TorchAoConfig(_config(name)), pre_quantized=False)
    quantizer.validate_environment(device_map=None)
    quantizer.preprocess_model(model)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer

    def convert(owner: torch.nn.Module, parameter: str) -> bool:
        if not quantizer.param_needs_quantization(model, parameter):
            return False
        values: Any = owner.get_parameter(parameter.rpartition(".")[2]).data
        if isinstance(values, DTensor):  # each rank quantises its own part
            values = values.to_local()
        quantizer.get_quantize_ops().convert(
            {parameter: values}, model=model, full_layer_name=parameter, missing_keys=set()
        )
        return True

    return convert


def check_converted(model: torch.nn.Module) -> None:
    """Refuse a model that keeps plain weights where they should be quantised, which torchao does without an error.

    Raises:
        ValueError: The shape of a weight does not allow the quantisation.
    """
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(module, _TRIED, False) and not hasattr(weight, "__tensor_flatten__"):
            shape = " x ".join(map(str, () if weight is None else weight.shape))
            raise ValueError(f"torchao did not quantise {name}.weight ({shape}): choose another --llmgpu-quantization")


def stored(model: PreTrainedModel, world_size: int) -> dict[str, tuple[str, int]]:
    """Return name to kind and bytes of each tensor of the decoder, without input embeddings and output head.

    They are those of all ranks together. A kind is the class of a quantised tensor, or a dtype.
    """
    from torch.distributed.tensor import DTensor

    apart = {id(part) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    found = {}
    for path, module in model.named_modules():
        # A rank has a part of each quantised weight, and such a part is no DTensor.
        parts = world_size if getattr(module, _TRIED, False) else 1
        for name, tensor in () if id(module) in apart else module.named_parameters(recurse=False):
            is_plain = isinstance(tensor, DTensor) or not hasattr(tensor, "__tensor_flatten__")
            kind = str(tensor.dtype).removeprefix("torch.") if is_plain else type(tensor).__name__
            whole = tensor.numel() * tensor.element_size()  # of all ranks, for a DTensor
            found[f"{path}.{name}"] = kind, whole if isinstance(tensor, DTensor) else stored_bytes(tensor) * parts
    return found


def describe(stored: dict[str, tuple[str, int]] | None) -> dict[str, str]:
    """Return how much of the decoder's bytes each kind of weight has, `quantization: Int8Tensor 99 %, bfloat16 1 %`.

    The argument is what `stored` returns; nothing is returned for None.
    """
    sizes: Counter[str] = Counter()
    for kind, size in (stored or {}).values():
        sizes[kind] += size
    shares = [f"{kind} {100 * size / sizes.total():.0f} %" for kind, size in sizes.most_common()]
    return {"quantization": ", ".join(shares)} if shares else {}


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the real size of a tensor: `nbytes` of torchao's tensors is that of the plain one."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


if __name__ == "__main__":
    print(json.dumps(reasons_here(*sys.argv[1:])))
