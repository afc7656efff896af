"""The one rule for all times: device time and wall times of a case.

The datum is the log time of a launch, because clocks, allocator and host are the same within a launch. Where the SM
clock is known, times are those at the clock of the candidate (`fixed_clock`). A few launches estimate their own
deviation badly, and one launch not at all. The deviation of a row is therefore a mean of two variances, weighted by
their degrees of freedom: that of its launches, and the prior of its noise regime (empirical Bayes: Smyth 2004, limma).

A row is REGRESSED if its change is statistically significant and exceeds the threshold. All gated rows of times are one
family of tests (Holm). `comparable` selects the launches, and `judge.decided` has the rows of all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from pytest_llmgpu.analysis import noise_regime
from pytest_llmgpu.analysis.noise_regime import NoiseRegime, Prior
from pytest_llmgpu.gate import fixed_clock
from pytest_llmgpu.gate.exact import absent, other_execution
from pytest_llmgpu.gate.fixed_clock import Fitted, Pass, Samples, log_clocks, passes
from pytest_llmgpu.gate.policy import AmountRule, TimeRule
from pytest_llmgpu.gate.stats import t_quantile, t_tail
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.derived import device_passes_s, device_times_s, latencies, of_prefill, sums_s
from pytest_llmgpu.report.metrics import MetricName, spec_of
from pytest_llmgpu.report.result import CaseResult, Declared, Launch
from pytest_llmgpu.report.text import FACTORS_FROM, capital, plural, signed_percent, slowdown
from pytest_llmgpu.report.verdicts import Decided, Part, Row

POWER = 0.95
"""Probability with which the smallest slowdown is seen."""

PROMISED = 0.02
"""Distance above the threshold of a slowdown that a row with the verdict OK excludes."""

OTHER_GPU_SD = {"fixed_clock": 0.003, "device": 0.006}
"""Standard deviation of the log device time of one program between GPUs of one kind, by noise regime: at a fixed clock
pairs of H200 differed by 0.02 to 1.1 %, five H200 by up to 2 % else."""

PRACTICAL_LAUNCHES = 20
MEASURE_HERE = "Measure the baseline on these GPUs."

_IN_TURN, _REPLAYED = 0.02, 0.01
"""Thresholds of wall time where launches of both reports alternated, or in parts that the host's drift does not change,
and of CUDA graphs replayed in a row. Else one comparison in eleven had a false alarm with 2 %, one in 200 with 4 %."""

_ONE_SIDED = 0.95
"""Probability with which the change is above the lower end of its interval, and below the upper one."""

_POWER_QUANTILE = statistics.NormalDist().inv_cdf(POWER)
_GPU_QUANTILE = statistics.NormalDist().inv_cdf(0.99)

CLOCK = 0.01
"""A relative difference of clocks from which a reason states it."""

_LOWER, _LOWER_LAUNCHES = 0.005, 3
"""A program draws more power if its clock is lower by this fraction in each of at least so many launches in turn."""

WALL_TIMES: tuple[MetricName, ...] = ("time", "first_token", "token_time")


def smallest_seen(
    prior: Prior, launches: int, *, threshold: float, family: float = 1, confidence: float = 0.99
) -> float:
    """Return the smallest true slowdown that launches of each report with the noise of a prior show, as a fraction.

    `family` is the number of gated rows of times, times the number of ranks of this row.
    """
    error = prior.s0 * math.sqrt(2 / launches)
    # The smallest p of a family has to be below the first critical value of Holm's method.
    shown = t_quantile(prior.df0 + 2 * launches - 2, 1 - (1 - confidence) / family) * error
    return _ratio(max(math.log1p(threshold), shown) + _POWER_QUANTILE * error) - 1


def launches_needed(prior: Prior, *, threshold: float, change: float = 0.0, **rule: float) -> int | None:
    """Return how many launches in each report show `change`, at least the threshold plus `PROMISED`; None above 20."""
    numbers, most = range(1, PRACTICAL_LAUNCHES + 1), max(threshold + PROMISED, change)
    return next((one for one in numbers if smallest_seen(prior, one, threshold=threshold, **rule) <= most), None)


def comparable(
    base: CaseResult,
    head: CaseResult,
    metric: MetricName = "time",
    has: Callable[[Launch], object] = lambda _: True,
    **fields: Any,
) -> tuple[list[Launch], list[Launch]] | Row | str:
    """Return the launches of two completed results whose times can be compared, or a row or a reason without any.

    They have the time, and ran the same batches, undisturbed. Throttled launches count: times are compared at a fixed
    clock, or the prior has the noise of GPUs at their limit. `fields` are those of the row.
    """
    timed = [[one for one in result.launches if one.batches.latency_s and has(one)] for result in (base, head)]
    if (missing := absent(head, metric, *timed, **fields)) is not None:
        return missing
    sides = []
    for name, launches in zip(("baseline", "candidate"), timed, strict=True):
        valid = [launch for launch in launches if disturbances.untimed(launch, metric) is None]
        if not valid:
            disturbance = disturbances.untimed(launches[0], metric) or ""
            reason = f"The launches of the {name} were disturbed: {disturbance}."
            remedy = disturbances.remedy(disturbance)
            step = f"{remedy} Then measure the {name} again." if remedy else f"Measure the {name} again."
            return Row.of(head, metric, "UNDECIDED", reason, next_step=step, **fields)
        sides.append(valid)
    (then, now), unpaired = sides, ""
    plans = {launch.plan_sha256 for launch in (*then, *now)}
    counts = {len(launch.batches.latency_s) for launch in (*then, *now)}
    threads = [{tuple(launch.host.threads) for launch in side if launch.host} for side in sides]
    if head.case.device == "cpu" and all(threads) and threads[0] != threads[1]:
        words = [" or ".join(", ".join(map(str, ranks)) for ranks in sorted(found)) for found in threads]
        unpaired = f"The number of threads of each rank changed: {words[0]} in the baseline, {words[1]} in the "
        unpaired += "candidate. Set OMP_NUM_THREADS to the same value in both runs."
    elif None in plans or len(plans) > 1:
        how = "a launch lacks" if None in plans else "they differ by"
        unpaired = f"The batches cannot be paired: {how} plan_sha256."
    elif len(counts) > 1:
        unpaired = f"The batches cannot be paired: one launch has {min(counts)}, another {max(counts)}."
    if unpaired:
        reason = "\n".join(filter(None, (unpaired, other_execution(base, head))))
        return Row.of(head, metric, "NOT_COMPARABLE", reason, **fields)
    return then, now


class Timed(msgspec.Struct, frozen=True):
    """The times of one row. The verdict needs all rows."""

    result: CaseResult
    metric: MetricName
    """The metric; for a figure of the user's own that should be large, the logarithms have the other sign."""
    gated: bool
    ranks: Sequence[Samples]
    prior: Prior
    """The noise that is expected."""
    threshold: float
    """The slowdown that is allowed, as a fraction."""
    seconds: Sequence[tuple[float, ...]]
    """The time of the baseline and of the candidate that is shown, for each rank."""
    clocks_ghz: tuple[float, float] | None = None
    """The mean SM clock of the baseline and of the candidate, if the times are those at a fixed clock."""
    machine_sd: float = 0.0
    """The deviation of the log time between machines of one kind; 0 where both reports are of the same GPUs."""
    slope_sd: float = 0.0
    """The error of the change that no launch makes smaller: that of a slope which is not fitted, or of idling."""
    rank: int | None = None
    """The number of the rank that is judged; None: that which became slowest."""
    left_out: str = ""
    """A sentence about launches that are not used; empty if all are."""
    declared: Declared | None = None
    part: Part | None = None
    """Name of the second part of a metric; the first one is the row before (`exact.worse`)."""

    @property
    def family(self) -> Hashable:
        """All gated rows of times are one family of tests, the other rows of each metric are another."""
        return self.gated or self.metric

    @property
    def slowest(self) -> int:
        """The number of the rank that is judged."""
        if self.rank is not None:
            return self.rank
        return max(range(len(self.ranks)), key=lambda number: self.ranks[number].change)

    @property
    def change(self) -> float:
        """The change of the mean of the launches of that rank, as a logarithm."""
        return self.ranks[self.slowest].change

    @property
    def noise(self) -> Prior:
        """The deviation between launches: the prior and the launches of that rank."""
        return self.prior.updated(self.ranks[self.slowest])

    @property
    def error(self) -> float:
        """The standard error of the change, without differences between GPUs."""
        launches = sum(1 / len(side) for side in self.ranks[self.slowest])
        return math.hypot(self.noise.s0 * math.sqrt(launches), self.slope_sd)

    def p(self, sign: int) -> float:
        """Return the one-sided p of a change in a direction if the true change is 0, times the number of ranks."""
        distance = sign * self.change
        return min(1.0, len(self.ranks) * t_tail(distance / self.error, self.noise.df0)) if distance > 0 else 1.0

    def row(self, ps: Sequence[float], family: int, confidence: float) -> Row:
        """Return the verdict, by p of a slowdown and of a speed-up, both adjusted over so many rows of a family.

        REGRESSED: the change is statistically significant and exceeds the threshold. IMPROVED: the same in the other
        direction. OK: the upper end of the interval is below the threshold plus `PROMISED`, where the baseline is of
        other GPUs without the part of the threshold that is for the noise of the launches.
        """
        tests = family * len(self.ranks)
        change, error, noise = self.change, self.error, self.noise
        shown = t_quantile(noise.df0, 1 - (1 - confidence) / tests) * error
        limit, machines = math.log1p(self.threshold), math.sqrt(2) * self.machine_sd
        # Between machines a change up to their differences is OK. The noise of the launches makes nothing OK.
        allowed = max(limit, _GPU_QUANTILE * machines)
        if machines:  # The test takes differences between machines for a change: the threshold has to exceed both.
            limit = max(limit, shown + _GPU_QUANTILE * machines)
            error = math.hypot(error, machines)
        half = t_quantile(noise.df0, _ONE_SIDED) * error
        result: Decided = "UNDECIDED"
        slower, faster = ps
        if slower <= 1 - confidence and change > limit:
            result = "REGRESSED"
        elif faster <= 1 - confidence and change < -limit:
            result = "IMPROVED"
        elif change + half < math.log(math.exp(allowed) + PROMISED):
            result = "OK"
        needed = None
        unclear, step = result in {"OK", "UNDECIDED"}, ""
        if unclear and self.machine_sd:
            # An OK row has a step as well: behind so much noise that a slowdown would not have been seen, it is not OK.
            step = MEASURE_HERE
        elif unclear and self.slope_sd < self.threshold / 4:
            rule = {"threshold": self.threshold, "family": tests, "confidence": confidence}
            rule["change"] = _ratio(change) - 1 if change - half > limit else 0.0
            needed = launches_needed(msgspec.structs.replace(self.prior, s0=noise.s0), **rule)
        why = f" Not statistically significant among {plural(family, 'row')}"
        if change - half > limit:
            why += f": the interval is above the threshold, but the test at {100 * (1 - confidence):.2g} % decides"
            why += f". {needed} launches in each report show such a slowdown" if needed else ""
        base_s, head_s = self.seconds[self.slowest]
        sign = -1 if self.declared is not None and self.declared.better == "larger" else 1
        low, high = sorted((sign * (change - half), sign * (change + half)))
        row = Row.of(
            self.result,
            self.metric,
            result,
            "",
            next_step=step,
            gated=self.gated,
            base=base_s,
            head=head_s,
            declared=self.declared,
            ratio=_ratio(sign * change),
            low=_ratio(low),
            high=_ratio(high),
            threshold=math.expm1(limit),
            p=slower if change >= 0 else faster,
            n=min(map(len, self.ranks[0])),
            clock_ratio=None if self.clocks_ghz is None else self.clocks_ghz[1] / self.clocks_ghz[0],
            smallest_seen=_ratio(max(limit, shown) + _POWER_QUANTILE * error) - 1,
            launches_needed=needed,
        )
        return msgspec.structs.replace(row, reason=_described(self, row, f"{why}."))


