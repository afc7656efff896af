"""Exact figures of the work passes: FLOPs, host synchronizations, calls of kernels, of ops and of the CUDA runtime.

They are equal in every launch of an equal program, so that one launch suffices. They are compared rank by rank, because
the slowest rank decides the time of a case, and only where the passes ran the same batches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pytest_llmgpu.gate.policy import AmountRule, ExactRule, Rules
from pytest_llmgpu.report.derived import of_prefill
from pytest_llmgpu.report.metrics import MetricName, spec_of
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.text import listed, percent, signed_percent
from pytest_llmgpu.report.verdicts import NEITHER, ONLY_CANDIDATE, WORST_FIRST, Decided, Row
from pytest_llmgpu.report.work import WORK_OFF, WORK_ON, RankWork

_NAMED = 3
"""Most calls that a reason names, since it has two lines."""

_NO_REASON = "the report has no reason"

_Calls = Mapping[str, int]
"""Name of a function to its number of calls."""

_Ranks = Sequence[RankWork]
"""The records of the ranks of one launch."""


class _Metric(NamedTuple):
    """One figure of a rank."""

    name: MetricName
    """The name of the metric. A field of `RankWork` and its reason in `why` have the same name."""
    noun: str
    """The figure in a sentence."""
    value: Callable[[RankWork], int | None]
    """Returns the figure; None where the rank lacks it."""
    calls: Callable[[RankWork], _Calls | None]
    """Returns the calls whose changes explain a change of the figure."""
    eager: bool = True
    """True if the figure is from the eager pass; False: from the passes in the execution of the case."""


_METRICS = (
    _Metric("flops", "FLOPs", lambda rank: rank.flops, lambda rank: rank.ops),
    _Metric("host_syncs", "Host synchronizations", lambda rank: rank.host_syncs, lambda rank: rank.runtime_calls),
    _Metric("kernels", "Kernel calls", lambda rank: rank.kernels, lambda _: None, eager=False),
    _Metric("ops", "Calls of ops", lambda rank: _sum(rank.ops), lambda rank: rank.ops),
    _Metric("runtime_calls", "CUDA calls", lambda rank: _sum(rank.runtime_calls), lambda rank: rank.runtime_calls),
)


class Found(NamedTuple):
    """The result for one metric of a case."""

    metric: MetricName
    """The name of the metric."""
    row: Row | str
    """The verdict, or the reason why there is none."""
    gap: bool
    """True if the policy gates the metric and a report has it, so that a missing verdict is a gap."""


def work_rows(base: CaseResult, head: CaseResult, rules: Rules) -> Iterator[Found]:
    """Yield the result for each metric of the work passes.

    A case that generates has decode steps and prefills: the worse of the two results stands.
    """
    step = list(_work_rows(base, head, rules))
    if not head.case.generates:
        yield from step
        return
    first = {found.metric: found for found in _work_rows(of_prefill(base), of_prefill(head), rules)}
    for found in step:
        yield _worse(found, first.pop(found.metric, None))
    yield from (_worse(None, found) for found in first.values())


def worse(step: Row | None, prefill: Row) -> Row:
    """Return the worse of two rows on one metric, of two regressions the larger one, else that of the decode step.

    The smallest slowdown that is seen is that of both.
    """
    if step is None or _badness(prefill) < _badness(step):
        row = msgspec.structs.replace(prefill, prefill=True, reason=f"Of the prefill: {prefill.reason}")
    else:
        row = step
    if step is None or step.smallest_seen is None or prefill.smallest_seen is None:
        return row
    return msgspec.structs.replace(row, smallest_seen=max(step.smallest_seen, prefill.smallest_seen))


def _badness(row: Row) -> tuple[int, float]:
    return WORST_FIRST.index(row.result), -(row.ratio or 0.0) if row.worse else 0.0


def _worse(step: Found | None, prefill: Found | None) -> Found:
    """Return the worse of two results for one metric (see `worse`)."""
    if prefill is None or not isinstance(prefill.row, Row):
        assert step is not None or prefill is not None
        return step or prefill  # type: ignore[return-value]  # one of them is there
    return prefill._replace(
        row=worse(step.row if step is not None and isinstance(step.row, Row) else None, prefill.row)
    )


def _work_rows(base: CaseResult, head: CaseResult, rules: Rules) -> Iterator[Found]:
    """Yield the result for each metric of `Launch.work`.

    A metric that the policy does not gate has a result only where it changed: it explains other rows. A figure that
    neither report has, such as the FLOPs of fused kernels, is no gap.
    """
    sides = _worked(base), _worked(head)
    same = _equal_ranks(*sides)
    for metric in _METRICS:
        rule: AmountRule | ExactRule = getattr(rules, metric.name)
        if same is not None and not rule.gate:
            continue
        if same is not None and None not in (values := [metric.value(rank) for rank in same]):
            yield Found(metric.name, _equal_row(metric, values[0] or 0, sides, head, rule), gap=True)
            continue
        figures = [[_figures(metric, launch) for launch in side] for side in sides]
        before, after = (
            [launch for launch, ranks in zip(side, known, strict=True) if None not in ranks]
            for side, known in zip(sides, figures, strict=True)
        )
        if not before and not after:
            if rule.gate:
                yield Found(metric.name, NEITHER, gap=False)
            continue
        row = _row_or_reason(metric, before, after, head, rule)
        if rule.gate or (isinstance(row, Row) and row.verdict != "OK"):
            yield Found(metric.name, row, gap=rule.gate)


def lost(head: CaseResult, metric: MetricName, why: str, *, gated: bool) -> Row:
    """Return the row of a figure of the work passes that only the baseline has.

    Args:
        head: The result of the candidate.
        metric: The metric.
        why: The reason why the candidate lacks it.
        gated: True if the policy gates the metric.
    """
    reason = f"Only the baseline has {metric.replace('_', ' ')}: {why.rstrip('.')}."
    return Row.of(head, metric, "MISSING", reason, gated=gated, next_step=WORK_ON if why == WORK_OFF else "")


def _equal_ranks(before: Sequence[Launch], after: Sequence[Launch]) -> _Ranks | None:
    """Return the ranks of the first launch if every launch of both reports ran the same batches with equal figures.

    That is the most frequent case, and decided first: reports can have many thousand cases.
    """
    if not before or not after:
        return None
    first, *others = map(_exact, [*before, *after])
    return _ranks(before[0]) if all(one == first for one in others) else None


def _equal_row(
    metric: _Metric, value: int, sides: Sequence[list[Launch]], head: CaseResult, rule: AmountRule | ExactRule
) -> Row:
    return Row.of(
        head,
        metric.name,
        "OK",
        f"{metric.noun} are equal.",
        gated=rule.gate,
        base=float(value),
        head=float(value),
        ratio=1.0 if value else None,
        threshold=_threshold(rule),
        n=min(map(len, sides)),
    )


def _threshold(rule: AmountRule | ExactRule) -> float:
    return rule.margin if isinstance(rule, AmountRule) else 0.0


def _exact(launch: Launch) -> tuple[object, ...]:
    assert launch.work is not None
    figures = [(rank.flops, rank.host_syncs, rank.kernels, rank.ops, rank.runtime_calls) for rank in launch.work.ranks]
    return launch.plan_sha256, launch.work.batches, launch.work.eager_batches, figures


def _row_or_reason(
    metric: _Metric,
    before: Sequence[Launch],
    after: Sequence[Launch],
    head: CaseResult,
    rule: AmountRule | ExactRule,
) -> Row | str:
    """Judge one metric in the launches that have it."""
    if not before:
        return ONLY_CANDIDATE
    if not after:
        why = _why(metric, head)
        if not rule.gate:
            return f"the candidate lacks it: {why}"
        return lost(head, metric.name, why, gated=rule.gate)
    thens_by, nows_by = (_by_batches(metric, side) for side in (before, after))
    common = next((batches for batches in nows_by if batches in thens_by), None)
    if common is None:
        return "the work passes ran other batches (plan_sha256)"
    thens, nows = thens_by[common], nows_by[common]
    if len({len(ranks) for ranks in (*thens, *nows)}) > 1:
        return "the numbers of ranks differ"
    return _row(metric, thens, nows, head, rule)


class _Rank(NamedTuple):
    """One figure of one rank in the launches of both reports."""

    number: int
    then: list[int]
    now: list[int]

    @property
    def growth(self) -> float:
        """The growth as a fraction, from launches in the middle; infinite where the baseline has none."""
        was, is_now = statistics.median_low(self.then), statistics.median_low(self.now)
        return is_now / was - 1 if was else math.inf if is_now else 0.0

    def verdict(self, threshold: float) -> Decided:
        """Return the verdict. Where launches differ, their whole range has to lie above the threshold."""
        least, most = min(self.then), max(self.then)
        if min(self.now) - most > threshold * most:
            return "REGRESSED"
        if max(self.now) - least > threshold * least:
            return "UNDECIDED"
        return "IMPROVED" if least - max(self.now) > threshold * least else "OK"


def _row(
    metric: _Metric, thens: Sequence[_Ranks], nows: Sequence[_Ranks], head: CaseResult, rule: AmountRule | ExactRule
) -> Row:
    """Compare each rank with itself, and return the worst verdict with the figures of the rank that changed most."""
    threshold = _threshold(rule)
    ranks = [
        _Rank(number, *([metric.value(launch[number]) or 0 for launch in side] for side in (thens, nows)))
        for number in range(len(nows[0]))
    ]
    verdicts = [one.verdict(threshold) for one in ranks]
    verdict = min(verdicts, key=WORST_FIRST.index)
    concerned = [one for one, its in zip(ranks, verdicts, strict=True) if its == verdict]
    shown = max(concerned, key=lambda one: abs(one.growth))
    was, is_now = statistics.median_low(shown.then), statistics.median_low(shown.now)
    return Row.of(
        head,
        metric.name,
        verdict,
        _reason(metric, verdict, shown, concerned=len(concerned), ranks=len(ranks), threshold=threshold)
        + ("" if verdict == "OK" else _changed(metric, thens[0][shown.number], nows[0][shown.number])),
        gated=rule.gate,
        base=float(was),
        head=float(is_now),
        ratio=is_now / was if was else None,
        threshold=threshold,
        n=min(len(thens), len(nows)),
    )


def _reason(metric: _Metric, verdict: Decided, shown: _Rank, *, concerned: int, ranks: int, threshold: float) -> str:
    was, is_now = statistics.median_low(shown.then), statistics.median_low(shown.now)
    if verdict == "OK" and was == is_now:
        return f"{metric.noun} are equal."
    where = "" if ranks == 1 else " on each rank" if concerned == ranks else f" on rank {shown.number}"
    if verdict == "UNDECIDED":
        ends = (f"{min(figures):,} to {max(figures):,}" for figures in (shown.now, shown.then))
        return f"{metric.noun} differ between launches{where}: {', were '.join(ends)} in a work pass."
    written = spec_of(metric.name).written
    change = f" {signed_percent(shown.growth, 2)}{where}, threshold {percent(threshold)}:" if threshold else where + ":"
    return f"{metric.noun}{change} {written(is_now)} in a work pass, were {written(was)}."


def _changed(metric: _Metric, then: RankWork, now: RankWork) -> str:
    """Return the calls that changed most as a second line; empty where none did or they are not known."""
    before, after = metric.calls(then), metric.calls(now)
    if before is None or after is None:
        return ""
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in sorted(before.keys() | after.keys())}
    names = sorted((name for name in changes if changes[name]), key=lambda name: -abs(changes[name]))
    shown = [f"{name} {before.get(name, 0):,} -> {after.get(name, 0):,}" for name in names]
    return f"\nCalls: {listed(shown, _NAMED)}." if shown else ""


def _worked(result: CaseResult) -> list[Launch]:
    return [launch for launch in result.launches if launch.work is not None and launch.work.ranks]


def _figures(metric: _Metric, launch: Launch) -> tuple[int | None, ...]:
    """Return the figure of each rank; None where a rank lacks it."""
    return tuple([metric.value(rank) for rank in _ranks(launch)])


def _why(metric: _Metric, head: CaseResult) -> str:
    """Return why the candidate lacks a metric."""
    for launch in head.launches:
        if launch.work is None:
            return launch.why.get("work", _NO_REASON)
        for rank in launch.work.ranks:
            if metric.name in rank.why:
                return rank.why[metric.name]
    return _NO_REASON


def _ranks(launch: Launch) -> _Ranks:
    assert launch.work is not None
    return launch.work.ranks


def _by_batches(metric: _Metric, launches: Sequence[Launch]) -> dict[tuple[str | None, tuple[int, ...]], list[_Ranks]]:
    """Return the ranks of each launch by the plan and the batches that the figure is of."""
    found: dict[tuple[str | None, tuple[int, ...]], list[_Ranks]] = {}
    for launch in launches:
        assert launch.work is not None
        batches = launch.work.eager_batches if metric.eager else None
        of = tuple(launch.work.batches if batches is None else batches)
        found.setdefault((launch.plan_sha256, of), []).append(launch.work.ranks)
    return found


def _sum(calls: _Calls | None) -> int | None:
    return None if calls is None else sum(calls.values())
