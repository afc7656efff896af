"""The machine of a measurement, its libraries, and the devices that a run may use.

Torch is imported only in a child process (`python -m pytest_llmgpu.profiling.machine`): pytest's process must not hold
a CUDA context or pay for the import.
"""

from __future__ import annotations

import collections
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from pytest_llmgpu import processes
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.profiling.nvml import Inventory
from pytest_llmgpu.report.privacy import anonymous, is_secret
from pytest_llmgpu.report.report import Environment, Gpu, Node

_DISTRIBUTIONS = (
    *("pytest-llmgpu", "pytest", "torch", "transformers", "accelerate", "deepspeed", "ray", "datasets"),
    *("tokenizers", "safetensors", "triton", "nvidia-ml-py"),
)
_VARIABLES = re.compile(r"(NCCL|CUDA|PYTORCH)_.*|OMP_(NUM_THREADS|WAIT_POLICY)|GOMP_SPINCOUNT")


class TorchDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as CUDA lists it."""

    name: str
    """The name of the model."""
    uuid: str
    """The UUID in NVML's form, `GPU-...`."""
    memory_bytes: int
    """The memory that CUDA reports."""


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The installed torch and the GPUs that it can use."""

    version: str
    """The version of torch."""
    cuda: str | None = None
    """The CUDA version that torch was built for; None for a CPU build."""
    nccl: str | None = None
    """The NCCL version that torch was built with; None without NCCL."""
    devices: list[TorchDevice] = []
    """The GPUs in CUDA's order."""
    why: str | None = None
    """The reason why CUDA cannot be used; None if it can."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that a run uses."""

    device: str
    """The kind of device: `cuda` or `cpu`."""
    devices: int
    """The number of devices."""
    gpus: list[Gpu]
    """The chosen GPUs in CUDA's order; empty on a CPU."""
    facts: TorchFacts
    """The installed torch."""
    nodes: list[int] = []
    """The number of the node of each process that another program started for the ranks, in the order of the ranks.
    Empty if this process starts the ranks itself."""
    one_gpu_each: bool = False
    """True if each of these processes sees its own GPU only, as with Slurm's --gpus-per-task."""
    node_facts: list[Node] = []
    """The facts of each node; empty for this machine alone."""

    def node_of(self, rank: int) -> int:
        """Return the number of the node of a rank and, if there are several processes, of the GPU with this place."""
        return self.nodes[rank] if len(self.nodes) > 1 else 0

    @property
    def gpus_here(self) -> list[Gpu]:
        """The chosen GPUs of node 0, where pytest runs: NVML reads no others."""
        return self.gpus_of_nodes[0]

    @property
    def gpus_of_nodes(self) -> list[list[Gpu]]:
        """The chosen GPUs of each node that takes part."""
        number = 1 + max((self.node_of(place) for place in range(self.devices)), default=0)
        return [[gpu for place, gpu in enumerate(self.gpus) if self.node_of(place) == node] for node in range(number)]

    def describe(self) -> str:
        """Return the devices in words: `4 x NVIDIA H200 (cuda)`."""
        nodes = f" on {count} nodes" if (count := len({*self.nodes[: self.devices]})) > 1 else ""
        if self.device == "cuda":
            return f"{_count(gpu.name for gpu in self.gpus)} (cuda){nodes}"
        times = f"{self.devices} x " if self.devices > 1 else ""
        return f"{times}CPU, {_cores()} cores ({_cpu()}){nodes}"


