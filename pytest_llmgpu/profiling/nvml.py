"""NVML: which GPUs there are, how they are connected, and calls that NVML may refuse. The only importer of pynvml.

No call here takes longer than a fraction of a millisecond. Nothing here raises on a machine without NVML.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from pytest_llmgpu.report.report import Gpu

_PERMANENT = ("NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH")
_PATHS = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t to the words of `nvidia-smi topo -m`."""
_SWITCH = "switch"


class NvmlMissingError(RuntimeError):
    """NVML cannot be used on this machine. The message has the reason."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of this machine."""

    gpus: list[Gpu] = []
    topology: list[list[str]] | None = None
    """[gpu, gpu] The nearest path in the words of `nvidia-smi topo -m`: X, NV18, PIX, PXB, PHB, NODE, SYS."""
    driver: str | None = None
    """The version of the driver."""
    why: dict[str, str] = {}
    """Maps a field to the reason why it is None; `nvml` if NVML is missing, `gpu 3` for a GPU that does not answer."""


class Query:
    """Calls NVML functions and stores the reason of every call that NVML refuses."""

    def __init__(self, nvml: Any, why: dict[str, str] | None = None) -> None:
        self._nvml = nvml
        self._why = {} if why is None else why

    def __call__(self, field: str, call: Callable[..., Any], /, *arguments: Any) -> Any:
        """Return `call(*arguments)`. If NVML refuses, return None and store the reason in `why[field]`."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            self._why[field] = f"{call.__name__}: {error}"
            return None


def is_permanent(nvml: Any, error: Any) -> bool:
    """Return whether an NVMLError means that the call is not available here; after other errors a retry may succeed."""
    return error.value in [getattr(nvml, f"NVML_ERROR_{name}") for name in _PERMANENT]


@contextmanager
def session() -> Iterator[Any]:
    """Yield pynvml, initialised until the block ends.

    NvmlMissingError if pynvml, the driver's library or the driver is missing, or nvmlInit fails.
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
        with suppress(nvml.NVMLError):  # a lost GPU may refuse this too
            nvml.nvmlShutdown()


def inventory() -> Inventory:
    """Describe the GPUs of this machine. Without NVML the inventory is empty and has the reason."""
    try:
        with session() as nvml:
            why: dict[str, str] = {}
            query = Query(nvml, why)
            gpus: list[Gpu] = []
            handles: list[Any] = []
            for index in range(query("nvml", nvml.nvmlDeviceGetCount) or 0):
                handle = query(f"gpu {index}", nvml.nvmlDeviceGetHandleByIndex, index)
                uuid = None if handle is None else query(f"gpu {index}", nvml.nvmlDeviceGetUUID, handle)
                name = None if uuid is None else query(f"gpu {index}", nvml.nvmlDeviceGetName, handle)
                if uuid is not None and name is not None:
                    gpus.append(_gpu(nvml, handle, index=index, uuid=uuid, name=name))
                    handles.append(handle)
            return Inventory(
                gpus=gpus,
                topology=_topology(nvml, handles, query),
                driver=query("driver", nvml.nvmlSystemGetDriverVersion),
                why=why,
            )
    except NvmlMissingError as error:
        return Inventory(why=dict.fromkeys(("nvml", "topology", "driver"), str(error)))


def used_bytes(uuids: Sequence[str]) -> dict[str, int]:
    """Return the memory in use now, by any process, for each UUID that can be read; an empty map without NVML."""
    return {uuid: int(memory.used) for uuid, memory in _of_each(uuids, memory_v2)}


def computing(uuids: Sequence[str]) -> dict[str, dict[int, int]]:
    """Return the processes that compute on each GPU now: their ids in the namespace of the driver, and their bytes."""
    found = _of_each(uuids, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
    return {uuid: {one.pid: one.usedGpuMemory or 0 for one in listed} for uuid, listed in found}


def _of_each(uuids: Sequence[str], read: Callable[[Any, Any], Any]) -> Iterator[tuple[str, Any]]:
    with suppress(NvmlMissingError), session() as nvml:
        query = Query(nvml)
        for uuid in uuids:
            handle = query(uuid, nvml.nvmlDeviceGetHandleByUUID, uuid)
            found = None if handle is None else query(uuid, read, nvml, handle)
            if found is not None:
                yield uuid, found


def memory_v2(nvml: Any, handle: Any) -> Any:
    """Return a device's memory: `total`, `reserved` by the driver, `used` without the reserved part, `free`."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except TypeError:  # gpustat replaces the function by one without `version`, which calls v2 itself
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _gpu(nvml: Any, handle: Any, *, index: int, uuid: str, name: str) -> Gpu:
    why: dict[str, str] = {}
    query = Query(nvml, why)
    memory = query("memory_bytes", memory_v2, nvml, handle)
    if memory is None:
        why["reserved_bytes"] = why["memory_bytes"]
    links = _active_links(nvml, handle, query)
    limit_mw = query("power_limit_w", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return Gpu(
        index=index,
        uuid=uuid,
        name=name,
        memory_bytes=None if memory is None else int(memory.total),
        reserved_bytes=None if memory is None else int(memory.reserved),
        pcie_gen=query("pcie_gen", nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=query("pcie_width", nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        nvlinks=None if links is None else len(links),
        why=why,
    )


def _active_links(nvml: Any, handle: Any, query: Query) -> list[int] | None:
    """Return the numbers of a GPU's active NVLinks; None, with the reason under `nvlinks`, if it has no NVLink."""
    active: list[int] = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = (query if link == 0 else Query(nvml))("nvlinks", nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            return None if link == 0 else active  # this model has no more links
        if state:
            active.append(link)
    return active


def _topology(nvml: Any, handles: Sequence[Any], query: Query) -> list[list[str]] | None:
    """Return the [gpu, gpu] matrix of paths; None, with the reason under `topology`, if NVML refuses.

    Two GPUs are connected by the NVLinks between them; through switches by the smaller number of links to switches.
    """
    infos = [query("topology", nvml.nvmlDeviceGetPciInfo, handle) for handle in handles]
    if None in infos:
        return None
    # By their other end: `switch`, or the PCI bus id of another GPU.
    ends: list[Counter[str]] = [Counter() for _ in handles]
    ask = Query(nvml)
    for handle, counted in zip(handles, ends, strict=True):
        for link in _active_links(nvml, handle, ask) or ():
            if ask("", nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                counted[_SWITCH] += 1
            elif (remote := ask("", nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)) is not None:
                counted[_bus_id(remote)] += 1
    paths = [["X"] * len(handles) for _ in handles]
    for a in range(len(handles)):
        for b in range(a + 1, len(handles)):
            level = query("topology", nvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b])
            if level is None:
                return None
            count = ends[a][_bus_id(infos[b])] or min(ends[a][_SWITCH], ends[b][_SWITCH])
            paths[a][b] = paths[b][a] = f"NV{count}" if count else _PATHS.get(level, f"level {level}")
    return paths


def _bus_id(info: Any) -> str:
    raw = info.busId
    return (raw.decode() if isinstance(raw, bytes) else str(raw)).lower()
