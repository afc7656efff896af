"""Checks the answers of a case: of trained weights, of random weights, and generated texts.

Trained weights are compared with their baseline, given or published, with mp, and with guessing. Log-likelihoods are
compared, too: a model that is confident keeps its answers under a wrong kernel. Random weights answer by chance, but
with the same log-likelihoods at every batch size.

Generated texts are compared with those of mp by their log-likelihoods. Equal tokens are not the measure: rounding in
another batch or strategy makes greedy texts diverge, and both are right. The log-likelihoods of the same tokens must
agree: those of the decode steps with those of a forward over prompt and text, which has no KV cache; and, over the
texts of mp, those of any strategy with mp's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Literal

from pytest_llmgpu.analysis.findings import finding
from pytest_llmgpu.analysis.reference import same_series
from pytest_llmgpu.report import derived
from pytest_llmgpu.report.case import DEFAULT_TASK, PLAIN_INPUTS, REFERENCE_STRATEGY, Case
from pytest_llmgpu.report.derived import decode, generated, measured, predictions_of, typical_difference, value_of
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.result import Accuracy, AccuracyCheck, CaseResult, Comparison, Finding, Generation
from pytest_llmgpu.report.text import capital, percent, plural

Fault = Literal["below", "inputs", "overflow", "batch_size", "strategy", "cache"]
"""Why answers fail: an accuracy below its baseline, weights and prompts that do not match, numbers that overflow, a
batch size, a strategy, the KV cache."""

Checked = tuple[AccuracyCheck, Fault | None]
"""The check of the answers of a case, and why it fails; None where it does not."""

Others = Sequence[tuple[CaseResult, Comparison]]
"""The cases that a case is compared with: mp, then the smallest batch size of its series, as far as they are there."""

_NEXT_STEPS: dict[Fault, str] = {
    "below": "See which items flipped (`predictions` in the report), and check whether dtype, tokenizer, revision or "
    "library versions changed. --llmgpu-accuracy-baseline sets another baseline.",
    "inputs": "Check --llmgpu-model, --llmgpu-revision and --llmgpu-tokenizer; random weights are "
    "--llmgpu-load-format=dummy.",
    "overflow": "Try --llmgpu-dtype=bfloat16 or float32.",
    "batch_size": "Do not use this batch size. Look for a mask, padding or position that depends on the batch, or a "
    "workspace that is too small for its tokens.",
    "strategy": "Do not use {strategy} until this is fixed. Look for what {strategy} computes differently from "
    "{reference}, such as a mask that is ignored, a term that is added twice or a workspace that is too small.",
    "cache": "Look at the KV cache and at what a decode step reads: keys of another batch, a position that is off by "
    "one, a mask that hides a token.",
}

_PUBLISHED = {
    "huggyllama/llama-7b": ("7B", 0.761),
    "huggyllama/llama-13b": ("13B", 0.792),
    "huggyllama/llama-30b": ("33B", 0.828),
    "huggyllama/llama-65b": ("65B", 0.842),
}
"""Hub id to the name and the HellaSwag accuracy in table 3 of "LLaMA: Open and Efficient Foundation Language Models",
zero-shot, normalised by length. 33B was named 30b when its weights came out."""

_TOLERANCE = 0.01
"""The difference below the baseline that is allowed, as a fraction of the items."""

_BY_CHANCE = 0.01
"""A loss of items that is less likely than this is not explained by chance."""

_PLAIN = 0.001  # smaller fractions need more digits than a percentage with one decimal
_ROUNDING = 1e-9  # a value exactly at its threshold may be slightly below it in binary
_ENOUGH_ITEMS = 50  # on fewer items a trained model may score like guesses

DIFFERENCE = "loglikelihood_relative_difference"
"""The metric of a check of random weights or of texts."""

_COARSE = 3
"""Factor of the tolerance for random weights of a mixture of experts, which choose experts by so little that rounding
changes the choice (gpt-oss-20b in bfloat16 differs by 4.5 %), and for inputs that are rounded to 8 bits (decode and
forward of LLaMA-7B in fp8 differ by 5 %). Another text would differ by 50 %."""
_LEAST_PER_TOKEN = 1.0
"""A text counts as at least so unlikely for each token: of one that is almost certain, rounding is a large part."""

_DEEPSPEED_STRATEGY = "iok"  # its workspace is DeepSpeed's and has an option of its own


def check(
    result: CaseResult, mp: CaseResult | None, earlier: Sequence[CaseResult], options: Options
) -> tuple[AccuracyCheck | None, list[Finding]]:
    """Check the answers of a result and return the findings on them. The worst launch counts.

    The check is None for a result that did not complete or has no answers. `mp` is the result's reference; one of other
    weights is not used.
    """
    mp = None if mp is None or allowed_difference(result.case, mp, 0.0, "largest") is None else mp
    case, texts = result.case, [launch.generation for launch in result.launches if launch.generation is not None]
    if result.outcome != "completed" or not (texts if case.generates else result.accuracies):
        return None, []
    series = [other for other in same_series(result, earlier) if other.outcome == "completed" and measured(other)]
    smaller = [other for other in series if other.case.batch_size <= case.batch_size]
    smallest = min(smaller, key=lambda other: other.case.batch_size, default=None)
    others = [] if mp is None or result.comparison is None else [(mp, result.comparison)]
    if smallest is not None and not case.generates:
        others.append((smallest, compare(result, smallest, options.accuracy_metric)))
    if case.generates:
        checked = check_texts(result, mp)
    elif case.load_format == "dummy":
        checked = check_random_weights(result, mp, others)
    else:
        checked = check_accuracy(result, mp, others, options)
    return checked[0], _findings(result, checked, mp, [other for other, _ in reversed(others)])


def allowed_difference(
    case: Case, mp: CaseResult | None, rounding: float, kind: Literal["largest", "typical"]
) -> float | None:
    """Return the difference from mp up to which log-likelihoods are right; None where mp cannot show whether they are.

    Each of several ranks quantises its part of a weight with scales of its own, none of which is larger than that of
    the whole weight: the numbers are about as far from those of plain weights as mp's are, and so, beside rounding, at
    most twice as far from mp's.
    """
    if mp is None or case.quantization is None:
        return rounding
    if mp.case.quantization != case.quantization:
        return None
    if case.devices == 1 or case.quantization.endswith("-checkpoint"):
        return rounding
    from_plain = None if mp.comparison is None else getattr(mp.comparison, f"{kind}_difference")
    return None if from_plain is None else rounding + 2 * from_plain


def _checks_of_texts(case: Case, mp: CaseResult | None) -> str:
    """Return what checks texts that nothing has checked."""
    if mp is None and case.strategy != REFERENCE_STRATEGY:
        return f"Add {REFERENCE_STRATEGY} to --llmgpu-strategy"
    of_engine = "Let the engine return token ids and log-likelihoods"
    return of_engine if case.execution == "engine" else "Use a smaller batch size or fewer new tokens"


def _findings(result: CaseResult, check: Checked, mp: CaseResult | None, others: Sequence[CaseResult]) -> list[Finding]:
    """Return the findings on answers; a failure begins with a workspace that is too small, the cause of any failure."""
    case, (found, fault), text = result.case, check, check[0].text
    random = case.load_format == "dummy"
    trained = not (random or case.generates)
    workspace = None if case.generates else _small_workspace(result)
    guessing = _guessing(result, found, others, clamped=workspace is not None) if trained else None
    compared = result.comparison if trained and (fault is not None or guessing is not None) else None
    if compared is not None and compared.mcnemar_p is not None and compared.mcnemar_p < _BY_CHANCE:
        text += f"; compared with {compared.reference}, {compared.lost:,} items are lost and {compared.won:,} won "
        text += f"({written(compared.mcnemar_p)})"
    if guessing is not None:
        chance, fault, cause = guessing
        text += f". Guessing gives {percent(chance, 0)}{f': {cause}' if workspace is None else ''}"
    if workspace is not None:
        overlap, step = workspace
        if fault is None:
            return [finding("unchecked-answers", f"{overlap}. Answers may be wrong although no check failed", step)]
        return [finding("wrong-answers", f"{overlap}: {text}", step)]
    if fault is not None:
        code = "unchecked-answers" if fault == "inputs" and found.ok is not False else "wrong-answers"
        step = _NEXT_STEPS[fault].format(strategy=case.strategy, reference=REFERENCE_STRATEGY)
        if (fault, case.strategy) == ("strategy", REFERENCE_STRATEGY):
            step = "Look for what changed the model: weights, a hook, a replaced module or versions of libraries."
        return [finding(code, text, step)]
    if found.ok is None and (case.generates or (trained and not others)):
        step = _checks_of_texts(case, mp) if case.generates else "Pass --llmgpu-accuracy-baseline=FRACTION"
        step += ", or compare the numbers with an earlier report (--llmgpu-compare), so that wrong ones fail."
        return [finding("unchecked-answers", text, step)]
    if random and not case.generates and mp is None and case.strategy != REFERENCE_STRATEGY:
        text = f"every batch size of {case.strategy} may be wrong in the same way: there is no independent case to "
        needed = f"{REFERENCE_STRATEGY} was not measured with both {case.quantization} and plain weights"
        text += f"compare its log-likelihoods with ({result.why.get('comparison', needed)})"
        step = f"Add {REFERENCE_STRATEGY} to --llmgpu-strategy if {case.strategy} runs the model of --llmgpu-model; "
        step += "compare a model of its own with an earlier report (--llmgpu-compare)."
        if "comparison" not in result.why:
            step = f"Add {REFERENCE_STRATEGY} to --llmgpu-strategy with --llmgpu-quantization=none,{case.quantization}."
        return [finding("unchecked-answers", text, step)]
    return []


def _small_workspace(result: CaseResult) -> tuple[str, str] | None:
    """Return what a workspace that is too small for its tokens does, and the next step; None where none is."""
    sizes = [(launch.tokens_granted, launch.tokens_requested) for launch in result.launches]
    small = [(held, needed) for held, needed in sizes if held is not None and needed is not None and held < needed]
    if not small:
        return None
    held, needed = min(small)
    owner, step = capital(result.case.strategy), "give it more memory or a smaller batch size"
    if result.case.strategy == _DEEPSPEED_STRATEGY:
        owner, step = "DeepSpeed", f"Remove --llmgpu-iok-min-tokens (DeepSpeed then reports out of memory), or {step}"
    tokens = f"{held:,} of {needed:,} tokens"
    return f"{owner}'s workspace held {tokens}, so keys and values of neighbouring heads overlap", step


def _guessing(
    result: CaseResult, found: AccuracyCheck, others: Sequence[CaseResult], *, clamped: bool
) -> tuple[float, Fault, str] | None:
    """Return the accuracy of guessing, and why the model guesses, also in words.

    None where it does not guess, or where no baseline and no other case is better or unknown.
    """
    first, metric = result.accuracies[0], found.metric
    values = decode(first.loglikelihoods)
    chance = first.items / max(1, len(values))  # one of the endings of an item
    threshold = chance + max(0.05, 2 * math.sqrt(chance * (1 - chance) / first.items))
    unknown = found.ok is None and (first.items >= _ENOUGH_ITEMS or clamped)
    if others:
        unknown = max(_value(other, metric) for other in others) > threshold + 0.05
    low = found.value is not None and found.value <= threshold
    if not low or not (found.ok is False or unknown):
        return None
    if not_finite := sum(not math.isfinite(value) for value in values):
        numbers = f"{not_finite:,} of {len(values):,}"
        cause = f"{numbers} log-likelihoods are not finite: numbers overflow in {result.case.dtype}"
        return chance, "overflow", cause
    right = next((one for one in others if _value(one, metric) > _value(result, metric) + 0.1), None)
    if right is None:
        return chance, "inputs", "weights, tokenizer and prompts do not belong together, or the model is untrained"
    better = f"{right.id} had {percent(_value(right, metric))}"
    if right.case.strategy == result.case.strategy:
        return chance, "batch_size", f"{better}, so the batch size loses the answers"
    return chance, "strategy", f"{better}, so {result.case.strategy} loses the answers"


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
    known = _PUBLISHED.get(case.model.lower())
    if known and metric == "acc_norm" and case.dataset == "hellaswag" and case.limit is None:
        return known[1], f"published for LLaMA {known[0]}"
    return None


def check_accuracy(result: CaseResult, mp: CaseResult | None, others: Others, options: Options) -> Checked:
    """Compare the accuracy of trained weights with its baseline, else with mp and with the smallest batch size.

    On the whole dataset the value may be the tolerance below the baseline. On the first items of a dataset it may also
    be below by chance: the check fails if even the one-sided 95 % upper bound of the value is too low. Compared with
    another case it neither passes nor fails where nothing is lost: the accuracy itself is still unchecked.
    """
    case, metric = result.case, options.accuracy_metric
    worst = min(result.accuracies, key=lambda accuracy: value_of(accuracy, metric))
    value = value_of(worst, metric)
    known = baseline(case, given=options.accuracy_baseline, metric=metric)
    text = f"accuracy ({metric}) is {percent(value)}"
    ok: bool | None = None
    expected: float | None = None
    source: str | None = None
    if known is None and others:
        worse = [other for other, compared in others if _has_lost(worst, other, compared, metric)]
        other = worse[0] if worse else others[0][0]
        expected, source, ok = _value(other, metric), other.id, False if worse else None
        text += f"; {other.id} has {percent(expected)}"
    else:
        text += f" on the first {worst.items:,} items" if case.limit else ""
        if known is None:
            text += f"; no baseline is known for {case.model} on {case.dataset}"
        else:
            expected, source = known
            bound = derived.upper_bound(value, worst.items) if case.limit else value
            ok = bound >= expected - _TOLERANCE - _ROUNDING
            text += f" (95 % upper bound {percent(bound)})" if case.limit else ""
            text += "; the baseline is" if ok else f", {100 * (expected - value):.1f} points below the baseline of"
            text += f" {percent(expected)} ({source}, tolerance {_TOLERANCE:g})"
    fault: Fault | None = "below" if ok is False else None
    if (mismatch := _mismatch(result, mp, others)) is not None:
        difference, fault = mismatch
        ok, text = False, text if ok is False else f"{difference}, although {text}"
    found = AccuracyCheck(
        metric=metric, value=value, baseline=expected, source=source, tolerance=_TOLERANCE, ok=ok, text=text
    )
    return found, fault


def _has_lost(accuracy: Accuracy, other: CaseResult, compared: Comparison, metric: str) -> bool:
    """Return whether more than the tolerance is lost compared with another case, and chance does not explain it.

    The exact sign test on the items that were lost or won is one-sided, at 1 %; without labels, on those that differ.
    """
    loss, lost, won = _value(other, metric) - value_of(accuracy, metric), compared.lost, compared.won
    if lost is None or won is None:
        net = round(loss * accuracy.items)
        differ = max(abs(net), len(compared.flipped))
        lost, won = (differ + net + 1) // 2, (differ - net) // 2
    return loss > _TOLERANCE + _ROUNDING and by_chance(lost, won) < _BY_CHANCE


def _value(result: CaseResult, metric: str) -> float:
    accuracy = measured(result)
    assert accuracy is not None, "only a scored result is compared with"
    return value_of(accuracy, metric)


def _mismatch(result: CaseResult, mp: CaseResult | None, others: Others) -> tuple[str, Fault] | None:
    """Compare log-likelihoods with those of mp, else with those of the bundled model, else of the smallest batch size.

    Return the difference in words, and its cause; None where rounding explains it or there is nothing to compare with.
    The bundled model keeps its answers with DeepSpeed's residual added twice, whose log-likelihoods are 10 % off:
    rounding is a thousandth of that.
    """
    case, columns = result.case, [decode(accuracy.loglikelihoods) for accuracy in result.accuracies]
    finite = all(math.isfinite(value) for values in columns for value in values)
    fault: Fault = "strategy"
    typical: float | None = None
    registered = case.model == case.dataset == "bundled" and case.task == DEFAULT_TASK and case.quantization is None
    if mp is None and registered:
        from pytest_llmgpu.inference import bundled

        source, expected = "registered for the bundled model", bundled.loglikelihoods()
        if any(len(values) > len(expected) for values in columns):
            return None  # another file than the bundled one is named `bundled`
        if finite:
            typical = max(typical_difference(values, expected[: len(values)]) for values in columns)
    elif others:
        source, typical = f"of {others[0][0].id}", others[0][1].typical_difference
        fault = "batch_size" if mp is None else "strategy"
    else:
        return None
    if not finite:
        return "log-likelihoods are not finite", fault
    rounding = derived.explained(case.dtype)
    allowed = allowed_difference(case, mp, rounding, "typical") or rounding
    if typical is None or typical <= allowed:
        return None
    differ = f"log-likelihoods typically differ by {percent(typical)} from those {source}"
    return f"{differ}; {case.dtype} allows {percent(allowed)}", fault


def check_random_weights(result: CaseResult, mp: CaseResult | None, others: Others) -> Checked:
    """Compare log-likelihoods of random weights with those of mp, else of the smallest batch size.

    Batch sizes that are wrong in the same way agree with each other.
    """
    case, (other, compared) = result.case, others[0] if others else (None, None)
    subject = "log-likelihoods of dummy weights"
    tolerance = allowed_difference(case, mp, _tolerance(result), "largest") or _tolerance(result)
    columns = [decode(accuracy.loglikelihoods) for accuracy in result.accuracies]
    broken = next((values for values in columns if not all(map(math.isfinite, values))), None)
    value = None if compared is None else compared.largest_difference
    ok: bool | None = False
    fault: Fault = "batch_size" if mp is None else "strategy"
    if broken is not None:
        fault = "overflow"
        text = f"{sum(not math.isfinite(one) for one in broken):,} of {len(broken):,} {subject} are not finite"
    elif other is None:
        ok, text = None, "dummy weights: larger batch sizes are compared with the log-likelihoods of this case"
    elif value is None:
        text = f"{subject} cannot be compared: those of {other.id} are not all finite"
    else:
        ok = value <= tolerance
        difference = percent(value) if value >= _PLAIN else f"{100 * value:.1g} %"
        text = f"{subject} differ by up to {difference} from those of {other.id}; {case.dtype} allows "
        text += f"{100 * tolerance:.3g} %"
        if ok and mp is None and case.strategy != REFERENCE_STRATEGY:
            ok, text = None, f"{text}, but both may be wrong in the same way"
    expected, source = None if value is None else 0.0, None if other is None else other.id
    found = AccuracyCheck(
        metric=DIFFERENCE, value=value, baseline=expected, source=source, tolerance=tolerance, ok=ok, text=text
    )
    return found, fault if ok is False else None


def check_texts(result: CaseResult, mp: CaseResult | None) -> Checked:
    """Check the texts of a case by their log-likelihoods, and by those of the texts of mp where it scored them, too.

    The check neither passes nor fails where nothing independent was there to compare with.
    """
    launches = [launch.generation for launch in result.launches if launch.generation is not None]
    texts, tolerance = plural(len(launches[0].new_tokens), "text"), _tolerance(result)
    again = [(one, one.prefill_loglikelihoods) for one in launches if one.prefill_loglikelihoods is not None]
    value: float | None = None
    source: str | None = None
    ok: bool | None = None
    fault: Fault | None = None
    compared, of_mp = (None, None) if mp is None else (result.comparison, generated(mp))
    failed = any("generation" in one.why for one in result.launches) or any(one.tokens is None for one in launches)
    if compared is not None and of_mp is not None and not failed and not again:
        source, most = compared.reference, max(_equal(one, of_mp).count(0) for one in launches)
        text = f"{texts} are compared with those of {source}: {most:,} begin with another token"
        if launches[0].loglikelihoods is None:
            ok = False if 2 * most > len(of_mp.new_tokens) else None
            text += "; the engine returns no log-likelihoods"
        else:
            value = compared.largest_difference
            ok = value is not None and value <= tolerance
            text += f", and up to the first token that differs log-likelihoods {_differ(value)}"
            text += f"; {100 * tolerance:g} % is allowed"
        fault = "strategy" if ok is False else None
    elif len(again) < len(launches):
        reasons = [launch.why["generation"] for launch in result.launches if "generation" in launch.why]
        text = f"{texts} are unchecked: {next(iter(reasons), 'the engine computes no log-likelihoods of texts')}"
    else:
        value = own = _worst([_largest(one.loglikelihoods or right, right, one.new_tokens) for one, right in again])
        ok = own is not None and own <= tolerance
        fault = None if ok else "cache"
        text = f"log-likelihoods of {texts} {_differ(own)} between decode steps and a forward without a KV cache"
        text += f"; {100 * tolerance:g} % is allowed"
        allowed = allowed_difference(result.case, mp, tolerance, "largest") or tolerance
        scored = any(one.reference_loglikelihoods is not None for one in launches)
        if compared is not None and scored and of_mp is not None and of_mp.prefill_loglikelihoods is not None:
            source, reference = compared.reference, compared.largest_difference
            value = None if own is None or reference is None else max(own, reference)
            text += f"; over the texts of {source} they {_differ(reference)} from its own"
            if ok and (reference is None or reference > allowed):
                ok, fault = False, "strategy"
        elif result.case.strategy != REFERENCE_STRATEGY:
            ok = None if ok else False
            text += f"; {REFERENCE_STRATEGY} generated no texts in this run, so that both may be wrong in the same way"
    found = AccuracyCheck(
        metric=DIFFERENCE, value=value, baseline=0.0, source=source, tolerance=tolerance, ok=ok, text=text
    )
    return found, fault


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
        mcnemar_p=None if lost is None or won is None else min(1.0, 2 * by_chance(max(lost, won), min(lost, won))),
        largest_difference=None if typical is None else max(finite),
        typical_difference=typical,
    )


def compare_texts(result: CaseResult, mp: CaseResult) -> Comparison:
    """Compare the texts of a result with those of mp, and its log-likelihoods of mp's texts with mp's own."""
    launches = [launch.generation for launch in result.launches if launch.generation is not None]
    own, of_mp = launches[0], generated(mp)
    assert of_mp is not None, "only generated texts are compared with"
    equal, expected = _equal(own, of_mp), of_mp.prefill_loglikelihoods
    diverged = [number for number, count in enumerate(equal) if count < own.new_tokens[number]]
    scored = [one.reference_loglikelihoods for one in launches if one.reference_loglikelihoods is not None]
    largest = typical = None
    if scored and expected is not None:
        largest = _worst([_largest(values, expected, of_mp.new_tokens) for values in scored])
        if largest is not None:
            typical = max(typical_difference(decode(values), decode(expected)) for values in scored)
    elif not scored and own.loglikelihoods is not None:  # an engine that scores no given texts
        # Up to the first token that differs, and with it, both chose the likeliest.
        known = [one for one in launches if one.loglikelihoods is not None and one.tokens is not None]
        alike = [(one, [count + 1 for count in _equal(one, of_mp)]) for one in known]
        both = [(one.loglikelihoods, of_mp.loglikelihoods, one.new_tokens, counted) for one, counted in alike]
        largest = _worst([_largest(*one) for one in both])
    return Comparison(
        reference=mp.id,
        items=len(equal),
        flipped=diverged,
        first_difference=min((equal[number] for number in diverged), default=None),
        lost=None,
        won=None,
        mcnemar_p=None,
        largest_difference=largest,
        typical_difference=typical,
    )


def differing(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return the numbers of the items whose answer changed."""
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


