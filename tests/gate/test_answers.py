from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import known, make_answers, make_check, make_generation, make_result

from pytest_llmgpu.gate import answers
from pytest_llmgpu.gate.answers import Answered, answered, below_floor, predictions_row, texts_row
from pytest_llmgpu.gate.judge import decided
from pytest_llmgpu.gate.policy import AccuracyRule, TextsRule
from pytest_llmgpu.report.case import GENERATE
from pytest_llmgpu.report.derived import encode
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Row

ITEMS = 1000


def _result(*wrong: int, items: int = ITEMS, **fields: Any) -> CaseResult:
    missed = frozenset(wrong)
    return make_result(accuracy=make_answers([number not in missed for number in range(items)]), **fields)


def _answered(base: CaseResult, head: CaseResult, **rule: Any) -> Any:
    return answered(base, head, AccuracyRule(**rule))


def _judged(base: CaseResult, head: CaseResult, **rule: Any) -> Row:
    return decided([_answered(base, head, **rule)], 0.95)[0]


@pytest.mark.parametrize(
    ("lost", "won", "verdict", "p"),
    [
        (0, 0, "OK", 1.0),
        (4, 0, "OK", 1 / 16),  # 0.4 points at most, and the threshold is 0.5
        (5, 0, "REGRESSED", 1 / 32),
        (20, 0, "REGRESSED", 0.5**20),
        (8, 4, "UNDECIDED", 794 / 4096),
        (3, 3, "OK", 42 / 64),
        (0, 5, "IMPROVED", 1 / 32),
    ],
)
def test_items_that_flipped_decide(lost: int, won: int, verdict: str, p: float, prose: Prose) -> None:
    """McNemar's exact one-sided p; where it is not significant, a loss of the threshold has to be ruled out."""
    row = _judged(_result(*range(100, 100 + won)), _result(*range(lost)))
    assert row.result == verdict
    assert row.p == pytest.approx(p)
    assert (row.lost, row.won) == (list(range(lost)), list(range(100, 100 + won)))
    assert known(row.low) <= (lost - won) / ITEMS <= known(row.high)
    assert prose == row.reason


def test_the_p_of_items_lost_is_shown_where_other_numbers_decide() -> None:
    """Log-likelihoods that differ take their case out of the family of tests; its own p stays that of the test."""
    other = msgspec.structs.replace(_answered(_result(), _result(*range(14))), difference=0.5)
    assert other.p(1) == 1.0
    row = decided([other], 0.95)[0]
    assert (row.result, row.p) == ("REGRESSED", 0.5**14)
    assert "14 items lost, 0 won of 1,000 (p = 6.1e-05)" in row.reason


def test_few_items_cannot_rule_out_a_loss() -> None:
    """One of 16 lost is 6 points, and may be chance: neither OK nor REGRESSED."""
    assert _judged(_result(items=16), _result(3, items=16)).verdict == "UNDECIDED"
    assert _judged(_result(items=16), _result(3, items=16), threshold=0.07).verdict == "OK"


def _same(number: int, **rule: Any) -> Any:
    result = _result(strategy=f"s{number}")
    return _answered(result, result, **rule)


def _random(number: int) -> Any:
    result = _numbers(-3.0, load_format="dummy", strategy=f"s{number}")
    return _answered(result, result)


@pytest.mark.parametrize(
    ("other", "verdict", "p"),
    [
        (_same, "UNDECIDED", 20 / 128),
        (functools.partial(_same, gate=False), "REGRESSED", 1 / 128),
        (_random, "REGRESSED", 1 / 128),
    ],
    ids=["gated", "not gated", "random weights"],
)
def test_the_gated_series_of_trained_models_are_one_family(
    other: Callable[[int], Answered], verdict: str, p: float
) -> None:
    """Seven items lost are significant alone, and not among twenty series. Random weights answer by chance."""
    first, *others = map(other, range(19))
    found = decided([first, _answered(_result(), _result(*range(7))), *others], 0.95)
    assert (found[1].verdict, found[1].p) == (verdict, p)
    assert {row.result for row in (found[0], *found[2:])} == {"OK"}


def test_other_wrong_answers_are_no_loss_but_other_predictions(prose: Prose) -> None:
    """An item that is wrong in two ways was neither lost nor won; predictions are exact."""
    found = _answered(_result(0), _wrong_differently(0))
    assert decided([found], 0.95)[0].verdict == "OK"
    row = predictions_row(found, gated=True)
    assert (row.result, row.base, row.head) == ("REGRESSED", 0.0, found.changed / found.items)
    assert prose == row.reason
    assert predictions_row(_answered(_result(0), _result(0)), gated=False).verdict == "OK"


