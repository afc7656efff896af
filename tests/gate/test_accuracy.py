from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import make_accuracy, make_answers, make_result

from pytest_llmgpu.gate.accuracy import Answered, answered, below_floor, predictions_row, rows
from pytest_llmgpu.gate.policy import AccuracyRule
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult
from pytest_llmgpu.report.verdicts import Row

ITEMS = 1000


def _result(*wrong: int, items: int = ITEMS) -> CaseResult:
    return make_result(accuracy=make_answers([number not in wrong for number in range(items)]))


def _judged(base: CaseResult, head: CaseResult, note: str = "", **rule: Any) -> Row:
    found = answered(base, head, AccuracyRule(**rule))
    assert isinstance(found, Answered), found
    return rows([found], 0.95, note)[0]


@pytest.mark.parametrize(
    ("lost", "won", "verdict", "p"),
    [
        (0, 0, "OK", 1.0),
        (4, 0, "OK", 1 / 16),  # 0.4 points at most, and the margin is 0.5
        (5, 0, "REGRESSED", 1 / 32),
        (8, 4, "NOT_ENOUGH_DATA", 794 / 4096),
        (3, 3, "OK", 42 / 64),
        (0, 5, "IMPROVED", 1 / 32),
    ],
)
def test_items_that_flipped_decide(lost: int, won: int, verdict: str, p: float) -> None:
    """McNemar's exact one-sided p by hand; without evidence a loss of the margin has to be ruled out."""
    row = _judged(_result(*range(100, 100 + won)), _result(*range(lost)))
    assert row.verdict == verdict
    assert row.p == pytest.approx(p)
    assert (row.lost, row.won) == (list(range(lost)), list(range(100, 100 + won)))
    assert row.low is not None
    assert row.high is not None
    assert row.low <= (lost - won) / ITEMS <= row.high
    assert len(row.reason.splitlines()) <= 2


def test_lost_items_are_named(prose: Prose) -> None:
    """The first of them, and how many more; the row has all."""
    row = _judged(_result(), _result(*range(20)))
    assert prose == row.reason


def test_few_items_cannot_rule_out_a_loss() -> None:
    """One of 16 lost is 6 points, and may be chance: neither OK nor REGRESSED."""
    assert _judged(_result(items=16), _result(3, items=16)).verdict == "NOT_ENOUGH_DATA"
    assert _judged(_result(items=16), _result(3, items=16), margin=0.07).verdict == "OK"


def test_cases_are_one_family() -> None:
    """Six items lost are evidence alone and none among twenty cases."""
    found = answered(_result(), _result(*range(6)), AccuracyRule())
    same = answered(_result(), _result(), AccuracyRule())
    assert isinstance(found, Answered)
    assert isinstance(same, Answered)
    (alone,), (among, *rest) = (rows(cases, 0.95, "") for cases in ([found], [found, *[same] * 19]))
    assert (alone.verdict, alone.alone) == ("REGRESSED", None)
    assert (among.verdict, among.alone) == ("NOT_ENOUGH_DATA", "REGRESSED")
    assert {row.alone for row in rest} == {None}


def test_other_wrong_answers_are_no_loss_but_other_predictions(prose: Prose) -> None:
    """An item that is wrong in two ways was neither lost nor won; predictions are exact."""
    base = _result(0)
    accuracy = base.launches[0].accuracy
    assert accuracy is not None
    other = msgspec.structs.replace(accuracy, predictions_norm=[2, *accuracy.predictions_norm[1:]])
    found = answered(base, make_result(accuracy=other), AccuracyRule())
    assert isinstance(found, Answered)
    assert rows([found], 0.95, "")[0].verdict == "OK"
    row = predictions_row(found, gated=True)
    assert row.verdict == "REGRESSED"
    assert prose == row.reason
    same = answered(base, base, AccuracyRule())
    assert isinstance(same, Answered)
    assert predictions_row(same, gated=False).verdict == "OK"


def test_without_labels_only_sameness_can_be_told() -> None:
    """Without labels equal answers are OK, others NOT_ENOUGH_DATA; the labels of one report are enough."""
    plain, other = (make_accuracy(items=ITEMS, predictions=[first] + [0] * (ITEMS - 1)) for first in (0, 1))
    assert _judged(make_result(accuracy=plain), make_result(accuracy=plain)).verdict == "OK"
    row = _judged(make_result(accuracy=plain), make_result(accuracy=other))
    assert (row.verdict, row.p) == ("NOT_ENOUGH_DATA", None)
    labelled = msgspec.structs.replace(plain, labels=[0] * ITEMS)
    assert _judged(make_result(accuracy=labelled), make_result(accuracy=other)).lost == [0]


