"""Checks the accuracy of trained weights: with its baseline, given or published, with mp, and with guessing.

Log-likelihoods are compared, too: a model that is confident keeps its answers under a wrong kernel. Random weights
answer by chance, but with the same log-likelihoods at every batch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_llmgpu.analysis.comparison import (
    DIFFERENCE,
    by_chance,
    differing,
    largest_difference,
    lost_and_won,
    written,
)
from pytest_llmgpu.analysis.findings import (
    NEXT_STEPS,
    Checked,
    Fault,
    finding,
    of_small_workspace,
    small_workspace,
    wrong_answers,
)
from pytest_llmgpu.analysis.reference import missing
from pytest_llmgpu.report.case import DEFAULT_TASK, REFERENCE_STRATEGY, Case
from pytest_llmgpu.report.derived import (
    LOGLIKELIHOOD_TOLERANCES,
    decode,
    explained,
    measured,
    predictions_of,
    typical_difference,
    upper_bound,
    value_of,
)
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.result import Accuracy, AccuracyCheck, CaseResult, Finding
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

_TOLERANCE = 0.01
"""The difference below the baseline that is allowed, as a fraction of the items."""

_BY_CHANCE = 0.01
"""A loss of items that is less likely than this is not explained by chance."""

_PLAIN = 0.001  # smaller fractions need more digits than a percentage with one decimal
_ROUNDING = 1e-9  # a value exactly at its threshold may be slightly below it in binary
_ENOUGH_ITEMS = 50  # on fewer items a trained model may score like guesses


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


def check_accuracy(result: CaseResult, mp: CaseResult | None, smallest: CaseResult | None, options: Options) -> Checked:
    """Compare the accuracy of trained weights with its baseline, else with mp and with the smallest batch size.

    On the whole dataset the value may be the tolerance below the baseline. On the first items of a dataset it may also
    be below by chance: the check fails if even the one-sided 95 % upper bound of the value is too low. Compared with
    another case it neither passes nor fails where nothing is lost: the accuracy itself is still unchecked.
    """
    case, metric, tolerance = result.case, options.accuracy_metric, _TOLERANCE
    worst = min(result.accuracies, key=lambda accuracy: value_of(accuracy, metric))
    value = value_of(worst, metric)
    known = baseline(case, given=options.accuracy_baseline, metric=metric)
    others = [other for other in (mp, smallest) if other is not None]
    mismatch = _mismatch(result, mp, smallest)
    text = f"accuracy ({metric}) is {percent(value)}"
    ok: bool | None = None
    expected: float | None = None
    source: str | None = None
    if known is None and others:
        worse = [other for other in others if _has_lost(worst, other, metric, tolerance)]
        other = (worse or others)[0]
        expected, source, ok = _value(other, metric), other.id, False if worse else None
        text += f"; {other.id} has {percent(expected)}"
    else:
        text += f" on the first {worst.items:,} items" if case.limit else ""
        if known is None:
            text += f"; no baseline is known for {case.model} on {case.dataset}"
        else:
            expected, source = known
            bound = upper_bound(value, worst.items) if case.limit else value
            ok = bound >= expected - tolerance - _ROUNDING
            text += f" (95 % upper bound {percent(bound)})" if case.limit else ""
            text += "; the baseline is" if ok else f", {100 * (expected - value):.1f} points below the baseline of"
            text += f" {percent(expected)} ({source}, tolerance {tolerance:g})"
    if mismatch is not None and ok is not False:
        ok, text = False, f"{mismatch[0]}, although {text}"
    fault: Fault | None = None
    if ok is False:
        fault = "below" if mismatch is None else mismatch[1]
    found = AccuracyCheck(
        metric=metric, value=value, baseline=expected, source=source, tolerance=tolerance, ok=ok, text=text
    )
    return Checked(found, fault)


def _has_lost(accuracy: Accuracy, other: CaseResult, metric: str, tolerance: float) -> bool:
    """Return whether more than the tolerance is lost compared with another case, and chance does not explain it.

    The exact sign test on the items that were lost or won is one-sided, at 1 %. Without labels every item counts whose
    prediction differs.
    """
    before = measured(other)
    assert before is not None, "only a scored result is compared with"
    loss = value_of(before, metric) - value_of(accuracy, metric)
    exact = lost_and_won(accuracy, before, metric)
    if exact is None:
        net = round(loss * accuracy.items)
        differ = max(abs(net), len(differing(predictions_of(before, metric), predictions_of(accuracy, metric))))
        exact = (differ + net + 1) // 2, (differ - net) // 2
    return loss > tolerance + _ROUNDING and by_chance(*exact) < _BY_CHANCE


def _mismatch(result: CaseResult, mp: CaseResult | None, smallest: CaseResult | None) -> tuple[str, Fault] | None:
    """Compare log-likelihoods with those of mp, else with those of the bundled model, else of the smallest batch size.

    The bundled model keeps its answers with DeepSpeed's residual added twice, which changes its log-likelihoods by
    10 %. Rounding is a thousandth of that.

    Returns:
        The difference in words, and its cause; None where rounding explains it or there is nothing to compare with.
    """
    case, other = result.case, mp or smallest
    if mp is None and case.model == case.dataset == "bundled" and case.task == DEFAULT_TASK:
        from pytest_llmgpu.inference import bundled

        source, expected = "registered for the bundled model", bundled.loglikelihoods()
        fault: Fault = "strategy"
    elif other is not None and (before := measured(other)) is not None:
        source, expected = f"of {other.id}", decode(before.loglikelihoods)
        fault = "batch_size" if mp is None else "strategy"
    else:
        return None
    allowed = explained(case.dtype)
    for accuracy in result.accuracies:
        values = decode(accuracy.loglikelihoods)
        if len(values) > len(expected):
            return None  # another file than the bundled one is named `bundled`
        if not all(map(math.isfinite, values)):
            return "log-likelihoods are not finite", fault
        typical = typical_difference(values, expected[: len(values)])
        if typical > allowed:
            differ = f"log-likelihoods typically differ by {percent(typical)} from those {source}"
            return f"{differ}; {case.dtype} allows {percent(allowed)}", fault
    return None


def findings_on_accuracy(
    result: CaseResult, checked: Checked, mp: CaseResult | None, smallest: CaseResult | None
) -> list[Finding]:
    """Return the findings on trained weights.

    A workspace that is too small is the cause of any failure, so that a failure begins with it.
    """
    found, fault, text = checked.check, checked.fault, checked.check.text
    workspace, others = small_workspace(result), [one for one in (smallest, mp) if one is not None]
    chance = _chance(result, found, others, clamped=workspace is not None)
    if fault is not None or chance is not None:
        compared = result.comparison
        if compared is not None and compared.mcnemar_p is not None and compared.mcnemar_p < _BY_CHANCE:
            text += f"; compared with {compared.reference}, {compared.lost:,} items are lost and {compared.won:,} won "
            text += f"({written(compared.mcnemar_p)})"
    if chance is not None:
        fault, cause = _cause(result, found.metric, others, smallest)
        text += f". Guessing gives {percent(chance, 0)}{f': {cause}' if workspace is None else ''}"
    if workspace is not None:
        return [of_small_workspace(workspace, None if fault is None else text)]
    if fault == "inputs" and found.ok is not False:
        return [finding("unchecked-answers", text, NEXT_STEPS[fault])]
    if fault is not None:
        return [wrong_answers(text, result, fault)]
    if found.ok is None and not others:
        step = "Pass --llmgpu-accuracy-baseline=FRACTION, so that wrong answers fail the test."
        return [finding("unchecked-answers", text, step)]
    return []


def _chance(result: CaseResult, found: AccuracyCheck, others: Sequence[CaseResult], *, clamped: bool) -> float | None:
    """Return the accuracy of guessing where answers are guesses although a baseline or a case is better or unknown."""
    first = result.accuracies[0]
    chance = first.items / max(1, len(decode(first.loglikelihoods)))  # one of the endings of an item
    threshold = chance + max(0.05, 2 * math.sqrt(chance * (1 - chance) / first.items))
    guesses = found.ok is None and (first.items >= _ENOUGH_ITEMS or clamped)
    if others:
        guesses = max(_value(other, found.metric) for other in others) > threshold + 0.05
    low = found.value is not None and found.value <= threshold
    return chance if low and (found.ok is False or guesses) else None


def _cause(
    result: CaseResult, metric: str, others: Sequence[CaseResult], smallest: CaseResult | None
) -> tuple[Fault, str]:
    """Return why a model guesses, also in words."""
    values = decode(result.accuracies[0].loglikelihoods)
    if not_finite := sum(not math.isfinite(value) for value in values):
        numbers = f"{not_finite:,} of {len(values):,}"
        return "overflow", f"{numbers} log-likelihoods are not finite: numbers overflow in {result.case.dtype}"
    right = next((one for one in others if _value(one, metric) > _value(result, metric) + 0.1), None)
    if right is None:
        return "inputs", "weights, tokenizer and prompts do not belong together, or the model is untrained"
    better = f"{right.id} had {percent(_value(right, metric))}"
    if right is smallest:
        return "batch_size", f"{better}, so the batch size loses the answers"
    return "strategy", f"{better}, so {result.case.strategy} loses the answers"


def _value(result: CaseResult, metric: str) -> float:
    accuracy = measured(result)
    assert accuracy is not None, "only a scored result is compared with"
    return value_of(accuracy, metric)


def check_random_weights(result: CaseResult, mp: CaseResult | None, smallest: CaseResult | None) -> Checked:
    """Compare log-likelihoods of random weights with those of mp, else of the smallest batch size.

    Batch sizes that are wrong in the same way agree with each other.
    """
    case, other = result.case, mp or smallest
    tolerance = LOGLIKELIHOOD_TOLERANCES[case.dtype]
    columns = [decode(accuracy.loglikelihoods) for accuracy in result.accuracies]
    broken = next((values for values in columns if not all(map(math.isfinite, values))), None)
    value: float | None = None
    ok: bool | None = False
    subject = "log-likelihoods of dummy weights"
    fault: Fault | None = "batch_size" if mp is None else "strategy"
    if broken is not None:
        fault = "overflow"
        text = f"{sum(not math.isfinite(one) for one in broken):,} of {len(broken):,} {subject} are not finite"
    elif other is None or (before := measured(other)) is None:
        ok, text = None, "dummy weights: larger batch sizes are compared with the log-likelihoods of this case"
    else:
        differences = [largest_difference(one.loglikelihoods, before.loglikelihoods) for one in result.accuracies]
        value = max((difference for difference in differences if difference is not None), default=None)
        if value is None:
            text = f"{subject} cannot be compared: those of {other.id} are not all finite"
        else:
            ok = value <= tolerance
            difference = percent(value) if value >= _PLAIN else f"{100 * value:.1g} %"
            text = f"{subject} differ by up to {difference} from those of {other.id}; {case.dtype} allows "
            text += f"{100 * tolerance:g} %"
            if ok and mp is None and case.strategy != REFERENCE_STRATEGY:
                ok, text = None, f"{text}, but both may be wrong in the same way"
    found = AccuracyCheck(
        metric=DIFFERENCE,
        value=value,
        baseline=None if value is None else 0.0,
        source=None if other is None else other.id,
        tolerance=tolerance,
        ok=ok,
        text=text,
    )
    return Checked(found, fault if ok is False else None)


def findings_on_random_weights(
    result: CaseResult, checked: Checked, mp: CaseResult | None, earlier: Sequence[CaseResult]
) -> list[Finding]:
    """Return the findings on random weights."""
    if (workspace := small_workspace(result)) is not None:
        return [of_small_workspace(workspace, None if checked.fault is None else checked.check.text)]
    if checked.fault is not None:
        return [wrong_answers(checked.check.text, result, checked.fault)]
    if mp is None and result.case.strategy != REFERENCE_STRATEGY:
        strategy, reason = result.case.strategy, missing(result, earlier)
        text = f"every batch size of {strategy} may be wrong in the same way: there is no independent case to compare "
        step = f"Add {REFERENCE_STRATEGY}: --strategy={REFERENCE_STRATEGY},{strategy}."
        return [finding("unchecked-answers", f"{text}its log-likelihoods with ({reason})", step)]
    return []
