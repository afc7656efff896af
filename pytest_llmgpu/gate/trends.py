"""The metrics of one machine over its stored reports: each case, commit by commit, with its changes marked.

What counts as a change is the gate's verdict, by its default policy and the machine's calibration if there is one,
against the last earlier report of the machine that has the same case.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from pytest_llmgpu.gate import judge, promotion
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.gate.timing import calibration_file
from pytest_llmgpu.gate.timing.calibration import Calibration
from pytest_llmgpu.report import file as reports
from pytest_llmgpu.report.metrics import METRICS, MetricName, MetricSpec
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.store import listing, store
from pytest_llmgpu.store.store import Stored

__all__ = ["Change", "Column", "Figure", "Line", "Trend", "chosen", "trends"]

Change = Literal["worse", "better", "changed"]
"""What is said of a figure beside the one before it. `changed`: other answers."""

_GIB = 2**30

_WORDS: dict[str, Change] = {
    "FAILED": "worse",
    "REGRESSED": "worse",
    "CAPACITY_REGRESSED": "worse",
    "IMPROVED": "better",
    "CAPACITY_IMPROVED": "better",
}

_APART: tuple[Callable[[CaseResult], str], ...] = (
    lambda result: result.case.model,
    lambda result: f"of {result.case.devices}",
    lambda result: result.case.dtype,
    lambda result: "uncapped" if (cap := result.case.gpu_memory_bytes) is None else f"{cap / _GIB:.4g} GiB",
    lambda result: "all items" if (limit := result.case.limit) is None else f"{limit} items",
    lambda result: result.key[:8],
)
"""What tells cases of one id apart, in the order in which it is tried."""

_Identity = tuple[str, str]
"""Key and id of a result: a case that is measured twice has two ids."""

_Said = dict[tuple[str, str, MetricName], Row]
"""Key, id and metric to what the gate says."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one case in one report."""

    value: float | None
    """In the metric's unit; None where the case has none."""
    outcome: str
    change: Change | None = None
    """None: none that the gate is sure of, or nothing to compare with."""
    reason: str = ""
    """What the gate says of a change."""


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One report."""

    number: int
    """In the store."""
    commit: str
    """As people read it."""
    created: str


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one case over all reports."""

    name: str
    """Id of the case, with the model where other cases have that id too."""
    strategy: str
    batch_size: int
    figures: list[Figure | None]
    """One a report; None where it does not have the case."""


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """One metric over all reports."""

    metric: str
    title: str
    """With its unit."""
    columns: list[Column]
    """The reports, oldest first."""
    lines: list[Line]
    """By strategy, in the order in which they ran, then batch size."""


def chosen(folder: Path, machine: str | None = None) -> list[Stored]:
    """Return the reports of one machine in the order in which they were measured, without copies.

    A promoted report is in the store twice, and may have been measured long before it was promoted.

    Args:
        folder: a store, or the folder of one machine in a store.
        machine: whose reports are meant where a store has several.

    Raises:
        ValueError: there is none, or several machines and none was named, or one of them cannot be read.
    """
    found = store.stored(folder)
    if not found:
        whole = folder.resolve()
        found = [one for one in store.stored(whole.parent) if one.machine == whole.name]
    machines = sorted({one.machine for one in found})
    if not machines:
        raise ValueError(f"storage {folder}: holds no numbered report; a folder that --llmgpu-save wrote is needed")
    if machine is None and len(machines) > 1:
        raise ValueError(f"storage {folder}: holds several machines; --machine is one of {', '.join(machines)}")
    if machine is not None and machine not in machines:
        raise ValueError(f"machine {machine!r}: the store {folder} has {', '.join(machines)}")
    kept = [one for one in found if one.machine == (machine or machines[0])]
    return sorted(_without_copies(kept), key=lambda one: (one.created, one.number))


