"""Which GPUs there are, how they are joined, and which of them CUDA shows: the only importer of pynvml.

No call here takes longer than a fraction of a millisecond. Nothing here raises for a machine without NVML.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from pytest_llmgpu.profiling.nvml_query import Ask, lasting
from pytest_llmgpu.profiling.topology import active_links, matrix
from pytest_llmgpu.report.machine import Gpu

__all__ = ["Inventory", "NvmlMissingError", "inventory", "memory_v2", "session", "used_bytes", "visible"]


class NvmlMissingError(RuntimeError):
    """NVML cannot be used on this machine; the message says why."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of this machine."""

    gpus: list[Gpu] = []
    topology: list[list[str]] | None = None
    """[gpu, gpu] the nearest path in the words of `nvidia-smi topo -m`: X, NV18, PIX, PXB, PHB, NODE, SYS."""
    driver: str | None = None
    cuda: str | None = None
    """Newest CUDA the driver supports: `13.0`."""
    why: dict[str, str] = {}
    """Field to the reason it is None; `nvml` where NVML is absent, `gpu 3` for a GPU that does not answer."""


@contextmanager
def session() -> Iterator[Any]:
    """Yield pynvml, initialised, for as long as the block runs.

    Raises:
        NvmlMissingError: pynvml, the driver's library or the driver is missing or refuses.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlMissingError(f"pynvml cannot be imported: {error}") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlMissingError(f"nvmlInit: {error}") from error
    try:
        yield nvml
    finally:
        with suppress(nvml.NVMLError):  # a lost GPU may refuse this too, and nothing is left to do
            nvml.nvmlShutdown()


def inventory() -> Inventory:
    """Describe the GPUs of this machine; without NVML an empty inventory that says why."""
    try:
        with session() as nvml:
            return _inventory(nvml)
    except NvmlMissingError as error:
        reason = str(error)
        return Inventory(why=dict.fromkeys(("nvml", "topology", "driver", "cuda"), reason))


def used_bytes(uuids: Sequence[str]) -> dict[str, int]:
    """Return the memory in use now, by any process, for each UUID that can be read; without NVML an empty map."""
    answer: dict[str, int] = {}
    try:
        with session() as nvml:
            ask = Ask(nvml, {})
            for uuid in uuids:
                handle = ask(uuid, nvml.nvmlDeviceGetHandleByUUID, uuid)
                used = None if handle is None else ask(uuid, _used_bytes, nvml, handle)
                if used is not None:
                    answer[uuid] = used
    except NvmlMissingError:
        return {}
    return answer


def memory_v2(nvml: Any, handle: Any) -> Any:
    """Return a device's memory: `total`, `reserved` for the driver, `used` beside that, `free`.

    Raises:
        NVMLError: The driver is older than this call, or refuses.
    """
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except TypeError:  # gpustat puts a function without `version` in its place, which asks for v2 by itself
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _used_bytes(nvml: Any, handle: Any) -> int:
    try:
        return int(memory_v2(nvml, handle).used)
    except nvml.NVMLError as error:
        if not lasting(nvml, error):
            raise
    return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)


def visible(inventory: Inventory, cuda_visible_devices: str | None, cuda_device_order: str | None = None) -> list[Gpu]:
    """Return the GPUs a CUDA program would see, in its order: item 0 is its `cuda:0`.

    CUDA's rules (CUDA C++ programming guide, environment variables): the list ends at the first entry that names no
    GPU, a GPU named twice empties it, `GPU-` UUIDs may be shortened while they stay unambiguous.

    Args:
        inventory: The GPUs there are.
        cuda_visible_devices: CUDA_VISIBLE_DEVICES; None where unset: all GPUs.
        cuda_device_order: CUDA_DEVICE_ORDER; None where unset: FASTEST_FIRST.

    Raises:
        ValueError: A MIG instance is named, or indices count GPUs of different kinds in an order only CUDA knows.
    """
    if cuda_visible_devices is None:
        _refuse_unknown_order(inventory, cuda_device_order)
        return list(inventory.gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in cuda_visible_devices.split(",")):
        if entry.startswith("MIG-"):
            raise ValueError(
                f"CUDA_VISIBLE_DEVICES names the MIG instance {entry!r}: NVML has no utilisation of MIG instances; "
                "allowed are indices and GPU- UUIDs of whole GPUs"
            )
        gpu = _by_uuid(inventory, entry) if entry.startswith("GPU-") else _by_index(inventory, entry, cuda_device_order)
        if gpu is None:
            break
        if gpu in chosen:
            return []
        chosen.append(gpu)
    return chosen


def _by_uuid(inventory: Inventory, entry: str) -> Gpu | None:
    matches = [gpu for gpu in inventory.gpus if gpu.uuid.lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None


def _by_index(inventory: Inventory, entry: str, order: str | None) -> Gpu | None:
    # CUDA reads as strtoul(3) does: "1x" is 1.
    digits = re.match(r"\+?\d+", entry)
    if digits is None:
        return None
    _refuse_unknown_order(inventory, order)
    return next((gpu for gpu in inventory.gpus if gpu.index == int(digits.group())), None)


def _refuse_unknown_order(inventory: Inventory, order: str | None) -> None:
    names = sorted({gpu.name for gpu in inventory.gpus})
    if len(names) > 1 and order != "PCI_BUS_ID":
        raise ValueError(
            f"CUDA_DEVICE_ORDER is {order!r} and the GPUs differ ({', '.join(names)}): CUDA may count them in another "
            "order than NVML; allowed are CUDA_DEVICE_ORDER=PCI_BUS_ID, or GPU- UUIDs in CUDA_VISIBLE_DEVICES"
        )


def _inventory(nvml: Any) -> Inventory:
    why: dict[str, str] = {}
    ask = Ask(nvml, why)
    version = ask("cuda", nvml.nvmlSystemGetCudaDriverVersion_v2)
    gpus: list[Gpu] = []
    handles: list[Any] = []
    links: list[list[int]] = []
    for index in range(ask("nvml", nvml.nvmlDeviceGetCount) or 0):
        handle = ask(f"gpu {index}", nvml.nvmlDeviceGetHandleByIndex, index)
        found = None if handle is None else _gpu(nvml, index, handle, why)
        if found is not None:
            gpus.append(found[0])
            links.append(found[1])
            handles.append(handle)
    return Inventory(
        gpus=gpus,
        topology=matrix(nvml, handles, links, ask),
        driver=ask("driver", nvml.nvmlSystemGetDriverVersion),
        cuda=None if version is None else f"{version // 1000}.{version % 1000 // 10}",
        why=why,
    )


def _gpu(nvml: Any, index: int, handle: Any, inventory_why: dict[str, str]) -> tuple[Gpu, list[int]] | None:
    """Describe one GPU and number its active links; None, its reason in the inventory's, where it names no UUID."""
    identify = Ask(nvml, inventory_why)
    uuid = identify(f"gpu {index}", nvml.nvmlDeviceGetUUID, handle)
    name = None if uuid is None else identify(f"gpu {index}", nvml.nvmlDeviceGetName, handle)
    if uuid is None or name is None:
        return None
    why: dict[str, str] = {}
    ask = Ask(nvml, why)
    memory = ask("memory_bytes", nvml.nvmlDeviceGetMemoryInfo, handle)
    apart = ask("reserved_bytes", memory_v2, nvml, handle)
    links = active_links(nvml, handle, ask)
    milliwatts = ask("power_limit_w", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    gpu = Gpu(
        index=index,
        uuid=uuid,
        name=name,
        memory_bytes=None if memory is None else int(memory.total),
        reserved_bytes=None if apart is None else int(apart.reserved),
        pcie_gen=ask("pcie_gen", nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=ask("pcie_width", nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        power_limit_w=None if milliwatts is None else milliwatts / 1000,
        nvlinks=None if links is None else len(links),
        why=why,
    )
    return gpu, links or []
