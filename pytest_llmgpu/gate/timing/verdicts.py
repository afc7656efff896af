"""The verdicts on time: the interval of each case is compared with its threshold, all cases of a report together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pytest_llmgpu.gate.stats.holm import holm
from pytest_llmgpu.gate.stats.intervals import Change, smallest_change
from pytest_llmgpu.gate.timing.pairing import OWN_NOISE, PROMISED, SUM, TYPICAL, Timed, launches_for
from pytest_llmgpu.report.text import signed_percent
from pytest_llmgpu.report.verdicts import Row, Verdict

__all__ = ["apart", "rows"]

_POINT = 0.01
"""Least difference between two ratios that a reason states."""

_SHOWN = 0.0005
"""Least change, as a fraction, that a table does not round to 0.0 %."""

_THOUSAND = 1000


class _Chances(NamedTuple):
    """The p values of one case, adjusted by Holm's method."""

    slower: float
    """The p of the typical batch if its true change were equal to the threshold."""
    faster: float
    """The p of the typical batch if its true change were equal to minus the threshold."""
    total: float
    """The p of the sum of all batches; 1 if the sum does not decide."""
    cases: int
    """Number of cases in the family."""
    family: float
    """Weight of all tests in the family, relative to the test of this typical batch."""


class _Judged(NamedTuple):
    """A verdict with the change and the p that it is based on."""

    verdict: Verdict
    reason: str
    change: Change
    p: float
    launches_needed: int | None = None


def rows(cases: Sequence[Timed], confidence: float, note: str) -> list[Row]:
    """Judge the times of all cases. The gated cases are one family of tests, the other cases are another.

    The p of a case is the probability of its change, or of a larger one, if the true change were equal to the
    threshold. It is at most 1 - confidence if the interval lies above the threshold. Holm's method adjusts the p of a
    family. A case is REGRESSED if its adjusted p is at most 1 - confidence, IMPROVED if the same holds below minus the
    threshold, OK if its interval lies below the threshold, and NOT_ENOUGH_DATA in all other cases. It is never OK if
    half of the interval is wider than the threshold plus `PROMISED`: with so much noise chance can put it there.

    The typical batch decides, because it has the least noise. The sum of all batches has a veto, because a stall in
    every tenth batch does not change the typical one. If the sum is above the threshold, the case is not OK or
    IMPROVED. With enough launches to estimate the noise of the sum it is a test of the family, with less weight, and
    can be REGRESSED.

    Args:
        cases: The return values of `timed`.
        confidence: The confidence of each end of an interval.
        note: The second line of the reason of a change; empty for none.
    """
    summed = [number for number, case in enumerate(cases) if case.sums_decide]
    gates = [case.rule.gate for case in cases]
    families = [*gates, *(gates[number] for number in summed)]
    bars = [math.log1p(case.margin) for case in cases]
    typical = [case.change.p_above(bar) for case, bar in zip(cases, bars, strict=True)]
    weights = [TYPICAL] * len(cases) + [SUM] * len(summed)
    slower = holm([*typical, *(cases[number].total.p_above(bars[number]) for number in summed)], families, weights)
    faster = holm([case.change.p_below(-bar) for case, bar in zip(cases, bars, strict=True)], gates)
    totals = dict(zip(summed, slower[len(cases) :], strict=True))
    members, sums = Counter(gates), Counter(gates[number] for number in summed)
    found = []
    for number, case in enumerate(cases):
        members_here, sums_here = members[case.rule.gate], sums[case.rule.gate]
        chances = _Chances(
            slower[number],
            faster[number],
            totals.get(number, 1.0),
            members_here,
            members_here + sums_here * SUM / TYPICAL,
        )
        found.append(_row(case, chances, confidence, note))
    return found


def apart(one: float, other: float) -> bool:
    """Return whether two ratios differ visibly: by more than a point, or in direction."""
    low, high = sorted((one, other))
    return high - low > _POINT or (low < 1 - _SHOWN and high > 1 + _SHOWN)


def _row(case: Timed, chances: _Chances, confidence: float, note: str) -> Row:
    judged = _verdict(case, chances, confidence)
    first, *rest = judged.reason.splitlines()
    reason = "\n".join([first + _left_out(case), *rest])
    if judged.verdict in {"REGRESSED", "IMPROVED"} and "\n" not in reason:
        reason = "\n".join(filter(None, (reason, " ".join(filter(None, (_waiting(case), note))))))
    half = judged.change.half_width(confidence)
    return Row.of(
        case.result,
        "time",
        judged.verdict,
        reason,
        gated=case.rule.gate,
        base=case.base_s,
        head=case.head_s,
        ratio=_ratio(judged.change.log_ratio),
        low=_ratio(judged.change.log_ratio - half),
        high=_ratio(judged.change.log_ratio + half),
        threshold=case.margin,
        p=judged.p,
        n=min(case.launches),
        smallest_seen=smallest_change(case.change, case.margin, confidence, chances.family),
        launches_needed=judged.launches_needed,
        alone=_alone(case, judged.verdict, confidence) if chances.cases > 1 else None,
    )


def _left_out(case: Timed) -> str:
    """Return a sentence on the launches that are not used, to be appended; empty if all are used."""
    found = [
        f"{counted} of {counted + left} launches of the {side} are used"
        for side, counted, left in zip(("baseline", "candidate"), case.launches, case.left_out, strict=True)
        if left
    ]
    return f" {' and '.join(found)} (`profile.invalid`)." if found else ""


