"""The one rule for all times: device time and wall times of a case.

Wall times (`WALL_TIMES`) are the time of a case and, where it generates, time to first token and time per token.

The datum is the mean log time of a launch, because clocks, allocator and host are the same within a launch. Its
deviation is that of `noise_model`. A row is REGRESSED if its change is statistically significant and exceeds the
threshold. All gated rows of times are one family of tests (Holm).

`device_times` and `wall_times` collect the data of a row, `rows` judges all of them: `decide` returns the figures of a
verdict, `describe` words them.
"""

from __future__ import annotations

import datetime
import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pytest_llmgpu.analysis import noise_regime
from pytest_llmgpu.analysis.noise_regime import NoiseRegime
from pytest_llmgpu.gate.comparable_launches import Refusal, Sides
from pytest_llmgpu.gate.exact import absent
from pytest_llmgpu.gate.noise_model import (
    DAY_SD,
    GPU_SD,
    PRACTICAL_LAUNCHES,
    Prior,
    critical_t,
    deviation,
    launches_needed,
    smallest_slowdown,
)
from pytest_llmgpu.gate.policy import DeviceTimeRule, TimeRule
from pytest_llmgpu.gate.stats.distributions import t_quantile, t_tail
from pytest_llmgpu.gate.stats.holm import holm
from pytest_llmgpu.report.derived import device_times_s, inference_s
from pytest_llmgpu.report.metrics import MetricName, default_threshold, spec_of
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.text import FACTORS_FROM, plural, signed_percent, significant, slowdown
from pytest_llmgpu.report.verdicts import Decided, Row, stated

PROMISED = 0.02
"""Distance above the threshold of a slowdown that a row with the verdict OK excludes."""

_IN_TURN = 0.02
"""Threshold of wall time where launches of both reports alternated. A host drifts by 1 % from day to day: against a
stored baseline one comparison in eleven had a false alarm with this threshold, one in 200 with 4 %."""

_ONE_SIDED = 0.95
"""Probability with which the change is above the lower end of its interval, and below the upper one."""

_GPU_QUANTILE = statistics.NormalDist().inv_cdf(0.99)

_DAY_S = 12 * 3600
"""Sessions that are further apart are of different days."""

_LARGEST_THRESHOLD = 1.0
"""With a larger threshold, which allows more than twice the time, a reason states that a time cannot be judged."""

_THOUSAND = 1000

_NAMES = {
    "device_time": "Device time",
    "time": "Time",
    "first_token": "Time to first token",
    "token_time": "Time per token",
}


def _first_tokens_s(launch: Launch) -> Sequence[float]:
    return [] if launch.generation is None else launch.generation.first_token_s


def _steps_s(launch: Launch) -> Sequence[float]:
    return [] if launch.generation is None else launch.generation.step_s


WALL_TIMES: dict[MetricName, tuple[Callable[[Launch], Sequence[float]], Callable[[Launch], float]]] = {
    "time": (lambda launch: launch.batches.latency_s, inference_s),
    "first_token": (_first_tokens_s, lambda launch: statistics.median(_first_tokens_s(launch))),
    "token_time": (_steps_s, lambda launch: statistics.median(_steps_s(launch))),
}
"""Metric of wall time to the times of a launch whose mean is judged, and to the time of a launch that is shown."""


class Samples(NamedTuple):
    """The launches of one rank, or of a case whose time is one for all ranks."""

    base: Sequence[float]
    """The logarithm of the time of each launch of the baseline."""
    head: Sequence[float]
    """The logarithm of the time of each launch of the candidate."""


class Name(msgspec.Struct, frozen=True):
    """The names of a row."""

    key: str
    id: str
    nodeid: str | None
    metric: MetricName


class Timed(msgspec.Struct, frozen=True):
    """The times of one row. The verdict needs all rows."""

    name: Name
    gated: bool
    ranks: Sequence[Samples]
    """The launches of each rank; the rank that became slowest decides."""
    prior: Prior
    """The noise that is expected, the calibration included."""
    threshold: float
    """The slowdown that is allowed, as a fraction."""
    spread: float
    """The ratio of the slowest to the fastest launch of one report above which the row is never OK."""
    seconds: Sequence[tuple[float, ...]]
    """The time of the baseline and of the candidate that is shown, for each rank."""
    machine_sd: float = 0.0
    """The deviation of the log time between machines of one kind; 0 where both reports are of the same GPUs."""
    left_out: str = ""
    """A sentence about launches that are not used; empty if all are."""
    prefill: bool = False
    """True if the times are of prefills; the row before is that of the decode steps of the case."""


