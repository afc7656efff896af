"""Accuracy: items that flipped, by McNemar's exact test; the floor of the policy; log-likelihoods.

A trained model keeps its answers under a slightly wrong kernel, and random weights answer by chance. Therefore the
log-likelihoods are compared as well, and for random weights they alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pytest_llmgpu.analysis.reference import largest_difference
from pytest_llmgpu.analysis.sign_test import by_chance, written
from pytest_llmgpu.gate.policy import AccuracyRule
from pytest_llmgpu.gate.stats.distributions import net_loss
from pytest_llmgpu.gate.stats.holm import holm
from pytest_llmgpu.report.derived import decode, explained, predictions_of, typical_difference, value_of
from pytest_llmgpu.report.result import Accuracy, CaseResult
from pytest_llmgpu.report.text import listed, percent
from pytest_llmgpu.report.verdicts import Row, Verdict

__all__ = ["Answered", "answered", "below_floor", "predictions_row", "rows"]

_ROUNDING = 1e-9  # a floor can be slightly above the same fraction in binary


class Answered(NamedTuple):
    """The answers of one case and of its baseline, before a verdict: that needs all cases."""

    before: CaseResult
    result: CaseResult
    rule: AccuracyRule
    items: int
    base: float
    """Accuracy of the baseline, as a fraction."""
    head: float
    """Accuracy of the candidate, as a fraction."""
    lost: list[int]
    """Items that were right and are wrong now."""
    won: list[int]
    """Items that were wrong and are right now."""
    other: int
    """Items with another answer in neither list: wrong both times, or all of them where there are no labels."""
    labelled: bool
    """True if the right answers are known."""
    difference: float | None
    """Typical difference of the log-likelihoods, as a fraction of the baseline's, in the launch where it is largest.

    None where a report lacks them, infinite where only the candidate's are not finite."""
    largest: float | None
    """Largest difference of one log-likelihood, as a fraction; None likewise, and for trained weights."""
    changed: int
    """Most items that one launch answers differently."""
    odd_launch: int | None
    """The launch that `lost` and `won` are of, counted from 1, where the candidate's launches differ and the baseline's
    agree; None where they are of the launch with the median accuracy."""
    launches: int
    """Launches of the candidate with answers."""

    @property
    def random_weights(self) -> bool:
        """True if the weights are random, so that the answers are chance."""
        return self.result.case.load_format == "dummy"

    @property
    def looks(self) -> int:
        """Launches among which the judged one is the worst; 1 for the median one."""
        return 1 if self.odd_launch is None else self.launches

    @property
    def allowed(self) -> float:
        """Typical difference of log-likelihoods that is allowed, as a fraction."""
        return explained(self.result.case.dtype) if self.rule.difference is None else self.rule.difference

    @property
    def allowed_largest(self) -> float:
        """Difference of one log-likelihood that is allowed: rounding can move both reports."""
        return 2 * self.allowed


def answered(base: CaseResult, head: CaseResult, rule: AccuracyRule) -> Answered | Row | str:
    """Compare the answers of two results of one case, in the launch with the median accuracy of each report.

    Greedy scoring gives equal answers in every launch. Where the candidate's launches differ and the baseline's agree,
    the worst launch is compared: a wrong minority of launches is wrong.

    Returns:
        The input of `rows`; a row where no comparison is possible; or the reason why there is nothing to compare.
    """
    thens, nows = _scored(base), _scored(head)
    if thens and not nows:
        return Row.of(head, "accuracy", "MISSING", "Only the baseline scored items.", gated=rule.gate)
    if not thens or not nows:
        return "accuracy is new" if nows else "no items were scored"
    then, now = _median(thens, rule.metric), _median(nows, rule.metric)
    befores, afters = ([predictions_of(one, rule.metric) for one in scored] for scored in (thens, nows))
    before, labels = predictions_of(then, rule.metric), now.labels or then.labels
    if any(len(one) != len(before) for one in (*afters, *([labels] if labels is not None else []))):
        reason = f"The numbers of scored items differ: {len(afters[0]):,}, were {len(before):,}."
        return Row.of(head, "accuracy", "NOT_COMPARABLE", reason, gated=rule.gate)
    counts = [len(_flips(before, after)) for after in afters]
    odd = not _agree(afters) and _agree(befores)
    if odd:
        now = min(zip(nows, counts, strict=True), key=lambda one: (value_of(one[0], rule.metric), -one[1]))[0]
    after = predictions_of(now, rule.metric)
    flips = _flips(before, after)
    lost = [number for number in flips if labels is not None and before[number] == labels[number]]
    won = [number for number in flips if labels is not None and after[number] == labels[number]]
    differences = [found for one in nows if (found := _difference(then, one)) is not None]
    dummy = head.case.load_format == "dummy"
    largest = [found for one in nows if dummy and (found := _largest_difference(then, one)) is not None]
    return Answered(
        before=base,
        result=head,
        rule=rule,
        items=len(after),
        base=value_of(then, rule.metric),
        head=value_of(now, rule.metric),
        lost=lost,
        won=won,
        other=len(flips) - len(lost) - len(won),
        labelled=labels is not None,
        difference=max(differences, default=None),
        largest=max(largest, default=None),
        changed=max(counts),
        odd_launch=nows.index(now) + 1 if odd else None,
        launches=len(nows),
    )


