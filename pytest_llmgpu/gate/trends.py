"""The metrics of one machine over its stored reports, with the changes of each case.

A change of device time, or of the wall time of replayed CUDA graphs where there is no device time, is a step or a drift
over all reports of the same GPUs (`gate.history`). A change of another figure is a verdict of the gate against the last
earlier report with the same case. Both use the default policy, and the calibration of the machine if there is one.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pytest_llmgpu.analysis import noise_regime
from pytest_llmgpu.gate import calibration, history, judge, promotion
from pytest_llmgpu.gate.calibration import Calibration
from pytest_llmgpu.gate.noise_model import Prior, prior_of
from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report import file as reports
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.metrics import METRICS, MetricName, MetricSpec, spec_of
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import GIB
from pytest_llmgpu.report.verdicts import Row
from pytest_llmgpu.store import store
from pytest_llmgpu.store.store import Stored

Change = Literal["worse", "better", "changed", "disturbed"]
"""The change of a figure from the earlier ones. `changed` is for predictions. A `disturbed` time is not that of the
program alone: it is compared with no other one."""

_CHANGES: dict[str, Change] = {
    "FAILED": "worse",
    "REGRESSED": "worse",
    "CAPACITY_REGRESSED": "worse",
    "IMPROVED": "better",
    "CAPACITY_IMPROVED": "better",
}

_Identity = tuple[str, str]
"""Key and id of a result, or of a series with its strategy as id. A case that is measured twice in a session has two
ids."""

_DISTINCTIONS: tuple[Callable[[_Identity, Case], str], ...] = (
    lambda _, case: case.model,
    lambda _, case: f"{case.new_tokens} tokens after {case.prompt_tokens}" if case.generates else "score",
    lambda _, case: case.dataset,
    lambda _, case: f"of {case.devices}",
    lambda _, case: case.dtype,
    lambda _, case: "uncapped" if (cap := case.gpu_memory_bytes) is None else f"{cap / GIB:.4g} GiB",
    lambda _, case: "all items" if (limit := case.limit) is None else f"{limit} items",
    lambda identity, _: identity[0][:8],
)
"""The properties that distinguish cases of one id, in the order in which they are tried."""

_Rows = dict[tuple[str, str, MetricName], Row]
"""The row of the gate for each key, id and metric; for metrics of a series the id is empty."""

_TIMES: tuple[Literal["device_time", "time"], ...] = ("device_time", "time")
"""The metrics whose changes are searched in the history, the best first."""


class _Past(NamedTuple):
    """A time of one case in one report."""

    place: int
    """The number of the report, from 0."""
    value: float
    """The time in seconds."""
    gpus: frozenset[str]
    """The GPUs of the session, by UUID."""
    prior: Prior
    """The expected noise."""


_Marks = dict[int, tuple[float, str] | None]
"""The number of a report to its change as a fraction and the reason; None where the history shows no change. Reports
whose history is too short to show one have no entry."""


class UnreadableError(ValueError):
    """A stored report cannot be read; the message names it in one line."""

    def __init__(self, stored: Stored, message: str) -> None:
        super().__init__(message)
        self.stored = stored
        """The report."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one case in one report."""

    value: float | None
    """The value in the unit of the metric; None if the case has none."""
    outcome: str
    """The outcome of the case."""
    change: Change | None = None
    """The change; None if there is no significant one, or no earlier figure."""
    reason: str = ""
    """The reason of the verdict on the change, or the change in the history."""
    growth: float | None = None
    """The change of the history as a fraction; None if the figure is compared with the one before."""

    @property
    def changed(self) -> bool:
        """True if the figure is worse or better than the earlier ones, or its predictions are others."""
        return self.change is not None and self.change != "disturbed"


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One report."""

    number: int
    """The number of the report in the store."""
    commit: str
    """The measured commit, shortened."""
    created: str
    """The time of the measurement."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one case over all reports."""

    name: str
    """The id of the case, with distinctions if other cases have the same id; for a series its strategy instead."""
    strategy: str
    """The strategy of the case."""
    batch_size: int | None
    """The batch size of the case; None for a metric that a series has once."""
    figures: list[Figure | None]
    """The figure of each report; None if the report does not have the case."""


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """One metric over all reports."""

    metric: str
    """The name of the metric."""
    title: str
    """The title of the metric with its unit."""
    columns: list[Column]
    """The reports, the oldest first."""
    lines: list[Line]
    """The cases, by strategy in the order in which these ran, then by batch size."""

    @property
    def of(self) -> Literal["case", "series"]:
        """The subject of each line."""
        return "series" if any(line.batch_size is None for line in self.lines) else "case"


