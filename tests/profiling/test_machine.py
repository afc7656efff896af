from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_llmgpu import processes
from pytest_llmgpu.profiling import machine as environment
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.machine import Machine, TorchFacts, fingerprint, machine, probe
from pytest_llmgpu.profiling.nvml import Inventory
from pytest_llmgpu.report.report import Gpu, Node

_CPU_TORCH = TorchFacts(version="2.13.0+cpu", why="Torch not compiled with CUDA enabled")


def _gpus(letters: str, **fields: Any) -> list[Gpu]:
    return [Gpu(index=index, uuid=f"GPU-{one}", name="NVIDIA H200", **fields) for index, one in enumerate(letters)]


_CUDA_TORCH = TorchFacts(version="2.13.0", cuda="13.0", nccl="2.29.1", devices=_gpus("dcba", memory_bytes=10**11))
_BLIND_TORCH = TorchFacts(version="2.13.0", cuda="13.0", why="No CUDA GPUs are available")
_FOUR_GPUS = Inventory(gpus=_gpus("abcd", nvlinks=18), driver="580.1")
_NO_NVML = Inventory(why={"nvml": "nvmlInit: NVML Shared Library Not Found"})


def _choose(
    device: str = "auto",
    devices: int | None = None,
    *,
    facts: TorchFacts = _CUDA_TORCH,
    inventory: Inventory = _FOUR_GPUS,
    visible: str | None = None,
    nodes: int = 0,
) -> Machine:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        _installed(patch, facts, inventory, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
        patch.setattr(environment, "_DEVICE_NODES", Path(folder))
        for number in range(nodes):
            Path(folder, f"nvidia{number}").touch()
        return machine(device, devices)


def _installed(patch: pytest.MonkeyPatch, facts: TorchFacts, inventory: Inventory, **environ: str) -> TorchFacts:
    patch.setattr(environment, "probe", lambda: facts)
    patch.setattr(nvml, "inventory", lambda: inventory)
    for name in (name for name in os.environ if environment._VARIABLES.fullmatch(name)):
        patch.delenv(name)
    for name, value in environ.items():
        patch.setenv(name, value)
    return facts


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_all_gpus_are_taken_in_cudas_order(device: str) -> None:
    """Devices are matched by UUID: NVML's order is that of the PCI bus, CUDA's may differ."""
    chosen = _choose(device)
    assert (chosen.device, chosen.devices) == ("cuda", 4)
    assert [gpu.index for gpu in chosen.gpus] == [3, 2, 1, 0]
    assert chosen.describe() == "4 x NVIDIA H200 (cuda)"


def test_gpus_are_known_without_nvml() -> None:
    """Torch's values are used, and those that only NVML has are None with a reason."""
    mixed = TorchFacts(version="2", cuda="13.0", devices=[Gpu(index=0, uuid=name, name=name) for name in "ABA"])
    assert _choose(facts=mixed, inventory=_NO_NVML).describe() == "2 x A, 1 x B (cuda)"
    gpu = _choose(devices=1, inventory=_NO_NVML).gpus[0]
    assert (gpu.index, gpu.uuid, gpu.name, gpu.memory_bytes) == (0, "GPU-d", "NVIDIA H200", 10**11)
    assert gpu.why["nvlinks"] == "nvmlInit: NVML Shared Library Not Found"


def test_the_cpu_is_chosen_by_option_or_where_gpus_are_hidden() -> None:
    """The number of devices is passed on to the strategy; an empty CUDA_VISIBLE_DEVICES chooses the CPU."""
    chosen = _choose("cpu", 2)
    assert (chosen.device, chosen.devices, chosen.gpus) == ("cpu", 2, [])
    assert chosen.describe().startswith("2 x CPU, ")
    for visible in ("", "-1", "-1,0", "NoDevFiles"):
        assert _choose(facts=_BLIND_TORCH, visible=visible).device == "cpu"


_BLIND = {"facts": _BLIND_TORCH}


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        ("cuda", {"devices": 8}, "devices 8: CUDA lists 4; allowed are 1 to 4$"),
        ("cuda", {"devices": 8, "visible": "0,1"}, "devices 8: CUDA lists 4 with CUDA_VISIBLE_DEVICES=0,1; allowed"),
        ("auto cuda", {"facts": _CPU_TORCH, "nodes": 4}, "4 x NVIDIA H200 found.*not compiled with CUDA.*install a"),
        ("auto cuda", {"facts": _CPU_TORCH, "inventory": _NO_NVML, "nodes": 2}, r"2 x /dev/nvidia\* found.*install a"),
        ("auto cuda", {**_BLIND, "visible": "7"}, "4 x NVIDIA H200 found.*CUDA_VISIBLE_DEVICES='7' names a GPU"),
        ("auto cuda", _BLIND, "4 x NVIDIA H200 found.*No CUDA GPUs are available.*nvidia-smi"),
        ("cuda", {**_BLIND, "inventory": _NO_NVML}, "no GPU found"),
        ("cuda", {**_BLIND, "visible": ""}, "4 x NVIDIA H200 found.*hides every GPU: unset it"),
    ],
)
def test_devices_that_torch_cannot_use_are_refused(devices: str, options: dict[str, Any], message: str) -> None:
    """A GPU machine is not measured on its CPU by default; one line has the value and what to do."""
    for device in devices.split():
        unusable = f"--llmgpu-device={device}: " if "facts" in options else ""
        with pytest.raises(ValueError, match=f"^{unusable}{message}") as caught:
            _choose(device, **options)
        assert str(caught.value).endswith(", or pass --llmgpu-device=cpu to measure the CPU") == bool(unusable)
        assert "\n" not in str(caught.value)