def wall_times(
    base: CaseResult,
    head: CaseResult,
    rule: TimeRule,
    *,
    metric: MetricName = "time",
    in_turn: bool,
    same_gpus: bool,
    declared: Declared | None = None,
) -> Timed | Row | str:
    """Return the wall times of two completed results, or a figure of their own, or why they cannot be compared.

    Those of forwards that the GPU limits are compared at a fixed clock, with the slope of device time.
    """
    sides = comparable(base, head, metric, lambda one: latencies(one, metric)[0], gated=rule.gate, declared=declared)
    if not isinstance(sides, tuple):
        return sides
    timed = [[latencies(launch, metric) for launch in side] for side in sides]
    results = [of_prefill(one) if metric == "first_token" else one for one in (base, head)]
    regime = noise_regime.noisiest(*results)
    if declared is not None:  # it is of the host, whatever the forwards are
        regime = max(regime, "eager_host", key=noise_regime.REGIMES.index)
    sums, left_out = sums_s([[times_s for times_s, _ in side] for side in timed])
    logs = [list(map(math.log, side)) for side in sums]
    count = 1 if metric == "time" else len(timed[1][0][0])
    base_s, head_s = (_ratio(statistics.fmean(side)) / count for side in logs)
    seconds, batches = base_s * count, len(sides[0][0].batches.latency_s)
    if declared is not None and declared.better == "larger":
        logs = [[-one for one in side] for side in logs]
    means, fit_sd = None, 0.0
    ghz = [[of_launch for _, of_launch in side] for side in timed]
    points = [[*map(fixed_clock.mean_pass, *both)] for both in zip(logs, ghz, strict=True)]
    kernels = [found for one in results for found in _kernels(one.launches) if found]  # a slope needs some with a clock
    if regime in {"replayed", "eager_device"} and kernels and all(map(all, (*points, kernels))):
        fitted = fixed_clock.fit(points[0], points[1], kernels)
        logs, means, fit_sd = [*map(list, fitted.samples)], (fitted.base_ghz, fitted.head_ghz), fitted.sd
    prior = noise_regime.prior_of_time(regime, seconds=seconds, batches=batches)
    if (threshold := rule.threshold) is None:
        threshold = _IN_TURN if in_turn else spec_of(metric).threshold or 0.0
    return Timed(
        result=head,
        metric=metric,
        gated=rule.gate,
        ranks=[Samples(*logs)],
        prior=msgspec.structs.replace(prior, s0=math.hypot(prior.s0, fit_sd)),
        threshold=threshold,
        seconds=[(base_s, head_s)],
        clocks_ghz=means,
        machine_sd=0.0 if same_gpus else max(OTHER_GPU_SD["device"], prior.s0),
        left_out=left_out + _left_out(base, head, sides, "`profile.invalid`"),
        declared=declared,
    )


