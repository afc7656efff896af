"""The figures of a case that other tools get, and the name by which they know it again in the next report."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from pytest_llmgpu.render.exports.escaping import one_line
from pytest_llmgpu.render.grouping import capacities
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import inference_s, peaks_bytes
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult, Launch

__all__ = ["Figure", "FigureName", "accuracy_metric", "describe", "figures", "largest_batches", "launches_s", "names"]

FigureName = Literal["time", "sequences", "tokens", "accuracy", "memory", "traffic"]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a completed case."""

    name: FigureName
    unit: str
    value: float
    low: float | None = None
    """Least value of a launch; None with fewer than two."""
    high: float | None = None
    """Largest."""
    bigger_is_better: bool = False


def figures(result: CaseResult) -> list[Figure]:
    """Return what there is of time, rates, accuracy, peak memory and traffic; nothing for a case that did not complete.

    The accuracy of random weights is chance and no figure.
    """
    return [figure for figure in _all(result) if math.isfinite(figure.value)]


def accuracy_metric(result: CaseResult) -> Literal["acc", "acc_norm"]:
    """Return the accuracy that the case was checked by."""
    return "acc" if result.accuracy_check is not None and result.accuracy_check.metric == "acc" else "acc_norm"


def launches_s(result: CaseResult) -> list[float]:
    """Return the seconds that each launch of a completed case spent in batches; without batches the one figure it has.

    Nothing for a case that did not complete: a total over some of its batches says nothing.
    """
    if result.outcome != "completed":
        return []
    seconds = [inference_s(launch) for launch in _timed(result)]
    return seconds or ([result.inference_s] if result.inference_s is not None else [])


def names(results: Sequence[CaseResult]) -> list[str]:
    """Return a name of one line for each result: `mp-bs8 (llama-7b, float16, 4 x cuda, hellaswag)`.

    It holds no more than what people choose, so that a case has the name it had in the report before, and does not
    depend on the report's other cases but for `#2` where two would have the same.
    """
    return _numbered(f"{result.case.id} ({describe(result.case)})" for result in results)


def largest_batches(report: Report) -> list[tuple[str, int, str]]:
    """Return name, largest batch size and a sentence on it for each series where it is known; 0 where none fits."""
    cases = {result.case.series: result.case for result in report.cases}
    known = [
        (cases[one.series], one.largest_fit or 0, one.text)
        for one in capacities(report)
        if one.series in cases and (one.largest_fit is not None or one.smallest_oom is not None)
    ]
    numbered = _numbered(f"{case.strategy} ({describe(case)})" for case, _, _ in known)
    return [(name, size, text) for name, (_, size, text) in zip(numbered, known, strict=True)]


def describe(case: Case) -> str:
    """Return what a series of cases measures, without strategy and batch size."""
    parts = [
        f"{case.model} with random weights" if case.load_format == "dummy" else case.model,
        case.dtype,
        f"{case.devices} x {case.device}",
        case.dataset if case.limit is None else f"first {case.limit} of {case.dataset}",
    ]
    if case.gpu_memory_bytes is not None:
        parts.append(f"{case.gpu_memory_bytes / 2**30:g} GiB each")
    return one_line(", ".join([*parts, *(f"{key}={value}" for key, value in case.strategy_options.items() if value)]))


def _numbered(lines: Iterable[str]) -> list[str]:
    used: Counter[str] = Counter()
    found = []
    for line in map(one_line, lines):
        used[line] += 1
        found.append(line if used[line] == 1 else f"{line} #{used[line]}")
    return found


def _all(result: CaseResult) -> Iterator[Figure]:
    if result.outcome != "completed":
        return
    seconds = launches_s(result)
    launches = _timed(result)
    if result.inference_s is not None:
        yield _figure("time", "s", result.inference_s, seconds)
    rates = [sum(launch.batches.sequences) / s for launch, s in zip(launches, seconds, strict=False) if s]
    if result.sequences_per_s is not None:
        yield _figure("sequences", "sequences/s", result.sequences_per_s, rates, bigger_is_better=True)
    rates = [sum(launch.batches.tokens) / s for launch, s in zip(launches, seconds, strict=False) if s]
    if result.tokens_per_s is not None:
        yield _figure("tokens", "tokens/s", result.tokens_per_s, rates, bigger_is_better=True)
    metric = accuracy_metric(result)
    accuracy = result.acc if metric == "acc" else result.acc_norm
    if accuracy is not None and result.case.load_format != "dummy":
        yield _figure("accuracy", metric, accuracy, (), bigger_is_better=True)
    if peaks := list(map(float, peaks_bytes(result))):
        yield _figure("memory", "bytes", statistics.median(peaks), peaks)
    if result.traffic is not None:
        yield _figure("traffic", "bytes/sequence", result.traffic.wire_bytes_per_sequence, ())


def _figure(
    name: FigureName, unit: str, value: float, launches: Sequence[float], *, bigger_is_better: bool = False
) -> Figure:
    several = len(launches) > 1 and all(map(math.isfinite, launches))
    return Figure(
        name=name,
        unit=unit,
        value=value,
        low=min(launches) if several else None,
        high=max(launches) if several else None,
        bigger_is_better=bigger_is_better,
    )


def _timed(result: CaseResult) -> list[Launch]:
    return [launch for launch in result.launches if launch.batches.latency_s]
