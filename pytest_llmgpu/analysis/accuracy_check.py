"""Checks whether the answers of a case are still right: `decide` compares the accuracy, `describe` words the result."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pytest_llmgpu.analysis import reference
from pytest_llmgpu.analysis.sign_test import by_chance
from pytest_llmgpu.report.case import DEFAULT_TASK, REFERENCE_STRATEGY, Case
from pytest_llmgpu.report.derived import (
    LOGLIKELIHOOD_TOLERANCES,
    decode,
    explained,
    measured,
    typical_difference,
    upper_bound,
    value_of,
)
from pytest_llmgpu.report.result import Accuracy, AccuracyCheck, CaseResult, CheckedMetric
from pytest_llmgpu.report.text import percent

_PUBLISHED = {"7b": ("7B", 0.761), "13b": ("13B", 0.792), "30b": ("33B", 0.828), "65b": ("65B", 0.842)}
"""Size in hub ids to the name and the HellaSwag accuracy in table 3 of "LLaMA: Open and Efficient Foundation Language
Models", zero-shot, normalised by length. 33B was named 30b when its weights came out."""

_HUB_IDS = {
    "huggyllama/llama-{}": ("7b", "13b", "30b", "65b"),
    "decapoda-research/llama-{}-hf": ("7b", "13b", "30b", "65b"),
    "elinas/llama-{}-hf-transformers-4.29": ("7b", "13b", "30b", "65b"),
    "yahma/llama-{}-hf": ("7b", "13b"),
    "baffo32/decapoda-research-llama-{}-hf": ("7b",),
    "luodian/llama-{}-hf": ("7b",),
}
_SIZE_BY_HUB_ID = {hub_id.format(size): size for hub_id, sizes in _HUB_IDS.items() for size in sizes}

_DUMMY_METRIC = "loglikelihood_relative_difference"
_BY_CHANCE = 0.01
"""A loss of items that is less likely than this is not explained by chance."""

