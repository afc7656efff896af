from __future__ import annotations

import msgspec
from support.report_factory import make_result

from pytest_llmgpu.analysis.earlier import Earlier
from pytest_llmgpu.report.result import CaseResult, Finding


def _result(limit: int, strategy: str = "mp", code: str | None = None) -> CaseResult:
    result = make_result(limit=limit, strategy=strategy)
    result.findings = [] if code is None else [Finding(code=code, severity="info", text="", next_step="")]
    return result


def _ids(results: list[CaseResult]) -> list[tuple[int | None, str]]:
    return [(result.case.limit, result.case.strategy) for result in results]


def test_a_case_is_compared_with_those_that_compute_the_same() -> None:
    """Other strategies of the same items count, and other items do not."""
    results = [_result(1), _result(2), _result(1, "tp"), _result(1, "iok")]
    earlier = Earlier(results)
    case = results[3].case
    assert _ids(earlier.before(3, case)) == [(1, "mp"), (1, "tp")]
    assert _ids(earlier.peers(case)) == [(1, "mp"), (1, "tp"), (1, "iok")]
    assert earlier.before(0, case) == []


def test_findings_are_stated_once_a_session() -> None:
    """The first case with each finding is among the earlier ones of every case, also after a further launch."""
    earlier = Earlier([_result(1), _result(2, code="a"), _result(3, code="a"), _result(4, code="b")])
    case = _result(9).case
    assert _ids(earlier.before(4, case)) == [(2, "mp"), (4, "mp")]
    assert _ids(earlier.before(3, case)) == [(2, "mp")]
    earlier.put(0, _result(1, code="a"))
    assert _ids(earlier.before(1, case)) == [(1, "mp")]
    earlier.put(0, _result(1))
    assert _ids(earlier.before(1, case)) == []


def test_the_last_assessment_of_a_case_counts() -> None:
    """A case is assessed again after each of its launches."""
    first = _result(1)
    earlier = Earlier([first])
    again = msgspec.structs.replace(first, outcome="crashed")
    earlier.put(0, again)
    assert earlier.peers(first.case) == [again]
