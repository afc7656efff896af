"""Whether a series still fits: the largest batch size that completed and the smallest that was out of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row, Verdict

__all__ = ["Reach", "largest_batch_row", "reaches", "series_of", "settled"]

OUT_OF_MEMORY = frozenset(("oom", "skipped_after_oom"))
"""Outcomes that say that a batch size does not fit."""


class Reach(msgspec.Struct, kw_only=True):
    """How far a series went."""

    result: CaseResult
    """One of its results."""
    fits: int = 0
    """Largest batch size that completed, 0 for none."""
    fails: int | None = None
    """Smallest batch size that was out of memory; None where none was."""

    @property
    def known(self) -> bool:
        """Whether any case of the series says something: a crash does not."""
        return bool(self.fits) or self.fails is not None


def series_of(case: Case) -> tuple[object, ...]:
    """Return what the cases of one series share. Faster than `Case.series`, and good within one process only."""
    fields = msgspec.structs.asdict(case)
    return tuple(
        str(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in {"batch_size", "execution"}
    )


def reaches(results: Sequence[CaseResult]) -> dict[tuple[object, ...], Reach]:
    """Return how far each series went."""
    found: dict[tuple[object, ...], Reach] = {}
    for result in results:
        size = result.case.batch_size
        reach = found.setdefault(series_of(result.case), Reach(result=result))
        if result.outcome == "completed":
            reach.fits = max(reach.fits, size)
        elif result.outcome in OUT_OF_MEMORY:
            reach.fails = size if reach.fails is None else min(reach.fails, size)
    return found


def largest_batch_row(base: Reach, head: Reach, *, gated: bool) -> Row | None:
    """Judge a series in which something was out of memory; None where nothing was, so that no limit is known.

    A size that one side did not run is no change: what the other side ran out of memory at has to have fitted.
    """
    limited = base.fails is not None or head.fails is not None
    if not limited or not base.known or not head.known:
        return None
    if head.fails is not None and head.fails <= base.fits:
        verdict: Verdict = "CAPACITY_REGRESSED"
    elif base.fails is not None and base.fails <= head.fits:
        verdict = "CAPACITY_IMPROVED"
    else:
        verdict = "OK"
    now = f"{head.fits} sequences fit" + (f" and {head.fails} do not" if head.fails is not None else "")
    then = f"{base.fits} did" + (f" and {base.fails} did not" if base.fails is not None else "")
    case = head.result.case
    return Row(
        key=case.series,
        id=case.strategy,
        metric="largest_batch",
        verdict=verdict,
        reason=f"{now}; in the baseline {then}.",
        gated=gated,
        base=float(base.fits),
        head=float(head.fits),
        ratio=head.fits / base.fits if base.fits else None,
    )


def settled(
    gone: CaseResult, heads: Mapping[tuple[object, ...], Reach], measured_by: Mapping[str, set[tuple[object, ...]]]
) -> bool:
    """Return whether a case that only the baseline has was a probe for the largest batch size, and needs no second one.

    Each run probes other sizes, in the test whose own case was out of memory. So the candidate's series has to have
    run out of memory too, in the same test, and to have settled this size: it is at most what fits, or at least what
    does not.

    Args:
        gone: the baseline's result.
        heads: what `reaches` gives for the candidate.
        measured_by: node id to the series that the candidate measured in it.
    """
    series = series_of(gone.case)
    head = heads.get(series)
    if head is None or head.fails is None or gone.nodeid is None or series not in measured_by.get(gone.nodeid, ()):
        return False
    return gone.case.batch_size <= head.fits or gone.case.batch_size >= head.fails
