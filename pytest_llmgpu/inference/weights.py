"""A model in a rank: its skeleton, and the values of its parameters, read from safetensors or random from a seed.

A library may convert a model while it is filled layer by layer, so that no device holds the whole model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_llmgpu.inference import models, quantization
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.text import plural

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.distributed.configuration_utils import DistributedConfig

Reader = Callable[[str, "torch.nn.Parameter"], "torch.Tensor"]
"""Returns all values of a parameter on their device, by its full name and the empty parameter."""


def skeleton(source: ModelSource, dtype: torch.dtype, *, tied: bool = True) -> PreTrainedModel:
    """Build a model without weights: its parameters are on the meta device, its buffers on the CPU.

    With `tied` false, the caller has to call `tie_weights`.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config(source), dtype=dtype, trust_remote_code=False, attn_implementation=source.attention
        )
    if tied:  # init_empty_weights replaces parameters one by one, which unties them
        model.tie_weights()
    quantization.prepare(model, source.quantization)
    model.eval()
    return model


def config(source: ModelSource) -> PretrainedConfig:
    """Return the config of a model, with the choices of the options: those of config.json are not used."""
    models.silence_transformers()
    config = models.config_of(source.directory or json.dumps(source.config))
    # The arguments of from_pretrained are ignored where they are None.
    config._attn_implementation = source.attention  # noqa: SLF001 - no public setter
    config._experts_implementation = source.experts  # noqa: SLF001
    return config