def parts(
    base: CaseResult, head: CaseResult, rule: TimeRule, *, same_gpus: bool, same_host: bool
) -> Iterator[Timed | str]:
    """Yield the parts of wall time that are judged by themselves, or why there is none in the baseline."""
    if isinstance(replays := device_times(base, head, rule, in_a_row=True), Timed):
        yield replays
    elif any(map(noise_regime.has_replays, head.launches)):
        yield "replays in a row: this baseline has none of these batches, promote a new one"
    # Another CPU, Python or torch needs another time for the reference.
    if same_host and noise_regime.noisiest(base, head) == "eager_host" and base.case.execution == head.case.execution:
        if noise_regime.has_speed(base) is None and noise_regime.has_speed(head):
            yield "host at equal speed: this baseline has none, promote a new one"
        of_gpu, of_host = noise_regime.by_limit(base, head)
        if of_host is not None:
            yield from _host_times(*of_host, rule, same_gpus=same_gpus)
        if of_gpu and isinstance(gpu := wall_times(*of_gpu, rule, in_turn=True, same_gpus=same_gpus), Timed):
            some, planned = (len(one.launches[0].batches.latency_s) for one in (of_gpu[1], head))
            left_out = f" They are {some} of {planned} batches.{gpu.left_out}"
            yield msgspec.structs.replace(gpu, part="batches that the GPU limits", left_out=left_out)