def below_floor(result: CaseResult, rule: AccuracyRule) -> str | None:
    """Return why the answers are wrong whatever the baseline's are; None where they are not."""
    values = [value_of(accuracy, rule.metric) for accuracy in _scored(result)]
    if values and rule.floor is not None and result.case.load_format != "dummy":
        worst = min(values)
        if worst < rule.floor - _ROUNDING:
            where = "" if worst == max(values) else f" in launch {values.index(worst) + 1} of {len(values)}"
            return (
                f"Accuracy ({rule.metric}) {percent(worst, 2)}{where}, below the policy's floor of "
                f"{percent(rule.floor, 2)}."
            )
    check = result.accuracy_check
    return f"{check.text}." if check is not None and check.ok is False else None


def rows(cases: Sequence[Answered], confidence: float, note: str) -> list[Row]:
    """Judge the answers of all cases. The gated cases are one family of tests, the others another.

    p is McNemar's, exact and one-sided: the probability of at least as many lost among the items lost or won, at even
    odds, adjusted over the cases by Holm's method. The verdict is REGRESSED where p is at most 1 - confidence or the
    answers are below a floor, IMPROVED likewise for items won, OK where a loss of the threshold is ruled out, else
    NOT_ENOUGH_DATA. The worst of several launches that differ has its p multiplied by their number; it is never OK.

    Log-likelihoods that differ by more than rounding explains are REGRESSED whatever the answers are, and IMPROVED
    where the baseline failed its own check and the candidate passes it.
    """
    tested = [case for case in cases if not case.random_weights]
    gates = [case.rule.gate for case in tested]
    family = Counter(gates)
    worse = holm([min(1.0, case.looks * by_chance(len(case.lost), len(case.won))) for case in tested], gates)
    better = holm([by_chance(len(case.won), len(case.lost)) for case in tested], gates)
    chances = iter(zip(worse, better, strict=True))
    return [
        _row_of_random_weights(case, note)
        if case.random_weights
        else _row(case, *next(chances), confidence, note, family_size=family[case.rule.gate])
        for case in cases
    ]


def predictions_row(case: Answered, *, gated: bool) -> Row:
    """Judge whether a launch answers any item differently, whether right or wrong."""
    flipped = case.changed
    return Row.of(
        case.result,
        "predictions",
        "REGRESSED" if flipped else "OK",
        f"{flipped:,} of {case.items:,} items have another answer ({case.rule.metric})."
        if flipped
        else f"All {case.items:,} items have the same answer.",
        gated=gated,
        base=0.0,
        head=flipped / case.items if case.items else 0.0,
        threshold=0.0,
    )


_Cause = Literal["floor", "numbers", "unlabelled", "lost", "disagree", "won", "ruled_out", "not_ruled_out"]
"""Why a verdict on the answers is what it is."""


def _row(case: Answered, worse: float, better: float, confidence: float, note: str, *, family_size: int) -> Row:
    low, high = net_loss(len(case.lost), len(case.won), case.items, confidence)
    floor = below_floor(case.result, case.rule)
    if floor is not None:
        verdict: Verdict = "REGRESSED"
        cause: _Cause = "floor"
    elif _numbers_differ(case):
        verdict, cause = _verdict_on_numbers(case), "numbers"
    else:
        verdict, cause = _verdict_on_items(case, worse, better, high, 1 - confidence)
    chance = better if len(case.won) > len(case.lost) else worse
    reason = _reason(case, cause, floor, chance)
    if note and verdict in {"REGRESSED", "IMPROVED"} and "\n" not in reason:
        reason += f"\n{note}"
    alone: Verdict | None = None
    if verdict in {"OK", "NOT_ENOUGH_DATA"} and case.labelled and case.odd_launch is None and family_size > 1:
        alone = "REGRESSED" if low > 0 else "IMPROVED" if high < 0 else None
    return Row.of(
        case.result,
        "accuracy",
        verdict,
        reason,
        gated=case.rule.gate,
        base=case.base,
        head=case.head,
        low=low,
        high=high,
        threshold=case.rule.margin,
        p=chance if case.labelled else None,
        alone=alone,
        lost=case.lost,
        won=case.won,
    )


def _verdict_on_items(
    case: Answered, worse: float, better: float, largest_loss: float, alpha: float
) -> tuple[Verdict, _Cause]:
    """Return the verdict on items lost and won; `largest_loss` is the upper end of the net loss's interval."""
    if not case.labelled:
        return ("NOT_ENOUGH_DATA" if case.other or case.odd_launch is not None else "OK"), "unlabelled"
    if worse <= alpha:
        return "REGRESSED", "lost"
    if case.odd_launch is not None:
        return "NOT_ENOUGH_DATA", "disagree"
    if better <= alpha:
        return "IMPROVED", "won"
    return ("OK", "ruled_out") if largest_loss <= case.rule.margin else ("NOT_ENOUGH_DATA", "not_ruled_out")


