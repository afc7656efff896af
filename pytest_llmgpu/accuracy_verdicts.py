"""Whether answers got worse: the items that flipped, by McNemar's exact test, and the floor under the accuracy.

A model that is sure of its answers keeps them under a wrong kernel, and random weights answer by chance: therefore the
log-likelihoods are compared too, and those of random weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pytest_llmgpu.comparison import by_chance, written
from pytest_llmgpu.metrics import decode, explained, predictions_of, typical_difference, value_of
from pytest_llmgpu.policy import AccuracyRule
from pytest_llmgpu.result import Accuracy, CaseResult
from pytest_llmgpu.statistics import holm, net_loss
from pytest_llmgpu.verdicts import Row, Verdict

__all__ = ["Answered", "answered", "below_floor", "predictions_row", "rows"]

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
    """Typical difference of the log-likelihoods, as a fraction of the baseline's; None where a side's are not known."""

    @property
    def by_chance(self) -> bool:
        """Whether the answers are: those of random weights."""
        return self.result.case.load_format == "dummy"

    @property
    def allowed(self) -> float:
        """The largest difference that is let pass."""
        return explained(self.result.case.dtype) if self.rule.difference is None else self.rule.difference


def answered(base: CaseResult, head: CaseResult, rule: AccuracyRule) -> Answered | Row | str:
    """Compare the answers of two results of one case: of the launch with the typical accuracy on each side.

    Returns:
        What `rows` judges; a row where comparing is impossible; or, in a few words, why there is nothing to compare.
    """
    then, now = typical(base, rule.metric), typical(head, rule.metric)
    if now is None and then is not None:
        return Row.of(head, "accuracy", "MISSING", "only the baseline scored items.", gated=rule.gate)
    if then is None or now is None:
        return "accuracy is new" if now is not None else "no items were scored"
    before, after = predictions_of(then, rule.metric), predictions_of(now, rule.metric)
    labels = now.labels or then.labels
    if len(before) != len(after) or (labels is not None and len(labels) != len(after)):
        return Row.of(head, "accuracy", "NOT_COMPARABLE", "the numbers of scored items differ.", gated=rule.gate)
    flips = [] if before == after else [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    lost = [number for number in flips if labels is not None and before[number] == labels[number]]
    won = [number for number in flips if labels is not None and after[number] == labels[number]]
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
        _difference(then, now),
    )


def typical(result: CaseResult, metric: str) -> Accuracy | None:
    """Return the answers of the launch with the median accuracy, the lower of two; None where none scored."""
    scored = [launch.accuracy for launch in result.launches if launch.accuracy is not None]
    if not scored:
        return None
    if len(scored) == 1:
        return scored[0]
    return sorted(scored, key=lambda accuracy: value_of(accuracy, metric))[(len(scored) - 1) // 2]


def below_floor(result: CaseResult, rule: AccuracyRule) -> str | None:
    """Return in a sentence how the answers are wrong whatever the baseline's are; None where they are not."""
    accuracy = typical(result, rule.metric)
    if accuracy is not None and rule.floor is not None and result.case.load_format != "dummy":
        value = value_of(accuracy, rule.metric)
        if value < rule.floor - _ROUNDING:
            return f"accuracy ({rule.metric}) is {_pct(value)}, below the policy's floor of {_pct(rule.floor)}."
    check = result.accuracy_check
    return f"{check.text}." if check is not None and check.ok is False else None


def rows(cases: Sequence[Answered], confidence: float, note: str) -> list[Row]:
    """Judge the answers of all cases as one family.

    p is McNemar's, exact and one-sided: of at least so many lost among the items lost or won, by even odds, adjusted
    over the cases by Holm's method. REGRESSED where it is at most 1 - confidence or where the answers are below a
    floor, IMPROVED likewise for items won, OK where a loss of the margin is ruled out, else INCONCLUSIVE.

    Log-likelihoods that differ by more than rounding explains are REGRESSED whatever the answers are; IMPROVED where
    the baseline's own check says that its answers were wrong, and the candidate's does not.
    """
    tested = [case for case in cases if not case.by_chance]
    worse = holm([by_chance(len(case.lost), len(case.won)) for case in tested])
    better = holm([by_chance(len(case.won), len(case.lost)) for case in tested])
    chances = iter(zip(worse, better, strict=True))
    return [
        _row_of_numbers(case, note) if case.by_chance else _row(case, *next(chances), confidence, note)
        for case in cases
    ]