_FAKE_TORCH = """
import os
import sys
import tempfile
print("a library's chatter on stdout")
__version__ = "9.9"
class version: cuda = "13.0"
class distributed: is_nccl_available = staticmethod(lambda: True)
class _Device: name, total_memory, uuid = "NVIDIA H200", 1000, "abc-{}"
class cuda:
    init = staticmethod(lambda: None)
    device_count = staticmethod(lambda: 2)
    @staticmethod
    def get_device_properties(number):
        device = _Device(); device.uuid = f"abc-{number}"; return device
    class nccl: version = staticmethod(lambda: (2, 29, 1))
"""


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the module that a child process imports as torch."""
    root = str(Path(environment.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    return tmp_path / "torch.py"


def test_the_probe_lists_the_gpus_that_torch_can_use(fake_torch: Path) -> None:
    """UUIDs have NVML's form, output of a library on stdout is ignored; or the reason is torch's first line."""
    fake_torch.write_text(_FAKE_TORCH, encoding="utf-8")
    gpus = [Gpu(index=index, uuid=f"GPU-abc-{index}", name="NVIDIA H200", memory_bytes=1000) for index in (0, 1)]
    assert probe() == TorchFacts(version="9.9", cuda="13.0", nccl="2.29.1", devices=gpus)
    broken = "init = staticmethod(lambda: (_ for _ in ()).throw(RuntimeError('driver too old\\nmore')))"
    fake_torch.write_text(_FAKE_TORCH.replace("init = staticmethod(lambda: None)", broken), encoding="utf-8")
    facts = probe()
    assert (facts.devices, facts.why) == ([], "driver too old")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('libcudart: no file')", "^torch cannot be used: ImportError: libcudart.*status 1 of"),
        ("import os; os.kill(os.getpid(), 4)", r"no message \(exit status -4 of"),
        ("import os; os.read(os.pipe()[0], 1)", r"took more than 0\.5 s"),
    ],
    ids=["fails", "kills", "hangs"],
)
def test_a_torch_that_does_not_import_is_one_line(fake_torch: Path, code: str, message: str) -> None:
    """The user sees no traceback, also of a library built for another processor and of a file system that hangs."""
    fake_torch.write_text(code, encoding="utf-8")
    timeout_s = 0.5 if "pipe" in code else 300.0
    with pytest.raises(ValueError, match=message) as caught:
        processes.ask("pytest_llmgpu.profiling.machine", library="torch", timeout_s=timeout_s)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_holds_machine_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs and driver come from NVML, CUDA and NCCL from torch; what is missing is None, with a reason."""
    monkeypatch.setattr(environment, "_DISTRIBUTIONS", ("pytest", "a-distribution-nobody-has"))
    found = fingerprint(_installed(monkeypatch, _CUDA_TORCH, _FOUR_GPUS))
    assert (found.driver, found.cuda, found.nccl, len(found.gpus)) == ("580.1", "13.0", "2.29.1", 4)
    assert found.python == sys.version.split()[0]
    assert found.versions == {"torch": "2.13.0", "pytest": pytest.__version__, "a-distribution-nobody-has": None}
    assert found.why == {}
    found = fingerprint(_installed(monkeypatch, _CPU_TORCH, _NO_NVML))
    assert (found.cuda, found.nccl, found.driver) == (None, None, None)
    without = "torch 2.13.0+cpu is built without CUDA"
    assert found.why == {"cuda": without, "nccl": without, **_NO_NVML.why}


