"""Findings on the answers of a case: `decide` returns what is wrong and its cause, `describe` words it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from pytest_llmgpu.analysis import accuracy_check, reference
from pytest_llmgpu.analysis.accuracy_check import smallest_batch_size
from pytest_llmgpu.analysis.finding_texts import has_finding
from pytest_llmgpu.analysis.sign_test import written
from pytest_llmgpu.report.case import REFERENCE_STRATEGY
from pytest_llmgpu.report.derived import decode, measured, value_of
from pytest_llmgpu.report.result import Accuracy, AccuracyCheck, CaseResult, Finding, Launch
from pytest_llmgpu.report.text import capital, percent, sentence

_DEEPSPEED_STRATEGY = "iok"  # its workspace is DeepSpeed's and has an option of its own
_ENOUGH_ITEMS = 50  # on fewer items a trained model may score like guesses
_NOT_BY_CHANCE = 0.01  # lost and won items are named if their probability is below this

Code = Literal[
    "accuracy-collapsed", "loglikelihood-mismatch", "accuracy-below-baseline", "accuracy-unchecked", "unverified"
]
"""The fault of the answers: the code of the finding."""

Cause = Literal["overflow", "batch_size", "strategy", "inputs"]
"""The cause of guessing: numbers that overflow, a batch size, a strategy, or weights and prompts that do not match.
"""

_ADVICE: dict[Code, str] = {
    "accuracy-below-baseline": "See which items flipped (`predictions` in the report), and check whether dtype, "
    "tokenizer, revision or library versions changed. --llmgpu-accuracy-baseline sets another baseline.",
    "accuracy-unchecked": "Pass --llmgpu-accuracy-baseline=FRACTION, so that wrong answers fail the test.",
    "unverified": "Add {reference}: --strategy={reference},{strategy}.",
}
_MISMATCH_ADVICE: dict[Cause, str] = {
    "batch_size": "The same sequence must get the same log-likelihood in every batch. Look for a mask, padding or "
    "position that depends on the batch, or a kernel that overflows.",
    "strategy": "The same sequence must get the same log-likelihood under every strategy. Look for what {strategy} "
    "computes differently, such as a mask that is ignored or a term that is added twice.",
}
_COLLAPSE_ADVICE: dict[Cause, str] = {
    "overflow": "Try --llmgpu-dtype=bfloat16 or float32.",
    "batch_size": "Look for a context that is cut at this batch size (a fused kernel's workspace that is too small for "
    "its tokens) or for padding that is not masked. Do not use this batch size.",
    "strategy": "Look for what {strategy} computes differently from {reference}: a term that is added twice, a mask "
    "that is ignored, a workspace that is too small. Do not use {strategy} until this is fixed.",
    "inputs": "Check --llmgpu-model, --llmgpu-revision and --llmgpu-tokenizer.",
}


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about the answers of a case, before they are worded."""

    code: Code | None = None
    """The fault; None where there is none."""
    fails: bool = False
    """True if it is a failure; else it is a warning."""
    cause: Cause | None = None
    """The cause, for `accuracy-collapsed` and for `loglikelihood-mismatch`."""
    better_case: CaseResult | None = None
    """A case of the same model that answers better, for `accuracy-collapsed`."""
    not_finite: int = 0
    """Number of log-likelihoods that are not finite, for `accuracy-collapsed`."""
    no_reference: str | None = None
    """Why there is no reference, for `unverified`."""


def decide(result: CaseResult, earlier: Sequence[CaseResult]) -> Decision:
    """Decide what is wrong with the answers of a completed result that has its check and its comparison."""
    accuracy, check = measured(result), result.accuracy_check
    if accuracy is None or check is None:
        return Decision()
    if result.case.load_format == "dummy":
        return _decide_dummy(result, check, earlier)
    return _decide_answers(result, accuracy, check, earlier)


