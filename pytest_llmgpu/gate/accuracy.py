"""Whether answers got worse: the items that flipped, by McNemar's exact test, and the floor under the accuracy.

A model that is sure of its answers keeps them under a wrong kernel, and random weights answer by chance: therefore the
log-likelihoods are compared too, and those of random weights alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pytest_llmgpu.analysis.reference import largest_difference
from pytest_llmgpu.analysis.sign_test import by_chance, written
from pytest_llmgpu.gate.policy import AccuracyRule
from pytest_llmgpu.gate.stats.distributions import net_loss
from pytest_llmgpu.gate.stats.holm import holm
from pytest_llmgpu.report.derived import decode, explained, predictions_of, typical_difference, value_of
from pytest_llmgpu.report.result import Accuracy, CaseResult
from pytest_llmgpu.report.verdicts import Row, Verdict

__all__ = ["Answered", "answered", "below_floor", "predictions_row", "rows"]

_DISAGREE = "The candidate's launches answer differently, and the baseline's all alike: the same batches should agree."

_ROUNDING = 1e-9  # a floor may be a hair above the same fraction in binary


class Answered(NamedTuple):
    """The answers of one case against its baseline's, not yet judged: that takes all cases."""

    before: CaseResult
    result: CaseResult
    rule: AccuracyRule
    items: int
    base: float
    head: float
    lost: list[int]
    won: list[int]
    other: int
    """Items answered otherwise that are in neither list: wrong both times, or all of them where there are no labels."""
    labelled: bool
    difference: float | None
    """Typical difference of the log-likelihoods, as a fraction of the baseline's, of the launch in which it is largest;
    None where a side's are not known."""
    largest: float | None
    """Largest such difference of one of them; None likewise, and for other than random weights."""
    changed: int
    """Most items that any launch answers otherwise."""
    odd: str | None
    """Which launch the items are of, in a few words, where the candidate's launches disagree and the baseline's do
    not; None where they are of the typical one."""
    looks: int
    """Launches among which that one is the worst; 1 for the typical one."""

    @property
    def by_chance(self) -> bool:
        """Whether the answers are: those of random weights."""
        return self.result.case.load_format == "dummy"

    @property
    def allowed(self) -> float:
        """The typical difference that is let pass."""
        return explained(self.result.case.dtype) if self.rule.difference is None else self.rule.difference

    @property
    def allowed_largest(self) -> float:
        """What one number may differ by: each side may be off by as much as rounding explains."""
        return 2 * self.allowed


def answered(base: CaseResult, head: CaseResult, rule: AccuracyRule) -> Answered | Row | str:
    """Compare the answers of two results of one case: of the launch with the typical accuracy on each side.

    Greedy scoring answers the same each time. Where the candidate's launches do not agree, and the baseline's do, the
    worst of them is compared: what is wrong in a minority of launches is wrong.

    Returns:
        What `rows` judges; a row where comparing is impossible; or, in a few words, why there is nothing to compare.
    """
    thens, nows = _scored(base), _scored(head)
    if thens and not nows:
        return Row.of(head, "accuracy", "MISSING", "only the baseline scored items.", gated=rule.gate)
    if not thens or not nows:
        return "accuracy is new" if nows else "no items were scored"
    then, now = _typical(thens, rule.metric), _typical(nows, rule.metric)
    befores, afters = ([predictions_of(one, rule.metric) for one in side] for side in (thens, nows))
    before, labels = predictions_of(then, rule.metric), now.labels or then.labels
    if any(len(one) != len(before) for one in (*afters, *([labels] if labels is not None else []))):
        return Row.of(head, "accuracy", "NOT_COMPARABLE", "the numbers of scored items differ.", gated=rule.gate)
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
        base,
        head,
        rule,
        len(after),
        value_of(then, rule.metric),
        value_of(now, rule.metric),
        lost,
        won,
        len(flips) - len(lost) - len(won),
        labels is not None,
        max(differences, default=None),
        max(largest, default=None),
        max(counts),
        f"in launch {nows.index(now) + 1} of {len(nows)}" if odd else None,
        len(nows) if odd else 1,
    )