class Estimate(msgspec.Struct, frozen=True):
    """The change of a row and its noise. All values but `degrees` and `rank` are logarithms of ratios."""

    change: float
    """The change of the mean of the launches."""
    sd: float
    """The deviation between launches: the prior and these launches."""
    error: float
    """The standard error of the change, without differences between GPUs."""
    degrees: float
    """The degrees of freedom of `sd`."""
    rank: int
    """The number of the rank that became slowest."""
    spread: float
    """The largest difference between two launches of one report."""


class Decision(msgspec.Struct, frozen=True):
    """The verdict on one row, with the figures that decided it."""

    verdict: Decided
    threshold: float
    """The threshold as a fraction, with the allowance for other GPUs."""
    ratio: float
    """The candidate's time divided by the baseline's."""
    low: float
    """The lower end of the interval of `ratio`."""
    high: float
    """The upper end of that interval."""
    p: float
    """The adjusted p of the change in its direction."""
    smallest_seen: float
    """The smallest slowdown that these launches show, as a fraction."""
    scattered: bool
    """True if the launches of one report differ too much for OK."""
    launches_needed: int | None
    """Minimum launches required in each report to exclude a slowdown of the threshold plus `PROMISED`."""


def wall_times(
    base: CaseResult,
    head: CaseResult,
    sides: Sides | Refusal,
    rule: TimeRule,
    *,
    metric: MetricName = "time",
    prior: Prior,
    regime: NoiseRegime,
    in_turn: bool,
    machine_sd: float,
) -> Timed | Row:
    """Return the wall times of two completed results, or why they cannot be compared.

    Args:
        base: The result of the baseline.
        head: The result of the candidate.
        sides: The launches that can be compared, or why there are none.
        rule: The threshold.
        metric: A metric of `WALL_TIMES`.
        prior: The expected noise.
        regime: The noise regime of the case.
        in_turn: True if launches of both reports alternated.
        machine_sd: The deviation between machines; 0 if both reports are of the same GPUs.
    """
    if isinstance(sides, Refusal):
        return _refused(head, metric, sides, gated=rule.gate)
    latencies_s, shown_s = WALL_TIMES[metric]
    samples = Samples(*([_mean_log(latencies_s(one)) for one in side] for side in sides))
    base_s, head_s = (_mean_s([math.log(shown_s(one)) for one in side]) for side in sides)
    margin = rule.margin if rule.margin is not None else _IN_TURN if in_turn else default_threshold(metric)
    left_out = _left_out(base, head, sides, "`profile.invalid`, or copies of others")
    return Timed(
        name=Name(head.key, head.id, head.nodeid, metric),
        gated=rule.gate,
        ranks=[samples],
        prior=prior,
        threshold=max(margin, rule.absolute_s / base_s),
        spread=noise_regime.largest_spread(regime),
        seconds=[(base_s, head_s)],
        machine_sd=machine_sd,
        left_out=left_out,
    )


class _RankTime(NamedTuple):
    """The device time of one rank in one launch."""

    uuids: tuple[str, ...]
    log_s: float
    """The logarithm of `device_times_s`."""


def device_times(
    base: CaseResult,
    head: CaseResult,
    sides: Sides | Refusal,
    rule: DeviceTimeRule,
    *,
    prior: Prior,
    regime: NoiseRegime,
    other_day: bool,
) -> Timed | Row | str | None:
    """Return the device times of two completed results, or why they cannot be compared; None for a CPU.

    Ranks with equal GPUs are compared; where the GPUs are others of the same kind, ranks of equal number.

    Args:
        base: The result of the baseline.
        head: The result of the candidate.
        sides: The launches that can be compared, or why there are none.
        rule: The threshold.
        prior: The expected noise.
        regime: The noise regime of the case.
        other_day: True if the sessions are of different days.
    """
    if head.case.device == "cpu":
        return None
    measured = _measured(base, head, sides, gated=rule.gate)
    if not isinstance(measured, _Measured):
        return measured
    launches = [*measured.base, *measured.head]
    names = [rank.uuids for rank in launches[-1]]
    same = all(sorted(rank.uuids for rank in launch) == sorted(names) for launch in launches)
    if same:
        measured = _Measured(
            *([sorted(launch, key=lambda rank: names.index(rank.uuids)) for launch in side] for side in measured)
        )
    sides_of_rank = [[[launch[number] for launch in side] for side in measured] for number in range(len(names))]
    seconds = [tuple(_mean_s([one.log_s for one in side]) for side in sides) for sides in sides_of_rank]
    left_out = _left_out(base, head, measured, "`work`, `profile.invalid`, or copies of others")
    return Timed(
        name=Name(head.key, head.id, head.nodeid, "device_time"),
        gated=rule.gate,
        ranks=[Samples(*([rank.log_s for rank in side] for side in sides)) for sides in sides_of_rank],
        seconds=seconds,
        prior=prior,
        threshold=rule.margin + (DAY_SD if same and other_day else 0.0),
        spread=noise_regime.largest_spread(regime),
        machine_sd=0.0 if same else GPU_SD,
        left_out=left_out,
    )


