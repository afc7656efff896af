"""Checks whether texts are those of the model: `decide` compares log-likelihoods, `describe` words the result.

Equal tokens are not the measure: rounding in another batch or strategy makes greedy texts part, and both are right. The
log-likelihoods of the same tokens must agree: those of the decode steps with those of a forward over prompt and text,
which has no KV cache; and, over the texts of mp, those of any strategy with mp's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

import msgspec

from pytest_llmgpu.analysis import reference
from pytest_llmgpu.report.case import REFERENCE_STRATEGY
from pytest_llmgpu.report.derived import (
    LOGLIKELIHOOD_TOLERANCES,
    decode,
    decode_tokens,
    generated,
    typical_difference,
)
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult, Comparison, Finding, Generation
from pytest_llmgpu.report.text import plural, sentence

METRIC = "loglikelihood_relative_difference"
"""The metric of the check in the report."""

_LEAST_PER_TOKEN = 1.0
"""A text counts as at least so unlikely for each token: rounding of a text that is almost certain is no large part of
its log-likelihood."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the check as data."""

    texts: int
    """Number of texts."""
    unchecked: str | None = None
    """Why the texts were not scored again; None if they were."""
    tolerance: float
    """The largest difference that rounding explains, as a fraction of the log-likelihood of a text."""
    own: float | None = None
    """The largest difference between decode steps and a forward without a KV cache; None where one is not finite."""
    reference: float | None = None
    """The largest difference from mp over mp's texts; None where one is not finite, and without mp."""
    reference_id: str | None = None
    """Id of the case of mp; None where there is none."""
    is_reference: bool = False
    """True for mp itself."""

    @property
    def own_ok(self) -> bool:
        """True if the decode steps agree with a forward without a KV cache."""
        return self.own is not None and self.own <= self.tolerance

    @property
    def reference_ok(self) -> bool | None:
        """True if the strategy agrees with mp; None where there is nothing to compare with."""
        if self.reference_id is None:
            return None
        return self.reference is not None and self.reference <= self.tolerance

    @property
    def ok(self) -> bool | None:
        """False if a comparison failed; None where nothing independent was there to compare with."""
        if self.unchecked is not None:
            return None
        if not self.own_ok or self.reference_ok is False:
            return False
        return True if self.is_reference else self.reference_ok


def decide(result: CaseResult, mp: CaseResult | None) -> Decision | None:
    """Check the texts of a case; if it has several launches, the worst one counts.

    Args:
        result: The case.
        mp: The case whose texts were scored, too; None if there is none.

    Returns:
        The decision; None for a result that did not complete or generated nothing.
    """
    launches = [launch.generation for launch in result.launches if launch.generation is not None]
    if result.outcome != "completed" or not launches:
        return None
    texts, tolerance = len(launches[0].new_tokens), LOGLIKELIHOOD_TOLERANCES[result.case.dtype]
    again = [(one, one.prefill_loglikelihoods) for one in launches if one.prefill_loglikelihoods is not None]
    if len(again) < len(launches):
        reason = next((launch.why["generation"] for launch in result.launches if "generation" in launch.why), "")
        return Decision(texts=texts, tolerance=tolerance, unchecked=reason or "no reason was recorded")
    of_mp = None if mp is None else generated(mp)
    foreign = [found for one in launches if (found := _from_reference(one, of_mp)) is not None]
    return Decision(
        texts=texts,
        tolerance=tolerance,
        own=_worst([_largest(one.loglikelihoods, values, one) for one, values in again]),
        reference=_worst(foreign),
        reference_id=mp.id if mp is not None and foreign else None,
        is_reference=result.case.strategy == REFERENCE_STRATEGY,
    )