def below_floor(result: CaseResult, rule: AccuracyRule) -> str | None:
    """Return in a sentence how the answers are wrong whatever the baseline's are; None where they are not."""
    values = [value_of(accuracy, rule.metric) for accuracy in _scored(result)]
    if values and rule.floor is not None and result.case.load_format != "dummy":
        worst = min(values)
        if worst < rule.floor - _ROUNDING:
            where = "" if worst == max(values) else f" in launch {values.index(worst) + 1} of {len(values)}"
            return f"accuracy ({rule.metric}) is {_pct(worst)}{where}, below the policy's floor of {_pct(rule.floor)}."
    check = result.accuracy_check
    return f"{check.text}." if check is not None and check.ok is False else None


def rows(cases: Sequence[Answered], confidence: float, note: str) -> list[Row]:
    """Judge the answers of all cases: those that are gated as one family, the others as one of their own.

    p is McNemar's, exact and one-sided: of at least so many lost among the items lost or won, by even odds, adjusted
    over the cases by Holm's method. REGRESSED where it is at most 1 - confidence or where the answers are below a
    floor, IMPROVED likewise for items won, OK where a loss of the margin is ruled out, else INCONCLUSIVE. The
    worst of launches that disagree has its p multiplied by their number; what is not REGRESSED then is INCONCLUSIVE.

    Log-likelihoods that differ by more than rounding explains are REGRESSED whatever the answers are; IMPROVED where
    the baseline's own check says that its answers were wrong, and the candidate's does not.
    """
    tested = [case for case in cases if not case.by_chance]
    gates = [case.rule.gate for case in tested]
    together = Counter(gates)
    worse = holm([min(1.0, case.looks * by_chance(len(case.lost), len(case.won))) for case in tested], gates)
    better = holm([by_chance(len(case.won), len(case.lost)) for case in tested], gates)
    chances = iter(zip(worse, better, strict=True))
    return [
        _row_of_numbers(case, note)
        if case.by_chance
        else _row(case, *next(chances), confidence, note, among=together[case.rule.gate])
        for case in cases
    ]


def predictions_row(case: Answered, *, gated: bool) -> Row:
    """Judge whether any item is answered otherwise in any launch, for the better or not."""
    flipped = case.changed
    return Row.of(
        case.result,
        "predictions",
        "REGRESSED" if flipped else "OK",
        f"{flipped:,} of {case.items:,} items are answered otherwise ({case.rule.metric})."
        if flipped
        else f"all {case.items:,} items are answered as before.",
        gated=gated,
        base=0.0,
        head=flipped / case.items if case.items else 0.0,
        margin=0.0,
    )


def _row(case: Answered, worse: float, better: float, confidence: float, note: str, *, among: int) -> Row:
    lost, won, rule = len(case.lost), len(case.won), case.rule
    low, high = net_loss(lost, won, case.items, confidence)
    change = f"accuracy ({rule.metric}) is {_pct(case.head)}{f' {case.odd}' if case.odd else ''}, was {_pct(case.base)}"
    flips = f"{lost:,} items lost and {won:,} won of {case.items:,} ({written(better if won > lost else worse)})"
    verdict: Verdict
    if (floor := below_floor(case.result, rule)) is not None:
        verdict, reason = "REGRESSED", floor
        if not lost + won + case.other:
            reason += "\nThe baseline answered the same."
        elif case.labelled:
            reason += f"\nAgainst the baseline: {flips}."
    elif _foreign(case):
        verdict, reason = _of_foreign(case)
        reason += f"\n{change}: {flips}." if case.labelled else ""
    else:
        verdict, reason = _of_items(case, worse, better, confidence, change, flips)
    if note and verdict in {"REGRESSED", "IMPROVED"} and "\n" not in reason:
        reason += f"\n{note}"
    alone: Verdict | None = None
    if verdict in {"OK", "INCONCLUSIVE"} and case.labelled and not case.odd and among > 1:
        alone = "REGRESSED" if low > 0 else "IMPROVED" if high < 0 else None
    return Row.of(
        case.result,
        "accuracy",
        verdict,
        reason,
        gated=rule.gate,
        base=case.base,
        head=case.head,
        low=low,
        high=high,
        margin=rule.margin,
        p=(better if won > lost else worse) if case.labelled else None,
        alone=alone,
        lost=case.lost,
        won=case.won,
    )