def test_the_floor_holds_whatever_the_baseline_says(prose: Prose) -> None:
    """By the policy, or by the candidate's own check: the same wrong answers as before are still wrong."""
    base, head = _result(0, 1), _result(0, 1)
    assert _judged(base, head, floor=0.998).verdict == "OK"
    row = _judged(base, head, floor=0.999)
    assert row.result == "REGRESSED"
    assert prose == row.reason
    head.accuracy_check = make_check("60 points below")
    assert below_floor(head, AccuracyRule()) == "60 points below."
    assert _judged(base, head).verdict == "REGRESSED"
    head.accuracy_check = make_check("not known", ok=None)
    assert below_floor(head, AccuracyRule()) is None


def _of_launches(*results: CaseResult) -> CaseResult:
    """Return the first result with the launches of all."""
    return msgspec.structs.replace(results[0], launches=[launch for one in results for launch in one.launches])


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_launch_that_is_wrong_is_a_loss(place: int, prose: Prose) -> None:
    """However few they are and wherever: the same batches have the same answers each time."""
    launches = [_result()] * 5
    launches[place] = _result(*range(50))
    base, head = _of_launches(*[_result()] * 3), _of_launches(*launches)
    row = _judged(base, head)
    assert row.result == "REGRESSED"
    assert prose == row.reason
    assert prose == predictions_row(_answered(base, head), gated=True).reason
    assert prose == _judged(base, head, floor=0.96).reason


def _wrong_differently(number: int) -> CaseResult:
    """Return a result in which an item is wrong in another way than `_result` has it."""
    found = _result(number)
    accuracy = known(found.launches[0].accuracy)
    chosen = list(accuracy.predictions_norm)
    chosen[number] = (chosen[number] + 1) % 4
    found.launches[0].accuracy = msgspec.structs.replace(accuracy, predictions_norm=chosen)
    return found


_TWENTY = range(100, 120)


def test_a_launch_that_was_chosen_has_a_larger_p() -> None:
    """It is the worst of five, so that its p is five times as large."""
    row = _judged(_result(), _of_launches(*[_result()] * 4, _result(*range(6))))
    assert (row.result, row.p, row.lost) == ("UNDECIDED", 5 / 64, [0, 1, 2, 3, 4, 5])


def test_a_baseline_that_disagrees_with_itself_is_compared_by_its_worst_launch() -> None:
    """So is the candidate: its odd launch may be what the baseline's is."""
    base = _of_launches(_result(), _result(), _result(*range(50)))
    assert _judged(base, base).verdict == "OK"


def test_other_numbers_in_one_launch_are_a_regression() -> None:
    """Of real weights and of random ones."""
    for fields in ({}, {"load_format": "dummy"}):
        same, other = (_numbers(value, dtype="float16", **fields) for value in (-2.0, -2.2))
        assert _judged(_of_launches(same, same), _of_launches(same, other, same)).verdict == "REGRESSED"


def test_answers_that_are_gone_or_of_other_items() -> None:
    """Gone is MISSING, other numbers of items are NOT_COMPARABLE, and new ones have nothing to compare with."""
    gone: Any = answered(_result(), make_result(), AccuracyRule(gate=False))
    assert (gone.verdict, gone.gated) == ("MISSING", False)
    fewer: Any = answered(_result(), _result(items=10), AccuracyRule())
    assert fewer.result == "NOT_COMPARABLE"
    assert answered(make_result(), _result(), AccuracyRule()) == "only the candidate has it"
    assert answered(make_result(), make_result(), AccuracyRule()) == "neither report has it"


