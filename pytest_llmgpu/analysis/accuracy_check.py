"""Whether a case's answers are still right: which accuracy to hold it against, and the comparison."""

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
from pytest_llmgpu.report.result import Accuracy, AccuracyCheck, CaseResult

__all__ = [
    "baseline",
    "check",
    "check_accuracy",
    "check_against",
    "check_dummy",
    "check_numbers",
    "foreign_numbers",
    "smallest_batch_size",
]

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
_CHANCE_BAR = 0.01
"""Largest probability that is not put down to chance."""

_ROUNDING = 1e-9  # a bar exactly the tolerance below may be a hair above it in binary


def baseline(
    *,
    given: float | None,
    metric: str,
    model: str,
    dataset: str,
    limit: int | None,
    load_format: str = "auto",
    task: str = DEFAULT_TASK,
) -> tuple[float, str] | None:
    """Return the accuracy to hold a model against, as a fraction, and where it comes from; None where none is known.

    The given value wins, then the bundled model's registered one, then the published one of a known hub id, which
    holds for `acc_norm` on the whole of HellaSwag only; both are for the default task. Dummy weights have no accuracy.
    """
    if load_format == "dummy":
        return None
    if given is not None:
        return given, "--llmgpu-accuracy-baseline"
    if task != DEFAULT_TASK:
        return None
    if model == dataset == "bundled":
        from pytest_llmgpu.inference.bundled import ACCURACY

        return ACCURACY[metric], "registered for the bundled model"
    size = _SIZE_BY_HUB_ID.get(model.lower())
    if size and metric == "acc_norm" and dataset == "hellaswag" and limit is None:
        name, value = _PUBLISHED[size]
        return value, f"published for LLaMA {name}"
    return None


def check_accuracy(
    accuracy: Accuracy, known: tuple[float, str] | None, *, metric: str, tolerance: float, case: Case
) -> AccuracyCheck:
    """Compare an accuracy with its baseline.

    On the whole dataset the value may lie `tolerance` below. On its first items only chance may have put it there:
    it fails where even its one-sided 95 % upper bound lies lower.
    """
    value = value_of(accuracy, metric)
    says = f"accuracy ({metric}) is {_pct(value)}" + (f" on the first {accuracy.items:,} items" if case.limit else "")
    if known is None:
        return AccuracyCheck(
            metric=metric,
            value=value,
            baseline=None,
            source=None,
            tolerance=tolerance,
            ok=None,
            text=f"{says}, and no baseline is known for {case.model} on {case.dataset}",
        )
    expected, source = known
    best_case = upper_bound(value, accuracy.items) if case.limit else value
    ok = best_case >= expected - tolerance - _ROUNDING
    if case.limit:
        says += f" (95 % upper bound {_pct(best_case)})"
    verb = "; the baseline is" if ok else f", {100 * (expected - value):.1f} points below the baseline of"
    text = f"{says}{verb} {_pct(expected)} ({source}, tolerance {tolerance:g})"
    return AccuracyCheck(
        metric=metric, value=value, baseline=expected, source=source, tolerance=tolerance, ok=ok, text=text
    )


def check_dummy(loglikelihoods: str, other: CaseResult | None, dtype: str) -> AccuracyCheck:
    """Compare log-likelihoods of random weights with another case's: mp's, or those of the smallest batch size.

    Random weights answer by chance, but the same inputs must get the same numbers from every strategy and at every
    batch size.

    Args:
        loglikelihoods: base64 of float32, as in `Accuracy`.
        other: that other result, None where this one is what others are compared with.
        dtype: dtype of the weights, which decides the tolerance.

    Raises:
        ValueError: unknown dtype.
    """
    if dtype not in LOGLIKELIHOOD_TOLERANCES:
        raise ValueError(f"dtype {dtype!r}: allowed are {', '.join(LOGLIKELIHOOD_TOLERANCES)}")
    tolerance = LOGLIKELIHOOD_TOLERANCES[dtype]
    values = decode(loglikelihoods)
    largest: float | None = None
    ok: bool | None = None
    if not_finite := sum(not math.isfinite(value) for value in values):
        ok, text = False, f"{not_finite:,} of {len(values):,} log-likelihoods of dummy weights are not finite"
    elif other is None:
        text = "dummy weights: the log-likelihoods of larger batch sizes are compared with this one's"
    else:
        before = measured(other)
        assert before is not None, "only a scored result is compared with"
        largest = reference.largest_difference(loglikelihoods, before.loglikelihoods)
        ok = largest is not None and largest <= tolerance
        text = (
            f"log-likelihoods of dummy weights cannot be compared: not all of {other.id} are finite"
            if largest is None
            else f"log-likelihoods of dummy weights differ by up to {largest:.1e} from {other.id}'s; "
            f"{dtype} allows {tolerance:g}"
        )
    return AccuracyCheck(
        metric=_DUMMY_METRIC,
        value=largest,
        baseline=None if largest is None else 0.0,
        source=other.id if other else None,
        tolerance=tolerance,
        ok=ok,
        text=text,
    )