def _decide_answers(
    result: CaseResult, accuracy: Accuracy, check: AccuracyCheck, earlier: Sequence[CaseResult]
) -> Decision:
    mp, smallest = reference.reference(result, earlier), smallest_batch_size(result, earlier)
    if _guesses(result, accuracy, check, [one for one in (smallest, mp) if one is not None]):
        return _decide_collapse(result, accuracy, check, smallest, mp)
    if check.ok is False:
        mismatch = accuracy_check.decide_mismatch(result, mp, smallest)
        if mismatch is None:
            return Decision(code="accuracy-below-baseline", fails=True)
        of_batch_size = smallest is not None and mismatch.source == smallest.id
        cause: Cause = "batch_size" if of_batch_size else "strategy"
        return Decision(code="loglikelihood-mismatch", fails=True, cause=cause)
    return Decision(code="accuracy-unchecked" if check.ok is None and smallest is None and mp is None else None)


def _decide_dummy(result: CaseResult, check: AccuracyCheck, earlier: Sequence[CaseResult]) -> Decision:
    mp = reference.reference(result, earlier)
    if check.ok is False:
        return Decision(code="loglikelihood-mismatch", fails=True, cause="batch_size" if mp is None else "strategy")
    series = reference.same_series(result, earlier)
    if mp is None and result.case.strategy != REFERENCE_STRATEGY and not has_finding("unverified", series):
        return Decision(code="unverified", no_reference=reference.missing(result, earlier))
    return Decision()


def _guesses(result: CaseResult, accuracy: Accuracy, check: AccuracyCheck, others: Sequence[CaseResult]) -> bool:
    """Return whether the answers are guesses although another case or the baseline is better, or none is there."""
    chance = _chance(accuracy)
    threshold = chance + max(0.05, 2 * math.sqrt(chance * (1 - chance) / accuracy.items))
    if check.value is None or check.value > threshold:
        return False
    if check.ok is False:
        return True
    if others:
        return max(_value(other, check.metric) for other in others) > threshold + 0.05
    return check.ok is None and (accuracy.items >= _ENOUGH_ITEMS or _clamp(result) is not None)


def _decide_collapse(
    result: CaseResult, accuracy: Accuracy, check: AccuracyCheck, smallest: CaseResult | None, mp: CaseResult | None
) -> Decision:
    not_finite = sum(not math.isfinite(value) for value in decode(accuracy.loglikelihoods))
    better = value_of(accuracy, check.metric) + 0.1
    better_case = next((one for one in (smallest, mp) if one is not None and _value(one, check.metric) > better), None)
    cause: Cause = "inputs"
    if not_finite:
        cause = "overflow"
    elif better_case is not None:
        cause = "batch_size" if better_case is smallest else "strategy"
    return Decision(
        code="accuracy-collapsed",
        fails=cause != "inputs" or check.ok is False or _clamp(result) is not None,
        cause=cause,
        better_case=better_case,
        not_finite=not_finite,
    )


def _clamp(result: CaseResult) -> tuple[int, int] | None:
    """Return granted and requested tokens of the smallest workspace that is too small; None where none is."""

    def tokens(launch: Launch) -> tuple[int, int] | None:
        requested, granted = launch.tokens_requested, launch.tokens_granted
        return (granted, requested) if requested is not None and granted is not None and granted < requested else None

    return min((clamp for launch in result.launches if (clamp := tokens(launch)) is not None), default=None)


def _value(result: CaseResult, metric: str) -> float:
    accuracy = measured(result)
    assert accuracy is not None, "only a scored result is compared with"
    return value_of(accuracy, metric)


def _chance(accuracy: Accuracy) -> float:
    """Return the accuracy of guessing: one divided by the number of endings of an item."""
    return accuracy.items / max(1, len(decode(accuracy.loglikelihoods)))