def chosen(folder: Path, machine: str | None = None, without: Sequence[Stored] = ()) -> list[Stored]:
    """Return the reports of one machine in the order of their measurement, without copies.

    A promoted report is in the store twice, and its measurement can be much older than its promotion.

    Args:
        folder: A store, or the folder of one machine in a store.
        machine: The machine, which is needed if the store has several.
        without: Reports that are left out.

    Raises:
        UnreadableError: A report cannot be read.
        ValueError: There is no report, or the machine is ambiguous or unknown.
    """
    found = store.stored(folder) if folder.is_dir() else []
    if not found:
        whole = folder.resolve()
        found = [one for one in store.stored(whole.parent) if one.machine == whole.name]
    found = [one for one in found if one not in without]
    machines = sorted({one.machine for one in found})
    if not machines:
        raise ValueError(
            f"storage {folder}: it has no numbered report that can be read; give a folder that --llmgpu-save wrote "
            "(llmgpu show REPORT shows one report)"
        )
    if machine is None and len(machines) > 1:
        raise ValueError(
            f"storage {folder}: it has reports of several machines; give --machine, one of {', '.join(machines)}"
        )
    if machine is not None and machine not in machines:
        raise ValueError(
            f"machine {machine!r}: storage {folder} has no report of it; allowed are {', '.join(machines)}"
        )
    kept = [one for one in found if one.machine == (machine or machines[0])]
    return sorted(_without_copies(kept), key=lambda one: (one.created, one.number))


def trends(kept: Sequence[Stored], last: int | None = None) -> list[Trend]:
    """Return each metric over stored reports.

    Args:
        kept: The reports, the oldest first.
        last: The number of newest reports with a column; None: all. Older reports are only compared with.

    Raises:
        UnreadableError: A report cannot be read.
        ValueError: The calibration cannot be read.
    """
    shown = range(0 if last is None else max(0, len(kept) - last), len(kept))

    @functools.cache
    def load(place: int) -> Report:
        return _loaded(kept[place])  # A report without a column is kept only if a case needs it.

    columns = [
        Column(number=kept[place].number, commit=store.commit(load(place).commit), created=load(place).created)
        for place in shown
    ]
    noise = calibration.in_force(kept[-1].path.parent.parent, load(len(kept) - 1)) if kept else None
    rows = [_rows(map(load, reversed(range(place))), load(place), noise) for place in shown]
    cases = [{_identity(result): result for result in load(place).cases} for place in shown]
    series = [_by_series(load(place)) for place in shown]
    pasts: dict[tuple[str, _Identity], list[_Past]] = {}
    for place in range(max(0, shown.start - history.WINDOW), len(kept)):
        _add_times(pasts, place, load(place) if place in shown else _loaded(kept[place]), noise)
    names = [f"{one.number:04}" for one in kept]
    searched = sum(len(past) >= history.FEWEST for past in pasts.values())
    marks = {name: _marks(past, names, shown.start, searched) for name, past in pasts.items()}
    found = []
    for spec in METRICS:
        if spec.trended is not None:
            lines = _lines(spec, series if spec.trended.of_series else cases, rows, marks, shown.start)
            if any(one is not None and one.value is not None for line in lines for one in line.figures):
                found.append(Trend(metric=spec.trended.name, title=spec.trended.title, columns=columns, lines=lines))
    return found