def trends(kept: Sequence[Stored], last: int | None = None) -> list[Trend]:
    """Return each metric that there is over some stored reports, which are given oldest first.

    Args:
        kept: the reports.
        last: how many of the newest have a column; None: all. Those before them are what they are held against.

    Raises:
        ValueError: one of them cannot be read, or the calibration beside them.
    """

    @functools.cache
    def load(place: int) -> Report:
        return reports.load(kept[place].path)  # those without a column only as far back as there are new cases

    shown = range(0 if last is None else max(0, len(kept) - last), len(kept))
    columns = [
        Column(number=kept[place].number, commit=listing.commit(load(place).commit), created=load(place).created)
        for place in shown
    ]
    noise = calibration_file.in_force(kept[-1].path.parent.parent, load(len(kept) - 1)) if kept else None
    said = [_changes(map(load, reversed(range(place))), load(place), noise) for place in shown]
    cases = [{_identity(result): result for result in load(place).cases} for place in shown]
    newest_of = {identity: result for of_report in cases for identity, result in of_report.items()}
    names = _names(newest_of)
    strategies = list(dict.fromkeys(result.case.strategy for result in newest_of.values()))
    ordered = sorted(
        newest_of.items(), key=lambda item: (strategies.index(item[1].case.strategy), item[1].case.batch_size)
    )
    found = []
    for spec in METRICS:
        if spec.trended is None:
            continue
        lines = [
            Line(
                name=names[identity],
                strategy=newest.case.strategy,
                batch_size=newest.case.batch_size,
                figures=[
                    None if (result := of_report.get(identity)) is None else _figure(result, spec, rows)
                    for of_report, rows in zip(cases, said, strict=True)
                ],
            )
            for identity, newest in ordered
        ]
        if any(one is not None and one.value is not None for line in lines for one in line.figures):
            found.append(Trend(metric=spec.trended.name, title=spec.trended.title, columns=columns, lines=lines))
    return found


def _without_copies(kept: Sequence[Stored]) -> list[Stored]:
    """Return the reports but for those whose measurement has a lower number too."""
    found: list[Stored] = []
    for one in kept:
        # By the files' names first: few are opened.
        alike = [other for other in found if (other.created, other.commit) == (one.created, one.commit)]
        if alike:
            report = reports.load(one.path)
            if any(promotion.is_same(report, reports.load(other.path)) for other in alike):
                continue
        found.append(one)
    return found


def _changes(earlier: Iterable[Report], report: Report, noise: Calibration | None) -> _Said:
    """Return what the gate says of each case against the first of the earlier reports, newest first, that has it."""
    left = {result.key for result in report.cases}
    found: _Said = {}
    for base in earlier:
        common = left & {result.key for result in base.cases}
        if common:
            rows = judge.judge(base, report, Policy(), today=datetime.date.min, calibration=noise).rows
            found |= {(row.key, row.id, row.metric): row for row in rows if row.key in common}
        left -= common
        if not left:
            break
    return found


def _figure(result: CaseResult, spec: MetricSpec, said: _Said) -> Figure:
    assert spec.figure is not None
    assert spec.trended is not None
    number = spec.figure(result) if result.outcome == "completed" else None
    value = None if number is None else number.value / spec.trended.scale
    for name in spec.trended.judged_by:
        row = said.get((result.key, result.id, name))
        if row is not None and row.verdict in _WORDS:
            word: Change = "changed" if name == "predictions" else _WORDS[row.verdict]
            return Figure(value=value, outcome=result.outcome, change=word, reason=row.reason)
    return Figure(value=value, outcome=result.outcome)


def _identity(result: CaseResult) -> _Identity:
    return (result.key, result.id)


def _names(results: Mapping[_Identity, CaseResult]) -> dict[_Identity, str]:
    """Return the id of each, and where other cases have the same what tells them apart, at last the key."""
    names = {identity: result.id for identity, result in results.items()}
    for more in _APART:
        alike: dict[str, set[str]] = {}
        for identity, name in names.items():
            alike.setdefault(name, set()).add(more(results[identity]))
        names = {
            identity: f"{name} {more(results[identity])}" if len(alike[name]) > 1 else name
            for identity, name in names.items()
        }
    return names