def describe(decision: Decision, result: CaseResult) -> list[Finding]:
    """Return the findings of a decision: the wrong answers, a workspace that is too small.

    A workspace that is too small is the cause of any failure, so that a failure begins with it.
    """
    found = []
    clamp = _describe_clamp(result)
    if decision.code is not None:
        clamped = clamp and decision.fails
        found.append(
            Finding(
                code=decision.code,
                severity="failure" if decision.fails else "warning",
                text=sentence(f"{clamp}: {_text(decision, result)}" if clamped else _text(decision, result)),
                next_step=_clamp_advice(result) if clamped else _advice(decision, result),
            )
        )
    if clamp and not decision.fails:
        found.append(
            Finding(
                code="workspace-clamped",
                severity="warning",
                text=sentence(f"{clamp}. Answers may be wrong although no check failed"),
                next_step=_clamp_advice(result),
            )
        )
    return found


def _text(decision: Decision, result: CaseResult) -> str:
    """Return what is wrong with the answers, without a full stop."""
    check, accuracy = result.accuracy_check, measured(result)
    assert check is not None, "only checked answers are wrong"
    assert accuracy is not None, "only answers are checked"
    if decision.no_reference is not None:
        return (
            f"every batch size of {result.case.strategy} may be wrong in the same way: there is no independent case to "
            f"compare its log-likelihoods with ({decision.no_reference})"
        )
    if decision.code == "accuracy-unchecked" or result.case.load_format == "dummy":
        return check.text
    text = f"{check.text}{_describe_lost(result)}"
    if decision.code == "accuracy-collapsed":
        text += f". Guessing gives {percent(_chance(accuracy), 0)}"
        if _clamp(result) is None:  # else the workspace is the cause
            text += f": {_describe_cause(decision, result, check, accuracy)}"
    return text


def _describe_cause(decision: Decision, result: CaseResult, check: AccuracyCheck, accuracy: Accuracy) -> str:
    """Return why a model guesses, without a full stop."""
    better_case = decision.better_case
    if decision.cause == "overflow":
        numbers = f"{decision.not_finite:,} of {len(decode(accuracy.loglikelihoods)):,}"
        return f"{numbers} log-likelihoods are not finite: numbers overflow in {result.case.dtype}"
    if better_case is None:
        return "weights, tokenizer and prompts do not belong together, or the model is untrained"
    loser = "the batch size" if decision.cause == "batch_size" else result.case.strategy
    return f"{better_case.id} had {percent(_value(better_case, check.metric))}, so {loser} loses the answers"


def _advice(decision: Decision, result: CaseResult) -> str:
    """Return what to do about wrong answers."""
    assert decision.code is not None
    if decision.cause is None:
        advice = _ADVICE[decision.code]
    else:
        advice = (_MISMATCH_ADVICE if decision.code == "loglikelihood-mismatch" else _COLLAPSE_ADVICE)[decision.cause]
    return advice.format(strategy=result.case.strategy, reference=REFERENCE_STRATEGY)


def _describe_lost(result: CaseResult) -> str:
    """Return how many items were lost compared with mp, where chance does not explain it; else an empty text."""
    found = result.comparison
    if found is None or found.lost is None or found.mcnemar_p is None or found.mcnemar_p >= _NOT_BY_CHANCE:
        return ""
    return (
        f"; compared with {found.reference}, {found.lost:,} items are lost and {found.won:,} won "
        f"({written(found.mcnemar_p)})"
    )


def _describe_clamp(result: CaseResult) -> str:
    """Return what a workspace that is too small does, without a full stop; empty where none is too small."""
    if (clamp := _clamp(result)) is None:
        return ""
    owner = "DeepSpeed" if result.case.strategy == _DEEPSPEED_STRATEGY else capital(result.case.strategy)
    return (
        f"{owner}'s workspace held {clamp[0]:,} of {clamp[1]:,} tokens, so keys and values of neighbouring heads "
        "overlap"
    )


def _clamp_advice(result: CaseResult) -> str:
    remedy = "give it more memory or a smaller batch size"
    if result.case.strategy != _DEEPSPEED_STRATEGY:
        return sentence(remedy)
    return f"Remove --llmgpu-iok-min-tokens (DeepSpeed then reports out of memory), or {remedy}."
