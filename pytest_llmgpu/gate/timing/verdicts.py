"""Whether cases became slower: an interval against a margin, and all cases of a report together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pytest_llmgpu.gate.stats.holm import holm
from pytest_llmgpu.gate.stats.intervals import Change, smallest_change
from pytest_llmgpu.gate.timing.pairing import OWN_NOISE, PROMISED, SUM, TYPICAL, Timed, launches_for
from pytest_llmgpu.report.verdicts import Row, Verdict

__all__ = ["apart", "rows"]

_POINT = 0.01
"""Between two ratios: more is named."""

_SHOWN = 0.0005
"""Least change, as a fraction, that a table shows with a sign and not as 0.0 %."""


class _Chances(NamedTuple):
    """Probabilities of one case's changes, adjusted."""

    slower: float
    """Of the typical batch, were its true change the margin."""
    faster: float
    """Likewise, were it the margin the other way."""
    total: float
    """Of the sum; 1 where that does not decide."""
    cases: int
    """In the family."""
    family: float
    """Their typical batches, and sums that decide, by weight: the typical batch's is 1."""


class _Said(NamedTuple):
    """A verdict, and what it rests on."""

    verdict: Verdict
    reason: str
    change: Change
    p: float
    launches_needed: int | None = None


def rows(cases: Sequence[Timed], confidence: float, note: str) -> list[Row]:
    """Judge the times of all cases: those that are gated as one family, the others as one of their own.

    A figure's p is the probability of its change, or a larger one, were the true change equal to the margin; it inverts
    the interval, so that p is at most 1 - confidence where the interval lies above the margin. Holm's method adjusts
    the p of a family. REGRESSED is what then still is that improbable, IMPROVED likewise below -margin; OK what has
    its interval below the margin; and everything else is INCONCLUSIVE. An interval that reaches further than margin
    and promise to each side is never OK: where noise is that large, luck puts it below the margin.

    The typical batch decides, since it has the least noise; the sum of all batches has a veto. Where that lies above
    the margin nothing is OK or IMPROVED, and with launches enough to know its own noise it is REGRESSED: a stall in
    every tenth batch leaves the typical one as it was. It is then a test of the family, of less weight.

    Args:
        cases: what `timed` returned.
        confidence: of each end of an interval.
        note: second line of the reason where a change needs an explanation; empty for none.
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
    """Return whether two ratios are visibly not one change: by more than a point, or in direction."""
    low, high = sorted((one, other))
    return high - low > _POINT or (low < 1 - _SHOWN and high > 1 + _SHOWN)


def _row(case: Timed, chances: _Chances, confidence: float, note: str) -> Row:
    said = _verdict(case, chances, confidence)
    first, *rest = said.reason.splitlines()
    reason = "\n".join([first + _left_out(case), *rest])
    if said.verdict in {"REGRESSED", "IMPROVED"} and "\n" not in reason:
        reason = "\n".join(filter(None, (reason, " ".join(filter(None, (_waiting(case), note))))))
    half = said.change.half_width(confidence)
    return Row.of(
        case.result,
        "time",
        said.verdict,
        reason,
        gated=case.rule.gate,
        base=case.base_s,
        head=case.head_s,
        ratio=_ratio(said.change.log_ratio),
        low=_ratio(said.change.log_ratio - half),
        high=_ratio(said.change.log_ratio + half),
        margin=case.margin,
        p=said.p,
        n=min(case.launches),
        smallest_change=smallest_change(case.change, case.margin, confidence, chances.family),
        launches_needed=said.launches_needed,
        alone=_alone(case, said.verdict, confidence) if chances.cases > 1 else None,
    )


def _left_out(case: Timed) -> str:
    """Return which side's figures are not of all its launches, as a sentence that goes on; empty where all count."""
    found = [
        f"{counted} of {counted + left} launches of the {side} count"
        for side, counted, left in zip(("baseline", "candidate"), case.launches, case.left_out, strict=True)
        if left
    ]
    return f" {' and '.join(found)} (`profile.invalid`)." if found else ""


def _alone(case: Timed, said: Verdict, confidence: float) -> Verdict | None:
    """Return what the interval of the typical batch says where Holm's method does not let it; None elsewhere."""
    half, bar = case.change.half_width(confidence), math.log1p(case.margin)
    if said == "REGRESSED":
        return None
    if case.change.log_ratio - half > bar:
        return "REGRESSED"
    # The sum's veto is another reason, which the row has.
    faster = case.change.log_ratio + half < -bar and case.total.log_ratio <= bar
    return "IMPROVED" if faster and said != "IMPROVED" else None