def machine(
    device: str,
    devices: int | None,
    *,
    facts: TorchFacts | None = None,
    inventory: Inventory | None = None,
    environ: Mapping[str, str] = os.environ,
    device_nodes: int | None = None,
) -> Machine:
    """Choose the devices of a run.

    Args:
        device: `cuda`, `cpu`, or `auto`: every GPU that CUDA may use, or else the CPU.
        devices: The number of devices; None for all GPUs, or for 1 on a CPU.
        facts: The installed torch; None to probe it.
        inventory: The GPUs that NVML lists; None to query it.
        environ: Environment variables, for CUDA_VISIBLE_DEVICES.
        device_nodes: The number of /dev/nvidia<n>; None to count them. They show a GPU if NVML is missing.

    Raises:
        ValueError: There are fewer devices, or torch cannot use a GPU that is present. A build of torch without CUDA
            must not result in a passed run on the CPU.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device {device!r}: allowed are auto, cuda, cpu")
    if devices is not None and devices < 1:
        raise ValueError(f"devices {devices}: at least 1 is needed")
    facts = probe() if facts is None else facts
    if device == "cpu":
        return Machine(device="cpu", devices=devices or 1, gpus=[], facts=facts)
    inventory = nvml.inventory() if inventory is None else inventory
    if facts.devices:
        return _cuda_machine(devices, facts, inventory, environ)

    nodes = len(list(Path("/dev").glob("nvidia[0-9]*"))) if device_nodes is None else device_nodes
    present = _count(gpu.name for gpu in inventory.gpus) or (f"{nodes} x /dev/nvidia*" if nodes else "")
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    hidden = mask is not None and mask.split(",")[0].strip() in ("", "-1", "NoDevFiles")
    if device == "auto" and (hidden or not present):
        return Machine(device="cpu", devices=devices or 1, gpus=[], facts=facts)
    raise ValueError(
        f"device {device}: {present or 'no GPU'} found, and torch {facts.version} cannot use CUDA ({facts.why}); "
        f"{_remedy(facts, mask, hidden=hidden)}, or pass --llmgpu-device=cpu to measure the CPU"
    )


def _remedy(facts: TorchFacts, mask: str | None, *, hidden: bool) -> str:
    """Describe what to do if torch cannot use CUDA; `mask` is CUDA_VISIBLE_DEVICES."""
    if hidden:
        return f"CUDA_VISIBLE_DEVICES={mask!r} hides every GPU: unset it"
    if facts.cuda is None:
        return "install a build of torch with CUDA"
    if mask is not None:
        return f"check that CUDA_VISIBLE_DEVICES={mask!r} names a GPU of this machine"
    return "check that nvidia-smi works and that the driver is new enough for this torch"


def _cuda_machine(devices: int | None, facts: TorchFacts, inventory: Inventory, environ: Mapping[str, str]) -> Machine:
    present = len(facts.devices)
    if devices is not None and devices > present:
        mask = environ.get("CUDA_VISIBLE_DEVICES")
        masked = "" if mask is None else f" with CUDA_VISIBLE_DEVICES={mask}"
        raise ValueError(f"devices {devices}: CUDA lists {present}{masked}; allowed are 1 to {present}")
    by_uuid = {gpu.uuid: gpu for gpu in inventory.gpus}
    chosen = facts.devices[: devices or present]
    why = inventory.why.get("nvml", "NVML does not list this device")
    gpus = [
        by_uuid.get(found.uuid)
        or Gpu(
            index=number,
            uuid=found.uuid,
            name=found.name,
            memory_bytes=found.memory_bytes,
            why=dict.fromkeys(("pcie_gen", "pcie_width", "power_limit_w", "nvlinks"), why),
        )
        for number, found in enumerate(chosen)
    ]
    return Machine(device="cuda", devices=len(gpus), gpus=gpus, facts=facts)


def probe() -> TorchFacts:
    """Return the installed torch and the GPUs that it can use, found out in a child process.

    Raises:
        ValueError: Torch cannot be imported. The message has the last line of the child process.
    """
    return msgspec.json.decode(processes.ask("pytest_llmgpu.profiling.machine", library="torch"), type=TorchFacts)


def _torch_facts() -> TorchFacts:
    """Import torch and return what it can use. This runs in the child process."""
    import torch

    found: list[TorchDevice] = []
    why = None
    try:
        torch.cuda.init()
        for number in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(number)
            uuid = str(device.uuid)
            uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            found.append(TorchDevice(name=device.name, uuid=uuid, memory_bytes=device.total_memory))
    except (RuntimeError, AssertionError) as error:
        found, why = [], str(error).partition("\n")[0]
    nccl = None
    if torch.version.cuda is not None and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return TorchFacts(version=str(torch.__version__), cuda=torch.version.cuda, nccl=nccl, devices=found, why=why)


def fingerprint(
    facts: TorchFacts, inventory: Inventory | None = None, environ: Mapping[str, str] = os.environ
) -> Environment:
    """Return the machine and its libraries, without names of hosts or users and without secrets."""
    inventory = nvml.inventory() if inventory is None else inventory
    why = {
        name: reason for name, reason in inventory.why.items() if name != "cuda"
    }  # NVML has the CUDA version of the driver
    if facts.cuda is None:
        why |= dict.fromkeys(("cuda", "nccl"), f"torch {facts.version} is built without CUDA")
    elif facts.nccl is None:
        why["nccl"] = f"torch {facts.version} is built without NCCL"
    return Environment(
        cpu=_cpu(),
        cores=_cores(),
        python=platform.python_version(),
        platform=platform.platform(),
        gpus=inventory.gpus,
        topology=inventory.topology,
        driver=inventory.driver,
        cuda=facts.cuda,
        nccl=facts.nccl,
        versions={name: installed_version(name) for name in _DISTRIBUTIONS} | {"torch": facts.version},
        variables={
            name: anonymous(environ[name])
            for name in sorted(environ)
            if _VARIABLES.fullmatch(name) and not is_secret(name)
        },
        why=why,
    )


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _count(names: Iterable[str]) -> str:
    """Return `4 x NVIDIA H200`, with a part for each name; empty for no names."""
    return ", ".join(f"{number} x {name}" for name, number in collections.Counter(names).items())


if __name__ == "__main__":
    print(msgspec.json.encode(_torch_facts()).decode())
