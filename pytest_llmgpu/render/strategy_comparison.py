"""The answers of the strategies compared with those of mp, in one line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_llmgpu.analysis.answers import written
from pytest_llmgpu.render.table import entries
from pytest_llmgpu.report.case import REFERENCE_STRATEGY
from pytest_llmgpu.report.result import CaseResult, Comparison
from pytest_llmgpu.report.text import plural


def with_reference(cases: Sequence[CaseResult], *, verbose: bool) -> Iterator[list[str]]:
    """Yield how much each strategy differs from mp, at the batch size with the largest difference: the parts of a line.

    Strategies that do not differ are left out unless `verbose`.
    """
    found = [(one.title, one.result, one.result.comparison) for one in entries(cases)]
    for title in dict.fromkeys(title for title, *_ in found):
        compared = [(result, one) for other, result, one in found if other == title and one is not None]
        if not compared:
            continue
        result, worst = max(compared, key=lambda pair: _severity(*pair))
        if not verbose and not any(_severity(result, worst)):
            continue
        where = f" at batch size {result.case.batch_size}"
        if len(compared) > 1:
            where = f", worst{where}" if any(_severity(result, worst)) else " at every batch size"
        first, *rest = _differences(result, worst)
        yield [f"{title} compared with {REFERENCE_STRATEGY}{where}: {first}", *rest]


def _severity(result: CaseResult, comparison: Comparison) -> tuple[bool, int, int, float]:
    """Return the sort key of the worst case: with random weights the numbers decide, else the predictions."""
    difference = comparison.largest_difference
    if result.case.generates:
        return (difference is None, 0, len(comparison.flipped), difference or 0.0)
    if result.case.load_format == "dummy":
        return (difference is None, 0, 0, difference or 0.0)
    return (difference is None, comparison.lost or 0, len(comparison.flipped), difference or 0.0)


def _differences(result: CaseResult, comparison: Comparison) -> list[str]:
    dummy = result.case.load_format == "dummy"
    parts = []
    if result.case.generates:
        text = f"{len(comparison.flipped):,} of {plural(comparison.items, 'text')} diverge"
        if comparison.first_difference is not None:
            text += f", the first at token {comparison.first_difference + 1}"
        parts.append(text)
    elif not dummy:
        text = f"{len(comparison.flipped):,} of {comparison.items:,} items flipped"
        if comparison.mcnemar_p is not None:
            text += f" ({comparison.lost:,} lost, {comparison.won:,} won, {written(comparison.mcnemar_p)})"
        parts.append(text)
    # The accuracy check uses the same figures: the largest difference of random weights, and the typical difference of
    # trained weights, because the relative difference of a log-likelihood near 0 is always large.
    difference = comparison.largest_difference if dummy else comparison.typical_difference
    # Each text has log-likelihoods of its own: those of the reference's texts are compared.
    name = f"log-likelihoods of {REFERENCE_STRATEGY}'s texts" if result.case.generates else "log-likelihoods"
    if difference is None:
        parts.append(f"not all {name} are finite")
    elif not difference:
        parts.append(f"{name} equal")
    else:
        parts.append(f"{name} differ by {100 * difference:.2g} % ({'largest' if dummy else 'typical'})")
    return parts
