from __future__ import annotations

import pytest
import torch
from support import tiny_model

from pytest_llmgpu.inference import weights
from pytest_llmgpu.inference.bundled import PRESETS
from pytest_llmgpu.strategies import mp
from pytest_llmgpu.strategies.protocol import DeviceMapSpillError

_GIB = 2**30


def _map(free_gib: list[float], monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib[device.index] * _GIB), 0))
    devices = tuple(torch.device("cuda", index) for index in range(len(free_gib)))
    source = tiny_model.source(PRESETS["llama-30b"], name="llama-30b")
    return mp.layer_map(weights.skeleton(source, torch.float16), devices, torch.float16)


def test_layers_are_spread_evenly_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA-30B on four GPUs: each layer is on one device, in the order of devices, with similar counts; or on one."""
    placed = _map([31.0] * 4, monkeypatch)
    layers = [placed[f"model.layers.{number}"] for number in range(60)]
    assert layers == sorted(layers)
    counts = [layers.count(device) for device in range(4)]
    assert max(counts) - min(counts) <= 3
    assert placed["model.embed_tokens"] == 0
    assert placed["lm_head"] == 3
    assert set(_map([139.0], monkeypatch).values()) == {0}


def test_a_model_that_fits_on_no_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error replaces an offload to the CPU or to disk by accelerate."""
    with pytest.raises(DeviceMapSpillError, match=r"modules fit on no GPU .*: 14\.0 GiB, 14\.0 GiB"):
        _map([14.0] * 4, monkeypatch)


def test_a_parameter_is_on_the_device_of_its_module() -> None:
    """The longest matching entry of the map decides."""
    device_map: dict[str, int | str] = {"model.embed_tokens": 0, "model.layers.1": 2, "": "cpu"}
    assert mp.device_of("model.layers.1.mlp.up_proj.weight", device_map) == torch.device("cuda", 2)
    assert mp.device_of("model.layers.11.mlp.up_proj.weight", device_map) == torch.device("cpu")
