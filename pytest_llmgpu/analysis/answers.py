"""Checks whether the answers of a case are right, compares them with those of mp, and finds the cause where they fail.

Accuracy is compared with a baseline or with another case. Log-likelihoods are compared, too: a model that is confident
keeps its answers under a wrong kernel. Equal tokens of texts are not the measure: rounding in another batch or strategy
makes greedy texts diverge, and both are right. The log-likelihoods of the same tokens must agree: those of the decode
steps with those of a forward over prompt and text, which has no KV cache; and, over the texts of mp, those of any
strategy with mp's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Literal, NamedTuple

from pytest_llmgpu.analysis.findings import finding
from pytest_llmgpu.analysis.reference import missing, same_series
from pytest_llmgpu.report.case import DEFAULT_TASK, REFERENCE_STRATEGY, Case
from pytest_llmgpu.report.derived import (
    LOGLIKELIHOOD_TOLERANCES,
    decode,
    decode_tokens,
    explained,
    generated,
    measured,
    predictions_of,
    typical_difference,
    upper_bound,
    value_of,
)
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.result import Accuracy, AccuracyCheck, CaseResult, Comparison, Finding, Generation
from pytest_llmgpu.report.text import capital, percent, plural

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

DIFFERENCE = "loglikelihood_relative_difference"
"""The metric of a check of random weights or of texts."""

_BY_CHANCE = 0.01
"""A loss of items that is less likely than this is not explained by chance."""

_ROUNDING = 1e-9  # a value exactly at its threshold may be slightly below it in binary
_PLAIN = 0.001  # smaller fractions need more digits than a percentage with one decimal
_ENOUGH_ITEMS = 50  # on fewer items a trained model may score like guesses
_DEEPSPEED_STRATEGY = "iok"  # its workspace is DeepSpeed's and has an option of its own

_LEAST_PER_TOKEN = 1.0
"""A text counts as at least so unlikely for each token: rounding of a text that is almost certain is no large part of
its log-likelihood."""

Fault = Literal["below", "inputs", "overflow", "batch_size", "strategy", "cache"]
"""Why answers fail: an accuracy below its baseline, weights and prompts that do not match, numbers that overflow, a
batch size, a strategy, the KV cache."""

_NEXT_STEPS: dict[Fault, str] = {
    "below": "See which items flipped (`predictions` in the report), and check whether dtype, tokenizer, revision or "
    "library versions changed. --llmgpu-accuracy-baseline sets another baseline.",
    "inputs": "Check --llmgpu-model, --llmgpu-revision and --llmgpu-tokenizer.",
    "overflow": "Try --llmgpu-dtype=bfloat16 or float32.",
    "batch_size": "Do not use this batch size. Look for a mask, padding or position that depends on the batch, or a "
    "workspace that is too small for its tokens.",
    "strategy": "Do not use {strategy} until this is fixed. Look for what {strategy} computes differently from "
    "{reference}, such as a mask that is ignored, a term that is added twice or a workspace that is too small.",
    "cache": "Look at the KV cache and at what a decode step reads: keys of another batch, a position that is off by "
    "one, a mask that hides a token.",
}


class Checked(NamedTuple):
    """The check of the answers of a case."""

    check: AccuracyCheck
    fault: Fault | None = None
    """Why the check fails; None where it does not."""


def check(
    result: CaseResult, mp: CaseResult | None, earlier: Sequence[CaseResult], options: Options
) -> tuple[AccuracyCheck | None, list[Finding]]:
    """Check the answers of a result, compare them with those of mp, and find what is wrong with them.

    If the result has several launches, the worst one counts.

    Returns:
        The check as the report holds it, None for a result that did not complete or has no answers; and the findings.
    """
    if result.outcome != "completed":
        return None, []
    if result.case.generates:
        checked = check_texts(result, mp)
        if checked is None:
            return None, []
        found = [] if checked.fault is None else [_wrong(checked.check.text, result, checked.fault)]
        return checked.check, found
    if not result.accuracies:
        return None, []
    size = result.case.batch_size
    scored = [other for other in same_series(result, earlier) if other.outcome == "completed" and measured(other)]
    smaller = [other for other in scored if other.case.batch_size <= size]
    smallest = min(smaller, key=lambda other: other.case.batch_size, default=None)
    if result.case.load_format == "dummy":
        checked = check_dummy(result, mp, smallest)
        return checked.check, _of_dummy(result, checked, mp, earlier)
    checked = check_accuracy(result, mp, smallest, options)
    return checked.check, _of_accuracy(result, checked, mp, smallest)


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
    case, metric, tolerance = result.case, options.accuracy_metric, options.accuracy_tolerance
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


def check_dummy(result: CaseResult, mp: CaseResult | None, smallest: CaseResult | None) -> Checked:
    """Compare log-likelihoods of random weights with those of mp, else of the smallest batch size.

    Random weights answer by chance, but the same inputs must get the same log-likelihoods from every strategy and at
    every batch size. Batch sizes that are wrong in the same way agree with each other.
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
        known = [difference for difference in differences if difference is not None]
        if not known:
            text = f"{subject} cannot be compared: those of {other.id} are not all finite"
        else:
            value = max(known)
            ok = value <= tolerance
            difference = percent(value) if value >= _PLAIN else f"{100 * value:.1g} %"
            text = f"{subject} differ by up to {difference} from those of {other.id}; "
            text += f"{case.dtype} allows {100 * tolerance:g} %"
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


