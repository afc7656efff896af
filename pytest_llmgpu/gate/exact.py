"""Metrics that do not vary by chance: work, traffic, its path, memory, execution and the largest batch size.

The amounts of a metric with the rule `exact` are equal in every launch of an equal program, so that one launch
suffices. They are compared rank by rank, because the slowest rank decides the time of a case, and only where the
forwards ran the same batches. A new one is a row of `report.metrics.METRICS`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pytest_llmgpu.analysis.traffic_path import FASTEST_FIRST, NAMES, describe_move, has_moved
from pytest_llmgpu.gate.policy import AmountRule, MemoryRule, Rules
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.derived import of_prefill
from pytest_llmgpu.report.metrics import METRICS, MetricName, MetricSpec, spec_of
from pytest_llmgpu.report.result import OUT_OF_MEMORY, CaseResult, Launch, Traffic
from pytest_llmgpu.report.text import gib, listed, percent, signed_percent
from pytest_llmgpu.report.verdicts import NEITHER, ONLY_CANDIDATE, WORST_FIRST, Decided, Row, stated
from pytest_llmgpu.report.work import WORK_OFF, WORK_ON

_NAMED = 3
"""Most changes that a reason names, since it has two lines."""

_NAMED_FIELDS = 2
"""Most fields in the name of a series."""

_USED_BYTES = 2**30
"""Growth of memory outside live tensors that is always allowed: a new version of a library can take as much."""

_EXECUTIONS = {"cuda_graphs": "as CUDA graphs", "eager": "eagerly", "compile": "compiled"}

_NOT_OF_SERIES = frozenset(("batch_size", "execution"))
"""Fields in which the cases of one series can differ."""


class Amounts(NamedTuple):
    """One amount in the launches of both reports."""

    then: Sequence[int]
    now: Sequence[int]

    @property
    def before(self) -> int:
        """The amount of a launch in the middle of the baseline."""
        return statistics.median_low(self.then)

    @property
    def after(self) -> int:
        """The amount of a launch in the middle of the candidate."""
        return statistics.median_low(self.now)

    @property
    def growth(self) -> float:
        """The growth as a fraction; infinite where the baseline has none."""
        return self.after / self.before - 1 if self.before else math.inf if self.after else 0.0

    def result(self, threshold: float) -> Decided:
        """Return the verdict. Where launches differ, their whole range has to lie beyond the threshold."""
        least, most = min(self.then), max(self.then)
        if min(self.now) - most > threshold * most:
            return "REGRESSED"
        if least - max(self.now) > threshold * least:
            return "IMPROVED"
        return "UNDECIDED" if max(self.now) - least > threshold * least else "OK"


def exact_rows(base: CaseResult, head: CaseResult, rules: Rules) -> Iterator[tuple[MetricName, Row | str]]:
    """Yield the verdict on each exact metric of two completed results, or the reason why there is none.

    A metric that the policy does not gate is there only where it changed: it explains other rows.
    """
    for spec in METRICS:
        row: Row | str | None = None
        if spec.rule == "exact":
            row = _exact_row(spec, base, head, rules)
            if row == NEITHER and spec.batches == "measured":
                continue  # Reports of versions without the metric lack it, and no option records it.
            if head.case.generates and spec.batches != "measured":
                prefill = _exact_row(spec, of_prefill(base), of_prefill(head), rules)
                row = worse(row if isinstance(row, Row) else None, prefill) if isinstance(prefill, Row) else row
        elif spec.rule == "traffic":
            row = traffic_row(base, head, rules.traffic)
        elif spec.rule == "path":
            row = path_row(base, head, gated=rules.path.gate)
        elif spec.rule == "memory":
            row = memory_row(base, head, rules.memory)
        changed = isinstance(row, Row) and row.result not in {"OK", "MISSING"}
        if row is not None and (changed or getattr(rules, spec.name).gate):
            yield spec.name, row


def worse(step: Row | None, prefill: Row) -> Row:
    """Return the worse of two rows on one metric, of two regressions the larger one, else that of the decode step.

    The smallest slowdown that is seen is that of both.
    """

    def badness(row: Row) -> tuple[int, float]:
        return WORST_FIRST.index(row.result), -(row.ratio or 0.0) if row.worse else 0.0

    row = step
    if row is None or badness(prefill) < badness(row):
        row = msgspec.structs.replace(prefill, prefill=True, reason=f"Prefill: {prefill.reason}")
    if step is None or step.smallest_seen is None or prefill.smallest_seen is None:
        return row
    return msgspec.structs.replace(row, smallest_seen=max(step.smallest_seen, prefill.smallest_seen))


def absent(head: CaseResult, metric: MetricName, before: object, after: object, *, gated: bool) -> Row | str | None:
    """Return a row or a reason where a report lacks a figure; one that only the candidate lacks is MISSING."""
    if before and after:
        return None
    if not before:
        return ONLY_CANDIDATE if after else NEITHER
    reasons = [launch.why.get(metric) for launch in head.launches]
    if metric == "path" and head.traffic is not None and head.traffic.path is not None:
        reasons = [head.traffic.path.text]
    if spec_of(metric).batches != "measured":
        reasons += [launch.why.get("work") for launch in head.launches if launch.work is None]
        ranks = [rank for launch in head.launches for rank in launch.ranks]
        reasons += [rank.why.get(metric) or rank.why.get(f"{metric}_s") for rank in ranks]
    why = next(filter(None, [*reasons, head.why.get(metric)]), "the report has no reason")
    reason = f"Only the baseline has {metric.replace('_', ' ')}: {why.rstrip('.')}."
    return Row.of(head, metric, "MISSING", reason, gated=gated, next_step=WORK_ON if why == WORK_OFF else "")


def _exact_row(spec: MetricSpec, base: CaseResult, head: CaseResult, rules: Rules) -> Row | str:
    """Compare each rank with itself; the row has the worst verdict and the figures of the rank that changed most."""
    assert spec.amount is not None
    rule = getattr(rules, spec.name)
    then, now = _by_batches(spec, base), _by_batches(spec, head)
    if (missing := absent(head, spec.name, then, now, gated=rule.gate)) is not None:
        return missing
    common = next((batches for batches in now if batches in then), None)
    if common is None:
        return "the forwards ran other batches (plan_sha256)"
    thens, nows = ([list(spec.amount(launch)) for launch in side[common]] for side in (then, now))
    if len(set(map(len, [*thens, *nows]))) > 1:
        return "the numbers of ranks differ"
    threshold = rule.threshold if isinstance(rule, AmountRule) else 0.0
    ranks = [
        Amounts(*([launch[number] or 0 for launch in side] for side in (thens, nows))) for number in range(len(nows[0]))
    ]
    results = [rank.result(threshold) for rank in ranks]
    result = min(results, key=WORST_FIRST.index)
    concerned = [number for number, its in enumerate(results) if its == result]
    number = max(concerned, key=lambda number: abs(ranks[number].growth))
    rank = ranks[number]
    where = "" if len(ranks) == 1 else " on each rank" if len(concerned) == len(ranks) else f" on rank {number}"
    if result == "OK" and rank.before == rank.after:
        reason = f"{spec.noun} are equal."
    elif result == "UNDECIDED":
        ends = (f"{min(amounts):,} to {max(amounts):,}" for amounts in (rank.now, rank.then))
        reason = f"{spec.noun} differ between launches{where}: {', were '.join(ends)}{_OF_BATCHES[spec.batches]}."
    else:
        change = f" {signed_percent(rank.growth, 2)}" if threshold else ""
        limit = f", threshold {percent(threshold)}" if threshold else ""
        figures = f"{spec.written(rank.after)}{_OF_BATCHES[spec.batches]}, were {spec.written(rank.before)}"
        reason = f"{spec.noun}{change}{where}{limit}: {figures}."
    if result != "OK":
        reason += _changed_calls(*(spec.explain(side[common][0])[number:] for side in (then, now)))
    return Row.of(
        head,
        spec.name,
        result,
        reason,
        gated=rule.gate,
        base=float(rank.before),
        head=float(rank.after),
        ratio=rank.after / rank.before if rank.before else None,
        threshold=threshold,
        n=min(len(thens), len(nows)),
    )


_OF_BATCHES = {"measured": "", "passes": " in a work pass", "eager": " in a work pass"}


def _by_batches(spec: MetricSpec, result: CaseResult) -> dict[tuple[object, ...], list[Launch]]:
    """Return the launches in which every rank has an amount, by the plan and the batches that it is of."""
    assert spec.amount is not None
    found: dict[tuple[object, ...], list[Launch]] = {}
    for launch in result.launches:
        amounts = spec.amount(launch)
        if amounts and None not in amounts:
            batches: list[int] = []
            if spec.batches != "measured" and launch.work is not None:
                eager = launch.work.eager_batches if spec.batches == "eager" else None
                batches = launch.work.batches if eager is None else eager
            found.setdefault((launch.plan_sha256, *batches), []).append(launch)
    return found


def _changed_calls(then: Sequence[Mapping[str, int] | None], now: Sequence[Mapping[str, int] | None]) -> str:
    """Return the calls of the first rank that changed most as a second line; empty where none did or is known."""
    before, after = (side[0] if side else None for side in (then, now))
    if before is None or after is None:
        return ""
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in sorted(before.keys() | after.keys())}
    names = sorted((name for name in changes if changes[name]), key=lambda name: -abs(changes[name]))
    shown = [f"{name} {before.get(name, 0):,} -> {after.get(name, 0):,}" for name in names]
    return f"\nCalls: {listed(shown, _NAMED)}." if shown else ""


def traffic_row(base: CaseResult, head: CaseResult, rule: AmountRule) -> Row | str | None:
    """Compare the traffic of each rank: its calls, payload bytes and wire bytes over all collectives.

    A shift between collectives that leaves these sums within the threshold is OK, and the reason lists it. Forwards in
    a new execution, and so in batches with another padding, are NOT_COMPARABLE.
    """
    if base.traffic is None or head.traffic is None:
        return absent(head, "traffic", base.traffic, head.traffic, gated=rule.gate)
    then, now = _sent(base.traffic), _sent(head.traffic)
    plans = [{launch.plan_sha256 for launch in one.launches} for one in (base, head)]
    result: Decided = "OK"
    if then == now:  # Records can differ all the same: the collectives can be in another order.
        reason = "Traffic is equal."
    elif (other := other_execution(base, head)) and plans[0] != plans[1]:
        result, reason = "NOT_COMPARABLE", f"The batches differ (plan_sha256), and so does their traffic.\n{other}"
    else:
        ranks = [Amounts([then[place]], [now[place]]) for place in {**then, **now} if isinstance(place[0], int)]
        result = min((rank.result(rule.threshold) for rank in ranks), key=WORST_FIRST.index)
        changed = sorted((place for place in {**then, **now} if then[place] != now[place]), key=str)
        named = [
            f"{collective} {then[collective, figure]:,} -> {now[collective, figure]:,} {figure}"
            for collective, figure in changed
            if isinstance(collective, str)
        ]
        signs = {now[place] > then[place] for place in changed}
        word = "changed" if len(signs) > 1 else "grew" if True in signs else "fell"
        limit = f" within the threshold of {percent(rule.threshold)}" if result == "OK" else ""
        more = f"; and {len(named) - _NAMED} more figures" if len(named) > _NAMED else ""
        what = "; ".join(named[:_NAMED]) or "the ranks split it differently"
        reason = f"Traffic {word}{limit}: {what}{more}."
    sent, now_sent = float(base.traffic.sent_bytes), float(head.traffic.sent_bytes)
    figures = {"base": sent, "head": now_sent, "ratio": now_sent / sent if sent else None, "threshold": rule.threshold}
    return Row.of(head, "traffic", result, reason, gated=rule.gate, **figures)


def _sent(traffic: Traffic) -> Counter[tuple[int | str, str]]:
    """Return the sums of calls and bytes of each rank over all collectives, and of each collective over all ranks."""
    sums: Counter[tuple[int | str, str]] = Counter()
    for number, rank in enumerate(traffic.ranks):
        for entry in rank:
            for place in (number, entry.collective):
                sums[place, "calls"] += entry.calls
                sums[place, "payload bytes"] += entry.payload_bytes
                sums[place, "wire bytes"] += entry.wire_bytes
    return sums


def path_row(base: CaseResult, head: CaseResult, *, gated: bool) -> Row | str | None:
    """Compare the links that carried the traffic: NVLink is faster than PCIe, and PCIe faster than over the host."""
    if base.traffic is None or head.traffic is None:
        return None
    if not any(head.traffic.ranks):
        return "nothing is sent"
    then, now = base.traffic.path, head.traffic.path
    before, after = (None if path is None else path.link for path in (then, now))
    if then is None or now is None or before is None or after is None:
        return absent(head, "path", before, after, gated=gated)
    if not has_moved(then, now):
        return Row.of(head, "path", "OK", f"Traffic goes over {NAMES[after]} as before.", gated=gated)
    result: Decided = "REGRESSED" if FASTEST_FIRST.index(after) > FASTEST_FIRST.index(before) else "IMPROVED"
    return Row.of(head, "path", result, f"Traffic {describe_move(then, now)}.", gated=gated)


def execution_row(base: CaseResult, head: CaseResult, *, gated: bool) -> Row | None:
    """Compare the execution: eager forwards are slower than recorded ones.

    Returns:
        REGRESSED where only the candidate ran eagerly, IMPROVED where only the baseline did; None where the execution
        did not change to or from eager, or where the users asked for different executions.
    """
    was, now = base.case.execution, head.case.execution
    if was == now or "eager" not in {was, now} or base.case.cuda_graphs != head.case.cuda_graphs:
        return None
    choice = next((f"\n{launch.execution_choice}" for launch in head.launches if launch.execution_choice), "")
    result: Decided = "REGRESSED" if now == "eager" else "IMPROVED"
    return Row.of(head, "execution", result, f"{_executions(base, head)}.{choice}", gated=gated)


def other_execution(base: CaseResult, head: CaseResult) -> str | None:
    """Return a sentence if one result ran its forwards as CUDA graphs and the other eagerly; else None."""
    if base.case.execution == head.case.execution:
        return None
    return f"{_executions(base, head)}: measure both with --llmgpu-cuda-graphs=on or off."


def _executions(base: CaseResult, head: CaseResult) -> str:
    now, was = (_EXECUTIONS.get(one.case.execution, one.case.execution) for one in (head, base))
    return f"The forwards ran {now}, the baseline's {was}"


class _Peak(NamedTuple):
    """The peak of one device in the launches of both reports, in bytes."""

    where: str
    bytes_: Amounts


_Figures = list[int | None]
"""A figure of each device of a launch; devices correspond by their order."""


def memory_row(base: CaseResult, head: CaseResult, rule: MemoryRule) -> Row | str:
    """Compare the peak of live tensors and of the workspace outside torch's allocator, on each device.

    The fullest device decides what fits. Another device that grew counts as well where the fullest one did not fall:
    memory that only moved to emptier devices is no regression. Equal runs have equal peaks except for the allocator's
    rounding, which the threshold covers. What torch reserved and what NVML reports in use, which is sampled, have a
    threshold of their own: memory outside live tensors takes the space of the next batch as well. Recorded graphs hold
    memory of their own: a change between forwards of another execution is NOT_COMPARABLE.
    """
    tensors = _of_launches(base, head, lambda launch: [device.peak_bytes for device in launch.memory])
    then, now = ([max(filter(None, launch)) for launch in side] for side in tensors)
    if (missing := absent(head, "memory", then, now, gated=rule.gate)) is not None:
        return missing

    def allowed(peak: _Peak) -> float:
        return max(rule.threshold, rule.absolute_bytes / peak.bytes_.before)

    def result_of(peak: _Peak) -> Decided:
        return peak.bytes_.result(allowed(peak))

    peak = _Peak("the fullest device", Amounts(then, now))
    if result_of(peak) in {"OK", "UNDECIDED"}:
        peak = min([peak, *_changed_peaks(head, tensors)], key=lambda one: WORST_FIRST.index(result_of(one)))
    noun, threshold, result = "Memory", allowed(peak), result_of(peak)
    more = "The launches differ by more than the threshold." if result == "UNDECIDED" else None
    if result != "REGRESSED":
        for figures, name, grew in _OUTSIDE_TENSORS:
            outside = _changed_peaks(head, _of_launches(base, head, figures))
            limits = [max(rule.used_threshold, _USED_BYTES / max(one.bytes_.then)) for one in outside]
            grown = [
                (one, limit)
                for one, limit in zip(outside, limits, strict=True)
                if one.bytes_.result(limit) == "REGRESSED"
            ]
            if grown:
                more = f"{grew} grew. Live tensors: {gib(peak.bytes_.after)}, was {gib(peak.bytes_.before)}."
                peak, threshold = max(grown, key=lambda one: one[0].bytes_.after - one[0].bytes_.before)
                noun, result = name, "REGRESSED"
                break
    if result != "OK" and (other := other_execution(base, head)) is not None:
        result, more = "NOT_COMPARABLE", other
    amounts = peak.bytes_
    change = f"{noun} {signed_percent(amounts.growth)}" if amounts.growth else f"{noun} is equal"
    return Row.of(
        head,
        "memory",
        result,
        f"{change}, threshold {percent(threshold)}: {gib(amounts.after)} on {peak.where}, was {gib(amounts.before)}."
        + (f"\n{more}" if more else ""),
        gated=rule.gate,
        base=amounts.before,
        head=amounts.after,
        ratio=amounts.after / amounts.before,
        low=min(amounts.now) / max(amounts.then),
        high=max(amounts.now) / min(amounts.then),
        threshold=threshold,
        n=min(map(len, amounts)),
    )


def _of_launches(
    base: CaseResult, head: CaseResult, figures: Callable[[Launch], _Figures]
) -> tuple[list[_Figures], list[_Figures]]:
    """Return the figures of the launches of both results that have any."""
    then, now = ([found for one in result.launches if any(found := figures(one))] for result in (base, head))
    return then, now


def _changed_peaks(head: CaseResult, sides: tuple[list[_Figures], list[_Figures]]) -> list[_Peak]:
    """Return the figure of each device that every launch of both reports has, where the launches differ."""
    if not all(sides) or len(set(map(len, [*sides[0], *sides[1]]))) > 1:
        return []
    return [
        _Peak(
            f"device {head.launches[-1].memory[place].index}",
            Amounts(*([launch[place] or 0 for launch in side] for side in sides)),
        )
        for place, of_launches in enumerate(zip(*sides[0], *sides[1], strict=True))
        if all(of_launches) and len(set(of_launches)) > 1
    ]


def _reserved_bytes(launch: Launch) -> _Figures:
    return [
        device.peak_reserved_bytes + (device.workspace_bytes or 0) if device.peak_reserved_bytes else None
        for device in launch.memory
    ]


def _used_bytes(launch: Launch) -> _Figures:
    """Return the most that NVML reported in use on each device; empty where other programs disturbed the launch."""
    disturbed = launch.profile is not None and disturbances.disturbed(launch.profile) is not None
    return [] if disturbed else [device.nvml_used_max_bytes for device in launch.memory]


_OUTSIDE_TENSORS = (
    (_reserved_bytes, "Memory reserved by torch", "The allocator's cache or its fragmentation"),
    (_used_bytes, "Memory in use (NVML)", "Caches, CUDA contexts or NCCL's buffers"),
)
"""Figures of memory outside live tensors, their names, and what can have grown."""


class Series(msgspec.Struct, kw_only=True):
    """The results of one series in one report: the cases that differ in their batch size only."""

    result: CaseResult
    """The first of its results."""
    fits: int = 0
    """Largest batch size that completed; 0 where none did."""
    fails: int | None = None
    """Smallest batch size that was out of memory; None where none was."""

    def __str__(self) -> str:
        return f"{self.fits}" + (f" (out of memory at {self.fails})" if self.fails is not None else "")


def by_series(results: Sequence[CaseResult]) -> dict[str, Series]:
    """Return the series of a report's results by `Case.series`."""
    found: dict[str, Series] = {}
    for result in results:
        size = result.case.batch_size
        series = found.setdefault(result.case.series, Series(result=result))
        if result.outcome == "completed":
            series.fits = max(series.fits, size)
        elif result.outcome in OUT_OF_MEMORY:
            series.fails = min(size, series.fails or size)
    return found