def written(probability: float) -> str:
    """Return a probability as text: `p = 0.0039`; the smallest are `p < 1e-06`."""
    return "p < 1e-06" if probability < 1e-6 else f"p = {probability:.2g}"  # noqa: PLR2004 - no test shows less


def _largest(
    loglikelihoods: str | None, expected: str | None, lengths: Sequence[int], counted: Sequence[int] | None = None
) -> float:
    """Return the largest difference of the log-likelihood of a text, as a fraction; NaN where one is not finite.

    Texts have these lengths, of which `counted` tokens at most count; None: all.
    """
    found, right, largest, start = decode(loglikelihoods), decode(expected), 0.0, 0
    for length, most in zip(lengths, counted or lengths, strict=True):
        end = start + min(length, most)
        own, other = math.fsum(found[start:end]), math.fsum(right[start:end])
        if not (math.isfinite(own) and math.isfinite(other)):
            return math.nan
        largest = max(largest, abs(own - other) / max(abs(other), _LEAST_PER_TOKEN * (end - start)))
        start += length
    return largest


def _tolerance(result: CaseResult) -> float:
    random = result.case.load_format == "dummy" and any("experts" in one.implementations for one in result.launches)
    coarse = random or result.case.quantization not in PLAIN_INPUTS
    return derived.LOGLIKELIHOOD_TOLERANCES[result.case.dtype] * (_COARSE if coarse else 1)


def _worst(differences: Sequence[float]) -> float | None:
    """Return the largest difference; None without one, and where one is not finite."""
    return max(differences) if differences and all(map(math.isfinite, differences)) else None


def _equal(own: Generation, of_mp: Generation) -> list[int]:
    """Return how many tokens at the beginning of each text are those of mp."""
    tokens = iter(zip(decode(own.tokens, "i"), decode(of_mp.tokens, "i"), strict=True))
    texts = [list(islice(tokens, count)) for count in own.new_tokens]
    return [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], text)) for text in texts]


def _differ(difference: float | None) -> str:
    return "are not all finite" if difference is None else f"differ by at most {100 * difference:.2g} %"
