"""Values of parameters, one at a time: read from safetensors, or random from a seed. It needs torch and runs in a rank.

A model is filled layer by layer while a library converts it, so that no device holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llmgpu.inference import model_files, models
from pytest_llmgpu.inference.models import ModelSource

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Reader = Callable[[str, "torch.nn.Parameter"], "torch.Tensor"]
"""Returns all values of a parameter on their device, by its full name and the empty parameter."""


def reader(skeleton: PreTrainedModel, source: ModelSource, device: torch.device, *, seed: int) -> Reader:
    """Return the reader of a model's parameters."""
    from safetensors import safe_open

    dtype = skeleton.dtype
    if source.load_format == "dummy":
        std = models.initializer_range(skeleton)

        def make(name: str, empty: torch.nn.Parameter) -> torch.Tensor:
            return models.dummy_tensor(name, empty.shape, std=std, seed=seed, dtype=dtype, device=device)

        return make
    assert source.directory is not None
    files = [safe_open(path, "pt", device=str(device)) for path in model_files.weight_files(Path(source.directory))]
    holder = {name: file for file in files for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118 - no mapping
    if all(name in holder for name, _ in skeleton.named_parameters()):
        return lambda name, _: holder[name].get_tensor(name).to(dtype)  # type: ignore[no-untyped-call]
    # The files have other names or other shapes than the model. transformers converts them in the host's memory.
    whole = dict(models.checkpoint(source, dtype, device_map={"": "cpu"}).named_parameters())

    def move(name: str, _: torch.nn.Parameter) -> torch.Tensor:
        return whole.pop(name).detach().to(device)

    return move


def fill(module: torch.nn.Module, prefix: str, read: Reader, device: torch.device) -> None:
    """Fill the empty parameters of a module and its submodules, and move their buffers to the device."""
    import torch

    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for inner, owner in module.named_modules():
        path = ".".join(filter(None, (prefix, inner)))
        for name, empty in list(owner.named_parameters(recurse=False)):
            # Tied parameters are one object with several names, and stay one object.
            if empty.is_meta and empty not in made:
                made[empty] = torch.nn.Parameter(read(f"{path}.{name}", empty), requires_grad=False)
            owner.register_parameter(name, made.get(empty, empty))
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = buffer.to(device)  # noqa: SLF001 - keeps it persistent or not


@contextmanager
def filled_in_turn(
    model: PreTrainedModel, read: Reader, device: torch.device, on_layer: Callable[[torch.nn.Module], None]
) -> Iterator[None]:
    """Return a context manager in which iterating over a list of layers fills each layer when it is reached.

    All other parameters are filled when the context is entered.

    Args:
        model: The model, with its parameters on the meta device.
        read: Returns the values of a parameter.
        device: The device of the values.
        on_layer: Called with each layer after it is filled.
    """
    import torch

    keep = _keeper(model, device)

    class InTurn(torch.nn.ModuleList):
        place = ""

        def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
            # torch's own named_children keeps a reference to every child, and so keeps every layer in memory.
            for name in list(self._modules):
                layer = self._modules[name]
                assert layer is not None
                fill(layer, f"{self.place}.{name}", read, device)
                on_layer(layer)
                yield name, layer
                del layer
                replaced = self._modules[name]
                assert replaced is not None
                keep(replaced)

    stacks = dict(layer_stacks(model))
    inside = [f"{place}." for place in stacks]
    for place, module in model.named_modules():
        if place not in stacks and not place.startswith(tuple(inside)):
            for name, empty in module.named_parameters(recurse=False):
                if empty.is_meta:
                    _set_everywhere(
                        model, empty, torch.nn.Parameter(read(f"{place}.{name}", empty), requires_grad=False)
                    )
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)  # noqa: SLF001 - as above
    for place, stack in stacks.items():
        stack.__class__ = InTurn
        stack.place = place  # type: ignore[assignment]  # it is an InTurn now
    try:
        yield
    finally:
        for stack in stacks.values():
            stack.__class__ = torch.nn.ModuleList


def _keeper(model: torch.nn.Module, device: torch.device) -> Callable[[torch.nn.Module], None]:
    """Return a function that moves a module's parameters to a memory pool of their own.

    Without the pool they would be placed in the large blocks that whole layers have left, and the process could not
    return those blocks: 3.8 of 19.8 GiB with DeepSpeed's kernels and LLaMA-30B on 4 GPUs.
    """
    import torch

    if device.type != "cuda":
        return lambda _: None
    pool = torch.cuda.MemPool()
    # The pool must exist as long as it has tensors.
    model._llmgpu_pool = pool  # type: ignore[assignment]  # noqa: SLF001 - nothing else lives as long as the tensors

    def keep(module: torch.nn.Module) -> None:
        with torch.cuda.use_mem_pool(pool, device):
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()

    return keep


def layer_stacks(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.ModuleList]]:
    """Yield the outermost lists of modules with their names: the layers of the decoder and of an encoder."""
    import torch

    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not name.startswith(tuple(f"{outer}." for outer in found)):
            found.append(name)
            yield name, module


def _set_everywhere(model: torch.nn.Module, old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Replace a parameter under each of its names: tied parameters stay tied."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):  # noqa: SLF001 - named_parameters names tied ones once
            if parameter is old:
                module.register_parameter(name, new)