def predictions_row(case: Answered, *, gated: bool) -> Row:
    """Judge whether any item is answered otherwise, for the better or not."""
    flipped = len(case.lost) + len(case.won) + case.other
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


def _row(case: Answered, worse: float, better: float, confidence: float, note: str) -> Row:
    lost, won, rule, alpha = len(case.lost), len(case.won), case.rule, 1 - confidence
    low, high = net_loss(lost, won, case.items, confidence)
    change = f"accuracy ({rule.metric}) is {_pct(case.head)}, was {_pct(case.base)}"
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
    elif not case.labelled:
        verdict = "INCONCLUSIVE" if case.other else "OK"
        reason = f"{case.other:,} of {case.items:,} items are answered otherwise; the right answers were not kept."
    elif worse <= alpha:
        verdict, reason = "REGRESSED", f"{change}: {flips}.\n{_listed('lost', case.lost)}"
    elif better <= alpha:
        verdict, reason = "IMPROVED", f"{change}: {flips}."
    elif high <= rule.margin:
        verdict = "OK"
        reason = f"{change}: {flips}." if lost + won else f"{change}: no item was lost or won."
    else:
        verdict = "INCONCLUSIVE"
        reason = (
            f"{change}: {flips}.\nThat does not rule out a loss of {100 * rule.margin:.2g} points; more items would."
        )
    if note and verdict in {"REGRESSED", "IMPROVED"} and "\n" not in reason:
        reason += f"\n{note}"
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
        lost=case.lost,
        won=case.won,
    )


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
    else:
        verdict = "OK"
        reason = f"log-likelihoods of random weights are the baseline's (typically within {case.difference:.1e})."
    return Row.of(case.result, "accuracy", verdict, reason, gated=case.rule.gate)


def _difference(before: Accuracy, after: Accuracy) -> float | None:
    """Return the typical difference of log-likelihoods; infinite where only the later ones are not finite."""
    if before.loglikelihoods == after.loglikelihoods:
        return 0.0 if before.loglikelihoods else None
    expected, values = decode(before.loglikelihoods), decode(after.loglikelihoods)
    if not expected or len(expected) != len(values) or not all(map(math.isfinite, expected)):
        return None
    return typical_difference(values, expected) if all(map(math.isfinite, values)) else math.inf


def _foreign(case: Answered) -> bool:
    return case.difference is not None and case.difference > case.allowed


def _of_foreign(case: Answered) -> tuple[Verdict, str]:
    """Return the verdict on log-likelihoods that are not the baseline's, and the reason."""
    assert case.difference is not None
    bar = f"{case.result.case.dtype} explains" if case.rule.difference is None else "the policy allows"
    reason = (
        f"log-likelihoods typically differ by {100 * case.difference:.2g} % from the baseline's, and {bar} "
        f"{100 * case.allowed:.2g} %"
        if math.isfinite(case.difference)
        else "log-likelihoods are not finite, and the baseline's are"
    )
    checks = [result.accuracy_check for result in (case.before, case.result)]
    wrong, mended = (check is not None and check.ok is False for check in checks)
    if wrong and not mended:
        return "IMPROVED", f"{reason}: the baseline's were wrong, by its own check."
    return "REGRESSED", f"{reason}."


def _listed(word: str, numbers: Sequence[int], most: int = 12) -> str:
    rest = f" and {len(numbers) - most:,} more" if len(numbers) > most else ""
    return f"Items {word}: {', '.join(map(str, numbers[:most]))}{rest}."


def _pct(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"
