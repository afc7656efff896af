"""The one rule for all times: device time and wall times of a case, of all cases together, and amounts of a series.

Wall times (`WALL_TIMES`) are the time of a case and, where it generates, time to first token and time per token.

The datum is the mean log time of a launch, because clocks, allocator and host are the same within a launch. Its
deviation is that of `noise_model`. A row is REGRESSED if its change is statistically significant and exceeds the
threshold. All gated rows of times are one family of tests (Holm).

`device_times` and `wall_times` collect the data of a row, `series.series_rows` those of amounts that are only shown,
`all_cases` adds the mean over the cases, and `rows` judges all of them: `decide` returns the figures of a verdict,
`describe` words them.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec

from pytest_llmgpu.analysis import noise_regime
from pytest_llmgpu.analysis.noise_regime import NoiseRegime
from pytest_llmgpu.gate.comparable_launches import Refusal, Sides
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
from pytest_llmgpu.gate.work import lost
from pytest_llmgpu.report.derived import device_times_s, inference_s
from pytest_llmgpu.report.metrics import MetricName, default_threshold, spec_of
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.text import FACTORS_FROM, plural, signed_percent, significant, slowdown
from pytest_llmgpu.report.verdicts import ALL_CASES, NEITHER, ONLY_CANDIDATE, Decided, Row, stated
from pytest_llmgpu.report.work import Ceilings

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

_LEAST_LAUNCHES = 2
"""Launches in each report from which the mean over all cases is judged."""

_POINT = 0.01
"""Least difference between two changes that a reason states."""

_SHOWN = 0.0005
"""Least part of a change by other GPUs that a reason states."""

_LARGEST_THRESHOLD = 1.0
"""With a larger threshold, which allows more than twice the time, a reason states that a time cannot be judged."""

_THOUSAND = 1000

_NAMES = {
    "device_time": "Device time",
    "time": "Time",
    "first_token": "Time to first token",
    "token_time": "Time per token",
    "load_time": "Load time",
    "warmup_time": "Warm-up",
    "transfer_time": "Transfer time",
    "energy": "Energy",
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
    gemm: Sequence[float] = ()
    """For each rank, the logarithm of the ratio of the GEMM times of its GPUs, where they can explain a change."""
    left_out: str = ""
    """A sentence about launches that are not used; empty if all are."""
    whole: bool = False
    """True if all launches of both reports are used and both reports are of the same GPUs."""
    results: Sequence[CaseResult] = ()
    """The result of the baseline and of the candidate; empty where the times are not those of one case."""
    members: int = 0
    """The number of cases of a row that is the mean over cases; else 0."""
    prefill: bool = False
    """True if the times are of prefills; the row before is that of the decode steps of the case."""


class Estimate(msgspec.Struct, frozen=True):
    """The change of a row and its noise. All values but `degrees` and `rank` are logarithms of ratios."""

    change: float
    """The change of the mean of the launches."""
    least: float
    """The smaller one of `change` and the change of the sum of all batches, which differ only in wall time."""
    most: float
    """The larger one of them."""
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
        whole=not machine_sd and not left_out,
        results=(base, head),
    )


class _RankTime(msgspec.Struct, frozen=True):
    """The device time of one rank in one launch."""

    uuids: tuple[str, ...]
    log_s: float
    """The logarithm of `device_times_s`."""
    gemm_s: float | None
    """The time of a matrix product of fixed size on the GPUs of the rank; None if it was not measured."""


def device_times(
    base: CaseResult,
    head: CaseResult,
    sides: Sides | Refusal,
    rule: DeviceTimeRule,
    *,
    prior: Prior,
    regime: NoiseRegime,
    ceilings: tuple[Ceilings | None, Ceilings | None],
    other_day: bool,
) -> Timed | Row | str | None:
    """Return the device times of two completed results, or why they cannot be compared; None for a CPU.

    Ranks with equal GPUs are compared. Where the GPUs are others of the same kind, ranks of equal number are compared,
    and the GEMM times of the GPUs can explain changes of cases that computation limits (`_explained_by_gemm`).

    Args:
        base: The result of the baseline.
        head: The result of the candidate.
        sides: The launches that can be compared, or why there are none.
        rule: The threshold.
        prior: The expected noise.
        regime: The noise regime of the case.
        ceilings: The rates of the GPUs in the sessions of the baseline and of the candidate.
        other_day: True if the sessions are of different days.
    """
    if head.case.device == "cpu":
        return None
    measured = _measured(base, head, sides, ceilings, gated=rule.gate)
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
    known = not same and regime == "device_compute" and all(rank.gemm_s for one in launches for rank in one)
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
        gemm=[math.log((head[-1].gemm_s or 1) / (then[-1].gemm_s or 1)) for then, head in sides_of_rank]
        if known
        else (),
        left_out=left_out,
        whole=same and not left_out,
        results=(base, head),
    )


def all_cases(cases: Sequence[Timed], known: Collection[tuple[str, str]]) -> list[Timed]:
    """Return the mean over the gated cases, for device time and for wall time; a change of all cases shows there first.

    Both reports need two launches, and the same GPUs. The launches of one report share GPU, clock and host, so that the
    mean of a launch over its cases is one datum. In a session that was resumed, this holds for launches of one start:
    the row has the cases whose launches are of the most frequent starts.

    Args:
        cases: The cases.
        known: Id and metric of the regressions that the policy accepts; they are left out.
    """
    found = []
    metrics: tuple[MetricName, ...] = ("device_time", "time")
    for metric in metrics:
        members = [
            case
            for case in cases
            if case.name.metric == metric
            and case.gated
            and case.whole
            and not case.prefill
            and min(map(len, case.ranks[0])) >= _LEAST_LAUNCHES
            and (case.name.id, metric) not in known
        ]
        counts = Counter(map(_launches_of, members))
        most = max(counts, key=counts.__getitem__, default=None)
        members = [case for case in members if _launches_of(case) == most]
        if len(members) > 1:
            # First the mean over the ranks: a case counts once, however many ranks it has.
            samples = Samples(
                *(_mean_of([_mean_of([rank[side] for rank in case.ranks]) for case in members]) for side in (0, 1))
            )
            found.append(
                Timed(
                    name=Name(ALL_CASES, ALL_CASES, None, metric),
                    gated=True,
                    ranks=[samples],
                    seconds=[(_mean_s(samples.base), _mean_s(samples.head))],
                    prior=max((case.prior for case in members), key=lambda prior: prior.s0),
                    threshold=max(case.threshold for case in members),
                    spread=max(case.spread for case in members),
                    members=len(members),
                )
            )
    return found


def _launches_of(case: Timed) -> tuple[object, ...]:
    starts = [tuple(launch.resumption for launch in result.launches) for result in case.results]
    return tuple(map(len, case.ranks[0])), *starts


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
    cases = _explained_by_gemm(cases)
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


def _explained_by_gemm(cases: Sequence[Timed]) -> list[Timed]:
    """Return the times without the part of their changes that the GEMM times of other GPUs explain.

    A GPU with a slower GEMM can be slower in forwards as well: of five H200 the slowest was 4 % slower in its GEMM and
    3 % in forwards. But two others had GEMMs 2.2 % apart and equal forwards. The changes of all cases show which part
    of the difference holds: their median, weighted by the difference, limited to none and all of it. A change of one
    case is therefore not explained by a GEMM whose difference the other cases do not have.
    """
    shares = sorted(
        ((_mean(rank.head) - _mean(rank.base)) / gemm, abs(gemm))
        for case in cases
        for rank, gemm in zip(case.ranks, case.gemm, strict=False)
        if gemm
    )
    if not shares:
        return list(cases)
    half = math.fsum(weight for _, weight in shares) / 2
    within = itertools.accumulate(weight for _, weight in shares)
    median = next(share for (share, _), sum_ in zip(shares, within, strict=True) if sum_ >= half)
    share = min(1.0, max(0.0, median))
    return [
        msgspec.structs.replace(
            case,
            gemm=[share * gemm for gemm in case.gemm],
            ranks=[
                Samples(rank.base, [log_s - share * gemm for log_s in rank.head])
                for rank, gemm in zip(case.ranks, case.gemm, strict=True)
            ],
        )
        if case.gemm
        else case
        for case in cases
    ]


def estimated(case: Timed) -> Estimate:
    """Return the change of the rank that became slowest, with its noise."""
    changes = [_mean(rank.head) - _mean(rank.base) for rank in case.ranks]
    number = max(range(len(changes)), key=changes.__getitem__)
    rank = case.ranks[number]
    noise = case.prior.updated(deviation(rank))
    change = of_sums = changes[number]
    if case.name.metric == "time" and not case.members:
        base_s, head_s = case.seconds[number]
        of_sums = math.log(head_s / base_s)
    return Estimate(
        change=change,
        least=min(change, of_sums),
        most=max(change, of_sums),
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
    change, least, most, alpha = estimate.change, estimate.least, estimate.most, 1 - confidence
    scattered = estimate.spread >= math.log(case.spread)
    needed = None
    if slower <= alpha and least > limit:
        verdict: Decided = "REGRESSED"
    elif faster <= alpha and most < -limit:
        verdict = "IMPROVED"
    elif most + half < math.log(math.exp(allowed) + PROMISED) and not scattered:
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
    over = f", mean over {plural(case.members, 'case')}" if case.members else ""
    threshold = f", threshold {_threshold(decision.threshold)}" if _can_be_judged(case, decision) else ""
    first = (
        f"{_NAMES[case.name.metric]}{of_rank} {signed_percent(decision.ratio - 1)} "
        f"(90 % CI {low:+.1f} to {high:+.1f} %){threshold}: "
        f"{_amount(head_s, unit)}, was {_amount(base_s, unit)}{over}."
        f"{_other_gpus(case, decision, estimate.rank)}{_of_sums(case, estimate.rank, decision.ratio)}{case.left_out}"
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
    distance = estimate.least if sign > 0 else -estimate.most
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
    ceilings: tuple[Ceilings | None, Ceilings | None],
    *,
    gated: bool,
) -> _Measured | Row | str:
    """Return the device times that can be compared, or why there are none."""
    measured = _Measured([], [])
    if not isinstance(sides, Refusal):
        measured = _Measured(
            *(
                [ranks for launch in side if (ranks := _rank_times(launch, head.case.dtype, rates))]
                for side, rates in zip(sides, ceilings, strict=True)
            )
        )
    if not all(measured):
        then, now = (any(map(device_times_s, result.launches)) for result in (base, head))
        if not then:
            return ONLY_CANDIDATE if now else NEITHER
        if not now:
            return lost(head, "device_time", _why_absent(head), gated=gated)
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


def _rank_times(launch: Launch, dtype: str, ceilings: Ceilings | None) -> list[_RankTime]:
    """Return the device time of each rank; empty if it was not measured."""
    rates = {} if ceilings is None else {one.uuid: one.gemm_flops_per_s.get(dtype) for one in ceilings.devices}
    found = []
    for rank, time_s in zip(launch.ranks, device_times_s(launch) or [], strict=False):
        known = [rate for uuid in rank.uuids if (rate := rates.get(uuid))]
        gemm_s = _mean([1 / rate for rate in known]) if known and len(known) == len(rank.uuids) else None
        found.append(_RankTime(tuple(rank.uuids), math.log(time_s), gemm_s))
    return found


def _why_absent(result: CaseResult) -> str:
    """Return why a result has no device time."""
    for launch in result.launches:
        if launch.work is None:
            return launch.why.get("work", "the report has no reason")
        for rank in launch.work.ranks:
            if "device_time_s" in rank.why:
                return rank.why["device_time_s"]
    return "the report has no reason"


def _can_be_judged(case: Timed, decision: Decision) -> bool:
    """Return whether other GPUs and noise leave a threshold that a reader can use."""
    return not case.machine_sd or decision.verdict == "REGRESSED" or decision.threshold <= _LARGEST_THRESHOLD


def _other_gpus(case: Timed, decision: Decision, rank: int) -> str:
    """Return a sentence if the GPUs are others of the same kind, with what their GEMM explains; else empty."""
    if not case.machine_sd:
        return ""
    first = "The baseline is of" if _can_be_judged(case, decision) else "Slowdowns cannot be judged with a baseline of"
    by = f" {first} other GPUs of the same kind; their times differ by {100 * case.machine_sd:.2g} %"
    if case.name.metric != "device_time":
        return f"{by} (assumed: as launches do)."
    explained = math.expm1(case.gemm[rank]) if case.gemm else 0.0
    if abs(explained) < _SHOWN:
        return f"{by} (measured on five GPUs)."
    return f"{by} (measured on five GPUs). Their GEMM times explain {signed_percent(explained)}, which is left out."


def _of_sums(case: Timed, rank: int, ratio: float) -> str:
    """Return a sentence if the sum of all batches changed by another factor than the batches did; else empty."""
    base_s, head_s = case.seconds[rank]
    of_sums = head_s / base_s
    if case.machine_sd or abs(of_sums - ratio) <= _POINT:
        return ""
    return f" The sum of all batches {signed_percent(of_sums - 1)}: the batches did not change by the same factor."


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_log(times_s: Sequence[float]) -> float:
    return _mean(list(map(math.log, times_s)))


def _mean_of(columns: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each launch over several columns of launches."""
    return [_mean(launch) for launch in zip(*columns, strict=True)]


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