def largest_batch_row(base: Series, head: Series, *, gated: bool) -> Row | None:
    """Compare the largest batch size that fits; None where nothing was out of memory, so that no limit is known.

    A batch size that one report lacks is no change: the size at which the other ran out of memory has to have fitted.
    A crash shows neither that a size fits nor that it does not.
    """
    if (base.fails is None and head.fails is None) or not all(one.fits or one.fails for one in (base, head)):
        return None
    result: Decided = "OK"
    if head.fails is not None and head.fails <= base.fits:
        result = "REGRESSED"
    elif base.fails is not None and base.fails <= head.fits:
        result = "IMPROVED"
    case = head.result.case
    return Row(
        key=case.series,
        id=case.strategy,
        metric="largest_batch",
        reason=f"Largest batch size {head}, was {base}.",
        gated=gated,
        base=float(base.fits),
        head=float(head.fits),
        ratio=head.fits / base.fits if base.fits else None,
        **stated(result),
    )


def was_probed(gone: CaseResult, heads: Mapping[str, Series], results: Sequence[CaseResult]) -> bool:
    """Return whether a case that only the baseline has was a probe for the largest batch size, and needs no second one.

    Each run probes other sizes, in the test whose own case was out of memory. So the candidate's series has to have
    run out of memory too, in the same test, and to have a result for this size: the size is at most the largest that
    fits, or at least the smallest that does not.
    """
    series, size = gone.case.series, gone.case.batch_size
    head = heads.get(series)
    if head is None or head.fails is None or head.fits < size < head.fails or gone.nodeid is None:
        return False
    return any(result.nodeid == gone.nodeid and result.case.series == series for result in results)


