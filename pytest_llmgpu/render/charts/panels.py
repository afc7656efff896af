"""Panels: the cases of a report that share a chart, and the figures that are drawn for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from pytest_llmgpu.gate.matching import pairs
from pytest_llmgpu.render.grouping import blocks, captions
from pytest_llmgpu.render.table import COLUMNS, Entry
from pytest_llmgpu.render.table import entries as entries_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, Link

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

_COVERED = 0.5  # counters below this share of what the program sent: its traffic took links that were not counted


_FIRST = ("mp", "tp", "iok")  # strategies that have the same colours and shapes in every chart of every report


class Panel(NamedTuple):
    """The cases of one chart: they differ only in strategy and batch size."""

    entries: list[Entry]
    """The results in the order of their curves, then of their batch sizes."""
    titles: list[str]
    """The titles of the curves that the report has."""
    domain: list[str]
    """All titles in the order of their colours, including strategies that the report lacks."""
    report: Report
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
    # The completed results of the baseline, by the series of the case that each is compared with, or its own.
    then: dict[str, list[CaseResult]] = {}
    for pair in [] if baseline is None else pairs(baseline.cases, report.cases):
        if pair.base is not None and pair.base.outcome == "completed" and not pair.differing:
            then.setdefault((pair.head or pair.base).case.series, []).append(pair.base)
    found = []
    for number, (group, (measured, caption)) in enumerate(zip(groups, captions(groups, report), strict=True), 1):
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


def domain(columns: Sequence[tuple[str, str]]) -> list[str]:
    """Return the titles in the order of their colours; mp, tp and iok keep their places also when they are absent.

    The first title of a strategy gets the strategy's colour.
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


def link_rate(result: CaseResult, way: str, links: Sequence[LinkName] = LINKS) -> float | None:
    """Return the bytes per second of a GPU in one direction, summed over those of the links that were counted."""
    rates = [COLUMNS[f"{link}_{way}_bytes_per_s"].value(result) for link in links]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def covers_traffic(result: CaseResult, links: Sequence[LinkName] = LINKS) -> bool:
    """Return whether the counters of these links include at least half of what the program sent from GPU to GPU.

    True also where nothing contradicts it: no counter was read, the program's traffic is not known, or the links are
    known to have carried it, whatever the sum (a reduction in the NVLink switch moves fewer bytes than a ring).
    """
    traffic, rate, sent = result.traffic, result.sequences_per_s, link_rate(result, "tx", links)
    if traffic is None or rate is None or sent is None:
        return True
    if traffic.path is not None and traffic.path.link is not None and _CARRIERS[traffic.path.link] <= set(links):
        return True
    return sent * result.case.devices >= _COVERED * traffic.wire_bytes_per_sequence * rate
