"""Checks random weights: they answer by chance, but with the same log-likelihoods at every batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_llmgpu.analysis.comparison import largest_difference
from pytest_llmgpu.analysis.findings import Checked, Fault, finding, of_small_workspace, small_workspace, wrong_answers
from pytest_llmgpu.analysis.generated_texts import DIFFERENCE
from pytest_llmgpu.analysis.reference import missing
from pytest_llmgpu.report.case import REFERENCE_STRATEGY
from pytest_llmgpu.report.derived import LOGLIKELIHOOD_TOLERANCES, decode, measured
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult, Finding
from pytest_llmgpu.report.text import percent

_PLAIN = 0.001  # smaller fractions need more digits than a percentage with one decimal


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
