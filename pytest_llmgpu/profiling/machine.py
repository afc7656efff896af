"""The machine of a measurement, its libraries, the devices that a run may use, and several machines as its nodes.

Torch is imported only in a child process (`python -m pytest_llmgpu.profiling.machine`): pytest's process must not hold
a CUDA context or pay for the import.
"""

from __future__ import annotations

import collections
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from pytest_llmgpu import processes
from pytest_llmgpu.profiling import nvml
from pytest_llmgpu.report.privacy import anonymous, is_secret
from pytest_llmgpu.report.report import Environment, Gpu, Node
from pytest_llmgpu.report.text import listed

_DISTRIBUTIONS = (
    *("pytest-llmgpu", "pytest", "torch", "transformers", "accelerate", "deepspeed", "ray", "datasets"),
    *("tokenizers", "safetensors", "triton", "nvidia-ml-py"),
    *("torchao", "bitsandbytes", "compressed-tensors", "kernels"),  # of quantised weights
)
_VARIABLES = re.compile(r"(NCCL|CUDA|PYTORCH)_.*|OMP_(NUM_THREADS|WAIT_POLICY)|GOMP_SPINCOUNT")
_DEVICE_NODES = Path("/dev")
"""The folder of nvidia0, nvidia1 and so on. They show a GPU if NVML is missing."""
_LIBRARIES = ("pytest-llmgpu", "torch", "transformers", "accelerate", "deepspeed", "triton", "torchao")
"""Distributions that every node must have in one version: their code computes and communicates."""


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The installed torch and the GPUs that it can use."""

    version: str
    """The version of torch."""
    cuda: str | None = None
    """The CUDA version that torch was built for; None for a CPU build."""
    nccl: str | None = None
    """The NCCL version that torch was built with; None without NCCL."""
    devices: list[Gpu] = []
    """The GPUs in CUDA's order; name, UUID and memory alone are known."""
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
    def gpus_of_nodes(self) -> list[list[Gpu]]:
        """The chosen GPUs of each node that takes part. The first is node 0, where pytest runs."""
        number = 1 + max((self.node_of(place) for place in range(self.devices)), default=0)
        return [[gpu for place, gpu in enumerate(self.gpus) if self.node_of(place) == node] for node in range(number)]

    def describe(self) -> str:
        """Return the devices in words: `4 x NVIDIA H200 (cuda)`."""
        nodes = f" on {count} nodes" if (count := len({*self.nodes[: self.devices]})) > 1 else ""
        if self.device == "cuda":
            return f"{_count(gpu.name for gpu in self.gpus) or 'remote server'} (cuda){nodes}"
        times = f"{self.devices} x " if self.devices > 1 else ""
        return f"{times}CPU, {len(os.sched_getaffinity(0))} cores ({_cpu()}){nodes}"


