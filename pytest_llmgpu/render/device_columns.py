"""The figures of the tables per device: which there are, their values, and why one is missing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from pytest_llmgpu.analysis.memory_model import split
from pytest_llmgpu.report.machine import Environment
from pytest_llmgpu.report.profile_figures import of_window
from pytest_llmgpu.report.result import CaseResult, CollectiveKind

__all__ = ["COMMUNICATION", "MEMORY", "Figure", "digits", "mean_and_largest", "of_devices", "sends", "why_missing"]

_GIB = 2**30


class Figure(msgspec.Struct, frozen=True):
    """A column of the devices' table."""

    title: str
    key: str
    """Name of the metric of the profile, of the field of `MemorySplit` or `DeviceMemory`, or `traffic` for what ranks
    put on the wire."""
    unit: float
    """What one of the title's units is in the report's."""
    several: bool = False
    """Whether it says something of several devices only."""
    spare: int = 0
    """Where columns do not fit, the one with the largest goes first; 0 for those that stay."""

    @property
    def name(self) -> str:
        """What a sentence calls it."""
        return self.title.partition("\n")[0]


COMMUNICATION = (
    Figure("GPU busy\n%", "utilization_pct", 1),
    Figure("PCIe TX\nGB/s", "pcie_tx_bytes_per_s", 1e9),
    Figure("PCIe RX\nGB/s", "pcie_rx_bytes_per_s", 1e9),
    Figure("NVLink TX\nGB/s", "nvlink_tx_bytes_per_s", 1e9, several=True),
    Figure("sent\nMB/sequence", "traffic", 1e6, several=True, spare=1),
)
MEMORY = (
    Figure("weights\nGiB", "weights_bytes", _GIB),
    Figure("activations\nGiB", "activations_bytes", _GIB),
    Figure("workspace\nGiB", "workspace_bytes", _GIB),
    Figure("cached\nGiB", "cached_bytes", _GIB, spare=3),
    Figure("rest\nGiB", "rest_bytes", _GIB, spare=1),
    Figure("torch peak\nGiB", "peak_allocated_bytes", _GIB, spare=2),  # weights and activations
    Figure("NVML peak\nGiB", "nvml_used_max_bytes", _GIB),
)


def of_devices(result: CaseResult, figure: Figure) -> list[float]:
    """Return a figure of each device in each launch; of a sampled metric its mean over the window.

    Of what ranks send, which is the same in every launch, one figure where all send alike.
    """
    if figure.key == "traffic":
        return [size / figure.unit for size in _sent_per_sequence(result)]
    if figure.key.endswith("_bytes"):
        held = [memory for launch in result.launches for memory in launch.memory]
        found = [getattr(memory if hasattr(memory, figure.key) else split(memory), figure.key) for memory in held]
    else:
        profiles = [launch.profile for launch in result.launches if launch.profile is not None]
        metrics = [of_window(profile, device, figure.key) for profile in profiles for device in profile.devices]
        found = [metric.mean for metric in metrics if not isinstance(metric, str)]
    return [value / figure.unit for value in found if value is not None]


def mean_and_largest(values: Sequence[Sequence[float]]) -> list[str]:
    """Return `mean (largest)` per case, with the decimals that the column's smallest mean needs."""
    means = [statistics.fmean(each) if each else None for each in values]
    places = digits(min((mean for mean in means if mean), default=1.0))
    return [
        "" if mean is None else f"{mean:.{places}f} ({max(each):.{places}f})" if len(each) > 1 else f"{mean:.{places}f}"
        for mean, each in zip(means, values, strict=True)
    ]


def why_missing(results: Sequence[CaseResult], figure: Figure, environment: Environment) -> str:
    """Return why a figure is missing, from the nearest `why` that says so."""
    for result in results:
        if reason := result.why.get(figure.key):
            return reason.rstrip(".")
    launches = [launch for result in results for launch in result.launches]
    for launch in launches:
        maps = [launch.why, *(memory.why for memory in launch.memory), *(split(memory).why for memory in launch.memory)]
        if launch.profile is not None:
            maps += [launch.profile.why, *(device.why for device in launch.profile.devices)]
        for why in maps:
            if reason := why.get(figure.key) or why.get("profile"):
                return reason.rstrip(".")
    if (reason := environment.why.get("nvml")) is not None:
        return reason
    sampled = [launch.profile for launch in launches if launch.profile is not None and figure in COMMUNICATION]
    told = (profile.why.get("samples") for profile in sampled)
    return next(filter(None, told), "no sample was taken").rstrip(".")


def sends(result: CaseResult) -> Mapping[CollectiveKind, tuple[float, float]]:
    """Return kind to calls of a batch and wire bytes of a sequence, both of a rank: means over the ranks."""
    launch = result.launches[-1] if result.launches else None
    if result.traffic is None or launch is None or not sum(launch.batches.sequences):
        return {}
    ranks, batches = len(result.traffic.ranks), launch.batches
    sums: dict[CollectiveKind, tuple[float, float]] = {}
    for one in (one for rank in result.traffic.ranks for one in rank):
        calls, size = sums.get(one.collective, (0.0, 0.0))
        sums[one.collective] = (
            calls + one.calls / len(batches.sequences) / ranks,
            size + one.wire_bytes / sum(batches.sequences) / ranks,
        )
    return sums


def _sent_per_sequence(result: CaseResult) -> list[float]:
    """Return what each device sends for a sequence; the mean of the devices where a process has several."""
    traffic = result.traffic
    if traffic is None:
        return []
    sent = [sum(one.sent_bytes for one in rank) for rank in traffic.ranks]
    if len(sent) != result.case.devices or len(set(sent)) == 1:
        return [traffic.wire_bytes_per_sequence / result.case.devices]
    return [traffic.wire_bytes_per_sequence * size / sum(sent) for size in sent]


def digits(value: float) -> int:
    """Return the decimals, 3 at most, that leave about three significant digits."""
    return 3 if value <= 0 else min(3, max(0, 2 - math.floor(math.log10(value))))