def _host_times(base: CaseResult, head: CaseResult, rule: TimeRule, *, same_gpus: bool) -> Iterator[Timed]:
    """Yield the times in which the host launches eager forwards, at the speed that it has in the candidate."""
    sides = comparable(base, head, "time", lambda launch: launch.batches.launch_s)
    if not isinstance(sides, tuple):
        return
    logs, difference, prior = noise_regime.at_equal_speed(sides)
    left_out = _left_out(base, head, sides, "`launch_s` or `profile.invalid`")
    yield Timed(
        result=head,
        metric="time",
        gated=rule.gate,
        ranks=[Samples(*logs)],
        prior=prior,
        threshold=_IN_TURN if rule.threshold is None else rule.threshold,
        seconds=[tuple(_ratio(statistics.fmean(side)) for side in logs)],
        machine_sd=0.0 if same_gpus else prior.s0,
        slope_sd=noise_regime.HOST_SLOPE_SD * abs(difference),
        left_out=f" The host took {_ratio(difference):.2f} times as long for equal work.{left_out}",
        part="host at equal speed",
    )


def device_times(
    base: CaseResult, head: CaseResult, rule: AmountRule | TimeRule, *, in_a_row: bool = False
) -> Timed | Row | str | None:
    """Return the device times of two completed results, or why they cannot be compared; None for a CPU.

    They are those at a fixed clock where it is known. Ranks of equal number are compared; their GPUs can be others of
    the same kind. `in_a_row`: the times of CUDA graphs that are replayed in a row instead; None without clocks.
    """
    if head.case.device == "cpu":
        return None
    metric: MetricName = "time" if in_a_row else "device_time"
    sides = comparable(base, head, metric, noise_regime.has_replays if in_a_row else device_times_s, gated=rule.gate)
    if not isinstance(sides, tuple):
        return sides
    # One launch without a clock, whose GPU waited in vain for the host, would take it from the others.
    clocked = [[launch for launch in side if all(_kernels([launch]))] for side in sides]
    most = all(2 * len(some) >= len(side) for some, side in zip(clocked, sides, strict=True))
    used: Sequence[Sequence[Launch]] = clocked if most else sides
    launches = [*used[0], *used[1]]
    works = [one.work for one in launches if one.work is not None]
    # In older reports copies between GPUs are device time.
    copies = [[one.collective for one in work.collectives or ()].count("peer_copy") for work in works]
    if len({(*work.batches, -len(work.ranks), copied) for work, copied in zip(works, copies, strict=True)}) > 1:
        reason = "The work passes ran other batches, ranks or copies between GPUs: make the newer report the baseline."
        return Row.of(head, "device_time", "NOT_COMPARABLE", reason, gated=rule.gate)
    same = len({tuple(tuple(rank.uuids) for rank in launch.ranks) for launch in launches}) == 1
    fits = [] if in_a_row else _fitted(used)
    if in_a_row:
        replayed = [[launch.ranks[0] for launch in side] for side in used]
        rows = [[passes(log_clocks(one.replays_ghz), one.replays_s) for one in side] for side in replayed]
        if not all(map(all, (*rows, _kernels(launches)))):
            return None
        fits = [fixed_clock.fit(rows[0], rows[1], _kernels(launches))]
    regime: NoiseRegime = "fixed_clock" if fits else "device"
    prior, clocks_ghz = noise_regime.PRIORS[regime], None
    if fits:
        ranks = [one.samples for one in fits]
        clocks_ghz = statistics.fmean(one.base_ghz for one in fits), statistics.fmean(one.head_ghz for one in fits)
    else:
        logs = [[list(map(math.log, device_times_s(one) or [])) for one in side] for side in used]
        ranks = [Samples(*([one[number] for one in side] for side in logs)) for number in range(len(launches[0].ranks))]
    # The rank that shows most: another's GPU may idle. On other GPUs the least: a program is slower on every rank.
    errors = [math.hypot(prior.s0, one.sd, one.idle_sd) for one in fits] or [1.0] * len(ranks)
    shown = [one.change / error for one, error in zip(ranks, errors, strict=True)]
    slowest = shown.index(max(shown) if same else min(shown, key=abs))
    if fits:
        prior = msgspec.structs.replace(prior, s0=math.hypot(prior.s0, fits[slowest].sd))
    return Timed(
        result=head,
        metric=metric,
        gated=rule.gate,
        ranks=ranks,
        prior=prior,
        threshold=_REPLAYED if rule.threshold is None else rule.threshold,
        seconds=[tuple(_ratio(statistics.fmean(side)) for side in rank) for rank in ranks],
        clocks_ghz=clocks_ghz,
        machine_sd=0.0 if same else OTHER_GPU_SD[regime],
        slope_sd=fits[slowest].idle_sd if fits else 0.0,
        rank=slowest,
        left_out=_left_out(base, head, used, f"`{'replays_s' if in_a_row else 'work'}` or `profile.invalid`"),
        part="replays in a row" if in_a_row else None,
    )