def test_the_floor_holds_whatever_the_baseline_says(prose: Prose) -> None:
    """By the policy, or by the candidate's own check: the same wrong answers as before are still wrong."""
    base, head = _result(0, 1), _result(0, 1)
    assert _judged(base, head, floor=0.998).verdict == "OK"
    row = _judged(base, head, floor=0.999)
    assert row.verdict == "REGRESSED"
    assert prose == row.reason
    head.accuracy_check = AccuracyCheck(
        metric="acc_norm", value=0.2, baseline=0.8, source="x", tolerance=0.01, ok=False, text="60 points below"
    )
    assert below_floor(head, AccuracyRule()) == "60 points below."
    assert _judged(base, head).verdict == "REGRESSED"
    head.accuracy_check = msgspec.structs.replace(head.accuracy_check, ok=None)
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
    assert row.verdict == "REGRESSED"
    assert prose == row.reason
    found = answered(base, head, AccuracyRule())
    assert isinstance(found, Answered)
    assert prose == predictions_row(found, gated=True).reason
    assert prose == _judged(base, head, floor=0.96).reason


def test_launches_that_disagree_a_little_are_not_ok(prose: Prose) -> None:
    """Nor an improvement; that the worst was chosen among five makes its evidence less by as much."""
    other = answered(_result(0), _of_launches(_result(0), _wrong_otherwise(0)), AccuracyRule())
    for head in ([_result(7)], [_result(*range(5))], [_result(*range(100, 110))]):
        row = _judged(_result(*range(100, 120)), _of_launches(*[_result(*range(100, 120))] * 4, *head))
        assert row.verdict == "NOT_ENOUGH_DATA"
        assert prose == row.reason
    assert isinstance(other, Answered)
    assert rows([other], 0.95, "")[0].verdict == "NOT_ENOUGH_DATA"
    assert predictions_row(other, gated=True).verdict == "REGRESSED"


def test_the_worst_of_launches_is_no_evidence_by_itself() -> None:
    """Items lost in one launch of five, which was chosen as the worst: that they are many alone says nothing."""
    five = _result(*range(5))
    found = [answered(_result(), head, AccuracyRule()) for head in (five, _of_launches(*[_result()] * 4, five))]
    typical, worst = rows([one for one in found if isinstance(one, Answered)], 0.95, "")
    assert (typical.verdict, typical.alone) == ("OK", "REGRESSED")
    assert (worst.verdict, worst.alone, worst.low) == ("NOT_ENOUGH_DATA", None, typical.low)


def _wrong_otherwise(number: int) -> CaseResult:
    """Return a result in which an item is wrong in another way than `_result` has it."""
    found = _result(number)
    accuracy = found.launches[0].accuracy
    assert accuracy is not None
    chosen = list(accuracy.predictions_norm)
    chosen[number] = (chosen[number] + 1) % 4
    found.launches[0].accuracy = msgspec.structs.replace(accuracy, predictions_norm=chosen)
    return found


def test_a_baseline_that_disagrees_with_itself_is_compared_by_its_typical_launch() -> None:
    """So is the candidate then: its odd launch may be what the baseline's is."""
    base = _of_launches(_result(), _result(), _result(*range(50)))
    assert _judged(base, base).verdict == "OK"


def test_other_numbers_in_one_launch_are_a_regression() -> None:
    """Of real weights and of random ones."""
    for fields in ({}, {"load_format": "dummy"}):
        same, other = (_numbers(value, dtype="float16", **fields) for value in (-2.0, -2.2))
        assert _judged(_of_launches(same, same), _of_launches(same, other, same)).verdict == "REGRESSED"


def test_what_is_not_gated_does_not_dilute_the_family() -> None:
    """Evidence among twenty cases that are reported only is evidence still; those are a family of their own."""
    found = answered(_result(), _result(*range(6)), AccuracyRule())
    same = answered(_result(), _result(), AccuracyRule(gate=False))
    assert isinstance(found, Answered)
    assert isinstance(same, Answered)
    assert rows([same, found, *[same] * 19], 0.95, "")[1].verdict == "REGRESSED"