def describe(decision: Decision) -> str:
    """Return the result of the check in one sentence, without a capital and a full stop."""
    if decision.unchecked is not None:
        return f"{plural(decision.texts, 'text')} are unchecked: {decision.unchecked}"
    allowed = f"{100 * decision.tolerance:g} % is allowed"
    text = (
        f"log-likelihoods of {plural(decision.texts, 'text')} {_differ(decision.own)} between decode steps and a "
        f"forward without a KV cache; {allowed}"
    )
    if decision.reference_id is not None:
        return f"{text}; over the texts of {decision.reference_id} they {_differ(decision.reference)} from its own"
    if not decision.is_reference:
        text += f"; {REFERENCE_STRATEGY} generated no texts in this run, so that both may be wrong in the same way"
    return text


def check(result: CaseResult, earlier: Sequence[CaseResult]) -> AccuracyCheck | None:
    """Return the check of a result as the report holds it; None if it generated nothing."""
    decision = decide(result, reference.reference(result, earlier))
    if decision is None:
        return None
    differences = [decision.own, *([decision.reference] if decision.reference_id is not None else [])]
    return AccuracyCheck(
        metric=METRIC,
        value=_worst(differences),
        baseline=0.0,
        source=decision.reference_id,
        tolerance=decision.tolerance,
        ok=decision.ok,
        text=describe(decision),
    )


def findings(result: CaseResult, earlier: Sequence[CaseResult]) -> list[Finding]:
    """Return the finding on texts that are wrong; none where they are right or were not generated."""
    decision = decide(result, reference.reference(result, earlier))
    if decision is None or decision.ok is not False:
        return []
    text = describe(decision)
    if decision.own_ok:
        step = (
            f"Look for what {result.case.strategy} computes differently from {REFERENCE_STRATEGY}, such as a mask that "
            "is ignored or a term that is added twice."
        )
    else:
        step = (
            "Look at the KV cache and at what a decode step reads: keys of another batch, a position that is off by "
            "one, a mask that hides a token."
        )
    return [Finding(code="generation-mismatch", severity="failure", text=sentence(text), next_step=step)]


def compare(result: CaseResult, mp: CaseResult) -> Comparison:
    """Compare the texts of a result with those of mp, and its log-likelihoods of mp's texts with mp's own."""
    own, of_mp = generated(result), generated(mp)
    assert own is not None, "only generated texts are compared"
    assert of_mp is not None, "only generated texts are compared with"
    pairs = list(zip(_texts(own), _texts(of_mp), strict=True))
    equal = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*pair, strict=True))) for pair in pairs]
    parted = [number for number, count in enumerate(equal) if count < own.new_tokens[number]]
    scored, expected = own.reference_loglikelihoods, of_mp.prefill_loglikelihoods
    largest = _worst([_from_reference(own, of_mp)])
    return Comparison(
        reference=mp.id,
        items=len(pairs),
        flipped=parted,
        first_difference=min((equal[number] for number in parted), default=None),
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
    found, right = decode(loglikelihoods), decode(expected)
    largest, start = 0.0, 0
    for tokens in texts.new_tokens:
        sums = math.fsum(found[start : start + tokens]), math.fsum(right[start : start + tokens])
        if not all(map(math.isfinite, sums)):
            return None
        largest = max(largest, abs(sums[0] - sums[1]) / max(abs(sums[1]), _LEAST_PER_TOKEN * tokens))
        start += tokens
    return largest


def _worst(differences: Sequence[float | None]) -> float | None:
    """Return the largest difference; None without one, and where one is not finite."""
    known = [difference for difference in differences if difference is not None and math.isfinite(difference)]
    return max(known) if known and len(known) == len(differences) else None


def _texts(generation: Generation) -> list[list[int]]:
    tokens, texts = decode_tokens(generation.tokens).tolist(), []
    start = 0
    for count in generation.new_tokens:
        texts.append(tokens[start : start + count])
        start += count
    return texts


def _differ(difference: float | None) -> str:
    return "are not all finite" if difference is None else f"differ by at most {100 * difference:.2g} %"