_ROUNDING = 1e-9  # a value exactly at its threshold may be slightly below it in binary
_PLAIN = 0.001  # smaller fractions need more digits than a percentage with one decimal


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Log-likelihoods that are not those of the model."""

    source: str | None
    """Id of the case that has the right ones; None for those that are registered for the bundled model."""
    typical_difference: float | None
    """Sum of all differences as a fraction of the sum of the right ones; None where some are not finite."""
    allowed: float
    """The largest typical difference that rounding explains."""
    dtype: str
    """The dtype of the weights, which decides what is allowed."""


class Decision(CheckedMetric, frozen=True, kw_only=True):
    """The result of a check as data; `describe` words it."""

    case: Case
    """The case that was checked."""
    items: int = 0
    """Number of items that were scored."""
    upper_bound: float | None = None
    """One-sided 95 % upper bound of the value, where only the first items of a dataset were scored."""
    other: Case | None = None
    """The case compared with, where the baseline is that of another case."""
    loglikelihoods: int = 0
    """Number of log-likelihoods of dummy weights."""
    not_finite: int = 0
    """How many of these are not finite."""
    mismatch: Mismatch | None = None
    """Log-likelihoods that fail the check although the answers pass."""


def check(
    result: CaseResult, earlier: Sequence[CaseResult], *, given: float | None, metric: str, tolerance: float
) -> AccuracyCheck | None:
    """Return the check of a result as the report holds it; see `decide` for the arguments."""
    decision = decide(result, earlier, given=given, metric=metric, tolerance=tolerance)
    if decision is None:
        return None
    figures = {name: getattr(decision, name) for name in CheckedMetric.__struct_fields__}
    return AccuracyCheck(**figures, text=describe(decision))


def decide(
    result: CaseResult, earlier: Sequence[CaseResult], *, given: float | None, metric: str, tolerance: float
) -> Decision | None:
    """Check a result in the way that fits its weights.

    Args:
        result: The case to check. If it has several launches, the worst one counts.
        earlier: Results of the same session; dummy weights and a model without a baseline are compared with these.
        given: `--llmgpu-accuracy-baseline`, a fraction.
        metric: `acc` or `acc_norm`.
        tolerance: How far below the baseline a value still passes, a fraction.

    Returns:
        The decision; None for a result that did not complete or scored nothing.

    Raises:
        ValueError: The metric is unknown.
    """
    accuracies = result.accuracies
    if result.outcome != "completed" or not accuracies:
        return None
    case = result.case
    mp, smallest = reference.reference(result, earlier), smallest_batch_size(result, earlier)
    if case.load_format == "dummy":
        decisions = [decide_dummy(accuracy.loglikelihoods, mp or smallest, case) for accuracy in accuracies]
        found = max(decisions, key=lambda one: (one.ok is False, one.value or 0.0))
        if found.ok and mp is None and case.strategy != REFERENCE_STRATEGY:
            # Batch sizes that are wrong in the same way agree with each other.
            return msgspec.structs.replace(found, ok=None)
        return found
    known = baseline(case, given=given, metric=metric)
    worst = min(accuracies, key=lambda accuracy: value_of(accuracy, metric))
    others = [other for other in (mp, smallest) if other is not None]
    if known is None and others:
        decisions = [_decide_by_case(worst, case, other, metric=metric, tolerance=tolerance) for other in others]
        found = next((one for one in decisions if one.ok is False), decisions[0])
    else:
        found = _decide_by_baseline(worst, case, known, metric=metric, tolerance=tolerance)
    if found.ok is not False and (mismatch := decide_mismatch(result, mp, smallest)) is not None:
        return msgspec.structs.replace(found, ok=False, mismatch=mismatch)
    return found


def baseline(case: Case, *, given: float | None, metric: str) -> tuple[float, str] | None:
    """Return the accuracy that trained weights should reach, as a fraction, and its source; None if none is known.

    The given value comes first, then the registered one of the bundled model, then the published one of a known hub
    id, which holds only for `acc_norm` on the whole of HellaSwag; the last two are known for the default task.
    """
    if given is not None:
        return given, "--llmgpu-accuracy-baseline"
    if case.task != DEFAULT_TASK:
        return None
    if case.model == case.dataset == "bundled":
        from pytest_llmgpu.inference.bundled import ACCURACY

        return ACCURACY[metric], "registered for the bundled model"
    size = _SIZE_BY_HUB_ID.get(case.model.lower())
    if size and metric == "acc_norm" and case.dataset == "hellaswag" and case.limit is None:
        name, value = _PUBLISHED[size]
        return value, f"published for LLaMA {name}"
    return None


def _decide_by_baseline(
    accuracy: Accuracy, case: Case, known: tuple[float, str] | None, *, metric: str, tolerance: float
) -> Decision:
    """Compare an accuracy with its baseline.

    On the whole dataset the value may be `tolerance` below. On the first items of a dataset it may also be below by
    chance: the check fails if even the one-sided 95 % upper bound of the value is too low.
    """
    value = value_of(accuracy, metric)
    expected, source = known or (None, None)
    bound = upper_bound(value, accuracy.items) if case.limit else None
    best_case = value if bound is None else bound
    return Decision(
        metric=metric,
        value=value,
        baseline=expected,
        source=source,
        tolerance=tolerance,
        ok=None if expected is None else best_case >= expected - tolerance - _ROUNDING,
        case=case,
        items=accuracy.items,
        upper_bound=bound,
    )


def _decide_by_case(accuracy: Accuracy, case: Case, other: CaseResult, *, metric: str, tolerance: float) -> Decision:
    """Compare an accuracy with that of another case, where no baseline is known: of mp or of the smallest batch size.

    The check fails if more than `tolerance` is lost and chance does not explain it: the exact sign test on the items
    that were lost or won, one-sided, at 1 %. Without labels every item counts whose prediction differs. If nothing is
    lost, the accuracy itself is still unchecked.
    """
    before = measured(other)
    assert before is not None, "only a scored result is compared with"
    value, expected = value_of(accuracy, metric), value_of(before, metric)
    exact = reference.lost_and_won(accuracy, before, metric)
    if exact is None:
        net = round((expected - value) * accuracy.items)
        differing = max(abs(net), len(reference.flipped(accuracy, before, metric)))
        exact = (differing + net + 1) // 2, (differing - net) // 2
    bad = expected - value > tolerance + _ROUNDING and by_chance(*exact) < _BY_CHANCE
    return Decision(
        metric=metric,
        value=value,
        baseline=expected,
        source=other.id,
        tolerance=tolerance,
        ok=False if bad else None,
        case=case,
        items=accuracy.items,
        other=other.case,
    )


def decide_dummy(loglikelihoods: str, other: CaseResult | None, case: Case) -> Decision:
    """Compare log-likelihoods of random weights with those of another case: of mp or of the smallest batch size.

    Random weights answer by chance, but the same inputs must get the same log-likelihoods from every strategy and at
    every batch size.

    Args:
        loglikelihoods: Base64 of float32, as in `Accuracy`.
        other: The other case; None where this one is the one that others are compared with.
        case: The case that is checked; its dtype decides the tolerance.

    Raises:
        ValueError: The dtype is unknown.
    """
    if case.dtype not in LOGLIKELIHOOD_TOLERANCES:
        raise ValueError(f"dtype {case.dtype!r}: allowed are {', '.join(LOGLIKELIHOOD_TOLERANCES)}")
    tolerance = LOGLIKELIHOOD_TOLERANCES[case.dtype]
    values = decode(loglikelihoods)
    not_finite = sum(not math.isfinite(value) for value in values)
    largest: float | None = None
    ok: bool | None = False if not_finite else None
    if other is not None and not not_finite:
        before = measured(other)
        assert before is not None, "only a scored result is compared with"
        largest = reference.largest_difference(loglikelihoods, before.loglikelihoods)
        ok = largest is not None and largest <= tolerance
    return Decision(
        metric=_DUMMY_METRIC,
        value=largest,
        baseline=None if largest is None else 0.0,
        source=other.id if other else None,
        tolerance=tolerance,
        ok=ok,
        case=case,
        other=other.case if other else None,
        loglikelihoods=len(values),
        not_finite=not_finite,
    )


def decide_mismatch(result: CaseResult, mp: CaseResult | None, smallest: CaseResult | None) -> Mismatch | None:
    """Compare log-likelihoods with those of mp, else with those of the bundled model, else of the smallest batch size.

    A model that is confident keeps its answers under a wrong kernel: the bundled one does with DeepSpeed's residual
    added twice, which changes its log-likelihoods by 10 %. Rounding is a thousandth of that.

    Returns:
        None where rounding explains the difference, and where there is nothing to compare with.
    """
    case = result.case
    if case.load_format == "dummy":
        return None
    if mp is None and case.model == case.dataset == "bundled" and case.task == DEFAULT_TASK:
        from pytest_llmgpu.inference import bundled

        source, expected = None, bundled.loglikelihoods()
    elif (other := mp or smallest) is not None and (before := measured(other)) is not None:
        source, expected = other.id, decode(before.loglikelihoods)
    else:
        return None
    allowed = explained(case.dtype)
    for accuracy in result.accuracies:
        values = decode(accuracy.loglikelihoods)
        if len(values) > len(expected):
            return None  # another file than the bundled one is named `bundled`
        finite = all(map(math.isfinite, values))
        typical = typical_difference(values, expected[: len(values)]) if finite else None
        if typical is None or typical > allowed:
            return Mismatch(source=source, typical_difference=typical, allowed=allowed, dtype=case.dtype)
    return None


def describe(decision: Decision) -> str:
    """Return the result of a check in one sentence, without a capital and a full stop."""
    text = _describe_dummy(decision) if decision.metric == _DUMMY_METRIC else _describe_accuracy(decision)
    return text if decision.mismatch is None else f"{describe_mismatch(decision.mismatch)}, although {text}"


def describe_mismatch(mismatch: Mismatch) -> str:
    """Return how far log-likelihoods are from the right ones, without a capital and a full stop."""
    if mismatch.typical_difference is None:
        return "log-likelihoods are not finite"
    source = "registered for the bundled model" if mismatch.source is None else f"of {mismatch.source}"
    return (
        f"log-likelihoods typically differ by {percent(mismatch.typical_difference)} from those {source}; "
        f"{mismatch.dtype} allows {percent(mismatch.allowed)}"
    )


def _describe_accuracy(decision: Decision) -> str:
    assert decision.value is not None, "only dummy weights may have no value"
    text = f"accuracy ({decision.metric}) is {percent(decision.value)}"
    if decision.other is not None and decision.baseline is not None:
        return f"{text}; {decision.source} has {percent(decision.baseline)}"
    if decision.case.limit:
        text += f" on the first {decision.items:,} items"
    if decision.baseline is None:
        return f"{text}; no baseline is known for {decision.case.model} on {decision.case.dataset}"
    if decision.upper_bound is not None:
        text += f" (95 % upper bound {percent(decision.upper_bound)})"
    verb = "; the baseline is"
    if decision.ok is False and decision.mismatch is None:
        verb = f", {100 * (decision.baseline - decision.value):.1f} points below the baseline of"
    return f"{text}{verb} {percent(decision.baseline)} ({decision.source}, tolerance {decision.tolerance:g})"


def _describe_dummy(decision: Decision) -> str:
    if decision.not_finite:
        return f"{decision.not_finite:,} of {decision.loglikelihoods:,} log-likelihoods of dummy weights are not finite"
    if decision.source is None:
        return "dummy weights: larger batch sizes are compared with the log-likelihoods of this case"
    if decision.value is None:
        return f"log-likelihoods of dummy weights cannot be compared: those of {decision.source} are not all finite"
    difference = percent(decision.value) if decision.value >= _PLAIN else f"{100 * decision.value:.1g} %"
    text = (
        f"log-likelihoods of dummy weights differ by up to {difference} from those of {decision.source}; "
        f"{decision.case.dtype} allows {100 * decision.tolerance:g} %"
    )
    return text if decision.ok is not None else f"{text}, but both may be wrong in the same way"


def smallest_batch_size(result: CaseResult, earlier: Sequence[CaseResult]) -> CaseResult | None:
    """Return the scored result of the same series with the smallest batch size; None if this one is the smallest."""
    candidates = [
        other
        for other in reference.same_series(result, earlier)
        if other.outcome == "completed"
        and measured(other) is not None
        and other.case.batch_size <= result.case.batch_size
    ]
    return min(candidates, key=lambda other: other.case.batch_size, default=None)
