"""Sources that are counters of bytes: PCIe's, which wrap every 4 GiB, and NVLink's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llmgpu.profiling.sampler.sources import MEMBERS, Clock, Spoken

__all__ = ["ByteCounters", "NvLink", "field_values"]

_POLL_S = 0.040
"""Longest wait between two looks at the byte counters: at Gen5 x16 they wrap every 0.08 s."""

_WRAP_BYTES = 1 << 32
_NVLINK_S = 0.95
"""How often NVLink's counters are read: a reading costs 1.2 ms, and the bytes of a window come from its marks."""

_KIB = 1 << 10
_ALL_LINKS = 0xFFFFFFFF


def field_values(nvml: Any, handle: Any, ids: Sequence[Any]) -> list[int | str]:
    """Return per field its value, or the reason there is none.

    Args:
        nvml: pynvml, initialised.
        handle: The device.
        ids: Field ids, or pairs of field id and scope.
    """
    answers: list[int | str] = []
    for value in nvml.nvmlDeviceGetFieldValues(handle, ids):
        if value.nvmlReturn:
            answers.append(f"nvmlDeviceGetFieldValues [{value.fieldId}]: {nvml.NVMLError(value.nvmlReturn)}")
        else:
            answers.append(int(getattr(value.value, MEMBERS.get(value.valueType, "ullVal"))))
    return answers


class ByteCounters:
    """PCIe byte counters of 32 bits, looked at so often that no wrap goes unseen; other time is left out."""

    method = "nvmlDeviceGetFieldValues [197, 198]"
    smallest_period_s = 0.0
    IDS: Mapping[str, int] = {"pcie_tx_bytes_per_s": 197, "pcie_rx_bytes_per_s": 198}

    def __init__(self, nvml: Any, handle: Any, limit_bytes_per_s: float | None, clock: Clock) -> None:
        """Read for the first time; what is refused now is not asked again.

        Args:
            nvml: pynvml, initialised.
            handle: The device.
            limit_bytes_per_s: What the link can carry; None where that is not known: as Gen5 x16.
            clock: CLOCK_MONOTONIC.
        """
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self._longest_s = _WRAP_BYTES / (limit_bytes_per_s or 70e9)
        self.poll_s = min(_POLL_S, 0.6 * self._longest_s)
        """How often `poll` is to be called at least."""
        first = field_values(nvml, handle, list(self.IDS.values()))
        self.metrics = [metric for metric, value in zip(self.IDS, first, strict=True) if not isinstance(value, str)]
        if not self.metrics:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._ids = [self.IDS[metric] for metric in self.metrics]
        self._last: list[int] | None = None
        self._refused: str | None = None
        self._bytes = [0] * len(self._ids)
        self._seconds = 0.0
        self._polled_s = clock()
        self.poll()

    @property
    def due_s(self) -> float:
        """CLOCK_MONOTONIC by which the next `poll` is to be made."""
        return self._polled_s + self.poll_s

    def poll(self) -> None:
        """Add what the counters have counted since the last look."""
        before, before_s = self._last, self._polled_s
        self._last, self._polled_s = None, self._clock()
        now = field_values(self._nvml, self._handle, self._ids)
        self._refused = next((value for value in now if isinstance(value, str)), None)
        if self._refused is not None:
            return
        self._last = [int(value) for value in now]
        passed_s = self._polled_s - before_s
        if before is None or passed_s > self._longest_s:
            return  # it may have wrapped more than once
        for place, (old, new) in enumerate(zip(before, self._last, strict=True)):
            self._bytes[place] += (new - old) % _WRAP_BYTES
        self._seconds += passed_s

    def read(self, now_s: float, *, hurry: bool = False) -> Spoken | None:  # noqa: ARG002 - samples stay apart
        """Answer with the bytes over the seconds in which no wrap can have been missed."""
        del now_s
        self.poll()
        counted, seconds = self._bytes, self._seconds
        self._bytes, self._seconds = [0] * len(self._ids), 0.0
        if seconds <= 0:
            late = (
                self._refused
                or f"{self.method}: read more than {self._longest_s:.3g} s late, in which the counter may have wrapped"
            )
            return Spoken({}, 0.0, dict.fromkeys(self.metrics, late))
        rates = (size / seconds for size in counted)
        return Spoken(dict(zip(self.metrics, rates, strict=True)), seconds)


class NvLink:
    """NVLink data counters over all links: 64 bits, in KiB."""

    method = "nvmlDeviceGetFieldValues [138, 139]"
    smallest_period_s = 0.0
    IDS: Mapping[str, int] = {"nvlink_tx_bytes_per_s": 138, "nvlink_rx_bytes_per_s": 139}

    def __init__(self, nvml: Any, handle: Any, clock: Clock) -> None:
        """Read for the first time; what is refused now is not asked again."""
        self._nvml, self._handle = nvml, handle
        self.metrics = list(self.IDS)
        first = self._counters()
        self.metrics = [metric for metric in self.IDS if not isinstance(first[metric], str)]
        if not self.metrics:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._last = first
        self._since_s = clock()

    def totals(self) -> dict[str, int]:
        """Return `nvlink_tx_bytes` and `nvlink_rx_bytes` since the driver was loaded; without one refused now."""
        found = self._counters().items()
        return {metric.removesuffix("_per_s"): value * _KIB for metric, value in found if not isinstance(value, str)}

    def read(self, now_s: float, *, hurry: bool = False) -> Spoken | None:
        """Answer with the bytes since the last answer, once a second."""
        seconds = now_s - self._since_s
        if seconds <= 0 or (seconds < _NVLINK_S and not hurry):
            return None
        now = self._counters()
        values: dict[str, float] = {}
        why: dict[str, str] = {}
        for metric, value in now.items():
            before = self._last[metric]
            if isinstance(value, str):
                why[metric] = value
            elif isinstance(before, str) or value < before:
                why[metric] = f"{self.method}: the counter went back or was refused before"
            else:
                values[metric] = (value - before) * _KIB / seconds
        self._last, self._since_s = now, now_s
        return Spoken(values, seconds, why)

    def _counters(self) -> dict[str, int | str]:
        ids = [(self.IDS[metric], _ALL_LINKS) for metric in self.metrics]
        return dict(zip(self.metrics, field_values(self._nvml, self._handle, ids), strict=True))