@functools.lru_cache(maxsize=64)
def days_apart(one: str, other: str) -> bool:
    """Return whether two sessions are of different days; True if a time of creation cannot be read."""
    try:
        times = [datetime.datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (one, other)]
        return abs((times[1] - times[0]).total_seconds()) > _DAY_S
    except (TypeError, ValueError):  # TypeError: only one of them has a time zone
        return True


def rows(cases: Sequence[Timed], confidence: float, note: str) -> list[Row]:
    """Judge times. All gated rows are one family of tests, the other rows of each metric are another.

    Args:
        cases: The times of each row.
        confidence: The confidence of a family: 1 minus the probability of any false alarm.
        note: The second line of the reason of a change; empty for none.
    """
    estimates = list(map(estimated, cases))
    families = [case.gated or case.name.metric for case in cases]
    slower = holm([_p(case, one, 1) for case, one in zip(cases, estimates, strict=True)], families)
    faster = holm([_p(case, one, -1) for case, one in zip(cases, estimates, strict=True)], families)
    members = Counter(families)
    found = []
    for number, (case, estimate) in enumerate(zip(cases, estimates, strict=True)):
        family = members[families[number]]
        decision = decide(
            case, estimate, slower=slower[number], faster=faster[number], family=family, confidence=confidence
        )
        found.append(_row(case, estimate, decision, describe(case, estimate, decision, family, note)))
    return found


def estimated(case: Timed) -> Estimate:
    """Return the change of the rank that became slowest, with its noise."""
    changes = [_mean(rank.head) - _mean(rank.base) for rank in case.ranks]
    number = max(range(len(changes)), key=changes.__getitem__)
    rank = case.ranks[number]
    noise = case.prior.updated(deviation(rank))
    return Estimate(
        change=changes[number],
        sd=noise.s0,
        error=noise.s0 * math.sqrt(sum(1 / len(side) for side in rank)),
        degrees=noise.df0,
        rank=number,
        spread=max(max(side) - min(side) for rank in case.ranks for side in rank),
    )


def decide(
    case: Timed, estimate: Estimate, *, slower: float, faster: float, family: int, confidence: float
) -> Decision:
    """Return the verdict on one row.

    REGRESSED: the change is statistically significant and exceeds the threshold. IMPROVED: the same in the other
    direction. OK: the upper end of the interval is below the threshold plus `PROMISED`, where the baseline is of other
    GPUs without the part of the threshold that is for the noise of the launches.

    Args:
        case: The times of the row.
        estimate: Its change and noise.
        slower: The adjusted p if the true change is 0 and the measured one is a slowdown.
        faster: The same if the measured change is a speedup.
        family: The number of rows in the family.
        confidence: The confidence of the family.
    """
    shown = critical_t(estimate.degrees, family * len(case.ranks), confidence) * estimate.error
    limit, error = math.log1p(case.threshold), estimate.error
    machines = math.sqrt(2) * case.machine_sd
    # Between machines a change up to their differences is OK. The noise of the launches makes nothing OK.
    allowed = max(limit, _GPU_QUANTILE * machines)
    if case.machine_sd:  # The test takes differences between machines for a change: the threshold has to exceed both.
        limit = max(limit, shown + _GPU_QUANTILE * machines)
        error = math.hypot(error, machines)
    half = t_quantile(estimate.degrees, _ONE_SIDED) * error
    change, alpha = estimate.change, 1 - confidence
    scattered = estimate.spread >= math.log(case.spread)
    needed = None
    if slower <= alpha and change > limit:
        verdict: Decided = "REGRESSED"
    elif faster <= alpha and change < -limit:
        verdict = "IMPROVED"
    elif change + half < math.log(math.exp(allowed) + PROMISED) and not scattered:
        verdict = "OK"
    else:
        verdict = "UNDECIDED"
    if verdict in {"OK", "UNDECIDED"} and not case.machine_sd:
        needed = launches_needed(
            msgspec.structs.replace(case.prior, s0=estimate.sd),
            slowdown=case.threshold + PROMISED,
            threshold=case.threshold,
            family=family * len(case.ranks),
            confidence=confidence,
        )
    return Decision(
        verdict=verdict,
        threshold=math.expm1(limit),
        ratio=_ratio(change),
        low=_ratio(change - half),
        high=_ratio(change + half),
        p=slower if change >= 0 else faster,
        smallest_seen=smallest_slowdown(math.expm1(limit), shown, error),
        scattered=scattered,
        launches_needed=needed,
    )