def _alone(case: Timed, verdict: Verdict, confidence: float) -> Verdict | None:
    """Return the verdict that the typical batch would have alone, if Holm's method changes it; else None."""
    half, bar = case.change.half_width(confidence), math.log1p(case.margin)
    if verdict == "REGRESSED":
        return None
    if case.change.log_ratio - half > bar:
        return "REGRESSED"
    # The veto of the sum is another cause, and the reason of the row states it.
    faster = case.change.log_ratio + half < -bar and case.total.log_ratio <= bar
    return "IMPROVED" if faster and verdict != "IMPROVED" else None


def _verdict(case: Timed, chances: _Chances, confidence: float) -> _Judged:
    change, total, bar, alpha = case.change, case.total, math.log1p(case.margin), 1 - confidence
    half = change.half_width(confidence)
    p = chances.slower if change.log_ratio >= 0 else chances.faster
    below = change.log_ratio + half < bar
    typical = _interval(change, confidence)
    seconds = f"threshold {100 * case.margin:.3g} %: {_seconds(case.head_s)}, was {_seconds(case.base_s)}."
    in_part = total.log_ratio - change.log_ratio > bar
    if chances.slower <= alpha:
        reason = f"Time {typical}, {seconds}{_assumed(case)}{_sums(case, change)}"
        return _Judged("REGRESSED", reason, change, p)
    if chances.total <= alpha:
        reason = f"Time of all batches {_interval(total, confidence)}, {seconds}{_sums(case, total)}\n"
        reason += f"Typical batch {typical}{': a part of the batches became much slower' if in_part else ''}."
        return _Judged("REGRESSED", reason, total, chances.total)
    if (chances.faster <= alpha or below) and total.log_ratio > bar:
        reason = f"Typical batch {typical}, all batches {_pct(total)}, {seconds}{_sums(case, change, total)}\n"
        reason += (
            "A part of the batches was much slower" if in_part else "The time of all batches is above the threshold"
        )
        reason += "." if case.sums_decide else f". Measure at least {OWN_NOISE} launches in each report to confirm it."
        return _Judged("NOT_ENOUGH_DATA", reason, change, p)
    reason = f"Time {typical}, {seconds}"
    if chances.faster <= alpha:
        return _Judged("IMPROVED", f"{reason}{_assumed(case)}{_sums(case, change)}", change, p)
    goal = case.margin + PROMISED
    if below and half <= math.log1p(goal):
        return _Judged("OK", f"{reason}{_sums(case, change)}", change, p)
    if abs(change.log_ratio) - half > bar:
        among = f"among {chances.cases:,} cases" if chances.cases > 1 else "with the test of the sum"
        reason += f" Not statistically significant {among}."
    needed = launches_for(case, goal, confidence, chances.cases)
    in_turn = launches_for(case._replace(session_sd=0.0), goal, confidence, chances.cases)
    required = f"Minimum launches required in each report to detect {100 * goal:+.3g} %"
    if needed is None and in_turn is not None:
        hint = (
            f"Sessions differ by {100 * case.session_sd:.2g} %: more launches do not help. Measure both in one session "
        )
        hint += f"with llmgpu ab. {required} there: {in_turn:,}."
    else:
        hint = f"{required}: {'more than 1,000' if needed is None else f'{needed:,}'}, now {min(case.launches):,}."
        hint += _assumed(case) if case.noise == case.known else ""
    return _Judged("NOT_ENOUGH_DATA", f"{reason}{_sums(case, change)}\n{hint}", change, p, needed)


def _sums(case: Timed, *stated: Change) -> str:
    """Return how the sum of all batches changed and why, if it differs from the changes already stated; else empty."""
    shown = math.log(case.head_s / case.base_s)
    if not all(apart(_ratio(shown), _ratio(change.log_ratio)) for change in stated):
        return ""
    by = signed_percent(_ratio(shown) - 1)
    if abs(shown - case.total.log_ratio) > abs(case.total.log_ratio - case.change.log_ratio):
        return f" All batches of the median launch {by}: launches of one report differ."
    return f" All batches {by}: the batches did not change by the same factor."


def _waiting(case: Timed) -> str:
    """Return a sentence if the time changed mostly by waiting of the GPUs; else empty."""
    if case.busy is None or not case.waited:
        return ""
    before, now = (f"{100 * busy:.0f} %" for busy in case.busy)
    return f"GPU utilisation {now}, was {before}: mostly the waiting of the GPUs changed. Look for it in the CPU code."


def _assumed(case: Timed) -> str:
    return f" Noise assumed {100 * case.known:.2g} %: run llmgpu calibrate." if case.sd is None else ""


def _interval(change: Change, confidence: float) -> str:
    half = change.half_width(confidence)
    low, high = (100 * (_ratio(change.log_ratio + end) - 1) for end in (-half, half))
    return f"{_pct(change)} ({100 * confidence:.3g} % CI {low:+.1f} to {high:+.1f} %)"


def _pct(change: Change) -> str:
    return signed_percent(_ratio(change.log_ratio) - 1)


def _seconds(value: float) -> str:
    """Return seconds with four digits, as 210.0 s."""
    return f"{value:#.4g} s" if value < _THOUSAND else f"{value:.4g} s"


def _ratio(log_ratio: float) -> float:
    """Return the exponential, limited to the range of a float, because latencies in a report can have any size."""
    return math.exp(max(-700.0, min(700.0, log_ratio)))
