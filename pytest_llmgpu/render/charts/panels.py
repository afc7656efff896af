"""Panels: the cases of a report that share a chart, and the figures that are drawn for each of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from pytest_llmgpu.gate.matching import pairs
from pytest_llmgpu.render.grouping import blocks, captions, differing_parts
from pytest_llmgpu.render.table import Entry
from pytest_llmgpu.render.table import entries as entries_of
from pytest_llmgpu.report.derived import of_window
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, DeviceMemory, Launch, Link

LinkName = Literal["nvlink", "pcie"]
"""The name of a link whose bytes NVML counts."""

LINKS: tuple[LinkName, ...] = get_args(LinkName)

_CARRIERS: dict[Link, frozenset[LinkName]] = {
    "nvlink": frozenset(("nvlink",)),
    "mixed": frozenset(LINKS),
    "pcie": frozenset(("pcie",)),
    "host": frozenset(("pcie",)),
}
"""The links whose counters include the traffic of a path."""

_COVERED = 0.5
"""Counters below this share of what the program sent: its traffic took links that were not counted."""


_FIRST = ("mp", "tp", "iok")
"""Strategies that have the same colours and shapes in every chart of every report."""


class Panel(NamedTuple):
    """The cases of one chart: they differ only in strategy and batch size."""

    entries: list[Entry]
    """The results in the order of their curves, then of their batch sizes."""
    titles: list[str]
    """The titles of the curves that the report has."""
    domain: list[str]
    """All titles in the order of their colours, including strategies that the report lacks."""
    report: Report
    """The report of the cases."""
    suffix: str = ""
    """The end of the charts' ids where a report has several panels."""
    caption: str = ""
    """The fields in which the panel differs from the report's other panels."""
    measured: str = ""
    """Model, dtype, GPUs and dataset, for an image that stands alone."""
    before: Sequence[Entry] = ()
    """The completed results of these cases and of others of their series in the baseline."""

    @property
    def completed(self) -> list[Entry]:
        """Return the entries with figures."""
        return [entry for entry in self.entries if entry.result.outcome == "completed"]

    @property
    def failed(self) -> list[Entry]:
        """Return the entries that ran and did not complete."""
        return [entry for entry in self.entries if entry.result.outcome not in {"completed", "skipped_after_oom"}]

    @property
    def several(self) -> bool:
        """Return whether a case uses more than one device."""
        return any(entry.result.case.devices > 1 for entry in self.entries)

    def of(self, title: str) -> list[Entry]:
        """Return the completed entries of one curve."""
        return [entry for entry in self.completed if entry.title == title]


def panels(report: Report, baseline: Report | None = None) -> list[Panel]:
    """Return the panels of a report, in the order in which their cases ran, with the results of a baseline."""
    groups = blocks(report.cases)
    several = len(groups) > 1
    then = {} if baseline is None else _by_series(report, baseline)
    parts = zip(groups, differing_parts(groups, report), captions(groups, report), strict=True)
    found = []
    for number, (group, caption, measured) in enumerate(parts, 1):
        entries = entries_of(group)
        strategies = {entry.title: entry.result.case.strategy for entry in entries}
        curves = {entry.result.case.series: entry.title for entry in entries}
        found.append(
            Panel(
                entries=entries,
                titles=list(strategies),
                domain=domain(list(strategies.items())),
                report=report,
                suffix=f"-{number}" if several else "",
                caption=caption,
                measured=measured,
                before=[Entry(title, "", result) for one, title in curves.items() for result in then.get(one, ())],
            )
        )
    return found


def _by_series(report: Report, baseline: Report) -> dict[str, list[CaseResult]]:
    """Return the completed results of a baseline by the series of the case that each is compared with, or its own."""
    found: dict[str, list[CaseResult]] = {}
    for pair in pairs(baseline.cases, report.cases):
        if pair.base is not None and pair.base.outcome == "completed" and not pair.differing:
            series = (pair.head or pair.base).case.series
            found.setdefault(series, []).append(pair.base)
    return found


def domain(columns: Sequence[tuple[str, str]]) -> list[str]:
    """Return the titles in the order of their colours; mp, tp and iok keep their places also when they are absent.

    Args:
        columns: title and strategy of each curve. The first title of a strategy gets the strategy's colour.
    """
    places = list(_FIRST)
    for title, strategy in columns:
        if title in places:
            continue
        if strategy in places and strategy not in {other for other, _ in columns}:
            places[places.index(strategy)] = title
        else:
            places.append(title)
    return places


def device_means(result: CaseResult, name: str) -> dict[int, float]:
    """Return the mean of a metric of the profile by device, over the window and the launches."""
    return _by_device(result, lambda launch: _metric_means(launch, name))


def memory_of(result: CaseResult) -> tuple[dict[int, float], str]:
    """Return the peak memory in bytes by device, and its source: NVML, or torch where NVML has no figure."""
    found = _by_device(result, lambda launch: _of_memory(launch.memory, "nvml_used_max_bytes"))
    if found:
        return found, "NVML"
    return _by_device(result, lambda launch: _of_memory(launch.memory, "peak_reserved_bytes")), "torch"


def link_rates(result: CaseResult, way: str, links: Sequence[LinkName] = LINKS) -> dict[int, float]:
    """Return the bytes per second by device in one direction, summed over those of the links that were counted."""
    found: dict[int, float] = {}
    for link in links:
        for index, value in device_means(result, f"{link}_{way}_bytes_per_s").items():
            found[index] = found.get(index, 0.0) + value
    return found


def covers_traffic(result: CaseResult, links: Sequence[LinkName] = LINKS) -> bool:
    """Return whether the counters of these links include at least half of what the program sent from GPU to GPU.

    True also where nothing contradicts it: no counter was read, the program's traffic is not known, or the links are
    known to have carried it, whatever the sum (a reduction in the NVLink switch moves fewer bytes than a ring).
    """
    traffic, rate, sent = result.traffic, result.sequences_per_s, link_rates(result, "tx", links)
    if traffic is None or rate is None or not sent:
        return True
    if traffic.path is not None and traffic.path.link is not None and _CARRIERS[traffic.path.link] <= set(links):
        return True
    # The mean, not the sum: launches on other GPUs add devices to the counters, but none to the case.
    return fmean(sent) * result.case.devices >= _COVERED * traffic.wire_bytes_per_sequence * rate


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