def machine(device: str, devices: int | None) -> Machine:
    """Choose the devices of a run.

    `device` is `cuda`, `cpu`, or `auto`: every GPU that CUDA may use, or else the CPU. `devices` is their number, at
    least 1; None for all GPUs, or for 1 on a CPU. ValueError if there are fewer devices, or torch cannot use a GPU that
    is present: a build of torch without CUDA must not result in a passed run on the CPU.
    """
    facts = probe()
    if device == "cpu":
        return Machine(device="cpu", devices=devices or 1, gpus=[], facts=facts)
    inventory, mask = nvml.inventory(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if facts.devices:
        present = len(facts.devices)
        if devices is not None and devices > present:
            masked = "" if mask is None else f" with CUDA_VISIBLE_DEVICES={mask}"
            raise ValueError(f"devices {devices}: CUDA lists {present}{masked}; allowed are 1 to {present}")
        by_uuid = {gpu.uuid: gpu for gpu in inventory.gpus}
        reason = inventory.why.get("nvml", "NVML does not list this device")
        why = dict.fromkeys(("pcie_gen", "pcie_width", "power_limit_w", "nvlinks"), reason)
        chosen = facts.devices[: devices or present]
        gpus = [by_uuid.get(found.uuid) or msgspec.structs.replace(found, why=why) for found in chosen]
        return Machine(device="cuda", devices=len(gpus), gpus=gpus, facts=facts)

    nodes = len(list(_DEVICE_NODES.glob("nvidia[0-9]*")))
    hidden = mask is not None and mask.split(",")[0].strip() in ("", "-1", "NoDevFiles")
    if device == "auto" and (hidden or not (inventory.gpus or nodes)):
        return Machine(device="cpu", devices=devices or 1, gpus=[], facts=facts)
    names = _count(gpu.name for gpu in inventory.gpus) or (f"{nodes} x /dev/nvidia*" if nodes else "no GPU")
    remedy = "check that nvidia-smi works and that the driver is new enough for this torch"
    if hidden:
        remedy = f"CUDA_VISIBLE_DEVICES={mask!r} hides every GPU: unset it"
    elif facts.cuda is None:
        remedy = "install a build of torch with CUDA"
    elif mask is not None:
        remedy = f"check that CUDA_VISIBLE_DEVICES={mask!r} names a GPU of this machine"
    unusable = f"torch {facts.version} cannot use CUDA ({facts.why})"
    remedy += ", or pass --llmgpu-device=cpu to measure the CPU"
    raise ValueError(f"--llmgpu-device={device}: {names} found, and {unusable}; {remedy}")


def probe() -> TorchFacts:
    """Return the installed torch and the GPUs that it can use, found out in a child process.

    ValueError, with the last line of the child process, if torch cannot be imported.
    """
    return msgspec.json.decode(processes.ask("pytest_llmgpu.profiling.machine", library="torch"), type=TorchFacts)


def _torch_facts() -> TorchFacts:
    """Import torch and return what it can use. This runs in the child process."""
    import torch

    found: list[Gpu] = []
    why = None
    try:
        torch.cuda.init()
        for number in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(number)
            uuid = str(device.uuid)
            uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            found.append(Gpu(index=number, uuid=uuid, name=device.name, memory_bytes=device.total_memory))
    except (RuntimeError, AssertionError) as error:
        found, why = [], str(error).partition("\n")[0]
    has_nccl = torch.version.cuda is not None and torch.distributed.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    return TorchFacts(version=str(torch.__version__), cuda=torch.version.cuda, nccl=nccl, devices=found, why=why)


def fingerprint(torch: TorchFacts | None = None) -> Node:
    """Return this machine and its libraries, with the facts of torch or those of `probe`, without names and secrets."""
    facts, inventory = torch or probe(), nvml.inventory()
    why = dict(inventory.why)
    if facts.cuda is None:
        why |= dict.fromkeys(("cuda", "nccl"), f"torch {facts.version} is built without CUDA")
    elif facts.nccl is None:
        why["nccl"] = f"torch {facts.version} is built without NCCL"
    return Node(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        platform=platform.platform(),
        gpus=inventory.gpus,
        topology=inventory.topology,
        driver=inventory.driver,
        cuda=facts.cuda,
        nccl=facts.nccl,
        versions={name: installed_version(name) for name in _DISTRIBUTIONS} | {"torch": facts.version},
        variables={
            name: anonymous(os.environ[name])
            for name in sorted(os.environ)
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


def check(found: Sequence[Node]) -> list[str]:
    """Refuse nodes that must not measure together; return the other differences in words.

    Libraries that compute or communicate, Python and this package must be equal. Drivers, devices and variables may
    differ: the report has those of each node. The ValueError names what differs, with the value on each node.
    """
    # It differs between nodes without an effect on the measurement.
    names = sorted({name for node in found for name in node.variables} - {"CUDA_VISIBLE_DEVICES"})
    must: dict[str, Sequence[object]] = {
        "Python": [node.python for node in found],
        **{name: [node.versions.get(name) for node in found] for name in _LIBRARIES},
        "CUDA": [node.cuda for node in found],
        "NCCL": [node.nccl for node in found],
    }
    may: dict[str, Sequence[object]] = {
        "driver": [node.driver for node in found],
        "GPUs": [", ".join(gpu.name for gpu in node.gpus) or None for node in found],
        "CPU": [node.cpu for node in found],
        "cores": [node.cores for node in found],
        **{name: [node.variables.get(name) for node in found] for name in names},
    }
    if refused := differences(must):
        raise ValueError(f"the nodes differ: {'; '.join(refused)}; install the same versions on every node")
    return differences(may)


def differences(facts: Mapping[str, Sequence[object]]) -> list[str]:
    """Return the facts in which nodes differ, in words: `torch 2.10.0 on nodes 0 and 2, 2.9.1 on node 1`."""
    found = []
    for name, values in facts.items():
        numbers: dict[str, list[str]] = {}
        for number, value in enumerate(values):
            numbers.setdefault("none" if value is None else str(value), []).append(str(number))
        if len(numbers) > 1:
            parts = [f"{value} on node{'s' * (len(on) > 1)} {listed(on)}" for value, on in numbers.items()]
            found.append(f"{name} {', '.join(parts)}")
    return found


def file_differences(files: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the files of a model whose SHA-256 differs between nodes, each with the start of its hash on each node."""
    names = sorted({name for of_node in files for name in of_node})
    differing = [name for name in names if len({of_node.get(name) for of_node in files}) > 1]
    return differences({name: [of_node.get(name, "none")[:12] for of_node in files] for name in differing})


def environment(devices: Machine) -> Environment:
    """Return the machine and its libraries for a report: the first node, the GPUs of all, and each node by itself."""
    nodes = devices.node_facts or [fingerprint(devices.facts)]
    gpus: list[Gpu] = []
    topology: list[list[str]] = []
    total = sum(len(node.gpus) for node in nodes)
    for node in nodes:
        before, after = len(gpus), total - len(gpus) - len(node.gpus)
        topology += [["NET"] * before + row + ["NET"] * after for row in node.topology or ()]
        gpus += [msgspec.structs.replace(gpu, index=before + gpu.index) for gpu in node.gpus]
    known = all(node.topology is not None for node in nodes)
    whole = {**msgspec.structs.asdict(nodes[0]), "gpus": gpus, "topology": topology if known else None}
    return Environment(**whole, nodes=list(nodes) if len(nodes) > 1 else [])


def _cpu() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def _count(names: Iterable[str]) -> str:
    """Return `4 x NVIDIA H200`, with a part for each name; empty for no names."""
    return ", ".join(f"{number} x {name}" for name, number in collections.Counter(names).items())


if __name__ == "__main__":
    print(msgspec.json.encode(_torch_facts()).decode())