def _kernels(launches: Iterable[Launch]) -> list[list[Pass]]:
    """Return the device time of the passes of each rank of launches with work passes; none without a clock."""
    return [passes(log_clocks(rank.clock_ghz), device_passes_s(rank)) for one in launches for rank in one.ranks]


def _fitted(sides: Sequence[Sequence[Launch]]) -> list[Fitted]:
    """Return the device time of each rank at a fixed clock; empty where the clock of a pass or a rank is not known."""
    columns = [list(zip(*(_kernels([launch]) for launch in side), strict=True)) for side in sides]
    is_known = all(passes for column in columns for rank in column for passes in rank)
    fits = [fixed_clock.fit(*both) for both in zip(*columns, strict=True)] if is_known else []
    ranks = (zip(*(launch.ranks for launch in side), strict=True) for side in sides)
    return [fixed_clock.of_passes(one, *both) for one, *both in zip(fits, *ranks, strict=False)]


def _left_out(base: CaseResult, head: CaseResult, used: Sequence[Sequence[object]], fields: str) -> str:
    """Return a sentence on the launches that are not used, with the fields that show why; empty if all are used."""
    counts = [sum(bool(launch.batches.latency_s) for launch in result.launches) for result in (base, head)]
    found = [
        f"{len(side)} of {count} launches of the {name} are used"
        for name, side, count in zip(("baseline", "candidate"), used, counts, strict=True)
        if len(side) < count
    ]
    return f" {' and '.join(found)} ({fields})." if found else ""


