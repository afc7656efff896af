"""Which GPUs there are and how they are connected."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_llmgpu.profiling.nvml import inventory, memory_v2, used_bytes

GIB = 1 << 30
StubEnvironment = Callable[..., dict[str, str]]


def evaluate(environment: dict[str, str], expression: str) -> Any:
    """Evaluate an expression over `nvml` in a process with that environment."""
    script = (
        "import msgspec, sys; from pytest_llmgpu.profiling import nvml; assert 'pynvml' not in sys.modules;"
        f"sys.stdout.buffer.write(msgspec.json.encode({expression}))"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    return json.loads(done.stdout)


def uuid(index: int) -> str:
    """Return the UUID the stub gives that device."""
    return f"GPU-{index:08d}-0000-0000-0000-000000000000"


@pytest.mark.parametrize("gpus", [1, 8])
def test_inventory_describes_every_gpu(nvml_stub: StubEnvironment, gpus: int) -> None:
    """Every GPU has the identity, memory and links that NVML gives."""
    answer = evaluate(nvml_stub(gpus=gpus, nvlinks=12), "nvml.inventory()")
    assert answer["gpus"] == [
        {
            "index": index,
            "uuid": uuid(index),
            "name": "Stub GPU",
            "memory_bytes": 80 * GIB,
            "reserved_bytes": GIB,
            "pcie_gen": 5,
            "pcie_width": 8,
            "power_limit_w": 700.0 + index,
            "nvlinks": 12,
            "why": {},
        }
        for index in range(gpus)
    ]
    assert (answer["driver"], answer["cuda"], answer["why"]) == ("999.01", "13.0", {})
    assert answer["topology"] == [["X" if a == b else "NV12" for b in range(gpus)] for a in range(gpus)]


@pytest.mark.parametrize(
    ("links", "near"),
    # Links that end at another GPU, without a switch, count for that pair only.
    [({}, "PIX"), ({"nvlinks": 4, "nvlinks_direct": 1}, "NV4")],
)
def test_inventory_has_the_path_of_each_pair(nvml_stub: StubEnvironment, links: dict[str, int], near: str) -> None:
    """GPUs without NVLink have a PCIe path between them, and None links with the reason."""
    answer = evaluate(nvml_stub(gpus=4, **links), "nvml.inventory()")
    assert answer["topology"][0] == ["X", near, "SYS", "SYS"]
    assert answer["topology"][2] == ["SYS", "SYS", "X", near]
    why = {} if links else {"nvlinks": "nvmlDeviceGetNvLinkState: Not Supported"}
    assert (answer["gpus"][0]["nvlinks"], answer["gpus"][0]["why"]) == (links.get("nvlinks"), why)


def test_inventory_has_the_reason_of_a_missing_field(nvml_stub: StubEnvironment) -> None:
    """A refused call makes its field None with the call and the refusal, and affects no other field."""
    refused = "nvmlDeviceGetMaxPcieLinkGeneration@0,nvmlDeviceGetMemoryInfo_v2@1,nvmlDeviceGetTopologyCommonAncestor"
    answer = evaluate(nvml_stub(gpus=2, unsupported=refused), "nvml.inventory()")
    assert [gpu["memory_bytes"] for gpu in answer["gpus"]] == [80 * GIB, None]
    assert answer["gpus"][1]["why"]["memory_bytes"] == answer["gpus"][1]["why"]["reserved_bytes"]
    assert [gpu["pcie_gen"] for gpu in answer["gpus"]] == [None, 5]
    assert answer["gpus"][0]["why"]["pcie_gen"] == "nvmlDeviceGetMaxPcieLinkGeneration: Not Supported"
    assert answer["topology"] is None
    assert answer["why"] == {"topology": "nvmlDeviceGetTopologyCommonAncestor: Not Supported"}


def test_inventory_leaves_out_a_lost_gpu(nvml_stub: StubEnvironment) -> None:
    """A lost GPU is left out with its reason; the others are described, and a failed shutdown is ignored."""
    answer = evaluate(nvml_stub(gpus=3, lost="1:0", shutdown=15), "nvml.inventory()")
    assert [gpu["index"] for gpu in answer["gpus"]] == [0, 2]
    assert answer["why"] == {"gpu 1": "nvmlDeviceGetUUID: GPU is lost"}


def test_a_missing_library_is_a_reason(
    nvml_stub: StubEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pynvml or a loadable libnvidia-ml.so.1 the inventory and the used memory are empty."""
    (tmp_path / "libnvidia-ml.so.1").touch()
    environment = {**nvml_stub(), "LD_LIBRARY_PATH": str(tmp_path)}
    answer = evaluate(environment, "[nvml.inventory(), nvml.used_bytes(['GPU-1'])]")
    assert (answer[0]["why"]["nvml"], answer[1]) == ("nvmlInit: NVML Shared Library Not Found", {})
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pynvml cannot be imported" in inventory().why["nvml"]
    assert used_bytes([uuid(0)]) == {}


def test_used_bytes_are_those_of_nvidia_smi(nvml_stub: StubEnvironment) -> None:
    """Memory in use excludes the driver's reserve, and a GPU that cannot be read is left out."""
    answer = evaluate(nvml_stub(gpus=2), f"nvml.used_bytes([{uuid(1)!r}, 'GPU-none', {uuid(0)!r}])")
    assert answer == {uuid(0): 10 * GIB, uuid(1): 11 * GIB}
    assert evaluate(nvml_stub(lost="0:0"), f"nvml.used_bytes([{uuid(0)!r}])") == {}


def test_the_processes_of_each_gpu_are_known_by_their_ids_and_bytes(nvml_stub: StubEnvironment) -> None:
    """A GPU that cannot be read is left out."""
    answer = evaluate(nvml_stub(gpus=2, processes="2@0"), f"nvml.computing([{uuid(0)!r}, {uuid(1)!r}, 'GPU-none'])")
    assert answer == {uuid(0): {"4000000": 1000, "4000001": 1001}, uuid(1): {"4000000": 1000}}


def test_used_bytes_survive_gpustat() -> None:
    """A memory call without the `version` argument, as gpustat installs it, is supported."""
    patched = SimpleNamespace(nvmlMemory_v2=2, nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=handle))
    assert memory_v2(patched, 5).used == 5
