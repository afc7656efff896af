"""The machine that a report was measured on, its libraries and its source."""

from __future__ import annotations

import msgspec

from pytest_llmgpu.report.bounds import Amount, Count
from pytest_llmgpu.report.work import Ceilings


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as NVML describes it, independent of CUDA_VISIBLE_DEVICES."""

    index: Count
    """NVML index, in the order of the PCI bus. The index in CUDA may differ. On several nodes the indices of a node
    continue those of the node before."""
    uuid: str
    """NVML's unique identifier of the GPU."""
    name: str
    """Product name of the GPU."""
    memory_bytes: Count | None = None
    """Total memory of the board, including the share of the driver."""
    reserved_bytes: Count | None = None
    """Memory that the driver reserves for itself; null if the driver does not report it."""
    pcie_gen: Count | None = None
    """Highest PCIe generation that both GPU and slot support. The current generation is lower while the GPU is idle."""
    pcie_width: Count | None = None
    """PCIe lanes in use; fewer than the board has can mean a badly seated board."""
    power_limit_w: Amount | None = None
    """Lowest power limit in force. A lower limit makes the GPU slower."""
    nvlinks: Count | None = None
    """Number of active NVLinks; null if the GPU has none."""
    why: dict[str, str] = {}
    """Field name mapped to the reason why its value is null."""


class Node(msgspec.Struct, kw_only=True):
    """A machine and its libraries, without names of hosts or users."""

    cpu: str | None = None
    """Model name of the CPU."""
    cores: Count | None = None
    """Number of CPU cores that the process may use."""
    python: str
    """Version of Python."""
    platform: str
    """Kernel and C library, such as `Linux-6.1.0-x86_64-with-glibc2.36`."""
    gpus: list[Gpu] = []
    """Every GPU of the node, visible to CUDA or not. In `environment`, the GPUs of all nodes in their order."""
    topology: list[list[str]] | None = None
    """Matrix [gpus][gpus] of the links between GPUs, in the terms of `nvidia-smi topo -m`; `NET` between nodes."""
    driver: str | None = None
    """Version of the NVIDIA driver."""
    cuda: str | None = None
    """CUDA version that torch was built for."""
    nccl: str | None = None
    """Version of NCCL."""
    versions: dict[str, str | None] = {}
    """Distribution name mapped to its version; null if it is not installed."""
    variables: dict[str, str] = {}
    """Environment variables that influence the measurement."""
    why: dict[str, str] = {}
    """Field name mapped to the reason why its value is null."""


class Environment(Node, kw_only=True):
    """The machine and its libraries, without names of hosts or users; of several nodes the first one."""

    nodes: list[Node] = []
    """Every node of a measurement on several, in the order of their ranks; empty for one node."""
    ceilings: Ceilings | None = None
    """Rates that the GPUs reached in short benchmarks of this session; null with the reason in `why`."""
    kernel_names: list[str] = []
    """Names of the kernels that rows of `work` refer to by number, cut to 120 characters."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The source that was measured."""

    sha: str | None = None
    """Hash of the commit."""
    branch: str | None = None
    """Name of the branch; null if HEAD is detached and no variable of a CI system names the branch."""
    dirty: bool | None = None
    """True if a tracked file differs from the commit; null if git could not be run."""
    source: str | None = None
    """Source of the commit: `git`, or the environment variable that named it."""
    why: dict[str, str] = {}
    """Field name mapped to the reason why its value is null."""
