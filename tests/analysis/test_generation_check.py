from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.report_factory import make_case, make_generation, make_result

from pytest_llmgpu.analysis import generation_check
from pytest_llmgpu.analysis.assess import assess
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Environment
from pytest_llmgpu.report.result import CaseResult, Launch

_TEXTS = [[1, 2, 3], [4, 5, 6]]
_VALUES = [[-2.0, -1.0, -3.0], [-0.5, -0.01, -0.2]]


def _result(strategy: str = "mp", *launches: Any) -> CaseResult:
    case = make_case(strategy=strategy, workload="generate", prompt_tokens=96, new_tokens=3)
    result = make_result(strategy=strategy)
    return msgspec.structs.replace(
        result, id=case.id, key=case.key, case=case, launches=[Launch(generation=one) for one in launches]
    )


def _generation(
    values: Sequence[Sequence[float]] = _VALUES, again: Sequence[Sequence[float]] = _VALUES, **fields: Any
) -> Any:
    return make_generation(_TEXTS, values, again, **fields)


def _changed(place: int, change: float) -> list[list[float]]:
    return [[value + change * (number == place) for value in row] for number, row in enumerate(_VALUES)]


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
    result = _result("mp", _generation(), _generation(again=_changed(place, change / 3)))
    decision = generation_check.decide(result, None)
    assert decision is not None
    assert decision.ok is ok
    found = [(one.code, one.severity) for one in generation_check.findings(result, [])]
    assert found == ([] if ok else [("generation-mismatch", "failure")])


def test_other_strategies_are_compared_over_the_texts_of_mp() -> None:
    """A strategy that agrees with itself may be wrong: without mp it is unchecked, unlike mp it fails."""
    mp = _result("mp", _generation())
    right = _result("tp", _generation(reference=mp.key, reference_values=_VALUES))
    wrong = _result("tp", _generation(reference=mp.key, reference_values=_changed(0, 0.5)))
    alone = _result("tp", _generation())
    checks = [generation_check.check(one, [mp]) for one in (right, wrong, alone)]
    assert [check.ok for check in checks if check is not None] == [True, False, None]
    assert [check.source for check in checks if check is not None] == [mp.id, mp.id, None]
    (finding,) = generation_check.findings(wrong, [mp])
    assert "tp" in finding.next_step


def test_the_first_position_at_which_texts_part_is_found() -> None:
    """Texts that part are no failure; the comparison has their numbers and the number of equal tokens before."""
    mp = _result("mp", _generation())
    other = make_generation(
        [[1, 2, 3], [4, 7, 6]], _VALUES, _VALUES, reference=mp.key, reference_values=_changed(1, 0.001)
    )
    found = generation_check.compare(_result("tp", other), mp)
    assert (found.reference, found.flipped, found.first_difference) == (mp.id, [1], 1)
    assert found.largest_difference == pytest.approx(0.001, rel=1e-3)
    same = generation_check.compare(_result("tp", _generation(reference=mp.key, reference_values=_VALUES)), mp)
    assert (same.flipped, same.first_difference, same.typical_difference) == ([], None, 0.0)


def test_a_case_that_generates_is_assessed_with_its_check() -> None:
    """Its figures are derived: medians over batches, steps and launches, and no 99th percentile of a few steps."""
    first = _generation(first_token_s=[0.1, 0.3], step_s=[0.01, 0.02, 0.03, 0.04])
    environment = Environment(cpu="c", cores=1, python="3", platform="p")
    result = assess([_result("mp", first)], earlier=[], environment=environment, options=Options())
    assert result.accuracy_check is not None
    assert result.accuracy_check.ok is True
    assert result.acc is None
    launches = [Launch(generation=first, batches=make_result().launches[0].batches)]
    timed = msgspec.structs.replace(_result("mp", first), launches=launches)
    result = assess([timed], earlier=[], environment=environment, options=Options())
    assert result.first_token_s == pytest.approx(0.2)
    assert result.token_p50_s == pytest.approx(0.025)
    assert result.token_p95_s == pytest.approx(0.0385)
    assert result.token_p99_s is None
    sequences = sum(launches[0].batches.sequences)
    assert result.tokens_per_s == pytest.approx(3 * sequences / sum(launches[0].batches.latency_s))


def test_texts_that_were_not_scored_again_are_unchecked() -> None:
    """The reason is in the text of the check, which neither passes nor fails."""
    result = _result("mp", msgspec.structs.replace(_generation(), prefill_loglikelihoods=None))
    result.launches[0].why["generation"] = "out of memory"
    found = generation_check.check(result, [])
    assert found is not None
    assert (found.ok, found.value) == (None, None)
    assert "out of memory" in found.text
    assert generation_check.findings(result, []) == []