def test_only_variables_that_change_a_measurement_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has no secret, no home folder, and no other variable of the user."""
    kept = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0,1", "CUDA_HOME": "/home/ada/cuda"}
    kept |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "2"}
    kept |= {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "300000"}
    secrets = dict.fromkeys(("NCCL_API_TOKEN", "PYTORCH_SECRET", "CUDA_LICENSE_KEY", "HF_TOKEN"), "t0p")
    others = {"HOME": "/home/ada", "MY_NCCL_X": "1", "OMP_NUM_THREADS_X": "1"}
    found = fingerprint(_installed(monkeypatch, _CPU_TORCH, _NO_NVML, **kept, **secrets, **others))
    assert found.variables == {**kept, "CUDA_HOME": "~/cuda"}
    assert "t0p" not in json.dumps(found.variables)


def _facts(letters: str = "ab", torch: str = "2.13.0", driver: str = "580.1", **variables: str) -> Node:
    """Return the facts of a node with a GPU for each letter."""
    gpus = _gpus(letters)
    return Node(
        python="3.12.1",
        platform="Linux",
        gpus=gpus,
        topology=[["X" if a is b else "NV18" for a in gpus] for b in gpus],
        driver=driver,
        nccl="2.29.1",
        versions={"torch": torch, "pytest-llmgpu": "0.1.0"},
        variables=variables,
    )


def test_the_facts_of_this_machine_are_stored_as_json() -> None:
    """The report has those of each node."""
    found = environment.fingerprint()
    assert msgspec.json.decode(msgspec.json.encode(found), type=Node) == found


def test_nodes_must_have_the_same_libraries() -> None:
    """A driver or a variable may differ and is stated; CUDA_VISIBLE_DEVICES is set for each node by its scheduler."""
    alike = [_facts(CUDA_VISIBLE_DEVICES="0"), _facts("cd", CUDA_VISIBLE_DEVICES="1")]
    assert environment.check(alike) == []
    assert environment.check([_facts(), _facts("c", driver="570.2", NCCL_DEBUG="INFO")]) == [
        "driver 580.1 on node 0, 570.2 on node 1",
        "GPUs NVIDIA H200, NVIDIA H200 on node 0, NVIDIA H200 on node 1",
        "NCCL_DEBUG none on node 0, INFO on node 1",
    ]
    with pytest.raises(ValueError, match=r"torch 2\.13\.0 on nodes 0, 2, 2\.12\.1 on node 1; install"):
        environment.check([_facts(), _facts("cd", torch="2.12.1"), _facts("ef")])


def test_files_of_a_model_are_compared_by_name_and_hash() -> None:
    """A file that a node lacks differs, too."""
    files = [{"config.json": "a" * 64, "tokenizer": "b" * 64}, {"config.json": "c" * 64}]
    assert environment.file_differences(files) == [
        "config.json aaaaaaaaaaaa on node 0, cccccccccccc on node 1",
        "tokenizer bbbbbbbbbbbb on node 0, none on node 1",
    ]
    assert environment.file_differences([files[0], dict(files[0])]) == []


def test_a_report_has_the_gpus_of_all_nodes_and_each_node() -> None:
    """The indices of a node continue those of the node before; one node is written as a machine alone."""
    nodes = [_facts("ab"), _facts("cd")]
    both, alone = (
        environment.environment(Machine(device="cpu", devices=1, gpus=[], facts=_CPU_TORCH, node_facts=facts))
        for facts in (nodes, nodes[:1])
    )
    assert [(gpu.index, gpu.uuid) for gpu in both.gpus] == [(0, "GPU-a"), (1, "GPU-b"), (2, "GPU-c"), (3, "GPU-d")]
    assert [[gpu.index for gpu in node.gpus] for node in both.nodes] == [[0, 1], [0, 1]]
    assert [" ".join(row) for row in both.topology or ()] == [
        "X NV18 NET NET",
        "NV18 X NET NET",
        "NET NET X NV18",
        "NET NET NV18 X",
    ]
    assert (alone.nodes, len(alone.gpus)) == ([], 2)
