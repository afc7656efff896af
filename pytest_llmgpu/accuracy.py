"""Whether a case's answers are still right: which accuracy to hold it against, and the comparison."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence

from pytest_llmgpu.case import Case
from pytest_llmgpu.metrics import upper_bound
from pytest_llmgpu.result import Accuracy, AccuracyCheck, CaseResult

__all__ = [
    "baseline",
    "check",
    "check_accuracy",
    "check_batch_size",
    "check_dummy",
    "decode",
    "measured",
    "reference",
    "value_of",
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
_DUMMY_TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Largest rounding, as a fraction of |log-likelihood|, that padding and kernels of another batch shape may cause."""

_CHANCE_BAR = 0.01
"""Largest probability that is not put down to chance."""

_ROUNDING = 1e-9  # a bar exactly the tolerance below may be a hair above it in binary


def baseline(
    *, given: float | None, metric: str, model: str, dataset: str, limit: int | None, load_format: str = "auto"
) -> tuple[float, str] | None:
    """Return the accuracy to hold a model against, as a fraction, and where it comes from; None where none is known.

    The given value wins, then the bundled model's registered one, then the published one of a known hub id, which
    holds for `acc_norm` on the whole of HellaSwag only. Dummy weights have no accuracy.
    """
    if load_format == "dummy":
        return None
    if given is not None:
        return given, "--llmgpu-accuracy-baseline"
    if model == dataset == "bundled":
        from pytest_llmgpu.bundled import ACCURACY

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


def check_dummy(loglikelihoods: str, smallest: CaseResult | None, dtype: str) -> AccuracyCheck:
    """Compare log-likelihoods of random weights with those of the series' smallest completed batch size.

    Random weights answer by chance, but the same inputs must get the same numbers at every batch size.

    Args:
        loglikelihoods: base64 of float32, as in `Accuracy`.
        smallest: that other result, None where this one is the smallest.
        dtype: dtype of the weights, which decides the tolerance.

    Raises:
        ValueError: unknown dtype.
    """
    if dtype not in _DUMMY_TOLERANCES:
        raise ValueError(f"dtype {dtype!r}: allowed are {', '.join(_DUMMY_TOLERANCES)}")
    tolerance = _DUMMY_TOLERANCES[dtype]
    values = decode(loglikelihoods)
    expected = _measured_loglikelihoods(smallest) if smallest else values
    assert len(values) == len(expected), "cases of one series score the same endings"

    largest: float | None = None
    ok: bool | None = None
    if not_finite := sum(not math.isfinite(value) for value in values):
        ok, text = False, f"{not_finite:,} of {len(values):,} log-likelihoods of dummy weights are not finite"
    elif smallest is None:
        text = "dummy weights: the log-likelihoods of larger batch sizes are compared with this one's"
    elif not all(map(math.isfinite, expected)):
        ok, text = False, f"log-likelihoods of dummy weights cannot be compared: not all of {smallest.id} are finite"
    else:
        # `or 1.0`: two zeros agree
        differences = (abs(a - b) / (abs(b) or abs(a) or 1.0) for a, b in zip(values, expected, strict=True))
        largest = max(differences, default=0.0)
        ok = largest <= tolerance
        text = (
            f"log-likelihoods of dummy weights differ by up to {largest:.1e} from {smallest.id}'s; "
            f"{dtype} allows {tolerance:g}"
        )
    return AccuracyCheck(
        metric=_DUMMY_METRIC,
        value=largest,
        baseline=None if largest is None else 0.0,
        source=smallest.id if smallest else None,
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
        earlier: results of the same session, for what dummy weights are compared with.
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
    if case.load_format == "dummy":
        smallest = reference(result, earlier)
        checks = [check_dummy(accuracy.loglikelihoods, smallest, case.dtype) for accuracy in accuracies]
        return max(checks, key=lambda one: (one.ok is False, one.value or 0.0))
    known = baseline(
        given=given,
        metric=metric,
        model=case.model,
        dataset=case.dataset,
        limit=case.limit,
        load_format=case.load_format,
    )
    worst = min(accuracies, key=lambda accuracy: value_of(accuracy, metric))
    smallest = reference(result, earlier)
    if known is None and smallest is not None:
        return check_batch_size(worst, smallest, metric=metric, tolerance=tolerance)
    return check_accuracy(worst, known, metric=metric, tolerance=tolerance, case=case)


def check_batch_size(accuracy: Accuracy, smallest: CaseResult, *, metric: str, tolerance: float) -> AccuracyCheck:
    """Compare with the smallest batch size where no baseline is known: a larger one must not cost answers.

    It fails where more than `tolerance` is lost and chance does not explain it: the exact sign test on the items whose
    prediction differs, one-sided, at 1 %. A difference that is wrong both times counts for chance. Where nothing is
    lost the accuracy itself is still unchecked.
    """
    before = measured(smallest)
    assert before is not None, "`reference` gives scored results only"
    value, expected = value_of(accuracy, metric), value_of(before, metric)
    lost = round((expected - value) * accuracy.items)
    column = "predictions" if metric == "acc" else "predictions_norm"
    pairs = zip(getattr(accuracy, column), getattr(before, column), strict=True)
    differing = max(lost, sum(one != other for one, other in pairs))
    bad = expected - value > tolerance + _ROUNDING and _by_chance(lost, differing) < _CHANCE_BAR
    text = f"accuracy ({metric}) is {_pct(value)}, and {_pct(expected)} at batch size {smallest.case.batch_size}"
    return AccuracyCheck(
        metric=metric,
        value=value,
        baseline=expected,
        source=smallest.id,
        tolerance=tolerance,
        ok=False if bad else None,
        text=text,
    )


def _by_chance(lost: int, differing: int) -> float:
    """Return how likely it is that of so many differing items at least so many more were lost than won by chance."""
    at_least = (differing + lost + 1) // 2
    return sum(math.comb(differing, count) for count in range(at_least, differing + 1)) / (1 << differing)


def reference(result: CaseResult, earlier: Sequence[CaseResult]) -> CaseResult | None:
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


def measured(result: CaseResult) -> Accuracy | None:
    """Return the accuracy record of the first launch that has one."""
    return next((launch.accuracy for launch in result.launches if launch.accuracy is not None), None)


def decode(loglikelihoods: str) -> array[float]:
    """Return the numbers behind `Accuracy.loglikelihoods`."""
    values = array("f")
    values.frombytes(base64.b64decode(loglikelihoods))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def value_of(accuracy: Accuracy, metric: str) -> float:
    """Return `acc` or `acc_norm` by name; ValueError for another name."""
    if metric not in ("acc", "acc_norm"):
        raise ValueError(f"accuracy metric {metric!r}: allowed are acc, acc_norm")
    return accuracy.acc if metric == "acc" else accuracy.acc_norm


def _measured_loglikelihoods(result: CaseResult) -> array[float]:
    accuracy = measured(result)
    assert accuracy is not None, "`reference` gives scored results only"
    return decode(accuracy.loglikelihoods)


def _pct(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