def with_distinct_names(rows: Sequence[Row], results: Sequence[CaseResult]) -> Sequence[Row]:
    """Return the rows with the fields in which series of one strategy differ in their ids: `mp (limit=40)`."""
    keys: dict[str, set[str]] = {}
    for row in rows:
        if spec_of(row.metric).scope == "series":
            keys.setdefault(row.id, set()).add(row.key)
    names: dict[str, str] = {}
    for strategy in (strategy for strategy, several in keys.items() if len(several) > 1):
        cases = {result.case.series: result.case for result in results if result.case.strategy == strategy}
        fields: dict[str, dict[str, Any]] = {
            key: {**msgspec.structs.asdict(case), **case.strategy_options, "strategy_options": None}
            for key, case in cases.items()
        }
        differing = [
            name
            for name in dict.fromkeys(itertools.chain(*fields.values()))
            if name not in _NOT_OF_SERIES and len({str(one.get(name)) for one in fields.values()}) > 1
        ]
        # A hash names nothing to the reader, unless it is all that differs.
        shown = [name for name in differing if not name.endswith("sha256")] or differing
        for key, one in fields.items():
            its = [f"{name}={value}" for name in shown if (value := one.get(name)) is not None]
            names[key] = f"{strategy} ({', '.join(its[:_NAMED_FIELDS])})" if its else strategy
    return [msgspec.structs.replace(row, id=names[row.key]) if row.key in names else row for row in rows]
