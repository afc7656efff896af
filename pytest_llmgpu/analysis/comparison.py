"""Compares the answers of a case with those of another one: items lost and won, log-likelihoods, and their chance.

Generated texts are compared with those of mp by their log-likelihoods. Equal tokens are not the measure: rounding in
another batch or strategy makes greedy texts diverge, and both are right. The log-likelihoods of the same tokens must
agree: those of the decode steps with those of a forward over prompt and text, which has no KV cache; and, over the
texts of mp, those of any strategy with mp's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice, takewhile

from pytest_llmgpu.analysis.findings import Checked, Fault
from pytest_llmgpu.report.case import REFERENCE_STRATEGY
from pytest_llmgpu.report.derived import (
    LOGLIKELIHOOD_TOLERANCES,
    decode,
    decode_tokens,
    generated,
    measured,
    predictions_of,
    typical_difference,
    value_of,
)
from pytest_llmgpu.report.result import Accuracy, AccuracyCheck, CaseResult, Comparison, Generation
from pytest_llmgpu.report.text import plural

DIFFERENCE = "loglikelihood_relative_difference"
"""The metric of a check of random weights or of texts."""

_LEAST_PER_TOKEN = 1.0
"""A text counts as at least so unlikely for each token: rounding of a text that is almost certain is no large part of
its log-likelihood."""


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


def check_texts(result: CaseResult, mp: CaseResult | None) -> Checked | None:
    """Check the texts of a case by their log-likelihoods, and by those of the texts of mp where it scored them, too.

    The check neither passes nor fails where nothing independent was there to compare with. It is None for a result that
    did not complete or generated nothing.
    """
    launches = [launch.generation for launch in result.launches if launch.generation is not None]
    if result.outcome != "completed" or not launches:
        return None
    texts, tolerance = plural(len(launches[0].new_tokens), "text"), LOGLIKELIHOOD_TOLERANCES[result.case.dtype]
    again = [(one, one.prefill_loglikelihoods) for one in launches if one.prefill_loglikelihoods is not None]
    value: float | None = None
    source: str | None = None
    ok: bool | None = None
    fault: Fault | None = None
    if len(again) < len(launches):
        reasons = [launch.why["generation"] for launch in result.launches if "generation" in launch.why]
        text = f"{texts} are unchecked: {next(iter(reasons), 'no reason was recorded')}"
    else:
        of_mp = None if mp is None else generated(mp)
        foreign = [far for one in launches if (far := _from_reference(one, of_mp)) is not None]
        own, reference = _worst([_largest(one.loglikelihoods, right, one) for one, right in again]), _worst(foreign)
        value = own
        ok = own is not None and own <= tolerance
        fault = None if ok else "cache"
        text = f"log-likelihoods of {texts} {_differ(own)} between decode steps and a forward without a KV cache"
        text += f"; {100 * tolerance:g} % is allowed"
        if mp is not None and foreign:
            value, source = _worst([own, reference]), mp.id
            text += f"; over the texts of {mp.id} they {_differ(reference)} from its own"
            if ok and (reference is None or reference > tolerance):
                ok, fault = False, "strategy"
        elif result.case.strategy != REFERENCE_STRATEGY:
            ok = None if ok else False
            text += f"; {REFERENCE_STRATEGY} generated no texts in this run, so that both may be wrong in the same way"
    found = AccuracyCheck(
        metric=DIFFERENCE, value=value, baseline=0.0, source=source, tolerance=tolerance, ok=ok, text=text
    )
    return Checked(found, fault)


def compare_texts(result: CaseResult, mp: CaseResult) -> Comparison:
    """Compare the texts of a result with those of mp, and its log-likelihoods of mp's texts with mp's own."""
    own, of_mp = generated(result), generated(mp)
    assert own is not None, "only generated texts are compared"
    assert of_mp is not None, "only generated texts are compared with"
    pairs = list(zip(_texts(own), _texts(of_mp), strict=True))
    equal = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*pair, strict=True))) for pair in pairs]
    diverged = [number for number, count in enumerate(equal) if count < own.new_tokens[number]]
    scored, expected = own.reference_loglikelihoods, of_mp.prefill_loglikelihoods
    largest = _worst([_from_reference(own, of_mp)])
    return Comparison(
        reference=mp.id,
        items=len(pairs),
        flipped=diverged,
        first_difference=min((equal[number] for number in diverged), default=None),
        lost=None,
        won=None,
        mcnemar_p=None,
        largest_difference=largest,
        typical_difference=None
        if scored is None or expected is None or largest is None
        else typical_difference(decode(scored), decode(expected)),
    )


def _from_reference(generation: Generation, of_mp: Generation | None) -> float | None:
    """Return the largest difference over the texts of mp; NaN where a number is not finite, None without the texts."""
    if of_mp is None or of_mp.prefill_loglikelihoods is None or generation.reference_loglikelihoods is None:
        return None
    found = _largest(generation.reference_loglikelihoods, of_mp.prefill_loglikelihoods, of_mp)
    return math.nan if found is None else found


def _largest(loglikelihoods: str, expected: str, texts: Generation) -> float | None:
    """Return the largest difference of the log-likelihood of a text, as a fraction; None where one is not finite."""
    found, right, largest = iter(decode(loglikelihoods)), iter(decode(expected)), 0.0
    for tokens in texts.new_tokens:
        own, other = math.fsum(islice(found, tokens)), math.fsum(islice(right, tokens))
        if not (math.isfinite(own) and math.isfinite(other)):
            return None
        largest = max(largest, abs(own - other) / max(abs(other), _LEAST_PER_TOKEN * tokens))
    return largest


def _worst(differences: Sequence[float | None]) -> float | None:
    """Return the largest difference; None without one, and where one is not finite."""
    known = [difference for difference in differences if difference is not None and math.isfinite(difference)]
    return max(known) if known and len(known) == len(differences) else None


def _texts(generation: Generation) -> list[list[int]]:
    tokens = iter(decode_tokens(generation.tokens))
    return [list(islice(tokens, count)) for count in generation.new_tokens]


def _differ(difference: float | None) -> str:
    return "are not all finite" if difference is None else f"differ by at most {100 * difference:.2g} %"