def check(
    result: CaseResult, earlier: Sequence[CaseResult], *, given: float | None, metric: str, tolerance: float
) -> AccuracyCheck | None:
    """Check a result in the way that suits its weights; None where it did not complete or scored nothing.

    Args:
        result: the case to check. Of several launches the worst one counts.
        earlier: results of the same session, for what dummy weights and a model without a baseline are compared with.
        given: `--llmgpu-accuracy-baseline`, a fraction.
        metric: `acc` or `acc_norm`.
        tolerance: how far below the baseline still passes, a fraction.

    Raises:
        ValueError: unknown metric.
    """
    accuracies = [launch.accuracy for launch in result.launches if launch.accuracy is not None]
    if result.outcome != "completed" or not accuracies:
        return None
    case = result.case
    mp, smallest = reference.reference(result, earlier), smallest_batch_size(result, earlier)
    if case.load_format == "dummy":
        checks = [check_dummy(accuracy.loglikelihoods, mp or smallest, case.dtype) for accuracy in accuracies]
        found = max(checks, key=lambda one: (one.ok is False, one.value or 0.0))
        if found.ok and mp is None and case.strategy != REFERENCE_STRATEGY:
            # What is wrong at every batch size agrees with itself.
            return msgspec.structs.replace(found, ok=None, text=f"{found.text}, but both may be wrong")
        return found
    known = baseline(
        given=given,
        metric=metric,
        model=case.model,
        dataset=case.dataset,
        limit=case.limit,
        load_format=case.load_format,
        task=case.task,
    )
    worst = min(accuracies, key=lambda accuracy: value_of(accuracy, metric))
    others = [other for other in (mp, smallest) if other is not None]
    if known is None and others:
        checks = [check_against(worst, case, other, metric=metric, tolerance=tolerance) for other in others]
        found = next((one for one in checks if one.ok is False), checks[0])
    else:
        found = check_accuracy(worst, known, metric=metric, tolerance=tolerance, case=case)
    return found if found.ok is False else check_numbers(found, result, mp)


def check_numbers(found: AccuracyCheck, result: CaseResult, mp: CaseResult | None) -> AccuracyCheck:
    """Fail what passes by its answers where its log-likelihoods are not those of the model (see `foreign_numbers`)."""
    foreign = foreign_numbers(result, mp)
    if foreign is None:
        return found
    return msgspec.structs.replace(found, ok=False, text=f"{foreign}, although {found.text}")


def foreign_numbers(result: CaseResult, mp: CaseResult | None) -> str | None:
    """Return how far log-likelihoods are from those of mp, or of the bundled model as registered; None for rounding.

    A model that is sure of its answers keeps them under a wrong kernel: the bundled one does with DeepSpeed's residual
    added twice, at 10 % of its log-likelihoods. Rounding stays a thousandth of that.
    """
    case, accuracies = result.case, [launch.accuracy for launch in result.launches if launch.accuracy is not None]
    if case.load_format == "dummy":
        return None
    witness = measured(mp) if mp is not None else None
    if mp is not None and witness is not None:
        whose, expected = f"{mp.id}'s", decode(witness.loglikelihoods)
    elif case.model == case.dataset == "bundled" and case.task == DEFAULT_TASK:
        from pytest_llmgpu.inference import bundled

        whose, expected = "those registered for the bundled model", bundled.loglikelihoods()
    else:
        return None
    allowed = explained(case.dtype)
    for accuracy in accuracies:
        values = decode(accuracy.loglikelihoods)
        if len(values) > len(expected):
            return None  # items of another file that is called like the bundled one
        if not all(map(math.isfinite, values)):
            return "log-likelihoods are not finite"
        typical = typical_difference(values, expected[: len(values)])
        if typical > allowed:
            return (
                f"log-likelihoods typically differ by {_pct(typical)} from {whose}, and {case.dtype} explains "
                f"{_pct(allowed)}"
            )
    return None


def check_against(accuracy: Accuracy, case: Case, other: CaseResult, *, metric: str, tolerance: float) -> AccuracyCheck:
    """Compare with another case where no baseline is known: with mp, and with the smallest batch size.

    It fails where more than `tolerance` is lost and chance does not explain it: the exact sign test on the items that
    were lost or won, one-sided, at 1 %. Without labels every item whose prediction differs counts, those that are
    wrong both times for chance. Where nothing is lost the accuracy itself is still unchecked.
    """
    before = measured(other)
    assert before is not None, "only a scored result is compared with"
    value, expected = value_of(accuracy, metric), value_of(before, metric)
    exact = reference.lost_and_won(accuracy, before, metric)
    if exact is None:
        net = round((expected - value) * accuracy.items)
        differing = max(abs(net), len(reference.flipped(accuracy, before, metric)))
        exact = (differing + net + 1) // 2, (differing - net) // 2
    bad = expected - value > tolerance + _ROUNDING and by_chance(*exact) < _CHANCE_BAR
    elsewhere = (
        f"{_pct(expected)} at batch size {other.case.batch_size}"
        if other.case.strategy == case.strategy
        else f"{other.id}'s is {_pct(expected)}"
    )
    return AccuracyCheck(
        metric=metric,
        value=value,
        baseline=expected,
        source=other.id,
        tolerance=tolerance,
        ok=False if bad else None,
        text=f"accuracy ({metric}) is {_pct(value)}, and {elsewhere}",
    )


def smallest_batch_size(result: CaseResult, earlier: Sequence[CaseResult]) -> CaseResult | None:
    """Return the scored result of the smallest batch size, up to this one's, of the same series; None without one."""
    candidates = [
        other
        for other in earlier
        if other is not result
        and other.outcome == "completed"
        and measured(other) is not None
        and other.case.batch_size <= result.case.batch_size
        and other.case.series == result.case.series
    ]
    return min(candidates, key=lambda other: other.case.batch_size, default=None)


def _pct(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