def describe(case: Timed, estimate: Estimate, decision: Decision, family: int, note: str) -> str:
    """Return the reason of a verdict in at most two lines.

    Args:
        case: The times of the row.
        estimate: Its change and noise.
        decision: The verdict and its figures.
        family: The number of rows in the family.
        note: The second line of the reason of a change; empty for none.
    """
    base_s, head_s = case.seconds[estimate.rank]
    low, high = 100 * (decision.low - 1), 100 * (decision.high - 1)
    unit = spec_of(case.name.metric).unit
    of_rank = f" of rank {estimate.rank}" if len(case.ranks) > 1 else ""
    threshold = f", threshold {_threshold(decision.threshold)}" if _can_be_judged(case, decision) else ""
    first = (
        f"{_NAMES[case.name.metric]}{of_rank} {signed_percent(decision.ratio - 1)} "
        f"(90 % CI {low:+.1f} to {high:+.1f} %){threshold}: "
        f"{_amount(head_s, unit)}, was {_amount(base_s, unit)}."
        f"{_other_gpus(case, decision)}{case.left_out}"
    )
    if decision.verdict in {"REGRESSED", "IMPROVED"}:
        return "\n".join(filter(None, (first, note)))
    if decision.verdict == "OK":
        return first
    if decision.scattered:
        return f"{first}\nLaunches of one report differ by a factor of {math.exp(min(estimate.spread, 700.0)):.1f}."
    if case.machine_sd:
        return first
    significant = f" Not statistically significant among {plural(family, 'row')}."
    needed = decision.launches_needed
    return (
        f"{first}{significant if estimate.change > math.log1p(decision.threshold) else ''}\n"
        f"Minimum launches required in each report to detect {100 * (case.threshold + PROMISED):+.3g} %: "
        f"{f'more than {PRACTICAL_LAUNCHES}' if needed is None or needed > PRACTICAL_LAUNCHES else needed}, "
        f"now {min(map(len, case.ranks[0])):,}."
    )


def _next_step(case: Timed, decision: Decision) -> str:
    """Return the next step for a row that more launches do not decide; empty for the others.

    An OK row has one as well: behind so much noise that a slowdown would not have been seen, it is not OK.
    """
    if decision.verdict not in {"UNDECIDED", "OK"}:
        return ""
    if decision.scattered:
        return "Look for other users of the machine (nvidia-smi, top), then measure again."
    return "Measure the baseline on the same GPUs to decide." if case.machine_sd else ""


def _row(case: Timed, estimate: Estimate, decision: Decision, reason: str) -> Row:
    base_s, head_s = case.seconds[estimate.rank]
    return Row(
        key=case.name.key,
        id=case.name.id,
        nodeid=case.name.nodeid,
        metric=case.name.metric,
        **stated(decision.verdict),
        reason=reason,
        next_step=_next_step(case, decision),
        gated=case.gated,
        base=base_s,
        head=head_s,
        ratio=decision.ratio,
        low=decision.low,
        high=decision.high,
        threshold=decision.threshold,
        p=decision.p,
        n=min(map(len, case.ranks[0])),
        smallest_seen=decision.smallest_seen,
        launches_needed=decision.launches_needed,
    )


def _p(case: Timed, estimate: Estimate, sign: int) -> float:
    """Return the one-sided p of a change in a direction if the true change is 0, times the number of ranks."""
    distance = sign * estimate.change
    if distance <= 0:
        return 1.0
    return min(1.0, len(case.ranks) * t_tail(distance / estimate.error, estimate.degrees))


