"""Calls that give one metric of one moment, or of a short time after it: all that older GPUs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pytest_llmgpu.profiling.nvml import memory_used_bytes

__all__ = ["CALLS", "PAPER", "Call"]

_KB = 1000
"""NVML's KB of PCIe throughput: undocumented, 1000 or 1024."""


class Call(NamedTuple):
    """A call that gives one metric of one moment, or of a short time after it began."""

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


CALLS: dict[str, Call] = {
    # The driver's own period, 1/6 s to 1 s by model, is not told.
    "utilization_pct": Call(
        "nvmlDeviceGetUtilizationRates", lambda nvml, handle: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    ),
    "memory_used_bytes": Call(
        "nvmlDeviceGetMemoryInfo_v2", lambda nvml, handle: float(memory_used_bytes(nvml, handle))
    ),
    "pcie_tx_bytes_per_s": Call(
        "nvmlDeviceGetPcieThroughput",
        lambda nvml, handle: _pcie_bytes_per_s(nvml, handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
        window_s=0.020,
    ),
    "pcie_rx_bytes_per_s": Call(
        "nvmlDeviceGetPcieThroughput",
        lambda nvml, handle: _pcie_bytes_per_s(nvml, handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
        window_s=0.020,
    ),
    "power_w": Call("nvmlDeviceGetPowerUsage", lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
    "sm_clock_mhz": Call(
        "nvmlDeviceGetClockInfo", lambda nvml, handle: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    ),
}
"""Metric to the call that gives it where no source does."""

PAPER = ("utilization_pct", "memory_used_bytes", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")
"""What the paper's profiler reads, in its order."""
