"""What a device counts since some moment in the past: read when a window begins and when it ends."""

from __future__ import annotations

from typing import Any

from pytest_llmgpu.profiling.nvml_query import Ask
from pytest_llmgpu.profiling.sampler.counters import field_values

__all__ = ["THROTTLED", "Cumulative"]

THROTTLED = {"throttled_power_s": 74, "throttled_heat_s": 75}
"""Count to its field: nanoseconds below the clock asked for. Apart, since a device may have one of them only."""

_MOST_EVENTS = 100
"""Events taken up at once; what is left waits for the next reading."""


class Cumulative:
    """The counters of one GPU, and how many compute processes it has at this moment."""

    NAMES = ("energy_j", *THROTTLED, "ecc_uncorrected", "xids", "compute_processes")

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._events: Any = None
        self._xids = 0

    def open(self) -> None:
        """Have the driver tell of Xid errors from now on; if it refuses, the next reading asks again and says why."""
        self._listen({})

    def read(self, why: dict[str, str]) -> dict[str, float]:
        """Return the counts by name; without those that cannot be had, their reasons put into `why`."""
        nvml, ask = self._nvml, Ask(self._nvml, why)
        energy_mj = ask("energy_j", nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        processes = ask("compute_processes", nvml.nvmlDeviceGetComputeRunningProcesses_v3, self._handle)
        counts = {
            "energy_j": None if energy_mj is None else energy_mj / 1000,
            **self._throttled_s(why),
            "ecc_uncorrected": ask(
                "ecc_uncorrected",
                nvml.nvmlDeviceGetTotalEccErrors,
                self._handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            "xids": self._count_xids(why),
            "compute_processes": None if processes is None else len(processes),
        }
        return {name: float(count) for name, count in counts.items() if count is not None}

    def _throttled_s(self, why: dict[str, str]) -> dict[str, float]:
        refused: dict[str, str] = {}
        answers = Ask(self._nvml, refused)("", field_values, self._nvml, self._handle, list(THROTTLED.values()))
        if answers is None:
            why.update(dict.fromkeys(THROTTLED, refused[""]))
            return {}
        named = dict(zip(THROTTLED, answers, strict=True))
        why.update((name, answer) for name, answer in named.items() if isinstance(answer, str))
        return {name: answer / 1e9 for name, answer in named.items() if not isinstance(answer, str)}

    def _listen(self, why: dict[str, str]) -> bool:
        """Register for Xid errors, once; return whether that is done."""
        nvml, ask = self._nvml, Ask(self._nvml, why)
        if self._events is None and (events := ask("xids", nvml.nvmlEventSetCreate)) is not None:
            ask("xids", nvml.nvmlDeviceRegisterEvents, self._handle, nvml.nvmlEventTypeXidCriticalError, events)
            if "xids" in why:
                Ask(nvml, {})("xids", nvml.nvmlEventSetFree, events)
            else:
                self._events = events
        return self._events is not None

    def _count_xids(self, why: dict[str, str]) -> int | None:
        """Return how many Xid errors the driver has told since it was asked to."""
        nvml = self._nvml
        if not self._listen(why):
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
