"""How the GPUs are joined: NVLinks, and the nearest path between each two, in the words of `nvidia-smi topo -m`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pytest_llmgpu.profiling.nvml_query import Ask

__all__ = ["active_links", "matrix"]

_PATHS = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t to words."""

_SWITCH = "switch"


def active_links(nvml: Any, handle: Any, ask: Ask) -> list[int] | None:
    """Return the numbers of a GPU's active NVLinks; None, with its reason under `nvlinks`, where it has none."""
    state = ask("nvlinks", nvml.nvmlDeviceGetNvLinkState, handle, 0)
    if state is None:
        return None
    active = [0] if state else []
    probe = Ask(nvml, {})
    for link in range(1, nvml.NVML_NVLINK_MAX_LINKS):
        state = probe("", nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break  # past the last link of this model
        if state:
            active.append(link)
    return active


def matrix(nvml: Any, handles: Sequence[Any], links: Sequence[Sequence[int]], ask: Ask) -> list[list[str]] | None:
    """Return the [gpu, gpu] matrix of paths; None, with its reason under `topology`, where NVML does not tell.

    Two GPUs are joined by the links that lead from one to the other, or else, through switches, by as many as the
    lesser of the two has to switches.

    Args:
        nvml: pynvml, initialised.
        handles: The GPUs.
        links: For each of them its active links.
        ask: Asks and keeps the reason of a refusal.
    """
    buses = [ask("topology", nvml.nvmlDeviceGetPciInfo, handle) for handle in handles]
    if None in buses:
        return None
    ends = [_ends(nvml, handle, active) for handle, active in zip(handles, links, strict=True)]
    paths = [["X"] * len(handles) for _ in handles]
    for a in range(len(handles)):
        for b in range(a + 1, len(handles)):
            level = ask("topology", nvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b])
            if level is None:
                return None
            count = ends[a][_bus(buses[b])] or min(ends[a][_SWITCH], ends[b][_SWITCH])
            paths[a][b] = paths[b][a] = f"NV{count}" if count else _PATHS.get(level, f"level {level}")
    return paths


def _ends(nvml: Any, handle: Any, links: Sequence[int]) -> Counter[str]:
    """Count a GPU's active links by where they end: `switch`, or the PCI bus id of another GPU."""
    ends: Counter[str] = Counter()
    probe = Ask(nvml, {})  # an end that is not told joins no pair
    for link in links:
        if probe("", nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            ends[_SWITCH] += 1
        elif (remote := probe("", nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)) is not None:
            ends[_bus(remote)] += 1
    return ends


def _bus(info: Any) -> str:
    raw = info.busId
    return (raw.decode() if isinstance(raw, bytes) else str(raw)).lower()
