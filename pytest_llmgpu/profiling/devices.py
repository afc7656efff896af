"""What the sampler reads of each GPU: one `Source` per metric. A new metric is a new entry of `SOURCES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pytest_llmgpu.profiling.ask import Ask
from pytest_llmgpu.profiling.nvml import NvmlMissingError, memory_used_bytes

__all__ = ["SOURCES", "Device", "Source", "open_devices"]

_KB = 1000
"""NVML's KB of PCIe throughput: undocumented, 1000 or 1024."""

_GB_PER_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}
"""PCIe generation to what one lane carries in one direction, encoding taken off."""

_LINK_MARGIN = 1.1
"""A reading this many times above what the link can carry is in another unit (seen of one driver branch)."""


class Source(NamedTuple):
    """Where one metric comes from."""

    method: str
    """The NVML call."""
    read: Callable[[Any, Any], float]
    """From (pynvml, device handle) to the value, in the unit of the metric's name."""
    window_s: float | None = None
    """How long the call looks and blocks; None for an instant reading or one whose own period is unknown.

    A call that blocks gets a thread of its own and must be safe in threads: GetFieldValues and GPM are not.
    """


def _pcie_bytes_per_s(nvml: Any, handle: Any, direction: int) -> float:
    return float(nvml.nvmlDeviceGetPcieThroughput(handle, direction) * _KB)


SOURCES: dict[str, Source] = {
    # The driver's own period, 1/6 s to 1 s by model, is not told.
    "utilization_pct": Source(
        "nvmlDeviceGetUtilizationRates", lambda nvml, handle: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    ),
    "memory_used_bytes": Source(
        "nvmlDeviceGetMemoryInfo_v2", lambda nvml, handle: float(memory_used_bytes(nvml, handle))
    ),
    "pcie_tx_bytes_per_s": Source(
        "nvmlDeviceGetPcieThroughput",
        lambda nvml, handle: _pcie_bytes_per_s(nvml, handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
        window_s=0.020,
    ),
    "pcie_rx_bytes_per_s": Source(
        "nvmlDeviceGetPcieThroughput",
        lambda nvml, handle: _pcie_bytes_per_s(nvml, handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
        window_s=0.020,
    ),
    "power_w": Source("nvmlDeviceGetPowerUsage", lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
    "sm_clock_mhz": Source(
        "nvmlDeviceGetClockInfo", lambda nvml, handle: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    ),
}
"""Metric name to its source, in the order of the sampler's columns."""


class Device:
    """One GPU: reads its metrics and remembers why one could not be read."""

    def __init__(self, nvml: Any, handle: Any, index: int, uuid: str) -> None:
        self.index = index
        self.uuid = uuid
        self.why: dict[str, str] = {}
        """Metric to the reason of its latest refusal."""
        self._nvml = nvml
        self._handle = handle
        self._pcie_limit = _pcie_limit(nvml, handle)

    def read(self, metric: str) -> float | None:
        """Return the metric's value now; None, with the reason in `why`, where NVML refuses or cannot be believed."""
        source = SOURCES[metric]
        try:
            value = source.read(self._nvml, self._handle)
        except self._nvml.NVMLError as error:
            self.why[metric] = f"{source.method}: {error}"
            return None
        if metric.startswith("pcie_") and self._pcie_limit is not None and value > self._pcie_limit:
            self.why[metric] = f"{source.method}: {value:.4g} bytes/s is more than the link can carry"
            return None
        return value


def open_devices(nvml: Any, uuids: Sequence[str] | None) -> tuple[list[Device], dict[str, str]]:
    """Find the GPUs to sample.

    Args:
        nvml: pynvml, initialised.
        uuids: Which GPUs, in which order; None for all, in NVML's order.

    Returns:
        The devices, and `gpu 3` to the reason it did not answer.

    Raises:
        NvmlMissingError: NVML shows no GPU, or not one of those asked for.
    """
    found: dict[str, Device] = {}
    why: dict[str, str] = {}
    ask = Ask(nvml, why)
    for index in range(ask("gpus", nvml.nvmlDeviceGetCount) or 0):
        handle = ask(f"gpu {index}", nvml.nvmlDeviceGetHandleByIndex, index)
        uuid = None if handle is None else ask(f"gpu {index}", nvml.nvmlDeviceGetUUID, handle)
        if uuid is not None:
            found[uuid] = Device(nvml, handle, index, uuid)
    wanted = list(found) if uuids is None else uuids
    absent = [uuid for uuid in wanted if uuid not in found]
    if absent or not wanted:
        refused = "".join(f"; {gpu}: {reason}" for gpu, reason in why.items())
        raise NvmlMissingError(f"NVML shows no GPU{' ' if absent else ''}{', '.join(absent)}{refused}")
    return [found[uuid] for uuid in wanted], why


def _pcie_limit(nvml: Any, handle: Any) -> float | None:
    """Return the bytes per second above which a PCIe reading cannot be right; None where the link is not told."""
    ask = Ask(nvml, {})
    lane = _GB_PER_S_PER_LANE.get(ask("generation", nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle))
    lanes = ask("width", nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    return None if lane is None or lanes is None else lane * 1e9 * lanes * _LINK_MARGIN