def _add_times(
    pasts: dict[tuple[str, _Identity], list[_Past]], place: int, report: Report, noise: Calibration | None
) -> None:
    """Add the quiet time of each case of a report: device time, or without it the wall time of replayed graphs."""
    gpus = frozenset(gpu.uuid for gpu in report.environment.gpus)
    for result in report.cases:
        for name in _TIMES if result.outcome == "completed" and not _disturbance(result) else ():
            figure = spec_of(name).figure
            found = figure(result) if figure is not None else None
            if found is not None and found.value > 0 and (name == "device_time" or _is_replayed(result)):
                regime = noise_regime.noisiest(name, result)
                # The history itself shows how the waiting for the host varies.
                prior = prior_of(regime, forwards=noise_regime.forwards(regime, result))
                if noise is not None:
                    prior = prior.calibrated(noise.of(result.key, name))
                pasts.setdefault((name, _identity(result)), []).append(_Past(place, found.value, gpus, prior))
                break


def _disturbance(result: CaseResult) -> str:
    """Return what disturbed half of the launches or more, the first of them; empty if the median is undisturbed."""
    found = list(filter(None, map(disturbances.untimed, result.launches)))
    return found[0] if found and 2 * len(found) >= len(result.launches) else ""


def _is_replayed(result: CaseResult) -> bool:
    return result.case.execution == "cuda_graphs"


def _marks(past: Sequence[_Past], names: Sequence[str], start: int, cases: int) -> _Marks:
    """Return the changes of one time over the reports of each set of GPUs.

    Args:
        past: The time in each report.
        names: The name of each report.
        start: The first report with a column: a change that began earlier is marked where it was found.
        cases: The number of cases whose history is searched.
    """
    marks: _Marks = {}
    by_gpus: dict[frozenset[str], list[_Past]] = {}
    for one in past:
        by_gpus.setdefault(one.gpus, []).append(one)
    for of_gpus in by_gpus.values():
        marks |= dict.fromkeys(one.place for one in of_gpus[history.FEWEST - 1 :])
        of_places = [names[one.place] for one in of_gpus]
        prior = max((one.prior for one in of_gpus), key=lambda prior: prior.s0)
        for shift in history.shifts([one.value for one in of_gpus], prior, cases=cases):
            first = of_gpus[shift.first].place
            place = first if first >= start else of_gpus[shift.found].place
            marks[place] = shift.change, history.describe(shift, of_places)
    return marks


def _lines(
    spec: MetricSpec,
    cases: Sequence[Mapping[_Identity, CaseResult]],
    rows: Sequence[_Rows],
    marks: Mapping[tuple[str, _Identity], _Marks],
    start: int,
) -> list[Line]:
    """Return one metric of all cases; `cases` and `rows` have an entry for each report from `start` on."""
    newest = {identity: result for of_report in cases for identity, result in of_report.items()}
    # Cases of a workload without the figure, such as the time to first token of a score, would have empty lines.
    measured = {
        one.case.generates for of_report in cases for one in of_report.values() if _value(one, spec) is not None
    }
    newest = {identity: result for identity, result in newest.items() if result.case.generates in measured}
    names = _names(newest)
    strategies = list(dict.fromkeys(result.case.strategy for result in newest.values()))
    ordered = sorted(newest.items(), key=lambda one: (strategies.index(one[1].case.strategy), one[1].case.batch_size))
    return [
        Line(
            name=names[identity],
            strategy=result.case.strategy,
            batch_size=None if spec.trended is not None and spec.trended.of_series else result.case.batch_size,
            figures=[
                _figure(of_report[identity], spec, of_rows, marks.get((spec.name, identity), {}), place)
                if identity in of_report
                else None
                for place, (of_report, of_rows) in enumerate(zip(cases, rows, strict=True), start)
            ],
        )
        for identity, result in ordered
    ]


