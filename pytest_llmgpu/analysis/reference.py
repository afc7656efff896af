"""Which cases of a session a case is compared with: those of its series, and mp, the reference strategy.

Every strategy computes the same numbers as mp, in another order. A strategy that is wrong at every batch size agrees
with itself, so it is compared with mp, not only with its own other cases. A case of quantised weights is compared with
mp of the same quantisation; without it, as mp itself, with mp of plain weights, whose numbers are others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from pytest_llmgpu.report.case import REFERENCE_STRATEGY, Case
from pytest_llmgpu.report.derived import generated, measured
from pytest_llmgpu.report.result import CaseResult

_decisive = attrgetter(
    *("workload", "scoring", "model", "revision", "load_format", "seed", "dtype"),
    *("dataset_sha256", "tokenizer_sha256", "add_bos", "limit", "prompt_tokens", "new_tokens"),
)
"""Returns the fields of a case that decide its log-likelihoods. The devices and their memory do not."""


def decisive(case: Case) -> tuple[object, ...]:
    """Return the fields of a case that decide its log-likelihoods, without the quantisation.

    A GPU draws other random weights than a CPU.
    """
    return *_decisive(case), case.load_format == "dummy" and case.device


def reference(result: CaseResult, earlier: Sequence[CaseResult]) -> CaseResult | None:
    """Return the scored case of mp with the same weights, else of plain weights; None without one.

    The same batch size comes first, then the largest smaller one, then the smallest larger one; at equal batch size
    the same devices come first. A case with wrong answers is taken only if there is no other.
    """
    if not _scored(result):
        return None
    texts = generated(result)
    if texts is not None:
        # Further launches may have been measured since: the case whose texts were scored counts.
        return next((other for other in earlier if other.key == texts.reference), None)
    return find(result.case, earlier)


def find(case: Case, earlier: Sequence[CaseResult]) -> CaseResult | None:
    """Return the case that `reference` chooses for a result of a case."""
    size = case.batch_size

    def distance(result: CaseResult) -> tuple[bool, bool, bool, int, bool, bool]:
        other = result.case
        kind = (other.quantization != case.quantization, result.has_wrong_answers)
        moved = (other.device != case.device, other.devices != case.devices)
        return (*kind, other.batch_size > size, abs(other.batch_size - size), *moved)

    return min(filter(_scored, _of_reference_strategy(case, earlier)), key=distance, default=None)


def missing(result: CaseResult, earlier: Sequence[CaseResult]) -> str:
    """Return the reason why `reference` finds no case for a result, without a full stop."""
    case = result.case
    if case.strategy == REFERENCE_STRATEGY and case.quantization is None:
        return f"it is {REFERENCE_STRATEGY} itself"
    if not _scored(result):
        return "the case did not complete" if result.outcome != "completed" else "the case scored nothing"
    if (texts := generated(result)) is not None and texts.tokens is None:
        return "the engine returns no token ids"
    if _of_reference_strategy(case, earlier):
        return f"no case of {REFERENCE_STRATEGY} completed in this run"
    weights = " with plain weights" if case.strategy == REFERENCE_STRATEGY else ""
    return f"{REFERENCE_STRATEGY}{weights} was not measured in this run"


def by_series(results: Iterable[CaseResult]) -> list[list[CaseResult]]:
    """Return the results of each series, in the order in which they appear."""
    found: dict[str, list[CaseResult]] = {}
    for result in results:
        found.setdefault(result.case.series, []).append(result)
    return list(found.values())


def same_series(result: CaseResult, earlier: Sequence[CaseResult]) -> list[CaseResult]:
    """Return the other results that differ from a result in their batch size at most."""
    fields = result.case.series
    return [other for other in earlier if other is not result and other.case.series == fields]


def _of_reference_strategy(case: Case, earlier: Sequence[CaseResult]) -> list[CaseResult]:
    """Return the cases of mp with the weights of a case, else with plain ones; none for mp with plain weights."""
    fields, weights = decisive(case), {case.quantization, None}
    weights -= {case.quantization} if case.strategy == REFERENCE_STRATEGY else set()
    of_mp = [other for other in earlier if other.case.strategy == REFERENCE_STRATEGY]
    return [other for other in of_mp if other.case.quantization in weights and decisive(other.case) == fields]


def _scored(result: CaseResult) -> bool:
    """Return whether a result has answers: log-likelihoods of endings, or texts with theirs."""
    return result.outcome == "completed" and (measured(result) or generated(result)) is not None
