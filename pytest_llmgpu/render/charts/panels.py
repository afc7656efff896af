"""Which cases stand in one chart, and the figures of each that are drawn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from pytest_llmgpu.render.charts.theme import domain
from pytest_llmgpu.render.grouping import blocks, capacities, captions, differing_parts
from pytest_llmgpu.render.time_table import layout
from pytest_llmgpu.report.capacity import Capacity
from pytest_llmgpu.report.profile_figures import of_window
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, DeviceMemory, Launch, Link

__all__ = ["LINKS", "Entry", "LinkName", "Panel", "counted", "device_means", "fmean", "memory_of", "panels", "saw"]

LinkName = Literal["nvlink", "pcie"]
"""A link whose bytes NVML counts."""

LINKS: tuple[LinkName, ...] = get_args(LinkName)

_CARRIERS: dict[Link, frozenset[LinkName]] = {
    "nvlink": frozenset(("nvlink",)),
    "mixed": frozenset(LINKS),
    "pcie": frozenset(("pcie",)),
    "host": frozenset(("pcie",)),
}
"""Whose counters show what took a path."""

_SEEN = 0.5  # less than so much of what the program sent, and its traffic took links that were not counted


class Entry(NamedTuple):
    """A result and the curve it is on."""

    title: str
    """Of the curve: `mp`."""
    result: CaseResult

    @property
    def batch_size(self) -> int:
        """Sequences per forward."""
        return self.result.case.batch_size


class Panel(NamedTuple):
    """What stands in one chart: cases that differ in strategy and batch size only."""

    entries: list[Entry]
    """By curve, then batch size."""
    titles: list[str]
    """Of the curves that are there."""
    domain: list[str]
    """Titles in the order of their colours, also of strategies that are not there."""
    report: Report
    capacity: list[Capacity]
    """Of these series."""
    suffix: str = ""
    """Of a chart's id, where a report needs several panels."""
    caption: str = ""
    """What tells the panel from the others."""
    measured: str = ""
    """Model, type, GPUs and dataset: what a picture says that stands alone."""

    @property
    def completed(self) -> list[Entry]:
        """Entries that have figures."""
        return [entry for entry in self.entries if entry.result.outcome == "completed"]

    @property
    def failed(self) -> list[Entry]:
        """Entries that were tried and did not complete."""
        return [entry for entry in self.entries if entry.result.outcome not in {"completed", "skipped_after_oom"}]

    @property
    def several(self) -> bool:
        """Whether a model is spread over more than one device."""
        return any(entry.result.case.devices > 1 for entry in self.entries)

    def place(self, entry: Entry) -> float:
        """Return where a curve stands among those that have figures, counted from their middle."""
        titles = list(dict.fromkeys(one.title for one in self.completed))
        return titles.index(entry.title) - (len(titles) - 1) / 2

    def of(self, title: str) -> list[Entry]:
        """Return the completed entries of one curve."""
        return [entry for entry in self.completed if entry.title == title]


def panels(report: Report) -> list[Panel]:
    """Return the panels of a report, in the order in which their cases ran."""
    groups = blocks(report.cases)
    several = len(groups) > 1
    known = capacities(report)
    told = zip(groups, differing_parts(groups, report), captions(groups, report), strict=True)
    found = []
    for number, (group, caption, measured) in enumerate(told, 1):
        titles, rows = layout(group)
        entries = [Entry(title, row[title]) for title in titles for row in rows.values() if title in row]
        strategies = {entry.title: entry.result.case.strategy for entry in entries}
        series = {result.case.series for result in group}
        found.append(
            Panel(
                entries=entries,
                titles=titles,
                domain=domain(list(strategies.items())),
                report=report,
                capacity=[capacity for capacity in known if capacity.series in series],
                suffix=f"-{number}" if several else "",
                caption=caption,
                measured=measured,
            )
        )
    return found


def device_means(result: CaseResult, name: str) -> dict[int, float]:
    """Return device to the mean of a metric of the profile, over the window and the launches."""
    return _by_device(result, lambda launch: _metric_means(launch, name))


def memory_of(result: CaseResult) -> tuple[dict[int, float], str]:
    """Return device to the bytes in use at the peak, and who says so: NVML, else torch."""
    found = _by_device(result, lambda launch: _of_memory(launch.memory, "nvml_used_max_bytes"))
    if found:
        return found, "NVML"
    return _by_device(result, lambda launch: _of_memory(launch.memory, "peak_reserved_bytes")), "torch"


def counted(result: CaseResult, way: str, links: Sequence[LinkName] = LINKS) -> dict[int, float]:
    """Return device to the bytes a second of these links together: what there is of them, in one direction."""
    found: dict[int, float] = {}
    for link in links:
        for index, value in device_means(result, f"{link}_{way}_bytes_per_s").items():
            found[index] = found.get(index, 0.0) + value
    return found


def saw(result: CaseResult, links: Sequence[LinkName] = LINKS) -> bool:
    """Return whether the counters of these links saw what the program sent from GPU to GPU: half of it at least.

    True where nothing says otherwise: no counter was read, the program's account is not known, or the links are known
    to have carried it, whatever the sum (one that a switch computes takes fewer bytes than a ring's).
    """
    traffic, rate, sent = result.traffic, result.sequences_per_s, counted(result, "tx", links)
    if traffic is None or rate is None or not sent:
        return True
    if traffic.path is not None and traffic.path.link is not None and _CARRIERS[traffic.path.link] <= set(links):
        return True
    # The mean: launches on other GPUs add devices to the counters, and none to the case.
    return fmean(sent) * result.case.devices >= _SEEN * traffic.wire_bytes_per_sequence * rate


def fmean(values: dict[int, float]) -> float:
    """Return the mean over devices."""
    return statistics.fmean(values.values())


def _by_device(result: CaseResult, figures: Callable[[Launch], dict[int, float]]) -> dict[int, float]:
    collected: dict[int, list[float]] = {}
    for launch in result.launches:
        for index, value in figures(launch).items():
            collected.setdefault(index, []).append(value)
    return {index: statistics.fmean(values) for index, values in sorted(collected.items())}


def _metric_means(launch: Launch, name: str) -> dict[int, float]:
    if launch.profile is None:
        return {}
    metrics = {device.index: of_window(launch.profile, device, name) for device in launch.profile.devices}
    return {
        index: metric.mean
        for index, metric in metrics.items()
        if not isinstance(metric, str) and metric.mean is not None
    }


def _of_memory(memory: Sequence[DeviceMemory], name: str) -> dict[int, float]:
    values = {of_device.index: getattr(of_device, name) for of_device in memory}
    return {index: float(value) for index, value in values.items() if value is not None}
