"""Metrics with one verdict per series: the cases that differ in their batch size only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import msgspec

from pytest_llmgpu.gate.policy import LoadTimeRule, Rules
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.metrics import MetricName, loads_s
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import percent, plural, signed_percent
from pytest_llmgpu.report.verdicts import Row, Verdict

__all__ = ["OUT_OF_MEMORY", "Series", "by_series", "series_of", "series_rows", "settled"]

OUT_OF_MEMORY = frozenset(("oom", "skipped_after_oom"))
"""Outcomes of a batch size that does not fit."""

_DEVIATION = 0.15
"""Standard deviation of the logarithm of load times between equal launches.

It was 0.07 to 0.15 in the six reports of 10 to 40 launches under benchmarks/reports.
"""


class Series(msgspec.Struct, kw_only=True):
    """The results of one series in one report."""

    result: CaseResult
    """The first of its results."""
    fits: int = 0
    """Largest batch size that completed; 0 where none did."""
    fails: int | None = None
    """Smallest batch size that was out of memory; None where none was."""

    @property
    def known(self) -> bool:
        """True if a batch size of the series completed or was out of memory: a crash shows neither."""
        return bool(self.fits) or self.fails is not None


def series_of(case: Case) -> tuple[object, ...]:
    """Return what the cases of one series share. Faster than `Case.series`, and valid within one process only."""
    fields = msgspec.structs.asdict(case)
    return tuple(
        str(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in {"batch_size", "execution"}
    )


def by_series(results: Sequence[CaseResult]) -> dict[tuple[object, ...], Series]:
    """Return the series of a report's results by `series_of`."""
    found: dict[tuple[object, ...], Series] = {}
    for result in results:
        size = result.case.batch_size
        series = found.setdefault(series_of(result.case), Series(result=result))
        if result.outcome == "completed":
            series.fits = max(series.fits, size)
        elif result.outcome in OUT_OF_MEMORY:
            series.fails = size if series.fails is None else min(series.fails, size)
    return found


def series_rows(base: Series, head: Series, rules: Rules) -> Iterator[Row]:
    """Yield the verdicts on a series that both reports have."""
    if (row := _largest_batch(base, head, gated=rules.largest_batch.gate)) is not None:
        yield row
    if (row := _load_time(base, head, rules.load_time)) is not None:
        yield row


def _load_time(base: Series, head: Series, rule: LoadTimeRule) -> Row | None:
    """Judge the time to load the model; None where a report lacks it, or too few launches decide and it is not gated.

    The ratio of the medians has a 99 % interval from the deviation of equal launches. It has to lie wholly above the
    threshold for REGRESSED and wholly below it for OK.
    """
    then, now = loads_s(base.result), loads_s(head.result)
    if not then or not now:
        return None
    before, after = statistics.median(then), statistics.median(now)
    launches, ratio = min(len(then), len(now)), after / before
    half_width = NormalDist().inv_cdf(0.99) * _DEVIATION * math.sqrt(1 / len(then) + 1 / len(now))
    low, high = ratio * math.exp(-half_width), ratio * math.exp(half_width)
    if low > 1 + rule.margin:
        verdict: Verdict = "REGRESSED"
    elif high < 1 - rule.margin:
        verdict = "IMPROVED"
    elif high <= 1 + rule.margin:
        verdict = "OK"
    elif rule.gate or launches > 1:
        verdict = "NOT_ENOUGH_DATA"
    else:
        return None
    return _row(
        head,
        "load_time",
        verdict,
        f"Load time {signed_percent(ratio - 1)}, threshold {percent(rule.margin)}: "
        f"{after:.3g} s, was {before:.3g} s; {plural(launches, 'launch')} in each report.",
        gated=rule.gate,
        base=before,
        head=after,
        ratio=ratio,
        low=low,
        high=high,
        threshold=rule.margin,
        n=launches,
    )


def _largest_batch(base: Series, head: Series, *, gated: bool) -> Row | None:
    """Judge the largest batch size that fits; None where nothing was out of memory, so that no limit is known.

    A batch size that one report lacks is no change: the size at which the other ran out of memory has to have fitted.
    """
    limited = base.fails is not None or head.fails is not None
    if not limited or not base.known or not head.known:
        return None
    if head.fails is not None and head.fails <= base.fits:
        verdict: Verdict = "CAPACITY_REGRESSED"
    elif base.fails is not None and base.fails <= head.fits:
        verdict = "CAPACITY_IMPROVED"
    else:
        verdict = "OK"
    return _row(
        head,
        "largest_batch",
        verdict,
        f"Largest batch size {_reach(head)}, was {_reach(base)}.",
        gated=gated,
        base=float(base.fits),
        head=float(head.fits),
        ratio=head.fits / base.fits if base.fits else None,
    )


def _reach(series: Series) -> str:
    return f"{series.fits}" + (f" (out of memory at {series.fails})" if series.fails is not None else "")


def _row(of: Series, metric: MetricName, verdict: Verdict, reason: str, **figures: Any) -> Row:
    case = of.result.case
    return Row(key=case.series, id=case.strategy, metric=metric, verdict=verdict, reason=reason, **figures)


def settled(
    gone: CaseResult, heads: Mapping[tuple[object, ...], Series], measured_by: Mapping[str, set[tuple[object, ...]]]
) -> bool:
    """Return whether a case that only the baseline has was a probe for the largest batch size, and needs no second one.

    Each run probes other sizes, in the test whose own case was out of memory. So the candidate's series has to have
    run out of memory too, in the same test, and to have settled this size: the size is at most the largest that fits,
    or at least the smallest that does not.

    Args:
        gone: The baseline's result.
        heads: The candidate's series, from `by_series`.
        measured_by: Node id to the series that the candidate measured in that test.
    """
    series = series_of(gone.case)
    head = heads.get(series)
    if head is None or head.fails is None or gone.nodeid is None or series not in measured_by.get(gone.nodeid, ()):
        return False
    return gone.case.batch_size <= head.fits or gone.case.batch_size >= head.fails