def _described(case: Timed, row: Row, why: str) -> str:
    """Return the reason of a verdict in one line; `why` is for a slowdown that is not significant."""
    was, now = map(row.spec.written, case.seconds[case.slowest])
    ratio, low, high, threshold = row.ratio or 0.0, row.low or 0.0, row.high or 0.0, row.threshold or 0.0
    of_rank = f" of rank {case.slowest}" if len(case.ranks) > 1 else ""
    limit = f"{100 * threshold:.3g} %" if threshold < FACTORS_FROM else slowdown(threshold)
    change = f"{capital(case.metric.replace('_', ' '))}{of_rank} {signed_percent(ratio - 1)}"
    interval = f"90 % CI {100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %"
    reason = f"{change} ({interval}), threshold {limit}: {now}, was {was}."
    if case.machine_sd:
        reason += f" The baseline is from other GPUs (spread between GPUs: {100 * case.machine_sd:.2g} %)."
    if case.clocks_ghz is not None and abs(case.clocks_ghz[1] / case.clocks_ghz[0] - 1) > CLOCK:
        now_mhz, then_mhz = (1000 * ghz for ghz in reversed(case.clocks_ghz))
        reason += f" Compared at equal clock: the GPU ran at {now_mhz:,.0f} MHz, was {then_mhz:,.0f} MHz."
    reason += case.left_out
    if row.verdict == "UNDECIDED" and not case.machine_sd and case.change > math.log1p(threshold):
        reason += why
    return reason


def with_power(row: Row, base: CaseResult, head: CaseResult) -> Row:
    """Return a row on device time as CHANGED where the candidate lowers its own clock: it draws more power.

    At an equal clock such a program is as fast as before. A machine drifts by much less than `_LOWER` between turns.
    """
    if row.metric != "device_time" or row.verdict != "OK" or row.clock_ratio is None:
        return row
    clocks = [
        [[ghz for rank in launch.ranks for gpu in rank.clock_ghz or () for ghz in gpu] for launch in result.launches]
        for result in (base, head)
    ]
    turns = [tuple(map(statistics.fmean, turn)) for turn in zip(*clocks, strict=False) if all(turn)]
    lower = sum(now < (1 - _LOWER) * then for then, now in turns)
    if lower < max(_LOWER_LAUNCHES, len(turns)):
        return row
    energy = ""
    if base.energy_j_per_sequence and head.energy_j_per_sequence:
        energy = f", energy per sequence {signed_percent(head.energy_j_per_sequence / base.energy_j_per_sequence - 1)}"
    clock = f"the clock was {100 * (1 - row.clock_ratio):.1f} % lower in each of {plural(lower, 'launch')} in turn"
    reason = f"More power per forward: {clock}{energy}. At an equal clock: {row.reason}"
    return msgspec.structs.replace(row, verdict="CHANGED", improved=False, reason=reason)


def _ratio(log_ratio: float) -> float:
    """Return the exponential, limited to the range of a float, because latencies in a report can have any size."""
    return math.exp(log_ratio if -700 < log_ratio < 700 else math.copysign(700, log_ratio))  # noqa: PLR2004
