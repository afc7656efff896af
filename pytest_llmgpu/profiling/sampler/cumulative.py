"""Cumulative counters of a device, which are read when a window begins and when it ends."""

from __future__ import annotations

from typing import Any

from pytest_llmgpu.profiling.nvml import Query
from pytest_llmgpu.profiling.sampler.sources import field_values

THROTTLED = {"throttled_power_s": 74, "throttled_heat_s": 75}
"""Name to the field with the nanoseconds below the requested clock. A device may have only one of them."""

_MOST_EVENTS = 100
"""The most events that one reading takes. The next reading takes the rest."""


class Cumulative:
    """The counters of one GPU, and its number of compute processes at this moment."""

    NAMES = ("energy_j", *THROTTLED, "ecc_uncorrected", "xids", "compute_processes")

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._events: Any = None
        self._xids = 0

    def open(self) -> None:
        """Register for Xid errors from now on. If the driver refuses, the next reading tries again."""
        self._register({})

    def read(self, why: dict[str, str]) -> dict[str, float]:
        """Return the counts by name. A count that is not available is left out, and its reason is put into `why`."""
        nvml, handle, query = self._nvml, self._handle, Query(self._nvml, why)
        energy_mj = query("energy_j", nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        processes = query("compute_processes", nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        throttled_s = self._throttled_s(why)
        error_types = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        counts = {
            "energy_j": None if energy_mj is None else energy_mj / 1000,
            **throttled_s,
            "ecc_uncorrected": query("ecc_uncorrected", nvml.nvmlDeviceGetTotalEccErrors, handle, *error_types),
            "xids": self._count_xids(why),
            "compute_processes": None if processes is None else len(processes),
        }
        return {name: float(count) for name, count in counts.items() if count is not None}

    def _throttled_s(self, why: dict[str, str]) -> dict[str, float]:
        try:
            values = field_values(self._nvml, self._handle, list(THROTTLED.values()))
        except self._nvml.NVMLError as error:
            values = [f"nvmlDeviceGetFieldValues: {error}"] * len(THROTTLED)
        named = dict(zip(THROTTLED, values, strict=True))
        why.update((name, value) for name, value in named.items() if isinstance(value, str))
        return {name: value / 1e9 for name, value in named.items() if not isinstance(value, str)}

    def _register(self, why: dict[str, str]) -> bool:
        """Register for Xid errors, once; return whether that is done."""
        nvml, query = self._nvml, Query(self._nvml, why)
        if self._events is None and (events := query("xids", nvml.nvmlEventSetCreate)) is not None:
            query("xids", nvml.nvmlDeviceRegisterEvents, self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            if "xids" in why:
                Query(nvml)("xids", nvml.nvmlEventSetFree, events)
            else:
                self._events = events
        return self._events is not None

    def _count_xids(self, why: dict[str, str]) -> int | None:
        """Return the number of Xid errors since the registration."""
        nvml = self._nvml
        if not self._register(why):
            return None
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