def _without_copies(kept: Sequence[Stored]) -> list[Stored]:
    """Return the reports without those whose measurement is also stored under a lower number."""
    found: list[Stored] = []
    for one in kept:
        # The names of the files are compared first, because few files are opened then.
        alike = [other for other in found if (other.created, other.commit) == (one.created, one.commit)]
        if alike:
            report = _loaded(one)
            if any(promotion.is_same(report, _loaded(other)) for other in alike):
                continue
        found.append(one)
    return found


def _loaded(one: Stored) -> Report:
    try:
        return reports.load(one.path)
    except ValueError as error:
        raise UnreadableError(one, str(error)) from None


def _rows(earlier: Iterable[Report], report: Report, noise: Calibration | None) -> _Rows:
    """Return the rows of each case against the first of the earlier reports that has it; the newest comes first."""
    left = {result.key for result in report.cases}
    found: _Rows = {}
    for base in earlier:
        common = left & {result.key for result in base.cases}
        if common:
            rows = judge.judge(base, report, Policy(), today=datetime.date.min, calibration=noise).rows
            keys = common | {result.case.series for result in report.cases if result.key in common}
            found |= {(row.key, _id(row), row.metric): row for row in rows if row.key in keys}
        left -= common
        if not left:
            break
    return found


def _id(row: Row) -> str:
    """Return the id of a case; the key of a series suffices."""
    return "" if spec_of(row.metric).scope == "series" else row.id


def _figure(result: CaseResult, spec: MetricSpec, rows: _Rows, marks: _Marks, place: int) -> Figure:
    assert spec.trended is not None
    value = _value(result, spec)
    figure = Figure(value=None if value is None else value / spec.trended.scale, outcome=result.outcome)
    case = result.case
    mark = marks.get(place)
    if mark is not None:
        growth, reason = mark
        return msgspec.structs.replace(figure, change="worse" if growth > 0 else "better", reason=reason, growth=growth)
    for name in spec.trended.judged_by:
        of_series = spec_of(name).scope == "series"
        row = rows.get((case.series, "", name) if of_series else (result.key, result.id, name))
        if name == spec.name and place in marks and not (row is not None and row.prefill):
            continue  # the history, which is that of decode steps, shows no change
        if row is not None and row.verdict in _CHANGES and result.id in (row.cases or [result.id]):
            change: Change = "changed" if name == "predictions" else _CHANGES[row.verdict]
            return msgspec.structs.replace(figure, change=change, reason=row.reason)
    noisy = figure.value is not None and spec.kind != "exact" and not spec.trended.of_series
    if noisy and (reason := _disturbance(result)):
        return msgspec.structs.replace(figure, change="disturbed", reason=f"{reason}.")
    return figure


def _value(result: CaseResult, spec: MetricSpec) -> float | None:
    """Return the figure of a case; None if it did not complete or has none."""
    assert spec.trended is not None
    if result.outcome != "completed":
        return None
    if spec.trended.value is not None:
        return spec.trended.value(result)
    figure = spec.figure(result) if spec.figure is not None else None
    return None if figure is None else figure.value


def _identity(result: CaseResult) -> _Identity:
    return (result.key, result.id)


def _by_series(report: Report) -> dict[_Identity, CaseResult]:
    """Return one result for each series: the first that completed, else the first."""
    found: dict[_Identity, CaseResult] = {}
    for result in sorted(report.cases, key=lambda one: one.outcome != "completed"):
        found.setdefault((result.case.series, result.case.strategy), result)
    return found


def _names(results: Mapping[_Identity, CaseResult]) -> dict[_Identity, str]:
    """Return the id of each result, with distinctions if other cases have the same id; the last one is the key."""
    names = {identity: identity[1] for identity in results}
    for distinction in _DISTINCTIONS:
        more = {identity: distinction(identity, result.case) for identity, result in results.items()}
        alike: dict[str, set[str]] = {}
        for identity, name in names.items():
            alike.setdefault(name, set()).add(more[identity])
        names = {
            identity: f"{name} {more[identity]}" if len(alike[name]) > 1 else name for identity, name in names.items()
        }
    return names