def checkpoint(
    source: ModelSource,
    dtype: torch.dtype,
    *,
    device_map: Mapping[str, int | str] | None = None,
    distributed_config: DistributedConfig | None = None,
) -> PreTrainedModel:
    """Load a model with its weights from safetensors, each directly on its device.

    Either a map from modules to devices or a description of how weights are sharded over the process group is given.
    ValueError if the files lack a weight, which transformers would fill with random numbers.
    """
    from transformers import AutoModelForCausalLM

    # With output_loading_info it returns a pair, which its annotations do not declare.
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    model, loading = from_pretrained(
        source.directory,
        config=config(source),
        dtype=dtype,
        attn_implementation=source.attention,
        device_map=None if device_map is None else dict(device_map),
        distributed_config=distributed_config,
        quantization_config=quantization.settings(source.quantization),
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    missing = sorted(loading["missing_keys"])
    if missing:
        lacks = f"{plural(len(missing), 'weight')} missing in its files, such as {missing[0]}"
        raise ValueError(f"model {source.name}: {lacks}")
    return model.eval()  # type: ignore[no-any-return]


def materialise(model: PreTrainedModel, device_of: Callable[[str], torch.device], *, seed: int) -> None:
    """Fill a skeleton with random weights, each made directly on its device, and move its buffers to their devices.

    A value depends on the seed, on the parameter's name, shape and dtype, and on the kind of device. It does not depend
    on how the model is spread over devices: `device_of` has the device of a parameter or buffer by its full name.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    read = _random(model, device_of, seed=seed)

    def make(name: str, empty: torch.nn.Parameter) -> torch.Tensor:
        values = read(name, empty)
        if not isinstance(empty, DTensor):
            return values
        # Every rank has made equal values. Without a source rank each keeps its shard of its own values.
        return distribute_tensor(values, empty.device_mesh, empty.placements, src_data_rank=None)

    fill(model, "", make, device_of)


def _random(model: PreTrainedModel, device_of: Callable[[str], torch.device], *, seed: int) -> Reader:
    """Return what makes values: 0 for biases, 1 for weights of norms, else a normal distribution around 0."""
    import torch

    dtype, std = model.dtype, float(getattr(model.config.get_text_config(), "initializer_range", 0.02))

    def make(name: str, empty: torch.nn.Parameter) -> torch.Tensor:
        shape, device = empty.shape, device_of(name)
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        own = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
        generator = torch.Generator(device).manual_seed(own)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std, generator=generator)

    return make


def reader(model: PreTrainedModel, source: ModelSource, device: torch.device, *, seed: int) -> Reader:
    """Return the reader of a model's parameters."""
    from safetensors import safe_open

    dtype = model.dtype
    if source.load_format == "dummy":
        return _random(model, lambda _: device, seed=seed)
    assert source.directory is not None
    files = [safe_open(path, "pt", device=str(device)) for path in models.weight_files(Path(source.directory))]
    holder = {name: file for file in files for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118 - no mapping
    if all(name in holder for name, _ in model.named_parameters()):
        return lambda name, _: holder[name].get_tensor(name).to(dtype)  # type: ignore[no-untyped-call]
    # The files have other names or other shapes than the model. transformers converts them in the host's memory.
    whole = dict(checkpoint(source, dtype, device_map={"": "cpu"}).named_parameters())
    return lambda name, _: whole.pop(name).detach().to(device)


def fill(
    module: torch.nn.Module,
    prefix: str,
    read: Reader,
    device_of: Callable[[str], torch.device],
    skipped: tuple[str, ...] = (),
) -> None:
    """Fill the empty parameters of a module and its submodules, and move its buffers to their devices.

    The prefix is the full name of the module, empty for a model. Submodules with the skipped names stay as they are.
    Each weight is quantised once it is made, as `skeleton` has prepared it: no device holds all plain weights.
    """
    import torch

    inside = tuple(f"{name}." for name in skipped)
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for inner, owner in module.named_modules():
        if inner in skipped or inner.startswith(inside):
            continue
        path = ".".join(filter(None, (prefix, inner)))
        for name, empty in list(owner.named_parameters(recurse=False)):
            # Tied parameters are one object with several names, and stay one object.
            if empty.is_meta and empty not in made:
                made[empty] = torch.nn.Parameter(read(f"{path}.{name}", empty), requires_grad=False)
            owner.register_parameter(name, made.get(empty, empty))
            if quantization.convert(module, f"{inner}.{name}"):
                del made[empty]  # the plain values
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = buffer.to(device_of(f"{path}.{name}"))  # noqa: SLF001 - keeps it persistent or not


@contextmanager
def filled_in_turn(
    model: PreTrainedModel, read: Reader, device: torch.device, on_layer: Callable[[torch.nn.Module], None]
) -> Iterator[None]:
    """Return a context manager in which iterating over a list of layers fills each layer when it is reached.

    All other parameters are filled when the context is entered. `on_layer` is called with each filled layer.
    """
    import torch

    # Without a pool of their own, parameters that a library has converted would be placed in the large blocks that
    # whole layers have left, and the process could not return those blocks: 3.8 of 19.8 GiB with DeepSpeed's kernels
    # and LLaMA-30B on 4 GPUs.
    pool = torch.cuda.MemPool() if device.type == "cuda" else None
    # The pool must exist as long as it has tensors, and nothing else lives as long as these.
    model._llmgpu_pool = pool  # type: ignore[assignment]  # noqa: SLF001

    class InTurn(torch.nn.ModuleList):
        place = ""

        def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
            # torch's own named_children keeps a reference to every child, and so keeps every layer in memory.
            for name in list(self._modules):
                layer = self.get_submodule(name)
                fill(layer, f"{self.place}.{name}", read, lambda _: device)
                on_layer(layer)
                yield name, layer
                del layer
                replaced = self.get_submodule(name)
                if pool is not None:
                    with torch.cuda.use_mem_pool(pool, device):
                        for parameter in replaced.parameters():
                            parameter.data = parameter.data.clone()

    stacks = dict(layer_stacks(model))
    fill(model, "", read, lambda _: device, skipped=tuple(stacks))
    for place, stack in stacks.items():
        stack.__class__ = InTurn
        stack.place = place  # type: ignore[assignment]  # it is an InTurn now
    try:
        yield
    finally:
        for stack in stacks.values():
            stack.__class__ = torch.nn.ModuleList


def layer_stacks(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.ModuleList]]:
    """Yield the outermost lists of modules with their names: the layers of the decoder and of an encoder."""
    import torch

    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not name.startswith(tuple(f"{outer}." for outer in found)):
            found.append(name)
            yield name, module