def _numbers(*values: float, **fields: Any) -> CaseResult:
    """Return a result of 100 items, all right, with these log-likelihoods over and over."""
    return make_result(accuracy=make_answers([True] * 100, list(values) * (400 // len(values))), **fields)


@pytest.mark.parametrize(
    ("off", "dtype", "verdict"),
    [
        (1.0008, "float32", "OK"),
        (1.0012, "float32", "REGRESSED"),
        (1.0012, "float16", "OK"),
        (0.99, "float16", "REGRESSED"),
        (0.99, "bfloat16", "OK"),
        (1.06, "bfloat16", "REGRESSED"),
    ],
)
def test_other_numbers_are_a_regression_although_every_answer_stays(off: float, dtype: str, verdict: str) -> None:
    """A wrong kernel may keep the answers of a model that is sure of them; rounding is another thing in each dtype."""
    row = _judged(_numbers(-2.0, -5.0, dtype=dtype), _numbers(-2.0 * off, -5.0 * off, dtype=dtype))
    assert row.result == verdict
    assert (row.lost, row.won) == ([], [])


def test_other_numbers_are_told_with_what_became_of_the_answers(prose: Prose) -> None:
    """In two lines, and a policy that allows them leaves the answers to McNemar."""
    base, head = _numbers(-2.0, -4.0, dtype="float16"), _numbers(-2.2, -4.4, dtype="float16")
    assert prose == _judged(base, head).reason
    assert prose == _judged(base, head, difference=0.05).reason
    allowed = _judged(base, head, difference=0.11, threshold=0.05)
    assert (allowed.verdict, allowed.p) == ("OK", 1.0)


def test_numbers_that_are_mended_are_no_regression(prose: Prose) -> None:
    """The baseline's own check had found them wrong, and the candidate's does not."""
    base, head = _numbers(-2.2, dtype="float16"), _numbers(-2.0, dtype="float16")
    base.accuracy_check = make_check("10 % off")
    row = _judged(base, head)
    assert row.result == "IMPROVED"
    assert prose == row.reason
    head.accuracy_check = base.accuracy_check
    assert _judged(base, head).verdict == "REGRESSED"


@pytest.mark.parametrize(
    ("right", "values", "verdict"),
    [
        (False, [-3.0] * 400, "OK"),
        (True, [-3.1] * 400, "REGRESSED"),
        (True, [-3.6] + [-3.0] * 399, "REGRESSED"),
        (True, [-3.04] * 34 + [-3.0] * 366, "REGRESSED"),
        (True, [-3.02] + [-3.0] * 399, "OK"),
    ],
    ids=["answers flip", "all differ", "one differs by far", "some differ", "one differs"],
)
def test_random_weights_are_judged_by_their_numbers_alone(
    right: bool, values: list[float], verdict: str, prose: Prose
) -> None:
    """Their answers are chance: items that flip and a floor do not count, and one number may not differ by far."""
    base, head = (
        make_result(accuracy=make_answers([hit] * 100, numbers), load_format="dummy", dtype="float16")
        for hit, numbers in ((True, [-3.0] * 400), (right, values))
    )
    row = _judged(base, head, floor=0.5)
    assert (row.result, row.p, row.lost, row.base) == (verdict, None, None, None)
    assert prose == row.reason
    unknown = make_result(accuracy=make_answers([True] * 100, []), load_format="dummy", dtype="float16")
    assert _judged(unknown, head).verdict == "UNDECIDED"


def test_numbers_that_are_not_finite_any_more(prose: Prose) -> None:
    """Are a regression; a baseline that has such numbers says nothing."""
    fine, broken = _numbers(-2.0), _numbers(float("nan"))
    row = _judged(fine, broken)
    assert row.result == "REGRESSED"
    assert prose == row.reason
    assert _judged(broken, fine).verdict == "OK"


_VALUES = ((-1.0, -2.0, -3.0, -2.0), (-4.0, -3.0, -2.0, -3.0))
"""Log-likelihoods of two texts of four tokens, -20 in all."""


def _texts(*launches: tuple[float, Sequence[Sequence[int]]], **fields: Any) -> CaseResult:
    """Return a result of two texts in float16; each launch has log-likelihoods by a factor, and its tokens."""
    result = make_result(workload=GENERATE, prompt_tokens=10, new_tokens=4, **fields)
    for factor, tokens in launches:
        values = [[factor * value for value in text] for text in _VALUES]
        launch = msgspec.structs.replace(result.launches[0], generation=make_generation(tokens, values, values))
        result.launches.append(launch)
    return msgspec.structs.replace(result, launches=result.launches[1:] or result.launches)


_SAME_TOKENS = ((1, 2, 3, 4), (5, 6, 7, 8))
_LAST_DIFFERS = ((1, 2, 3, 4), (5, 6, 7, 9))
_BOTH_DIFFER = ((1, 9, 9, 9), (9, 6, 7, 8))


@pytest.mark.parametrize(
    ("launches", "verdict"),
    [
        ([(1.004, _SAME_TOKENS)], "OK"),
        ([(1.006, _SAME_TOKENS)], "REGRESSED"),
        ([(0.994, _BOTH_DIFFER)], "REGRESSED"),
        ([(1.004, _BOTH_DIFFER)], "CHANGED"),
        ([(1.002, _SAME_TOKENS), (1.001, _LAST_DIFFERS), (1.0, _BOTH_DIFFER), (1.0, _SAME_TOKENS)], "CHANGED"),
        ([(1.0, _BOTH_DIFFER), (1.006, _SAME_TOKENS), (1.0, _SAME_TOKENS)], "REGRESSED"),
        ([(math.nan, _SAME_TOKENS)], "REGRESSED"),
        ([(-math.inf, _SAME_TOKENS)], "REGRESSED"),
    ],
    ids=["rounding", "other", "other and diverge", "diverge", "most diverge", "one launch is other", "NaN", "infinite"],
)
def test_texts_are_judged_by_the_numbers_of_their_tokens(
    launches: list[tuple[float, Sequence[Sequence[int]]]], verdict: str, prose: Prose
) -> None:
    """In the worst launch, above what rounding explains; texts that diverge within it never fail, gated or not."""
    row = _row_of_texts(_texts((1.0, _SAME_TOKENS)), _texts(*launches))
    assert (row.result, row.gated, row.threshold) == (verdict, verdict != "CHANGED", 0.005)
    assert prose == row.reason


def _row_of_texts(base: CaseResult, head: CaseResult, **rule: Any) -> Any:
    return texts_row(base, head, TextsRule(**rule))


def test_tokens_after_the_first_one_that_differs_do_not_count() -> None:
    """Their prefixes differ. The one that differs counts: both are the likeliest after the same tokens."""
    base, head = _texts((1.0, _SAME_TOKENS)), _texts((1.0, _BOTH_DIFFER))
    generation = known(head.launches[0].generation)
    for counted, values in ((False, [-1, -2, -9, -9, -4, -9, -9, -9]), (True, [-1, -2, -3, -2, -5, -3, -2, -3])):
        head.launches[0].generation = msgspec.structs.replace(generation, loglikelihoods=encode(values))
        assert _row_of_texts(base, head).result == ("REGRESSED" if counted else "CHANGED")


def test_the_policy_and_the_check_of_the_baseline_decide_as_for_items(prose: Prose) -> None:
    """A baseline that failed its own check was the wrong one; a policy allows more, or does not gate."""
    base, head = _texts((1.0, _SAME_TOKENS)), _texts((1.1, _BOTH_DIFFER))
    assert _row_of_texts(base, head, difference=0.2).result == "CHANGED"
    assert prose == _row_of_texts(base, head, difference=0.05).reason
    assert _row_of_texts(base, head, gate=False).verdict == "CHANGED"
    base.accuracy_check = make_check("10 % off")
    assert _row_of_texts(base, head).result == "IMPROVED"
    assert prose == _row_of_texts(base, head).reason


def test_texts_that_are_gone_or_of_other_prompts() -> None:
    """Gone is MISSING, other lengths are NOT_COMPARABLE; a baseline without texts or numbers has nothing to compare."""
    base, gone, rule = _texts((1.0, _SAME_TOKENS)), _texts(), TextsRule()
    assert _row_of_texts(base, gone).verdict == "MISSING"
    assert texts_row(gone, base, rule) == "only the candidate has it"
    assert texts_row(gone, gone, rule) == "neither report has it"
    assert texts_row(_result(), _result(), rule) is None
    assert texts_row(_texts((math.nan, _SAME_TOKENS)), base, rule) == "log-likelihoods of the baseline are not finite"
    other, generation = _texts(), known(base.launches[0].generation)
    other.launches[0].generation = msgspec.structs.replace(generation, prompt_tokens=[10, 11])
    assert _row_of_texts(base, other).verdict == "NOT_COMPARABLE"
    other.launches[0].generation = msgspec.structs.replace(generation, tokens=None, loglikelihoods=None)
    assert texts_row(other, other, rule) == "neither report has it", "a server that returns neither"
    assert texts_row(other, base, rule) == "only the candidate has it"
    assert _row_of_texts(base, other).verdict == "MISSING"


def test_a_difference_just_above_the_threshold_has_enough_digits() -> None:
    """Two equal numbers would be no reason."""
    row = _row_of_texts(_texts((1.0, _SAME_TOKENS)), _texts((1.00501, _SAME_TOKENS)))
    assert row.result == "REGRESSED"
    assert re.search(r"differ by 0\.501 % .* explains 0\.5 %", row.reason)
    limit = 0.001
    for difference in (limit, math.nextafter(limit, 1), limit * (1 + 1e-12)):
        with patch.object(answers, "typical_difference", lambda *_, difference=difference: difference):
            row = _row_of_texts(_texts((1.0, _SAME_TOKENS)), _texts((1.01, _SAME_TOKENS)), difference=limit)
        assert "differ by 0.1 %" in row.reason