def _of_items(
    case: Answered, worse: float, better: float, confidence: float, change: str, flips: str
) -> tuple[Verdict, str]:
    """Return the verdict on items lost and won, and the reason."""
    lost, won, alpha = len(case.lost), len(case.won), 1 - confidence
    if not case.labelled:
        reason = f"{case.other:,} of {case.items:,} items are answered otherwise; the right answers were not kept."
        return ("INCONCLUSIVE", reason) if case.other or case.odd else ("OK", reason)
    if worse <= alpha:
        return "REGRESSED", f"{change}: {flips}.\n{_listed('lost', case.lost)}"
    if case.odd:
        return "INCONCLUSIVE", f"{change}: {flips}.\n{_DISAGREE}"
    if better <= alpha:
        return "IMPROVED", f"{change}: {flips}."
    if net_loss(lost, won, case.items, confidence)[1] <= case.rule.margin:
        return "OK", f"{change}: {flips}." if lost + won else f"{change}: no item was lost or won."
    ruled = f"That does not rule out a loss of {100 * case.rule.margin:.2g} points; more items would."
    return "INCONCLUSIVE", f"{change}: {flips}.\n{ruled}"


def _row_of_numbers(case: Answered, note: str) -> Row:
    """Judge random weights, which answer by chance: the same inputs have to give the same numbers."""
    verdict: Verdict
    if (floor := below_floor(case.result, case.rule)) is not None:
        verdict, reason = "REGRESSED", floor
    elif case.difference is None:
        verdict, reason = "INCONCLUSIVE", "the baseline has no log-likelihoods to compare those of random weights with."
    elif _foreign(case):
        verdict, reason = _of_foreign(case)
        reason += f"\n{note}" if note else ""
    elif case.largest is not None and case.largest > case.allowed_largest:
        # No answer tells of a kernel that is wrong for some inputs only.
        verdict, reason = _told_foreign(case, f"differ by up to {_share(case.largest)}", case.allowed_largest)
        reason += f"\n{note}" if note else ""
    else:
        verdict = "OK"
        reason = f"log-likelihoods of random weights are the baseline's (typically within {case.difference:.1e})."
    return Row.of(case.result, "accuracy", verdict, reason, gated=case.rule.gate)


def _scored(result: CaseResult) -> list[Accuracy]:
    return [launch.accuracy for launch in result.launches if launch.accuracy is not None]


def _typical(scored: Sequence[Accuracy], metric: str) -> Accuracy:
    """Return the answers with the median accuracy, the lower of two."""
    return sorted(scored, key=lambda accuracy: value_of(accuracy, metric))[(len(scored) - 1) // 2]


def _agree(predictions: Sequence[Sequence[int]]) -> bool:
    return all(one == predictions[0] for one in predictions)


def _flips(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return the numbers of the items that are answered otherwise."""
    if before == after:
        return []
    return [number for number, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]


def _difference(before: Accuracy, after: Accuracy) -> float | None:
    """Return the typical difference of log-likelihoods; infinite where only the later ones are not finite."""
    if before.loglikelihoods == after.loglikelihoods:  # of most launches: nothing to decode
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


def _foreign(case: Answered) -> bool:
    return case.difference is not None and case.difference > case.allowed


def _of_foreign(case: Answered) -> tuple[Verdict, str]:
    """Return the verdict on log-likelihoods that are not the baseline's, and the reason."""
    assert case.difference is not None
    if not math.isfinite(case.difference):
        return _told_foreign(case, None, case.allowed)
    return _told_foreign(case, f"typically differ by {_share(case.difference)}", case.allowed)


def _told_foreign(case: Answered, differ: str | None, allowed: float) -> tuple[Verdict, str]:
    """Return verdict and reason; `differ` says by how much they do, None where they are not finite."""
    bar = f"{case.result.case.dtype} explains" if case.rule.difference is None else "the policy allows"
    reason = (
        f"log-likelihoods {differ} from the baseline's, and {bar} {_share(allowed)}"
        if differ is not None
        else "log-likelihoods are not finite, and the baseline's are"
    )
    checks = [result.accuracy_check for result in (case.before, case.result)]
    wrong, mended = (check is not None and check.ok is False for check in checks)
    if wrong and not mended:
        return "IMPROVED", f"{reason}: the baseline's were wrong, by its own check."
    return "REGRESSED", f"{reason}."


def _share(fraction: float) -> str:
    return f"{100 * fraction:.2g} %"


def _listed(word: str, numbers: Sequence[int], most: int = 12) -> str:
    rest = f" and {len(numbers) - most:,} more" if len(numbers) > most else ""
    return f"Items {word}: {', '.join(map(str, numbers[:most]))}{rest}."


def _pct(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"
