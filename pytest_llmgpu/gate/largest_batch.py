"""The largest batch size of each series that fits in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pytest_llmgpu.report.result import OUT_OF_MEMORY, CaseResult
from pytest_llmgpu.report.verdicts import Decided, Row, stated


class Series(msgspec.Struct, kw_only=True):
    """The results of one series in one report: the cases that differ in their batch size only."""

    result: CaseResult
    """The first of its results."""
    fits: int = 0
    """Largest batch size that completed; 0 where none did."""
    fails: int | None = None
    """Smallest batch size that was out of memory; None where none was."""

    def __str__(self) -> str:
        return f"{self.fits}" + (f" (out of memory at {self.fails})" if self.fails is not None else "")


def by_series(results: Sequence[CaseResult]) -> dict[str, Series]:
    """Return the series of a report's results by `Case.series`."""
    found: dict[str, Series] = {}
    for result in results:
        size = result.case.batch_size
        series = found.setdefault(result.case.series, Series(result=result))
        if result.outcome == "completed":
            series.fits = max(series.fits, size)
        elif result.outcome in OUT_OF_MEMORY:
            series.fails = min(size, series.fails or size)
    return found


def largest_batch_row(base: Series, head: Series, *, gated: bool) -> Row | None:
    """Compare the largest batch size that fits; None where nothing was out of memory, so that no limit is known.

    A batch size that one report lacks is no change: the size at which the other ran out of memory has to have fitted.
    A crash shows neither that a size fits nor that it does not.
    """
    if (base.fails is None and head.fails is None) or not all(one.fits or one.fails for one in (base, head)):
        return None
    result: Decided = "OK"
    if head.fails is not None and head.fails <= base.fits:
        result = "REGRESSED"
    elif base.fails is not None and base.fails <= head.fits:
        result = "IMPROVED"
    case = head.result.case
    return Row(
        key=case.series,
        id=case.strategy,
        metric="largest_batch",
        reason=f"Largest batch size {head}, was {base}.",
        gated=gated,
        base=float(base.fits),
        head=float(head.fits),
        ratio=head.fits / base.fits if base.fits else None,
        **stated(result),
    )


def was_probed(gone: CaseResult, heads: Mapping[str, Series], results: Sequence[CaseResult]) -> bool:
    """Return whether a case that only the baseline has was a probe for the largest batch size, and needs no second one.

    Each run probes other sizes, in the test whose own case was out of memory. So the candidate's series has to have
    run out of memory too, in the same test, and to have a result for this size: the size is at most the largest that
    fits, or at least the smallest that does not.
    """
    series, size = gone.case.series, gone.case.batch_size
    head = heads.get(series)
    if head is None or head.fails is None or head.fits < size < head.fails or gone.nodeid is None:
        return False
    return any(result.nodeid == gone.nodeid and result.case.series == series for result in results)
