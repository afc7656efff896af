"""Whether a case became slower: batch against batch, launch against launch, an interval against a margin."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from pytest_llmgpu import evidence
from pytest_llmgpu.metrics import inference_s
from pytest_llmgpu.policy import TimeRule
from pytest_llmgpu.result import CaseResult, Launch
from pytest_llmgpu.statistics import (
    UNCALIBRATED_SD,
    Change,
    change,
    holm,
    launch_levels,
    launches_needed,
    smallest_change,
)
from pytest_llmgpu.verdicts import Row, Verdict

__all__ = ["PROMISED", "Timed", "rows", "timed"]

_OWN_NOISE = 3
"""Launches a side whose spread says how sure their sums are: calibrated is the noise of the typical batch."""

PROMISED = 0.02
"""How far above the margin a slowdown is that the launches asked for show: one equal to the margin is never shown."""


class Timed(NamedTuple):
    """The time of one case against its baseline's, not yet judged: that takes all cases."""

    result: CaseResult
    rule: TimeRule
    change: Change
    """Of the typical batch."""
    total: Change
    """Of the sum of all batches, which a few that are much slower move and the typical one does not."""
    margin: float
    """The bar as a fraction, the absolute one included."""
    base_s: float
    head_s: float
    launches: tuple[int, int]
    sd: float | None
    """Calibrated noise; None: nobody measured it."""


def timed(base: CaseResult, head: CaseResult, rule: TimeRule, sd: float | None) -> Timed | Row | str:
    """Compare the times of two completed results of one case.

    Args:
        base: the baseline's.
        head: the candidate's.
        rule: the bar.
        sd: calibrated noise between launches, None where it is not known.

    Returns:
        What `rows` judges; a row where comparing is impossible; or, in a few words, why there is nothing to compare.
    """

    def refused(verdict: Verdict, reason: str) -> Row:
        return Row.of(head, "time", verdict, reason, gated=rule.gate)

    sides = []
    for name, result in (("baseline", base), ("candidate", head)):
        measured = [launch for launch in result.launches if launch.batches.latency_s]
        valid = [launch for launch in measured if evidence.untimed(launch) is None]
        if not measured and result is head:
            return refused("MISSING", "no batch was timed.")
        if not measured:
            return "no batch of the baseline was timed"
        if not valid:
            return refused(
                "INVALID", f"the {name}'s time does not speak for the case: {evidence.untimed(measured[0])}."
            )
        sides.append(valid)
    held = [all(_held_down(launch) for launch in side) for side in sides]
    if held[0] != held[1]:
        one = "baseline" if held[0] else "candidate"
        return refused("INVALID", f"only the {one} was held down by power or heat (`profile.invalid`).")
    if (reason := _unpaired([*sides[0], *sides[1]])) is not None:
        return refused("NOT_COMPARABLE", reason)
    levels = launch_levels(*([launch.batches.latency_s for launch in side] for side in sides))
    base_s, head_s = (statistics.median(map(inference_s, side)) for side in sides)
    sums = [[math.log(inference_s(launch)) for launch in side] for side in sides]
    noise = UNCALIBRATED_SD if sd is None else sd
    return Timed(
        head,
        rule,
        change(*levels, noise),
        change(sums[0], sums[1], noise),
        max(rule.margin, rule.absolute_s / base_s),
        base_s,
        head_s,
        (len(sides[0]), len(sides[1])),
        sd,
    )


def rows(cases: Sequence[Timed], confidence: float, note: str) -> list[Row]:
    """Judge the times of all cases as one family.

    A case's p is the probability of its change, or a larger one, were the true change equal to the margin; it inverts
    the interval, so that p is at most 1 - confidence where the interval lies above the margin. Holm's method adjusts
    the p of all cases. REGRESSED is what then still is that improbable, IMPROVED likewise below -margin; OK what has
    its interval below the margin; and everything else is INCONCLUSIVE. An interval that reaches further than margin
    and promise to each side is never OK: where noise is that large, luck puts it below the margin.

    The typical batch decides, since it has the least noise; the sum of all batches has a veto. Where that lies above
    the margin nothing is OK or IMPROVED, and with launches enough to know its own noise it is REGRESSED: a stall in
    every tenth batch leaves the typical one as it was.

    Args:
        cases: what `timed` returned.
        confidence: of each end of an interval.
        note: second line of the reason where a change needs an explanation; empty for none.
    """
    slower = holm([case.change.p_above(math.log1p(case.margin)) for case in cases])
    faster = holm([case.change.p_below(-math.log1p(case.margin)) for case in cases])
    totals = holm([case.total.p_above(math.log1p(case.margin)) for case in cases])
    return [
        _row(case, above, below, total, confidence, len(cases), note)
        for case, above, below, total in zip(cases, slower, faster, totals, strict=True)
    ]


