from __future__ import annotations

import pytest
from support.report_factory import make_failed, make_result

from pytest_llmgpu.gate.largest_batch import by_series, largest_batch_row, was_probed
from pytest_llmgpu.report.result import CaseResult


def _series(fits: list[int], fails: list[int]) -> list[CaseResult]:
    results = [make_result(batch_size=size, sequences=size) for size in fits]
    results += [make_failed(batch_size=size) for size in fails]
    for result in results:
        result.nodeid = "benchmarks/test_a.py::test_b[mp-bs64]"
    return results


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        (([32], [64]), ([32], [64]), "OK"),
        (([64], []), ([32], [64]), "REGRESSED"),
        (([32, 49], [64, 50]), ([32, 48], [64, 49]), "REGRESSED"),
        (([32], [64]), ([64], []), "IMPROVED"),
        (([32, 64], [128]), ([32], []), "OK"),  # 64 was not run: that is no limit
        (([], [8]), ([4], [8]), "OK"),
        (([64], []), ([32], []), None),  # nothing was out of memory: the largest size is not known
    ],
)
def test_the_largest_batch_that_fits(
    base: tuple[list[int], list[int]], head: tuple[list[int], list[int]], verdict: str | None
) -> None:
    """Only what one report fitted and the other ran out of memory at is a change."""
    (then,), (now,) = by_series(_series(*base)).values(), by_series(_series(*head)).values()
    row = largest_batch_row(then, now, gated=True)
    assert (row.result if row is not None else None) == verdict
    assert row is None or not row.base or row.ratio == (row.head or 0) / row.base
    assert row is None or (row.metric, row.id, row.key) == ("largest_batch", "mp", now.result.case.series)


def test_a_probe_needs_no_second_one() -> None:
    """A size between, that this run has a result for in the same test; not one that is gone."""
    head = _series([32, 48], [64, 50])
    found = by_series(head)
    probed = {size: was_probed(_series([size], [])[0], found, head) for size in (40, 48, 49, 50, 56)}
    assert probed == {40: True, 48: True, 49: False, 50: True, 56: True}
    elsewhere = _series([40], [])[0]
    elsewhere.nodeid = "benchmarks/test_a.py::test_b[mp-bs40]"
    assert not was_probed(elsewhere, found, head)
    all_fit = _series([32, 64], [])
    assert not was_probed(_series([40], [])[0], by_series(all_fit), all_fit)
