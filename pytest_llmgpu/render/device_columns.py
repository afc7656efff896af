"""Columns of the per-device tables: which columns exist, their values, and the reason for a missing value."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from pytest_llmgpu.analysis.capacity import split
from pytest_llmgpu.report.derived import of_window
from pytest_llmgpu.report.report import Environment
from pytest_llmgpu.report.result import CaseResult, CollectiveKind
from pytest_llmgpu.report.text import GIB


class Column(msgspec.Struct, frozen=True):
    """A column of a per-device table."""

    title: str
    """The first line is the name of the column, the second line is its unit."""
    key: str
    """The column shows this metric of the profile, this field of `MemorySplit` or `DeviceMemory`, or `traffic`: the
    bytes that the ranks send."""
    unit: float
    """A stored value is divided by this number."""
    several: bool = False
    """True: the column is shown only if a case ran on several devices."""
    drop_order: int = 0
    """If the table is too wide, the column with the largest number is dropped first; a column with 0 is never
    dropped."""

    @property
    def name(self) -> str:
        """The title without the unit."""
        return self.title.partition("\n")[0]


COMMUNICATION = (
    Column("GPU busy\n%", "utilization_pct", 1),
    Column("PCIe TX\nGB/s", "pcie_tx_bytes_per_s", 1e9),
    Column("PCIe RX\nGB/s", "pcie_rx_bytes_per_s", 1e9),
    Column("NVLink TX\nGB/s", "nvlink_tx_bytes_per_s", 1e9, several=True),
    Column("sent\nMB/sequence", "traffic", 1e6, several=True, drop_order=1),
)
MEMORY = (
    Column("weights\nGiB", "weights_bytes", GIB),
    Column("activations\nGiB", "activations_bytes", GIB),
    Column("workspace\nGiB", "workspace_bytes", GIB),
    Column("cached\nGiB", "cached_bytes", GIB, drop_order=3),
    Column("rest\nGiB", "rest_bytes", GIB, drop_order=1),
    Column("torch peak\nGiB", "peak_allocated_bytes", GIB, drop_order=2),  # the sum of weights and activations
    Column("NVML peak\nGiB", "nvml_used_max_bytes", GIB),
)


def device_values(result: CaseResult, column: Column) -> list[float]:
    """Return the value of each device in each launch, in the unit of the column.

    A sampled metric is the mean over the window. Traffic is the same in every launch: one value per device, or a single
    value if all ranks send the same.
    """
    if column.key == "traffic":
        return [size / column.unit for size in _sent_bytes_per_sequence(result)]
    if column.key.endswith("_bytes"):
        memories = [memory for launch in result.launches for memory in launch.memory]
        found = [getattr(memory if hasattr(memory, column.key) else split(memory), column.key) for memory in memories]
    else:
        metrics = [of_window(profile, device, column.key) for profile in result.profiles for device in profile.devices]
        found = [metric.mean for metric in metrics if not isinstance(metric, str)]
    return [value / column.unit for value in found if value is not None]


def mean_and_largest(values: Sequence[Sequence[float]]) -> list[str]:
    """Return `mean (largest)` per case, with the decimals that the smallest mean of the column needs."""
    means = [statistics.fmean(each) if each else None for each in values]
    places = digits(min((mean for mean in means if mean), default=1.0))
    return [
        "" if mean is None else f"{mean:.{places}f} ({max(each):.{places}f})" if len(each) > 1 else f"{mean:.{places}f}"
        for mean, each in zip(means, values, strict=True)
    ]


def missing(results: Sequence[CaseResult], column: Column, environment: Environment) -> str:
    """Return the reason why no case has a value of the column.

    The reports keep reasons in `why`. The most specific one wins: the case, then its launches, then the environment,
    then the samples of the profile.
    """
    for result in results:
        if reason := result.why.get(column.key):
            return reason.rstrip(".")
    launches = [launch for result in results for launch in result.launches]
    for launch in launches:
        maps = [launch.why, *(memory.why for memory in launch.memory), *(split(memory).why for memory in launch.memory)]
        if launch.profile is not None:
            maps += [launch.profile.why, *(device.why for device in launch.profile.devices)]
        for why in maps:
            if reason := why.get(column.key) or why.get("profile"):
                return reason.rstrip(".")
    if (reason := environment.why.get("nvml")) is not None:
        return reason
    sampled = [launch.profile for launch in launches if launch.profile is not None and column in COMMUNICATION]
    return next(filter(None, (profile.why.get("samples") for profile in sampled)), "no sample was taken").rstrip(".")


def collectives(result: CaseResult, *, of_step: bool = False) -> Mapping[CollectiveKind, tuple[float, float]]:
    """Return per kind the calls per batch and the wire bytes per sequence: both are means over the ranks.

    Args:
        result: The case.
        of_step: True: calls per decode step of the largest batch and bytes per token; none for a case that scores.
    """
    launch = result.launches[-1] if result.launches else None
    if result.traffic is None or launch is None or not sum(launch.batches.sequences):
        return {}
    sequences = launch.batches.sequences
    ranks, batches, rows = result.traffic.ranks, len(sequences), sum(sequences)
    if of_step:
        ranks, batches, rows = result.traffic.step or [], 1, max(sequences)
    sums: dict[CollectiveKind, tuple[float, float]] = {}
    for one in (one for rank in ranks for one in rank):
        calls, size = sums.get(one.collective, (0.0, 0.0))
        sums[one.collective] = (
            calls + one.calls / batches / len(ranks),
            size + one.wire_bytes / rows / len(ranks),
        )
    return sums


def _sent_bytes_per_sequence(result: CaseResult) -> list[float]:
    """Return the bytes that each device sends per sequence; the mean of the devices if one process has several."""
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
