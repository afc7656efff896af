"""The metrics of one machine over its stored reports, with the changes of each case.

A time changed with a report where the mean of the reports on the same GPUs has a step. An exact figure changed where it
differs from the last earlier one by more than the threshold of its metric.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from pytest_llmgpu.analysis import noise_regime
from pytest_llmgpu.analysis.noise_regime import PRIORS, Prior
from pytest_llmgpu.gate.stats import t_tail
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.metrics import BY_NAME, METRICS, MetricSpec, own_metrics
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import OUT_OF_MEMORY, CaseResult
from pytest_llmgpu.report.text import signed_percent
from pytest_llmgpu.store import store
from pytest_llmgpu.store.store import Stored

Change = Literal["worse", "better", "disturbed"]
"""The change of a figure from the earlier ones. A `disturbed` time is compared with no other one."""

_Marks = dict[int, tuple[Change, str]]
"""The changes of a metric of one case and their reasons, by the place of the report."""
_Kept = Sequence[tuple[Stored, Report]]

_SMALLEST = 0.002
"""Smallest step that is stated, as a fraction. A test of figures that hardly vary would find any."""

_CHANCE = 3e-4
"""Largest p of a step. By the simulation of `benchmarks/trend/changes.py` it finds one in at most 1 % of histories of
100 unchanged reports."""

_MOST_DEGREES = 20.0
"""Most degrees of freedom of a prior: reports of different days can differ by more than launches of one day."""

_FEWEST_BEFORE, _FEWEST_AFTER = 4, 2
"""Fewest reports before and after a step."""
FEWEST = _FEWEST_BEFORE + _FEWEST_AFTER
"""Fewest reports in which a step can be found."""

DEVICE_TIME = Prior(s0=0.003, df0=40.0)
"""Prior of device time between reports of the same GPUs: LLaMA-7B at batch sizes 8 to 64, 72 launches on two H200."""


class Step(NamedTuple):
    """A change of the mean that lasts."""

    first: int
    """The number of the first figure that it changed."""
    found: int
    """The number of the figure with which it was found."""
    change: float
    """The change of the mean as a fraction."""


class Figure(NamedTuple):
    """One metric of one case in one report."""

    value: float | None
    """The value in the unit of the trend; None if the case has none."""
    outcome: str
    """The outcome of the case."""
    change: Change | None = None
    """The change; None if there is no significant one, or no earlier figure."""
    reason: str = ""
    """The change in one sentence."""


class Line(NamedTuple):
    """One metric of one case over all reports."""

    name: str
    """The id of the case, with what differs where other cases have the same id."""
    strategy: str
    """The strategy of the case."""
    figures: list[Figure | None]
    """The figure of each report; None if the report does not have the case."""
    tested: bool | None
    """False if a time has too few undisturbed reports of the same GPUs to show a step; None for other figures."""


class Trend(NamedTuple):
    """One metric over all reports."""

    metric: str
    """The name of the metric."""
    title: str
    """The title of the metric with its unit."""
    columns: list[tuple[str, str, str]]
    """Date, number in the store and commit of each report, the oldest first."""
    lines: list[Line]
    """The cases, by strategy in the order in which these ran, then by batch size."""


def chosen(folder: Path, machine: str | None = None) -> list[Stored]:
    """Return the reports of one machine in the order of their measurement, without copies.

    A promoted report is in the store twice, and its measurement can be much older than its promotion. The folder is a
    store, or that of one machine in it; ValueError if it has no report, or those of several machines.
    """
    found = store.stored(folder) if folder.is_dir() else []
    if not found:
        whole = folder.resolve()
        found = [one for one in store.stored(whole.parent) if one.machine == whole.name]
    machines = sorted({one.machine for one in found})
    if not machines:
        raise ValueError(f"storage {folder}: it has no numbered report; give a folder that --llmgpu-save wrote")
    if machine is None and len(machines) > 1:
        raise ValueError(f"storage {folder}: several machines; give --machine, one of {', '.join(machines)}")
    if machine is not None and machine not in machines:
        raise ValueError(f"machine {machine!r}: storage {folder} has only {', '.join(machines)}")
    kept: dict[tuple[str, str | None], Stored] = {}
    for one in sorted(found, key=lambda one: (one.created, one.number)):
        if one.machine == (machine or machines[0]):
            kept.setdefault((one.created, one.commit), one)
    return list(kept.values())


def trends(kept: _Kept, last: int | None = None) -> list[Trend]:
    """Return each metric over stored reports, oldest first; those before the `last` ones are only compared with."""
    start = 0 if last is None else max(0, len(kept) - last)
    columns = [
        (report.created[:10], f"{one.number:04}", store.commit(report.commit).split(" ")[0])
        for one, report in kept[start:]
    ]
    cases: dict[tuple[str, str], dict[int, CaseResult]] = {}
    for place, (_, report) in enumerate(kept):
        for result in report.cases:
            cases.setdefault((result.key, result.id), {})[place] = result
    newest = {identity: results[max(results)] for identity, results in cases.items() if max(results) >= start}
    strategies = list(dict.fromkeys(result.case.strategy for result in newest.values()))
    order = sorted(newest.items(), key=lambda one: (strategies.index(one[1].case.strategy), one[1].case.batch_size))
    names: dict[tuple[str, str], str] = {}  # the id, and the fields that differ where other cases have the same id
    for identity, result in newest.items():
        alike = [msgspec.to_builtins(other.case) for (_, name), other in newest.items() if name == result.id]
        case = msgspec.to_builtins(result.case)
        differing = [name for name in case if any(case[name] != one[name] for one in alike)]
        plain = [name for name in differing if not name.endswith("sha256")]
        if sum(all(case[name] == one[name] for name in plain) for one in alike) == 1:
            differing = plain  # no other case is equal but for a hash
        shown = [f"{name} {case[name]}"[:30] for name in differing if case[name] is not None]  # a hash has 64 letters
        names[identity] = " ".join([result.id, *shown])
    found = []
    own = own_metrics(result for _, report in kept for result in report.cases)
    for spec in (spec for spec in (*METRICS, *own) if spec.trend):
        lines = []
        for identity, result in order:
            figures, tested = _figures(spec, kept, cases[identity], len(cases), start)
            if any(one is not None and one.value is not None for one in figures):
                lines.append(Line(names[identity], result.case.strategy, figures, tested))
        if lines:
            found.append(Trend(spec.name, spec.trend, columns, lines))
    return found


def steps(values: Sequence[float], prior: Prior, *, cases: int = 1) -> list[Step]:
    """Return the steps of a history in their order.

    After each report the figures since the last step are searched for a new one, which may have begun with any of
    them: the likelihood-ratio test of a change point with unknown means and deviation (Hawkins, Qiu and Kang 2003, "The
    changepoint model for statistical process control", Journal of Quality Technology 35, 355-366). The deviation is
    moderated as that of the gate: the prior counts as some reports more, because few reports do not show their
    deviation. There is no step where another figure of one report explains more: this may be an accident. All figures
    are above 0; `cases` is the number of histories that are searched, any of which may show a change by chance.
    """
    logs = [math.log(value) for value in values]
    found: list[Step] = []
    start = 0
    for end in range(1, len(logs) + 1):
        window = logs[start:end]
        size, mean = len(window), statistics.fmean(window)
        explained, growth, first = 0.0, 0.0, 0
        for place in range(_FEWEST_BEFORE, size - _FEWEST_AFTER + 1):
            difference = statistics.fmean(window[place:]) - statistics.fmean(window[:place])
            of_place = difference**2 * place * (size - place) / size
            if of_place >= explained:
                explained, growth, first = of_place, difference, place
        squares = [(value - mean) ** 2 for value in window]
        if not first or abs(math.expm1(growth)) < _SMALLEST or max(squares) * size / (size - 1) >= explained:
            continue
        expected = min(prior.df0, _MOST_DEGREES)
        degrees = size - 2 + expected
        left = max(0.0, math.fsum(squares) - explained) + expected * prior.s0**2
        if 2 * t_tail(math.sqrt(degrees * explained / left), degrees) * (size - _FEWEST_BEFORE) * cases <= _CHANCE:
            found.append(Step(start + first, end - 1, math.expm1(growth)))
            start += first
    return found


def _figures(
    spec: MetricSpec, kept: _Kept, results: Mapping[int, CaseResult], cases: int, start: int
) -> tuple[list[Figure | None], bool | None]:
    """Return the figure of one case in each report from `start` on, with its changes, and if a time was tested.

    `results` has the case by the place of its report, oldest first.
    """
    values = {place: figure.value for place, one in results.items() if (figure := spec.of(one)) is not None}
    marks: _Marks = {}
    tested = None
    if spec.rule == "time":
        marks, tested = _steps(spec, kept, results, values, cases, start)
    elif spec.rule is not None or spec.name in ("flops", "kernels"):  # exact: parts of the row `program`
        for (before, was), (place, value) in itertools.pairwise(values.items()):
            change = value - was if spec.points or not was else (value - was) / abs(was)
            if abs(change) > (spec.threshold or 0.0):
                reason = f"{spec.written(value)}, was {spec.written(was)} in report {kept[before][0].number:04}."
                marks[place] = ("better" if (change > 0) == spec.bigger_is_better else "worse", reason)
    figures: list[Figure | None] = [None] * (len(kept) - start)
    for place, one in results.items():
        if place >= start:
            shown = values[place] / spec.trend_unit if place in values else None
            figures[place - start] = Figure(shown, one.outcome, *marks.get(place, (None, "")))
    return figures, tested


def _steps(
    spec: MetricSpec,
    kept: _Kept,
    results: Mapping[int, CaseResult],
    values: Mapping[int, float],
    cases: int,
    start: int,
) -> tuple[_Marks, bool]:
    """Return the changes of a time of one case, and if steps on the same GPUs were searched.

    A change is another outcome, a disturbance or a step.

    A step that began before the report `start`, the first with a column, is marked where it was found.
    """
    marks: _Marks = {}
    names = [f"{one.number:04}" for one, _ in kept]
    for (before, was), (place, now) in itertools.pairwise(results.items()):
        fits = now.outcome not in OUT_OF_MEMORY
        if (was.outcome not in OUT_OF_MEMORY) != fits:
            reason = f"{now.outcome}, was {was.outcome} in report {names[before]}."
            marks[place] = ("better" if fits else "worse", reason)
    quiet: dict[frozenset[str], list[int]] = {}
    for place in (place for place, value in values.items() if value > 0):
        if (disturbed := disturbances.of_case(results[place], spec.name)) is not None:
            marks[place] = ("disturbed", f"{disturbed}.")
        else:
            quiet.setdefault(frozenset(gpu.uuid for gpu in kept[place][1].environment.gpus), []).append(place)
    for places in quiet.values():
        # The history itself shows how the waiting for the host varies.
        regime = noise_regime.noisiest(*(results[place] for place in places))
        regime = regime if spec.name in BY_NAME else max(regime, "eager_host", key=noise_regime.REGIMES.index)
        prior = DEVICE_TIME if spec.name == "device_time" else PRIORS[regime]
        for step in steps([values[place] for place in places], prior, cases=cases):
            first, found = places[step.first], places[step.found]
            reason = f"Step of {signed_percent(step.change)} since report {names[first]}, found with {names[found]}."
            change: Change = "better" if (step.change > 0) == spec.bigger_is_better else "worse"
            marks[first if first >= start else found] = (change, reason)
    return marks, max(map(len, quiet.values()), default=0) >= FEWEST