def _held_down(launch: Launch) -> bool:
    return launch.profile is not None and any(map(evidence.is_power, launch.profile.invalid))


def _unpaired(launches: Sequence[Launch]) -> str | None:
    """Return why the launches' batches cannot be compared one by one; None where they can."""
    plans = {launch.plan_sha256 for launch in launches}
    counts = {len(launch.batches.latency_s) for launch in launches}
    if None in plans:
        return "a launch does not say which batches it ran, so that they cannot be paired."
    if len(plans) > 1:
        return "the batches differ (plan_sha256), so that they cannot be paired."
    if len(counts) > 1:
        return f"a launch has {min(counts)} batches and another {max(counts)} of one plan."
    return None


def _row(case: Timed, slower: float, faster: float, total: float, confidence: float, family: int, note: str) -> Row:
    change, rule = case.change, case.rule
    half, bar, alpha = change.half_width(confidence), 1 + case.margin, 1 - confidence
    ratio, low, high = _ratio(change.log_ratio), _ratio(change.log_ratio - half), _ratio(change.log_ratio + half)
    found = f"{100 * (ratio - 1):+.1f} % ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %)"
    seconds = f"{case.head_s:.4g} s in all, was {case.base_s:.4g} s"
    assumed = f" (noise assumed {100 * UNCALIBRATED_SD:.2g} %: calibrate)" if case.sd is None else ""
    margin = f"the margin of {100 * case.margin:.3g} %"
    needed: int | None = None
    goal = case.margin + PROMISED
    if slower <= alpha:
        verdict: Verdict = "REGRESSED"
        reason = f"time changed by {found}, more than {margin}: {seconds}{assumed}."
    elif total <= alpha and min(case.launches) >= _OWN_NOISE:
        verdict = "REGRESSED"
        reason = f"time in all changed by {_pct(case.total)}, more than {margin}: {seconds}."
        reason += f"\nOf the typical batch by {found}: a part of the batches became much slower."
    elif (faster <= alpha or high < bar) and case.total.log_ratio > math.log1p(case.margin):
        verdict = "INCONCLUSIVE"
        reason = f"the typical batch changed by {found}, and time in all by {_pct(case.total)}: {seconds}."
        reason += f"\nA part of the batches was much slower; {_OWN_NOISE} launches a side tell whether that stays."
    elif faster <= alpha:
        verdict, reason = "IMPROVED", f"time changed by {found}, beyond {margin}: {seconds}{assumed}."
    elif high < bar and half <= math.log1p(goal):
        verdict, reason = "OK", f"time changed by {found}, within {margin}."
    else:
        verdict = "INCONCLUSIVE"
        known = UNCALIBRATED_SD if case.sd is None else case.sd
        # Of one launch, from the error of a difference between two groups.
        seen = (change.observed_error or 0.0) / math.sqrt(1 / case.launches[0] + 1 / case.launches[1])
        noise = max(known, seen)
        # Rounded up, so that cases of much the same noise share one calculation.
        needed = launches_needed(goal, case.margin, _rounded_up(noise), confidence, family)
        count = f"{case.launches[0]} launch{'es' * (case.launches[0] > 1)} against {case.launches[1]}"
        among = f" among {family:,} rows" if low > bar else ""
        reason = f"time changed by {found}: {count} cannot tell that from {margin}{among}."
        more = "more than 1,000" if needed is None else f"{needed:,}"
        assumed = assumed if noise == known else ""
        reason += f"\n{more} launches a side would show {100 * goal:+.3g} %{assumed}."
    if note and verdict in {"REGRESSED", "IMPROVED"} and "\n" not in reason:
        reason += f"\n{note}"
    return Row.of(
        case.result,
        "time",
        verdict,
        reason,
        gated=rule.gate,
        base=case.base_s,
        head=case.head_s,
        ratio=ratio,
        low=low,
        high=high,
        margin=case.margin,
        p=slower if change.log_ratio >= 0 else faster,
        n=min(case.launches),
        smallest_change=smallest_change(change, case.margin, confidence),
        launches_needed=needed,
    )


def _pct(change: Change) -> str:
    return f"{100 * (_ratio(change.log_ratio) - 1):+.1f} %"


def _ratio(log_ratio: float) -> float:
    """Return e to the power, kept within what a float holds: no latency is too odd to be written down."""
    return math.exp(max(-700.0, min(700.0, log_ratio)))


def _rounded_up(value: float) -> float:
    """Return a noise with two significant digits, not smaller."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit - 1e-9) * unit
