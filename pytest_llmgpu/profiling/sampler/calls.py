"""Calls that give one metric of one moment, or of a short time after it: all that older GPUs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pytest_llmgpu.profiling.nvml import memory_v2

__all__ = ["CALLS", "OLDER", "POLLED", "Call"]

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
    smallest_period_s: float = 0.0
    """Shortest sampling period that leaves it time; the time of calls that do not block is measured."""


_PCIE_WINDOW_S = 0.020
_PCIE_PERIOD_S = 0.025
"""The call was seen to take 21 ms, and a tick begins up to some milliseconds late."""


def _pcie_bytes_per_s(nvml: Any, handle: Any, direction: int) -> float:
    return float(nvml.nvmlDeviceGetPcieThroughput(handle, direction) * _KB)


CALLS: dict[str, Call] = {
    # The driver's own period, 1/6 s to 1 s by model, is not told.
    "utilization_pct": Call(
        "nvmlDeviceGetUtilizationRates", lambda nvml, handle: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    ),
    # As nvidia-smi shows it: without the driver's reserved share.
    "memory_used_bytes": Call("nvmlDeviceGetMemoryInfo_v2", lambda nvml, handle: float(memory_v2(nvml, handle).used)),
    "pcie_tx_bytes_per_s": Call(
        "nvmlDeviceGetPcieThroughput",
        lambda nvml, handle: _pcie_bytes_per_s(nvml, handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
        window_s=_PCIE_WINDOW_S,
        smallest_period_s=_PCIE_PERIOD_S,
    ),
    "pcie_rx_bytes_per_s": Call(
        "nvmlDeviceGetPcieThroughput",
        lambda nvml, handle: _pcie_bytes_per_s(nvml, handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
        window_s=_PCIE_WINDOW_S,
        smallest_period_s=_PCIE_PERIOD_S,
    ),
    "power_w": Call("nvmlDeviceGetPowerUsage", lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
    "sm_clock_mhz": Call(
        "nvmlDeviceGetClockInfo", lambda nvml, handle: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    ),
}
"""Metric to the call that gives it where no source does."""

OLDER = {
    "memory_used_bytes": Call(
        "nvmlDeviceGetMemoryInfo", lambda nvml, handle: float(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    ),
}
"""Metric to what gives it where the driver is older than the call."""

POLLED = ("utilization_pct", "memory_used_bytes", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")
"""The metrics that the method `polling` reads, in the order of Shin et al. 2024."""
