"""What a device counts since some moment in the past: read when a window begins and when it ends."""

from __future__ import annotations

from typing import Any

from pytest_llmgpu.profiling.ask import Ask
from pytest_llmgpu.profiling.counters import field_values

__all__ = ["Cumulative"]

_THROTTLED = (74, 75)
"""Fields: nanoseconds below the clock asked for, for power and for heat."""

_MOST_EVENTS = 100
"""Events taken up at once; what is left waits for the next reading."""


class Cumulative:
    """The counters of one GPU, and how many compute processes it has at this moment."""

    NAMES = ("energy_j", "throttled_s", "ecc_uncorrected", "xids", "compute_processes")

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._events: Any = None
        self._xids = 0

    def read(self, why: dict[str, str]) -> dict[str, float]:
        """Return the counts by name; without those that cannot be had, their reasons put into `why`."""
        nvml, ask = self._nvml, Ask(self._nvml, why)
        throttled_ns = ask("throttled_s", field_values, nvml, self._handle, _THROTTLED)
        known_ns = [value for value in throttled_ns or [] if not isinstance(value, str)]
        if throttled_ns is not None and not known_ns:
            why["throttled_s"] = str(throttled_ns[0])
        energy_mj = ask("energy_j", nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        processes = ask("compute_processes", nvml.nvmlDeviceGetComputeRunningProcesses_v3, self._handle)
        counts = {
            "energy_j": None if energy_mj is None else energy_mj / 1000,
            "throttled_s": sum(known_ns) / 1e9 if known_ns else None,
            "ecc_uncorrected": ask(
                "ecc_uncorrected",
                nvml.nvmlDeviceGetTotalEccErrors,
                self._handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            "xids": self._count_xids(ask, why),
            "compute_processes": None if processes is None else len(processes),
        }
        return {name: float(count) for name, count in counts.items() if count is not None}

    def _count_xids(self, ask: Ask, why: dict[str, str]) -> int | None:
        """Return how many Xid errors the driver has told since the first reading."""
        nvml = self._nvml
        if self._events is None:
            events = ask("xids", nvml.nvmlEventSetCreate)
            if events is None:
                return None
            ask("xids", nvml.nvmlDeviceRegisterEvents, self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            if "xids" in why:
                Ask(nvml, {})("xids", nvml.nvmlEventSetFree, events)
                return None
            self._events = events
        for _ in range(_MOST_EVENTS):
            try:
                nvml.nvmlEventSetWait_v2(self._events, 0)  # milliseconds
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    why["xids"] = f"nvmlEventSetWait_v2: {error}"
                    return None
                break
            self._xids += 1
        return self._xids