def _verdict(case: Timed, chances: _Chances, confidence: float) -> _Said:
    change, total, bar, alpha = case.change, case.total, math.log1p(case.margin), 1 - confidence
    half = change.half_width(confidence)
    p = chances.slower if change.log_ratio >= 0 else chances.faster
    below = change.log_ratio + half < bar
    typical = _interval(change, confidence)
    seconds = f"{case.head_s:.4g} s in all, was {case.base_s:.4g} s"
    assumed, margin = _assumed(case), f"the margin of {100 * case.margin:.3g} %"
    in_part = total.log_ratio - change.log_ratio > bar
    if chances.slower <= alpha:
        reason = f"time changed by {typical}, more than {margin}: {seconds}{assumed}.{_sums(case, change)}"
        return _Said("REGRESSED", reason, change, p)
    if chances.total <= alpha:
        reason = f"time in all changed by {_interval(total, confidence)}, more than {margin}: {seconds}."
        reason += f"{_sums(case, total)}\n"
        reason += f"Of the typical batch by {typical}"
        reason += ": a part of the batches became much slower." if in_part else "."
        return _Said("REGRESSED", reason, total, chances.total)
    if (chances.faster <= alpha or below) and total.log_ratio > bar:
        reason = f"the typical batch changed by {typical}, and time in all by {_pct(total)}: {seconds}."
        reason += f"{_sums(case, change, total)}\n"
        reason += "A part of the batches was much slower" if in_part else f"Time in all is above {margin}"
        reason += "." if case.sums_decide else f"; {OWN_NOISE} launches a side tell whether that stays."
        return _Said("INCONCLUSIVE", reason, change, p)
    if chances.faster <= alpha:
        reason = f"time changed by {typical}, beyond {margin}: {seconds}{assumed}.{_sums(case, change)}"
        return _Said("IMPROVED", reason, change, p)
    goal = case.margin + PROMISED
    if below and half <= math.log1p(goal):
        return _Said("OK", f"time changed by {typical}, within {margin}.{_sums(case, change)}", change, p)
    needed = launches_for(case, goal, confidence, chances.cases)
    count = f"{case.launches[0]} launch{'es' * (case.launches[0] > 1)} against {case.launches[1]}"
    among = ""
    if abs(change.log_ratio) - half > bar:
        among = f" among {chances.cases:,} rows" if chances.cases > 1 else " where the sum is tested, too"
    reason = f"time changed by {typical}: {count} cannot tell that from {margin}{among}.{_sums(case, change)}\n"
    in_turn = launches_for(case._replace(session_sd=0.0), goal, confidence, chances.cases)
    if needed is None and in_turn is not None:
        reason += f"Sessions differ by {100 * case.session_sd:.2g} %, so that no number of launches would show "
        reason += f"{100 * goal:+.3g} %: in one session, with llmgpu ab, {in_turn:,} a side would."
    else:
        more = "more than 1,000" if needed is None else f"{needed:,}"
        assumed = assumed if case.noise == case.known else ""
        reason += f"{more} launches a side would show {100 * goal:+.3g} %{assumed}."
    return _Said("INCONCLUSIVE", reason, change, p, needed)


def _sums(case: Timed, *told: Change) -> str:
    """Return how the figures of both sides changed where that is none of the changes told, and why it is not."""
    shown = math.log(case.head_s / case.base_s)
    if not all(apart(_ratio(shown), _ratio(change.log_ratio)) for change in told):
        return ""
    by = f"{100 * (_ratio(shown) - 1):+.1f} %"
    if abs(shown - case.total.log_ratio) > abs(case.total.log_ratio - case.change.log_ratio):
        return f" Time in all of the median launch changed by {by}: launches of one side differ."
    return f" Time in all changed by {by}: not all batches changed alike."


def _waiting(case: Timed) -> str:
    """Return where the time went that the GPUs did not work; empty where they did."""
    if case.busy is None or not case.waited:
        return ""
    before, now = (f"{100 * busy:.0f} %" for busy in case.busy)
    text = f"The GPUs were busy for {now} of the time, {before} before"
    return f"{text}: what changed is mostly waiting, for the CPU or in code that waits."


def _assumed(case: Timed) -> str:
    return f" (noise assumed {100 * case.known:.2g} %: calibrate)" if case.sd is None else ""


def _interval(change: Change, confidence: float) -> str:
    half = change.half_width(confidence)
    low, high = (100 * (_ratio(change.log_ratio + end) - 1) for end in (-half, half))
    return f"{_pct(change)} ({low:+.1f} to {high:+.1f} %)"


def _pct(change: Change) -> str:
    return f"{100 * (_ratio(change.log_ratio) - 1):+.1f} %"


def _ratio(log_ratio: float) -> float:
    """Return e to the power, kept within what a float holds: no latency is too odd to be written down."""
    return math.exp(max(-700.0, min(700.0, log_ratio)))
