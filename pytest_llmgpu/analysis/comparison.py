"""Compares the answers of a case with those of another one: items lost and won, log-likelihoods, and their chance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_llmgpu.analysis.generated_texts import compare_texts
from pytest_llmgpu.report.derived import decode, measured, predictions_of, typical_difference, value_of
from pytest_llmgpu.report.result import Accuracy, CaseResult, Comparison


def compare(result: CaseResult, mp: CaseResult, metric: str) -> Comparison:
    """Compare the answers of a result with those of its reference: predictions of the metric, or texts.

    If the result has several launches, the one with the fewest right answers counts, and the largest difference.
    """
    if result.case.generates:
        return compare_texts(result, mp)
    before, accuracies = measured(mp), result.accuracies
    assert before is not None, "a reference is a scored result"
    worst = min(accuracies, key=lambda accuracy: value_of(accuracy, metric))
    lost, won = lost_and_won(worst, before, metric) or (None, None)
    differences = [largest_difference(accuracy.loglikelihoods, before.loglikelihoods) for accuracy in accuracies]
    finite = [difference for difference in differences if difference is not None]
    typical = None
    if len(finite) == len(differences):
        expected = decode(before.loglikelihoods)
        typical = max(typical_difference(decode(accuracy.loglikelihoods), expected) for accuracy in accuracies)
    return Comparison(
        reference=mp.id,
        items=worst.items,
        flipped=differing(predictions_of(before, metric), predictions_of(worst, metric)),
        lost=lost,
        won=won,
        mcnemar_p=None if lost is None or won is None else mcnemar(lost, won),
        largest_difference=None if typical is None else max(finite),
        typical_difference=typical,
    )


def differing(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return the numbers of the items whose answer changed."""
    if before == after:  # most launches
        return []
    return [number for number, (then, now) in enumerate(zip(before, after, strict=True)) if then != now]


def lost_and_won(accuracy: Accuracy, before: Accuracy, metric: str) -> tuple[int, int] | None:
    """Return how many items were right before and are wrong now, and the reverse; None where labels are missing."""
    if accuracy.labels is None or before.labels is None:
        return None
    now = [one == label for one, label in zip(predictions_of(accuracy, metric), accuracy.labels, strict=True)]
    then = [one == label for one, label in zip(predictions_of(before, metric), before.labels, strict=True)]
    pairs = list(zip(then, now, strict=True))
    return pairs.count((True, False)), pairs.count((False, True))


def largest_difference(loglikelihoods: str, expected: str) -> float | None:
    """Return the largest difference as a fraction of the expected number; None where one is not finite."""
    pairs = list(zip(decode(loglikelihoods), decode(expected), strict=True))
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return None
    # Two zeros agree.
    return max((abs(a - b) / (abs(b) or abs(a) or 1.0) for a, b in pairs), default=0.0)


def by_chance(lost: int, won: int) -> float:
    """Return the exact probability of the one-sided sign test; 1.0 where nothing differs.

    It is the probability that at least `lost` of `lost + won` items are lost if each is lost or won with even odds.
    """
    differ = lost + won
    ways = total = 1  # ways to choose the items that were won: first none, then one more in each step
    for chosen in range(won):
        ways = ways * (differ - chosen) // (chosen + 1)
        total += ways
    return total / (1 << differ)


def mcnemar(lost: int, won: int) -> float:
    """Return the exact two-sided probability of McNemar's test: of a difference of this size by chance."""
    return min(1.0, 2 * by_chance(max(lost, won), min(lost, won)))


def written(probability: float) -> str:
    """Return a probability as text: `p = 0.0039`; the smallest are `p < 1e-06`."""
    return "p < 1e-06" if probability < 1e-6 else f"p = {probability:.2g}"  # noqa: PLR2004 - no test shows less
