"""mp: accelerate spreads whole layers evenly over the GPUs; one GPU computes at a time.

On a CPU it is the plain model, the reference for the numbers of every other strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pytest_llmgpu.inference import weights
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.text import gib
from pytest_llmgpu.strategies.protocol import DeviceMapSpillError, Loaded, Strategy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class LayerParallel(Strategy):
    """Layer-wise model parallelism: hidden states move from device to device, weights stay."""

    name = "mp"
    backend = "accelerate"
    quantizes = True

    def ranks(self, devices: int) -> int:  # noqa: ARG002 - one process drives all devices
        """Return 1: one process drives every device."""
        return 1

    def load(self, case: Case, source: ModelSource) -> Loaded:
        """Load the model layer by layer onto its devices."""
        import torch

        dtype = getattr(torch, case.dtype)
        skeleton = weights.skeleton(source, dtype)
        if case.device == "cpu":
            cpu = torch.device("cpu")
            model = _fill(skeleton, case, source, {"": "cpu"})
            return Loaded(model=model, config=skeleton.config, input_device=cpu, devices=(cpu,))
        devices = tuple(torch.device("cuda", index) for index in range(case.devices))
        # The map of quantised weights takes one byte for each number: those of four bits may need less.
        size = dtype if source.quantization is None else torch.int8
        model = _fill(skeleton, case, source, layer_map(skeleton, devices, size))
        head = model.get_output_embeddings().weight.device
        return Loaded(model=model, config=skeleton.config, input_device=head, devices=devices)


def _fill(
    skeleton: PreTrainedModel, case: Case, source: ModelSource, device_map: Mapping[str, int | str]
) -> PreTrainedModel:
    from accelerate import dispatch_model

    if source.load_format != "dummy":
        return weights.checkpoint(source, skeleton.dtype, device_map=device_map)
    weights.materialise(skeleton, lambda name: device_of(name, device_map), seed=case.seed)
    if len(device_map) == 1:
        return skeleton
    stay = skeleton._skip_keys_device_placement  # noqa: SLF001 - as in from_pretrained
    dispatched: PreTrainedModel = dispatch_model(skeleton, device_map=device_map, skip_keys=stay)
    return dispatched


def layer_map(skeleton: PreTrainedModel, devices: tuple[torch.device, ...], dtype: torch.dtype) -> dict[str, int]:
    """Return the device number of each module, by accelerate's balanced map of whole layers.

    DeviceMapSpillError if a module fits on no GPU: accelerate would offload it without an error.
    """
    import torch
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = list(skeleton._no_split_modules or [])  # noqa: SLF001 - transformers passes the same to accelerate
    free = {device.index: torch.cuda.mem_get_info(device)[0] for device in devices}
    limits = get_balanced_memory(skeleton, max_memory=dict(free), no_split_module_classes=whole, dtype=dtype)
    placed = infer_auto_device_map(skeleton, max_memory=limits, no_split_module_classes=whole, dtype=dtype)
    spilled = [name for name, device in placed.items() if not isinstance(device, int)]
    if spilled:
        where = f"{len(spilled)} of {len(placed)} modules fit on no GPU (first: {spilled[0]})"
        memory = f"free memory per GPU: {', '.join(gib(size, 1) for size in free.values())}"
        raise DeviceMapSpillError(f"{where}; {memory}: use more GPUs (--llmgpu-devices)")
    return dict(placed)


def device_of(parameter: str, device_map: Mapping[str, int | str]) -> torch.device:
    """Return the device of a parameter: that of the longest entry of the map that contains it."""
    import torch

    parts = parameter.split(".")
    for end in range(len(parts), -1, -1):
        device = device_map.get(".".join(parts[:end]))
        if device is not None:
            return torch.device(f"cuda:{device}" if isinstance(device, int) else device)
    raise AssertionError(f"the device map has no entry for {parameter}")
