"""Metrics with one verdict per series: the cases that differ in their batch size only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from pytest_llmgpu.report.metrics import spec_of
from pytest_llmgpu.report.result import OUT_OF_MEMORY, CaseResult
from pytest_llmgpu.report.verdicts import Decided, Row, stated

_NOT_OF_SERIES = frozenset(("batch_size", "execution"))
"""Fields in which the cases of one series can differ."""

_NAMED = 2
"""Most fields in the name of a series."""


class Series(msgspec.Struct, kw_only=True):
    """The results of one series in one report."""

    result: CaseResult
    """The first of its results."""
    fits: int = 0
    """Largest batch size that completed; 0 where none did."""
    fails: int | None = None
    """Smallest batch size that was out of memory; None where none was."""
    completed: dict[int, CaseResult] = {}
    """Batch size to the result that completed."""

    @property
    def known(self) -> bool:
        """True if a batch size of the series completed or was out of memory: a crash shows neither."""
        return bool(self.fits) or self.fails is not None


def by_series(results: Sequence[CaseResult]) -> dict[str, Series]:
    """Return the series of a report's results by `Case.series`."""
    found: dict[str, Series] = {}
    for result in results:
        size = result.case.batch_size
        series = found.setdefault(result.case.series, Series(result=result))
        if result.outcome == "completed":
            series.fits = max(series.fits, size)
            series.completed.setdefault(size, result)
        elif result.outcome in OUT_OF_MEMORY:
            series.fails = size if series.fails is None else min(series.fails, size)
    return found


def largest_batch_row(base: Series, head: Series, *, gated: bool) -> Row | None:
    """Judge the largest batch size that fits; None where nothing was out of memory, so that no limit is known.

    A batch size that one report lacks is no change: the size at which the other ran out of memory has to have fitted.
    """
    limited = base.fails is not None or head.fails is not None
    if not limited or not base.known or not head.known:
        return None
    if head.fails is not None and head.fails <= base.fits:
        verdict: Decided = "REGRESSED"
    elif base.fails is not None and base.fails <= head.fits:
        verdict = "IMPROVED"
    else:
        verdict = "OK"
    case = head.result.case
    return Row(
        key=case.series,
        id=case.strategy,
        metric="largest_batch",
        **stated(verdict),
        reason=f"Largest batch size {_reach(head)}, was {_reach(base)}.",
        gated=gated,
        base=float(base.fits),
        head=float(head.fits),
        ratio=head.fits / base.fits if base.fits else None,
    )


def _reach(series: Series) -> str:
    return f"{series.fits}" + (f" (out of memory at {series.fails})" if series.fails is not None else "")


def with_distinct_names(rows: Sequence[Row], results: Sequence[CaseResult]) -> Sequence[Row]:
    """Return the rows with the fields in which series of one strategy differ in their ids: `mp (limit=40)`.

    Args:
        rows: Rows of cases and of series.
        results: The results of the candidate.
    """
    keys: dict[str, set[str]] = {}
    for row in rows:
        if spec_of(row.metric).scope == "series":
            keys.setdefault(row.id, set()).add(row.key)
    names: dict[str, str] = {}
    for strategy, several in keys.items():
        if len(several) > 1:
            cases = {result.case.series: result.case for result in results if result.case.strategy == strategy}
            fields = {
                case.series: {**msgspec.structs.asdict(case), **case.strategy_options, "strategy_options": None}
                for case in cases.values()
            }
            differing = [
                name
                for name in dict.fromkeys(itertools.chain(*fields.values()))
                if name not in _NOT_OF_SERIES and len({str(one.get(name)) for one in fields.values()}) > 1
            ]
            # A hash names nothing to the reader, unless it is all that differs.
            shown = [name for name in differing if not name.endswith("sha256")] or differing
            for key, one in fields.items():
                its = [f"{name}={value}" for name in shown if (value := one.get(name)) is not None]
                names[key] = f"{strategy} ({', '.join(its[:_NAMED])})" if its else strategy
    if not names:
        return rows
    return [msgspec.structs.replace(row, id=names[row.key]) if row.key in names else row for row in rows]


def settled(gone: CaseResult, heads: Mapping[str, Series], measured_by: Mapping[str, set[str]]) -> bool:
    """Return whether a case that only the baseline has was a probe for the largest batch size, and needs no second one.

    Each run probes other sizes, in the test whose own case was out of memory. So the candidate's series has to have
    run out of memory too, in the same test, and to have settled this size: the size is at most the largest that fits,
    or at least the smallest that does not.

    Args:
        gone: The baseline's result.
        heads: The candidate's series, from `by_series`.
        measured_by: Node id to the series that the candidate measured in that test.
    """
    series = gone.case.series
    head = heads.get(series)
    if head is None or head.fails is None or gone.nodeid is None or series not in measured_by.get(gone.nodeid, ()):
        return False
    return gone.case.batch_size <= head.fits or gone.case.batch_size >= head.fails