def test_answers_that_are_gone_or_of_other_items() -> None:
    """Gone is MISSING, other numbers of items are NOT_COMPARABLE, and new ones have nothing to compare with."""
    gone = answered(_result(), make_result(), AccuracyRule(gate=False))
    assert isinstance(gone, Row)
    assert (gone.verdict, gone.gated) == ("MISSING", False)
    fewer = answered(_result(), _result(items=10), AccuracyRule())
    assert isinstance(fewer, Row)
    assert fewer.verdict == "NOT_COMPARABLE"
    assert answered(make_result(), _result(), AccuracyRule()) == "accuracy is new"
    assert answered(make_result(), make_result(), AccuracyRule()) == "no items were scored"


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
    assert row.verdict == verdict
    assert (row.lost, row.won) == ([], [])


def test_other_numbers_are_told_with_what_became_of_the_answers(prose: Prose) -> None:
    """In two lines, and a policy that allows them leaves the answers to McNemar."""
    base, head = _numbers(-2.0, -4.0, dtype="float16"), _numbers(-2.2, -4.4, dtype="float16")
    assert prose == _judged(base, head).reason
    assert prose == _judged(base, head, difference=0.05).reason
    allowed = _judged(base, head, difference=0.11, margin=0.05)
    assert (allowed.verdict, allowed.p) == ("OK", 1.0)


def test_numbers_that_are_mended_are_no_regression(prose: Prose) -> None:
    """The baseline's own check had found them wrong, and the candidate's does not."""
    base, head = _numbers(-2.2, dtype="float16"), _numbers(-2.0, dtype="float16")
    base.accuracy_check = AccuracyCheck(
        metric="acc_norm", value=1.0, baseline=1.0, source="x", tolerance=0.01, ok=False, text="10 % off"
    )
    row = _judged(base, head)
    assert row.verdict == "IMPROVED"
    assert prose == row.reason
    head.accuracy_check = base.accuracy_check
    assert _judged(base, head).verdict == "REGRESSED"


def test_random_weights_are_judged_by_their_numbers_alone(prose: Prose) -> None:
    """Their answers are chance: items that flip say nothing, a floor says nothing, other numbers say all."""
    right, wrong = ([value] * 100 for value in (True, False))
    base, flipped = (
        make_result(accuracy=make_answers(hits, [-3.0] * 400), load_format="dummy", dtype="float16")
        for hits in (right, wrong)
    )
    row = _judged(base, flipped, floor=0.5)
    assert (row.verdict, row.p, row.lost, row.base) == ("OK", None, None, None)
    assert prose == row.reason
    other = make_result(accuracy=make_answers(right, [-3.1] * 400), load_format="dummy", dtype="float16")
    assert _judged(base, other).verdict == "REGRESSED"
    for values, verdict, words in (
        (
            [-3.6] + [-3.0] * 399,
            "REGRESSED",
            "differ by up to 20 %",
        ),
        ([-3.04] * 34 + [-3.0] * 366, "REGRESSED", "differ by up to 1.3 %"),
        ([-3.02] + [-3.0] * 399, "OK", "typically differ"),
    ):
        few = make_result(accuracy=make_answers(right, values), load_format="dummy", dtype="float16")
        row = _judged(base, few)
        assert row.verdict == verdict
        assert words in row.reason
    unknown = make_result(accuracy=make_answers(right, []), load_format="dummy", dtype="float16")
    assert _judged(unknown, other).verdict == "NOT_ENOUGH_DATA"


def test_random_weights_are_no_member_of_the_family() -> None:
    """Twenty of them in a report do not dilute a trained model's case."""
    found = answered(_result(), _result(*range(5)), AccuracyRule())
    chance = answered(_numbers(-3.0, load_format="dummy"), _numbers(-3.0, load_format="dummy"), AccuracyRule())
    assert isinstance(found, Answered)
    assert isinstance(chance, Answered)
    assert [row.verdict for row in rows([chance, found, *[chance] * 19], 0.95, "")][:3] == ["OK", "REGRESSED", "OK"]


def test_numbers_that_are_not_finite_any_more(prose: Prose) -> None:
    """Are a regression; a baseline that has such numbers says nothing."""
    fine, broken = _numbers(-2.0), _numbers(float("nan"))
    row = _judged(fine, broken)
    assert row.verdict == "REGRESSED"
    assert prose == row.reason
    assert _judged(broken, fine).verdict == "OK"
