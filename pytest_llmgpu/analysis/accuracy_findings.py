"""What a person should know of a case's answers: which are wrong, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_llmgpu.analysis import reference
from pytest_llmgpu.analysis.accuracy_check import foreign_numbers, smallest_batch_size
from pytest_llmgpu.analysis.sign_test import written
from pytest_llmgpu.report.case import REFERENCE_STRATEGY
from pytest_llmgpu.report.derived import decode, measured, value_of
from pytest_llmgpu.report.result import Accuracy, AccuracyCheck, CaseResult, Finding, Launch

__all__ = ["capital", "of_accuracy", "said", "sentence"]

_DEEPSPEEDS = "iok"  # the strategy whose workspace is DeepSpeed's, with an option of its own
_ENOUGH_ITEMS = 50  # fewer cannot be told from guessing
_OTHERWISE = (
    "Look for what this strategy computes otherwise than mp, such as a mask that is ignored or a term that is added "
    "twice: its speed says nothing until its numbers are those of the model."
)
_NO_CHANCE = 0.01  # probability below which lost and won items are worth naming


def of_accuracy(result: CaseResult, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield what to say of a completed result's answers; see `findings`."""
    found = list(_of_weights(result, earlier))
    yield from found
    clamp = _clamp(result)
    if clamp and all(finding.severity != "failure" for finding in found):
        yield Finding(
            code="workspace-clamped",
            severity="warning",
            text=sentence(f"{clamp}, whatever the accuracy says"),
            next_step=_clamp_advice(result),
        )


