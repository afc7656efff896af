"""Calls that give one metric at one moment or over a short window: for devices without a source of the metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pytest_llmgpu.profiling.nvml import memory_v2

_PCIE_KB = 1000
"""The unit of NVML's PCIe throughput in bytes. NVIDIA does not document whether it is 1000 or 1024."""
_PCIE_WINDOW_S = 0.020
_PCIE_PERIOD_S = 0.025
"""The PCIe call takes 21 ms, and a tick may begin some milliseconds late."""


class Call(NamedTuple):
    """A call that gives one metric at one moment, or over a short window after its begin."""

    method: str
    """The NVML call."""
    read: Callable[[Any, Any], float]
    """From (pynvml, device handle) to the value, in the unit of the metric's name."""
    window_s: float | None = None
    """How long the call measures and blocks; None for an instant value or an unknown period of the driver.

    A call that blocks runs in its own thread and must be thread-safe; GetFieldValues and GPM are not.
    """
    smallest_period_s: float = 0.0
    """The shortest sampling period for a call that blocks. The time of other calls is measured."""


def _pcie(direction: str) -> Call:
    def read(nvml: Any, handle: Any) -> float:
        return float(nvml.nvmlDeviceGetPcieThroughput(handle, getattr(nvml, direction)) * _PCIE_KB)

    return Call("nvmlDeviceGetPcieThroughput", read, window_s=_PCIE_WINDOW_S, smallest_period_s=_PCIE_PERIOD_S)


CALLS: dict[str, Call] = {
    # The driver averages over 1/6 s to 1 s, depending on the model.
    "utilization_pct": Call(
        "nvmlDeviceGetUtilizationRates", lambda nvml, handle: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    ),
    # As nvidia-smi shows it: without the memory that the driver reserves.
    "memory_used_bytes": Call("nvmlDeviceGetMemoryInfo_v2", lambda nvml, handle: float(memory_v2(nvml, handle).used)),
    "pcie_tx_bytes_per_s": _pcie("NVML_PCIE_UTIL_TX_BYTES"),
    "pcie_rx_bytes_per_s": _pcie("NVML_PCIE_UTIL_RX_BYTES"),
    "power_w": Call("nvmlDeviceGetPowerUsage", lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
    "sm_clock_mhz": Call(
        "nvmlDeviceGetClockInfo", lambda nvml, handle: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    ),
}
"""Metric to the call that gives it."""

FALLBACKS = {
    "memory_used_bytes": Call(
        "nvmlDeviceGetMemoryInfo", lambda nvml, handle: float(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    ),
}
"""Metric to the call for drivers that are older than the one in `CALLS`."""

POLLED = ("utilization_pct", "memory_used_bytes", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")
"""The metrics that the method `polling` reads, in the order of Shin et al. 2024."""