def _wrong(text: str, result: CaseResult, fault: Fault) -> Finding:
    step = _NEXT_STEPS[fault].format(strategy=result.case.strategy, reference=REFERENCE_STRATEGY)
    return finding("wrong-answers", text, step)


def _of_dummy(
    result: CaseResult, checked: Checked, mp: CaseResult | None, earlier: Sequence[CaseResult]
) -> list[Finding]:
    """Return the findings on random weights."""
    clamp = _clamp(result)
    if checked.fault is not None:
        found = _wrong(checked.check.text, result, checked.fault)
        return [found if clamp is None else finding("wrong-answers", f"{clamp[0]}: {checked.check.text}", clamp[1])]
    if clamp is not None:
        return [_may_be_wrong(clamp)]
    if mp is None and result.case.strategy != REFERENCE_STRATEGY:
        strategy, reason = result.case.strategy, missing(result, earlier)
        text = f"every batch size of {strategy} may be wrong in the same way: there is no independent case to compare "
        step = f"Add {REFERENCE_STRATEGY}: --strategy={REFERENCE_STRATEGY},{strategy}."
        return [finding("unchecked-answers", f"{text}its log-likelihoods with ({reason})", step)]
    return []


def _of_accuracy(
    result: CaseResult, checked: Checked, mp: CaseResult | None, smallest: CaseResult | None
) -> list[Finding]:
    """Return the findings on trained weights.

    A workspace that is too small is the cause of any failure, so that a failure begins with it.
    """
    found, fault, text = checked.check, checked.fault, checked.check.text
    clamp, others = _clamp(result), [one for one in (smallest, mp) if one is not None]
    guesses = _guesses(result, found, others, clamped=clamp is not None)
    if fault is not None or guesses:
        compared = result.comparison
        if compared is not None and compared.mcnemar_p is not None and compared.mcnemar_p < _BY_CHANCE:
            text += f"; compared with {compared.reference}, {compared.lost:,} items are lost and {compared.won:,} won "
            text += f"({written(compared.mcnemar_p)})"
    if guesses:
        fault, cause = _cause(result, found.metric, others, smallest)
        text += f". Guessing gives {percent(_chance(result), 0)}{f': {cause}' if clamp is None else ''}"
    if clamp is not None:
        wrong = fault is not None
        return [finding("wrong-answers", f"{clamp[0]}: {text}", clamp[1]) if wrong else _may_be_wrong(clamp)]
    if fault == "inputs" and found.ok is not False:
        return [finding("unchecked-answers", text, _NEXT_STEPS[fault])]
    if fault is not None:
        return [_wrong(text, result, fault)]
    if found.ok is None and not others:
        step = "Pass --llmgpu-accuracy-baseline=FRACTION, so that wrong answers fail the test."
        return [finding("unchecked-answers", text, step)]
    return []


def _chance(result: CaseResult) -> float:
    """Return the accuracy of guessing: one divided by the number of endings of an item."""
    accuracy = result.accuracies[0]
    return accuracy.items / max(1, len(decode(accuracy.loglikelihoods)))


def _guesses(result: CaseResult, found: AccuracyCheck, others: Sequence[CaseResult], *, clamped: bool) -> bool:
    """Return whether the answers are guesses although another case or the baseline is better, or none is there."""
    chance, items = _chance(result), result.accuracies[0].items
    threshold = chance + max(0.05, 2 * math.sqrt(chance * (1 - chance) / items))
    if found.value is None or found.value > threshold:
        return False
    if found.ok is False:
        return True
    if others:
        return max(_value(other, found.metric) for other in others) > threshold + 0.05
    return found.ok is None and (items >= _ENOUGH_ITEMS or clamped)


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


def _clamp(result: CaseResult) -> tuple[str, str] | None:
    """Return what a workspace that is too small for its tokens does, and the next step; None where none is."""
    sizes = [(launch.tokens_granted, launch.tokens_requested) for launch in result.launches]
    clamped = [(held, needed) for held, needed in sizes if held is not None and needed is not None and held < needed]
    if not clamped:
        return None
    held, needed = min(clamped)
    owner, step = capital(result.case.strategy), "give it more memory or a smaller batch size"
    if result.case.strategy == _DEEPSPEED_STRATEGY:
        owner, step = "DeepSpeed", f"Remove --llmgpu-iok-min-tokens (DeepSpeed then reports out of memory), or {step}"
    tokens = f"{held:,} of {needed:,} tokens"
    return f"{owner}'s workspace held {tokens}, so keys and values of neighbouring heads overlap", step


def _may_be_wrong(clamp: tuple[str, str]) -> Finding:
    return finding("unchecked-answers", f"{clamp[0]}. Answers may be wrong although no check failed", clamp[1])


def _value(result: CaseResult, metric: str) -> float:
    accuracy = measured(result)
    assert accuracy is not None, "only a scored result is compared with"
    return value_of(accuracy, metric)


def compare(result: CaseResult, mp: CaseResult, metric: str) -> Comparison:
    """Compare the answers of a result with those of its reference: predictions of the metric, or texts.

    If the result has several launches, the one with the fewest right answers counts, and the largest difference.
    """
    if result.case.generates:
        return _compare_texts(result, mp)
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


def _compare_texts(result: CaseResult, mp: CaseResult) -> Comparison:
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
