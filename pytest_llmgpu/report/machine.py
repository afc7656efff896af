"""The machine that a report was measured on, its libraries and its source."""

from __future__ import annotations

import msgspec

__all__ = ["Commit", "Environment", "Gpu"]


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as NVML describes it, whatever CUDA_VISIBLE_DEVICES says."""

    index: int
    """NVML's index: by PCI bus. CUDA's may differ."""
    uuid: str
    name: str
    memory_bytes: int | None = None
    """All memory of the board, the driver's own share included."""
    reserved_bytes: int | None = None
    """The driver's own share, which no program can have; None where the driver does not tell it."""
    pcie_gen: int | None = None
    """Largest generation that GPU and slot agree on: the current one falls when the GPU idles."""
    pcie_width: int | None = None
    """Lanes in use now: a badly seated board shows here."""
    power_limit_w: float | None = None
    """What the board may draw, of all limits that were set: less slows it down."""
    nvlinks: int | None = None
    """Active NVLinks; None where the GPU has none to ask about."""
    why: dict[str, str] = {}
    """Field to the reason it is None."""


class Environment(msgspec.Struct, kw_only=True):
    """The machine and its libraries, without names of hosts or users."""

    cpu: str | None = None
    cores: int | None = None
    """Cores this process may use."""
    python: str
    platform: str
    """Kernel and C library: `Linux-6.1.0-x86_64-with-glibc2.36`."""
    gpus: list[Gpu] = []
    """Every GPU of the node, visible to CUDA or not."""
    topology: list[list[str]] | None = None
    """[gpus][gpus] how each pair is linked, in the words of `nvidia-smi topo -m`."""
    driver: str | None = None
    cuda: str | None = None
    """CUDA version torch was built for."""
    nccl: str | None = None
    versions: dict[str, str | None] = {}
    """Distribution to its version, None where it is not installed."""
    variables: dict[str, str] = {}
    """Environment variables that change what is measured."""
    why: dict[str, str] = {}


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The source that was measured."""

    sha: str | None = None
    branch: str | None = None
    """None where HEAD is detached and nothing else names the branch."""
    dirty: bool | None = None
    """Whether a tracked file differs from the commit; None where git did not answer."""
    source: str | None = None
    """`git`, or the environment variable that named the commit."""
    why: dict[str, str] = {}