def _refused(head: CaseResult, metric: MetricName, why: Refusal, *, gated: bool) -> Row:
    return Row.of(head, metric, why.verdict, why.reason, gated=gated, next_step=why.next_step)


def _left_out(base: CaseResult, head: CaseResult, used: Sequence[Sequence[object]], fields: str) -> str:
    """Return a sentence on the launches that are not used, to be appended; empty if all are used.

    Args:
        base: The result of the baseline.
        head: The result of the candidate.
        used: The launches of both that are used.
        fields: The fields of a launch that show why it is not.
    """
    if len(used[0]) == len(base.launches) and len(used[1]) == len(head.launches):
        return ""
    counts = [sum(bool(launch.batches.latency_s) for launch in result.launches) for result in (base, head)]
    found = [
        f"{len(side)} of {count} launches of the {name} are used"
        for name, side, count in zip(("baseline", "candidate"), used, counts, strict=True)
        if len(side) < count
    ]
    return f" {' and '.join(found)} ({fields})." if found else ""


class _Measured(NamedTuple):
    """The device times of two results: [launches, ranks]."""

    base: list[list[_RankTime]]
    head: list[list[_RankTime]]


def _measured(
    base: CaseResult,
    head: CaseResult,
    sides: Sides | Refusal,
    *,
    gated: bool,
) -> _Measured | Row | str:
    """Return the device times that can be compared, or why there are none."""
    measured = _Measured([], [])
    if not isinstance(sides, Refusal):
        measured = _Measured(*([ranks for launch in side if (ranks := _rank_times(launch))] for side in sides))
    if not all(measured):
        then, now = (any(map(device_times_s, result.launches)) for result in (base, head))
        if (missing := absent(head, "device_time", then, now, gated=gated)) is not None:
            return missing
        if isinstance(sides, Refusal):
            return _refused(head, "device_time", sides, gated=gated)
        reason = "The launches with device time were disturbed (`profile.invalid`)."
        return Row.of(head, "device_time", "UNDECIDED", reason, gated=gated)
    assert not isinstance(sides, Refusal)
    batches = {tuple(launch.work.batches) for side in sides for launch in side if launch.work is not None}
    if len(batches) > 1 or len({len(launch) for side in measured for launch in side}) > 1:
        reason = "The work passes ran other batches or ranks than the baseline's."
        return Row.of(head, "device_time", "NOT_COMPARABLE", reason, gated=gated)
    return measured


def _rank_times(launch: Launch) -> list[_RankTime]:
    """Return the device time of each rank; empty if it was not measured."""
    times_s = device_times_s(launch) or []
    return [_RankTime(tuple(rank.uuids), math.log(time_s)) for rank, time_s in zip(launch.ranks, times_s, strict=False)]


def _can_be_judged(case: Timed, decision: Decision) -> bool:
    """Return whether other GPUs and noise leave a threshold that a reader can use."""
    return not case.machine_sd or decision.verdict == "REGRESSED" or decision.threshold <= _LARGEST_THRESHOLD


def _other_gpus(case: Timed, decision: Decision) -> str:
    """Return a sentence if the GPUs are others of the same kind; else empty."""
    if not case.machine_sd:
        return ""
    first = "The baseline is of" if _can_be_judged(case, decision) else "Slowdowns cannot be judged with a baseline of"
    source = "measured on five GPUs" if case.name.metric == "device_time" else "assumed: as launches do"
    return f" {first} other GPUs of the same kind; their times differ by {100 * case.machine_sd:.2g} % ({source})."


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_log(times_s: Sequence[float]) -> float:
    return _mean(list(map(math.log, times_s)))


def _mean_s(log_times: Sequence[float]) -> float:
    return _ratio(_mean(log_times))


def _amount(value: float, unit: str) -> str:
    """Return an amount with four digits, as 210.0 s and 287,700 J."""
    return f"{f'{value:#.4g}' if round(value, 1) < _THOUSAND else significant(value)} {unit}"


def _threshold(fraction: float) -> str:
    """Return a threshold with three digits; from 1,000 % on as a factor."""
    return f"{100 * fraction:.3g} %" if fraction < FACTORS_FROM else slowdown(fraction)


def _ratio(log_ratio: float) -> float:
    """Return the exponential, limited to the range of a float, because latencies in a report can have any size."""
    return math.exp(log_ratio if -700 < log_ratio < 700 else math.copysign(700, log_ratio))  # noqa: PLR2004