def _reason(case: Answered, cause: _Cause, floor: str | None, chance: float) -> str:
    where = "" if case.odd_launch is None else f" in launch {case.odd_launch} of {case.launches}"
    change = f"Accuracy ({case.rule.metric}) {percent(case.head, 2)}{where}, was {percent(case.base, 2)}"
    flips = f"{len(case.lost):,} items lost, {len(case.won):,} won of {case.items:,} ({written(chance)})"
    if cause == "floor":
        assert floor is not None
        same = not (case.lost or case.won or case.other)
        compared = f"\nCompared with the baseline: {flips}." if case.labelled else ""
        return floor + ("\nThe baseline has the same answers." if same else compared)
    if cause == "numbers":
        return _reason_of_numbers(case) + (f"\n{change}: {flips}." if case.labelled else "")
    if cause == "unlabelled":
        return f"{case.other:,} of {case.items:,} items have another answer; the report lacks the right answers."
    more = {
        "lost": f"\nItems lost: {listed(case.lost)}.",
        "disagree": "\nThe candidate's launches differ in their answers; the baseline's agree.",
        "not_ruled_out": f"\nA loss of {100 * case.rule.margin:.2g} points is not ruled out: score more items.",
    }
    return f"{change}: {flips if case.lost or case.won else 'no item was lost or won'}.{more.get(cause, '')}"


def _row_of_random_weights(case: Answered, note: str) -> Row:
    """Judge random weights, whose answers are chance: equal inputs have to give equal log-likelihoods."""
    verdict: Verdict
    if (floor := below_floor(case.result, case.rule)) is not None:
        verdict, reason = "REGRESSED", floor
    elif case.difference is None:
        verdict, reason = "NOT_ENOUGH_DATA", "The baseline has no log-likelihoods to compare with."
    elif _numbers_differ(case) or (case.largest is not None and case.largest > case.allowed_largest):
        verdict = _verdict_on_numbers(case)
        reason = _reason_of_numbers(case) + (f"\n{note}" if note else "")
    else:
        verdict = "OK"
        reason = f"Log-likelihoods of random weights typically differ by {case.difference:.1e} from the baseline's."
    return Row.of(case.result, "accuracy", verdict, reason, gated=case.rule.gate)


def _numbers_differ(case: Answered) -> bool:
    return case.difference is not None and case.difference > case.allowed


def _verdict_on_numbers(case: Answered) -> Verdict:
    """Return the verdict on log-likelihoods that differ: a baseline that failed its own check was the wrong one."""
    wrong, still_wrong = (
        result.accuracy_check is not None and result.accuracy_check.ok is False for result in (case.before, case.result)
    )
    return "IMPROVED" if wrong and not still_wrong else "REGRESSED"


def _reason_of_numbers(case: Answered) -> str:
    assert case.difference is not None
    wrong = ": the baseline failed its own accuracy check" if _verdict_on_numbers(case) == "IMPROVED" else ""
    if not math.isfinite(case.difference):
        return f"Log-likelihoods are not finite, and the baseline's are{wrong}."
    if _numbers_differ(case):
        how, difference, allowed = "typically differ by", case.difference, case.allowed
    else:
        assert case.largest is not None
        how, difference, allowed = "differ by up to", case.largest, case.allowed_largest
    threshold = (
        f"rounding in {case.result.case.dtype} explains" if case.rule.difference is None else "the policy allows"
    )
    return (
        f"Log-likelihoods {how} {100 * difference:.2g} % from the baseline's; {threshold} {100 * allowed:.2g} %{wrong}."
    )


def _scored(result: CaseResult) -> list[Accuracy]:
    return [launch.accuracy for launch in result.launches if launch.accuracy is not None]


def _median(scored: Sequence[Accuracy], metric: str) -> Accuracy:
    """Return the answers with the median accuracy, the lower of two."""
    return sorted(scored, key=lambda accuracy: value_of(accuracy, metric))[(len(scored) - 1) // 2]


def _agree(predictions: Sequence[Sequence[int]]) -> bool:
    return all(one == predictions[0] for one in predictions)


def _flips(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return the numbers of the items whose answer changed."""
    if before == after:
        return []
    return [number for number, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]


def _difference(before: Accuracy, after: Accuracy) -> float | None:
    """Return the typical difference of log-likelihoods; infinite where only the later ones are not finite."""
    if before.loglikelihoods == after.loglikelihoods:  # most launches: nothing to decode
        return 0.0 if before.loglikelihoods else None
    expected, values = decode(before.loglikelihoods), decode(after.loglikelihoods)
    if not expected or len(expected) != len(values) or not all(map(math.isfinite, expected)):
        return None
    return typical_difference(values, expected) if all(map(math.isfinite, values)) else math.inf


def _largest_difference(before: Accuracy, after: Accuracy) -> float | None:
    """Return the largest difference of one log-likelihood; None where they cannot be compared or are not finite."""
    if before.loglikelihoods == after.loglikelihoods:
        return 0.0 if before.loglikelihoods else None
    if len(before.loglikelihoods) != len(after.loglikelihoods):
        return None
    return largest_difference(after.loglikelihoods, before.loglikelihoods)
