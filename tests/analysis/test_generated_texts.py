from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.assessed import assessed, check_of
from support.report_factory import make_case, make_generation, make_result

from pytest_llmgpu.analysis.answers import check_texts, compare
from pytest_llmgpu.report.result import CaseResult, Generation, Launch

_TEXTS = [[1, 2, 3], [4, 5, 6]]
_VALUES = [[-2.0, -1.0, -3.0], [-0.5, -0.01, -0.2]]


def _result(strategy: str = "mp", *launches: Generation) -> CaseResult:
    case = make_case(strategy=strategy, workload="generate", prompt_tokens=96, new_tokens=3)
    result = make_result(strategy=strategy)
    return msgspec.structs.replace(
        result, id=case.id, key=case.key, case=case, launches=[Launch(generation=one) for one in launches]
    )


def _generation(again: Sequence[Sequence[float]] = _VALUES, **fields: Any) -> Generation:
    return make_generation(_TEXTS, _VALUES, again, **fields)


def _changed(place: int, change: float) -> list[list[float]]:
    return [[value + change * (number == place) for value in row] for number, row in enumerate(_VALUES)]


_MP = _result("mp", _generation())


@pytest.mark.parametrize(
    ("change", "place", "ok"),
    [
        (0.01, 0, True),
        (0.05, 0, False),
        # A text that is almost certain counts as 1 nat a token: 5e-3 x 3.
        (0.014, 1, True),
        (0.016, 1, False),
        (math.nan, 1, False),
    ],
)
def test_one_text_that_differs_by_more_than_rounding_fails(change: float, place: int, ok: bool) -> None:
    """The worst text of the worst launch counts, relative to its log-likelihood or to its length."""
    check, fault = check_texts(_result("mp", _generation(), _generation(_changed(place, change / 3))), None)
    assert (check.ok, fault) == (ok, None if ok else "cache")


def test_texts_of_other_strategies_are_compared_with_mp() -> None:
    """A strategy that agrees with itself may be wrong: without mp it is unchecked, unlike mp it fails."""
    right, wrong, alone = (
        _result("tp", _generation(reference=_MP.key if values else None, reference_values=values))
        for values in (_VALUES, _changed(0, 0.5), None)
    )
    checks = [check_of(_MP, one) for one in (right, wrong, alone)]
    assert [(one.ok, one.source) for one in checks] == [(True, _MP.id), (False, _MP.id), (None, None)]
    results = [assessed(_MP, one)[1] for one in (right, wrong, alone)]
    assert [[one.code for one in result.findings] for result in results] == [[], ["wrong-answers"], []]
    assert "what tp computes" in results[1].findings[0].next_step
    # Without the forward over prompt and text the check has the reason, and neither passes nor fails.
    result = _result("mp", msgspec.structs.replace(_generation(), prefill_loglikelihoods=None))
    result.launches[0].why["generation"] = "out of memory"
    found = check_of(result)
    assert (found.ok, found.value, found.text) == (None, None, "2 texts are unchecked: out of memory")


def test_the_first_position_at_which_texts_diverge_is_found() -> None:
    """Texts that diverge are no failure; the comparison has their numbers and the number of equal tokens before."""
    fields: dict[str, Any] = {"reference": _MP.key, "reference_values": _changed(1, 0.001)}
    other = make_generation([[1, 2, 3], [4, 7, 6]], _VALUES, _VALUES, **fields)
    found = compare(_result("tp", other), _MP, "acc")
    assert (found.reference, found.flipped, found.first_difference) == (_MP.id, [1], 1)
    assert found.largest_difference == pytest.approx(0.001, rel=1e-3)
    same = compare(_result("tp", _generation(reference=_MP.key, reference_values=_VALUES)), _MP, "acc")
    assert (same.flipped, same.first_difference, same.typical_difference) == ([], None, 0.0)