def _of_weights(result: CaseResult, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    accuracy, check = measured(result), result.accuracy_check
    if accuracy is None or check is None:
        return
    if result.case.load_format == "dummy":
        yield from _of_dummy(result, check, earlier)
        return
    mp, smallest = reference.reference(result, earlier), smallest_batch_size(result, earlier)
    if _collapsed(result, accuracy, check, (smallest, mp)):
        yield _collapse(result, accuracy, check, smallest, mp)
    elif check.ok is False and foreign_numbers(result, mp):
        yield _failure("loglikelihood-mismatch", f"{check.text}{_lost(result)}", _OTHERWISE, result)
    elif check.ok is False:
        advice = (
            "See which items flipped (`predictions` in the report), and whether dtype, tokenizer, revision or library "
            "versions changed; --llmgpu-accuracy-baseline sets another bar."
        )
        yield _failure("accuracy-below-baseline", f"{check.text}{_lost(result)}", advice, result)
    elif check.ok is None and smallest is None and mp is None:
        advice = "Pass --llmgpu-accuracy-baseline=FRACTION, so that a wrong answer fails instead of going unseen."
        yield Finding(code="accuracy-unchecked", severity="warning", text=sentence(check.text), next_step=advice)

    if smallest is not None and (flips := _flips(accuracy, smallest, check.metric)):
        dtype = result.case.dtype
        rounding = "float32 rounding flips next to none" if dtype == "float32" else f"{dtype} rounding flips a few"
        yield Finding(
            code="predictions-differ",
            severity="info",
            text=f"{flips:,} of {accuracy.items:,} answers differ from those of {smallest.id}.",
            next_step=f"{capital(rounding)}; where it is more, compare `predictions` of both cases in the report.",
        )


def _of_dummy(result: CaseResult, check: AccuracyCheck, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    strategy = result.case.strategy
    mp = reference.reference(result, earlier)
    if check.ok is False:
        advice = (
            "Random weights answer by chance, but the same sequence must score the same in any batch: look for a "
            "mask, padding or position that depends on the batch, or a kernel that overflows."
            if mp is None
            else "Random weights answer by chance, but the same sequence must score the same under any strategy: look "
            f"for what {strategy} computes otherwise, such as a mask that is ignored or a term that is added twice."
        )
        yield _failure("loglikelihood-mismatch", check.text, advice, result)
    elif mp is None and strategy != REFERENCE_STRATEGY:
        series = [other for other in earlier if other.case.series == result.case.series]
        if not said("unverified", series):
            reason = reference.why_not(result, earlier)
            yield Finding(
                code="unverified",
                severity="warning",
                text=f"Every batch size of {strategy} may be wrong alike: there is nothing independent to compare its "
                f"log-likelihoods with ({reason}).",
                next_step=f"Add {REFERENCE_STRATEGY}: --strategy={REFERENCE_STRATEGY},{strategy}.",
            )


def _collapsed(
    result: CaseResult, accuracy: Accuracy, check: AccuracyCheck, witnesses: Sequence[CaseResult | None]
) -> bool:
    """Return whether the answers are guesses although something says that the model knows better, or nothing does."""
    chance = _chance(accuracy)
    bar = chance + max(0.05, 2 * math.sqrt(chance * (1 - chance) / accuracy.items))
    if check.value is None or check.value > bar:
        return False
    before = [_value(witness, check.metric) for witness in witnesses if witness is not None]
    if before:
        return check.ok is False or max(before) > bar + 0.05
    return check.ok is False or (check.ok is None and (accuracy.items >= _ENOUGH_ITEMS or bool(_clamp(result))))


def _collapse(
    result: CaseResult, accuracy: Accuracy, check: AccuracyCheck, smallest: CaseResult | None, mp: CaseResult | None
) -> Finding:
    values = decode(accuracy.loglikelihoods)
    not_finite = sum(not math.isfinite(value) for value in values)
    bar = value_of(accuracy, check.metric) + 0.1
    better = next((one for one in (smallest, mp) if one is not None and _value(one, check.metric) > bar), None)
    strategy = result.case.strategy
    if not_finite:
        cause = (
            f"{not_finite:,} of {len(values):,} log-likelihoods are not finite: numbers overflow in {result.case.dtype}"
        )
        advice = "Try --llmgpu-dtype=bfloat16 or float32."
    elif better is not None:
        loser = "the batch size" if better is smallest else strategy
        cause = f"{better.id} had {100 * _value(better, check.metric):.1f} %, so it is {loser} that loses the answers"
        advice = (
            "Look for a context that is cut at this batch size (a fused kernel's workspace too small for its tokens) "
            "or for padding that is not masked; do not use this batch size."
            if better is smallest
            else f"Look for what {strategy} computes otherwise than {better.case.strategy}: a term that is added "
            f"twice, a mask that is ignored, a workspace that is too small; do not use {strategy} until then."
        )
    else:
        cause = "weights, tokenizer and prompts do not belong together, or the model is untrained"
        advice = "Check --llmgpu-model, --llmgpu-revision and --llmgpu-tokenizer."
    guessing = f"{check.text}{_lost(result)}. Guessing gives {100 * _chance(accuracy):.0f} %"
    if _clamp(result):
        return _failure("accuracy-collapsed", guessing, advice, result)
    text = f"{guessing}: {cause}"
    if better is not None or not_finite or check.ok is False:
        return _failure("accuracy-collapsed", text, advice, result)
    return Finding(code="accuracy-collapsed", severity="warning", text=sentence(text), next_step=advice)


def _failure(code: str, text: str, advice: str, result: CaseResult) -> Finding:
    """Return a failure that begins with a clamped workspace where there was one: it is cause enough."""
    clamp = _clamp(result)
    return Finding(
        code=code,
        severity="failure",
        text=sentence(f"{clamp}: {text}" if clamp else text),
        next_step=_clamp_advice(result) if clamp else advice,
    )


def _clamp(result: CaseResult) -> str:
    """Return what a workspace that holds too few tokens does, of the launch with the fewest; empty where none does."""

    def room(launch: Launch) -> tuple[int, int] | None:
        requested, granted = launch.tokens_requested, launch.tokens_granted
        return (granted, requested) if requested is not None and granted is not None and granted < requested else None

    clamps = [clamp for launch in result.launches if (clamp := room(launch)) is not None]
    if not clamps:
        return ""
    granted, requested = min(clamps)
    owner = "DeepSpeed" if result.case.strategy == _DEEPSPEEDS else capital(result.case.strategy)
    held = f"{owner}'s workspace held {granted:,} of {requested:,} tokens"
    return f"{held}, so keys and values of neighbouring heads overlap"


def _clamp_advice(result: CaseResult) -> str:
    cure = "give it more memory or a smaller batch size"
    if result.case.strategy != _DEEPSPEEDS:
        return f"{capital(cure)}."
    return f"Drop --llmgpu-iok-min-tokens (DeepSpeed then raises, and it is out of memory), or {cure}."


def _lost(result: CaseResult) -> str:
    """Return what the comparison with mp says of lost items, where chance does not explain them."""
    found = result.comparison
    if found is None or found.lost is None or found.mcnemar_p is None or found.mcnemar_p >= _NO_CHANCE:
        return ""
    chance = written(found.mcnemar_p)
    return f"; against {found.reference} {found.lost:,} items are lost and {found.won:,} won ({chance})"


def _flips(accuracy: Accuracy, smallest: CaseResult, metric: str) -> int:
    before = measured(smallest)
    assert before is not None, "`smallest_batch_size` gives scored results only"
    return len(reference.flipped(accuracy, before, metric))


def _value(result: CaseResult, metric: str) -> float:
    accuracy = measured(result)
    assert accuracy is not None, "only a scored result is compared with"
    return value_of(accuracy, metric)


def _chance(accuracy: Accuracy) -> float:
    """Return the accuracy of guessing: one over the endings of an item."""
    return accuracy.items / max(1, len(decode(accuracy.loglikelihoods)))


def said(code: str, results: Sequence[CaseResult]) -> bool:
    """Return whether one of these results has such a finding."""
    return any(finding.code == code for other in results for finding in other.findings)


def sentence(text: str) -> str:
    """Return a text with a capital and one stop."""
    return capital(text.rstrip(".")) + "."


def capital(text: str) -> str:
    """Return a text with its first letter large."""
    return text[:1].upper() + text[1:]
