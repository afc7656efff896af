from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import make_accuracy, make_answers, make_result

from pytest_llmgpu.gate.answers import Answered, answered, below_floor, predictions_row, rows
from pytest_llmgpu.gate.policy import AccuracyRule
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult
from pytest_llmgpu.report.verdicts import Row

ITEMS = 1000


def _result(*wrong: int, items: int = ITEMS, **fields: Any) -> CaseResult:
    missed = frozenset(wrong)
    return make_result(accuracy=make_answers([number not in missed for number in range(items)]), **fields)


def _judged(base: CaseResult, head: CaseResult, note: str = "", **rule: Any) -> Row:
    found = answered(base, head, AccuracyRule(**rule))
    assert isinstance(found, Answered), found
    return rows([found], 0.95, note)[0]


@pytest.mark.parametrize(
    ("lost", "won", "verdict", "p"),
    [
        (0, 0, "OK", 1.0),
        (4, 0, "OK", 1 / 16),  # 0.4 points at most, and the threshold is 0.5
        (5, 0, "REGRESSED", 1 / 32),
        (8, 4, "UNDECIDED", 794 / 4096),
        (3, 3, "OK", 42 / 64),
        (0, 5, "IMPROVED", 1 / 32),
    ],
)
def test_items_that_flipped_decide(lost: int, won: int, verdict: str, p: float) -> None:
    """McNemar's exact one-sided p by hand; without evidence a loss of the threshold has to be ruled out."""
    row = _judged(_result(*range(100, 100 + won)), _result(*range(lost)))
    assert row.result == verdict
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
    assert _judged(_result(items=16), _result(3, items=16)).verdict == "UNDECIDED"
    assert _judged(_result(items=16), _result(3, items=16), threshold=0.07).verdict == "OK"


def _answered(base: CaseResult, head: CaseResult, **rule: Any) -> Answered:
    found = answered(base, head, AccuracyRule(**rule))
    assert isinstance(found, Answered)
    return found


def _same(strategy: str, **rule: Any) -> Answered:
    return _answered(_result(strategy=strategy), _result(strategy=strategy), **rule)


def test_the_series_are_one_family() -> None:
    """Seven items lost are significant alone, and not among twenty series."""
    lost = _answered(_result(), _result(*range(7)))
    (alone,), (among, *rest) = (
        rows(cases, 0.95, "") for cases in ([lost], [lost, *(_same(f"s{n}") for n in range(19))])
    )
    assert (alone.verdict, alone.p) == ("REGRESSED", 1 / 128)
    assert (among.verdict, among.p) == ("UNDECIDED", 20 / 128)
    assert {row.result for row in rest} == {"OK"}


SIZES = (1, 2, 4, 8, 16, 32, 64)


def _series(
    lost: Mapping[int, Iterable[int]], won: Mapping[int, Iterable[int]] | None = None, items: int = ITEMS
) -> list[Answered]:
    """Return the answers of seven batch sizes. The mappings have the items lost and won at each batch size."""
    return [
        _answered(
            _result(*(won or {}).get(size, ()), items=items, batch_size=size),
            _result(*lost.get(size, ()), items=items, batch_size=size),
        )
        for size in SIZES
    ]


def _ids(*sizes: int) -> list[str]:
    return [f"mp-bs{size}" for size in sizes]


def test_a_point_lost_at_every_batch_size_is_a_regression(prose: Prose) -> None:
    """All seven batch sizes lose the same 130 of 10,042 items and win 30: one row, with every batch size."""
    lost, won = dict.fromkeys(SIZES, range(130)), dict.fromkeys(SIZES, range(5000, 5030))
    (row,) = rows(_series(lost, won, items=10_042), 0.99, "")
    assert (row.result, row.id, row.cases) == ("REGRESSED", "mp", _ids(*SIZES))
    assert row.base is not None
    assert row.head is not None
    assert row.base - row.head == pytest.approx(100 / 10_042)
    assert (row.lost, row.won) == (list(range(130)), list(range(5000, 5030)))
    assert prose == row.reason


def test_a_collapse_at_one_batch_size_is_a_regression(prose: Prose) -> None:
    """As Shin et al. 2024 found for iok at batch size 32: 82 to 26 %, while the others keep their answers."""
    wrong = range(1800)
    cases = [
        _answered(_result(*wrong, items=10_042, batch_size=size), _result(*now, items=10_042, batch_size=size))
        for size in SIZES
        for now in [range(7431) if size == 32 else wrong]
    ]
    (row,) = rows(cases, 0.99, "")
    assert (row.result, row.cases, len(row.lost or ())) == ("REGRESSED", ["mp-bs32"], 5631)
    assert prose == row.reason


def test_few_items_lost_at_each_batch_size_add_up() -> None:
    """Three others at each size are 21 items; the same three at each size are three items, and may be chance."""
    others = {size: range(3 * number, 3 * number + 3) for number, size in enumerate(SIZES)}
    (row,) = rows(_series(others), 0.99, "")
    assert row.low is not None
    assert row.low < 0.003 == row.high, "the interval is of the mean change"
    assert (row.result, row.p, row.cases) == ("REGRESSED", 2 * 0.5**21, _ids(*SIZES))
    (row,) = rows(_series(dict.fromkeys(SIZES, range(3))), 0.99, "")
    assert (row.result, row.p) == ("OK", 2 * 0.5**3)


def test_the_worst_batch_size_is_adjusted_for_the_number_of_batch_sizes(prose: Prose) -> None:
    """Gains at six sizes hide a loss at one from the sum: Holm over seven sizes, with half of the allowed chance."""
    won = {size: range(100, 120) for size in SIZES if size != 4}
    (row,) = rows(_series({4: range(20)}, won), 0.99, "")
    assert (row.result, row.p, row.cases) == ("REGRESSED", 2 * 7 * 0.5**20, _ids(4))
    (row,) = rows(_series({4: range(10)}, won), 0.99, "")
    assert row.result == "IMPROVED"
    assert prose == row.reason


def test_items_won_at_every_batch_size_are_an_improvement() -> None:
    """By the same two tests."""
    (row,) = rows(_series({}, dict.fromkeys(SIZES, range(100, 110))), 0.99, "")
    assert (row.result, row.p, row.cases) == ("IMPROVED", 2 * 0.5**10, _ids(*SIZES))
    (row,) = rows(_series({}, {8: range(100, 115)}), 0.99, "")
    assert (row.result, row.cases) == ("IMPROVED", _ids(8))


def test_a_loss_that_is_not_ruled_out_names_its_batch_sizes(prose: Prose) -> None:
    """The verdict is OK only where a loss of the threshold is ruled out at every batch size."""
    (row,) = rows(_series({2: range(8), 16: range(8)}, {2: range(100, 104), 16: range(100, 104)}), 0.95, "")
    assert (row.result, row.cases) == ("UNDECIDED", _ids(2, 16))
    assert prose == row.reason
    (row,) = rows(_series({}), 0.95, "")
    assert (row.result, row.cases) == ("OK", _ids(*SIZES))
    assert prose == row.reason


def test_log_likelihoods_that_differ_at_one_batch_size_name_it(prose: Prose) -> None:
    """The other batch sizes are still tested for items lost."""
    same, other = (_numbers(value, dtype="float16", batch_size=size) for value, size in ((-2.0, 1), (-2.2, 4)))
    before = _numbers(-2.0, dtype="float16", batch_size=4)
    (row,) = rows([_answered(same, same), _answered(before, other)], 0.99, "")
    assert (row.result, row.cases) == ("REGRESSED", _ids(4))
    assert prose == row.reason


def test_a_floor_at_one_batch_size_names_it(prose: Prose) -> None:
    """It is a regression although the baseline is below the floor as well."""
    low = [_result(*range(50 * (size == 4)), batch_size=size) for size in (2, 4)]
    (row,) = rows([_answered(one, one, floor=0.96) for one in low], 0.99, "")
    assert (row.result, row.cases) == ("REGRESSED", _ids(4))
    assert prose == row.reason


@pytest.mark.parametrize("together", [True, False])
def test_false_alarms_are_rare_whether_batch_sizes_agree_or_not(together: bool) -> None:
    """Items flip by chance, the same ones at all batch sizes or other ones: at most 5 % of runs are REGRESSED."""
    alarms = 0
    for seed in range(150):
        chance = random.Random(seed)
        flips = {size: [(n, chance.random() < 0.5) for n in chance.sample(range(ITEMS), 12)] for size in SIZES}
        if together:
            flips = dict.fromkeys(SIZES, flips[1])
        lost, won = ({size: [n for n, is_lost in flips[size] if is_lost is side] for size in SIZES} for side in (1, 0))
        (row,) = rows(_series(lost, won), 0.95, "")
        alarms += row.result == "REGRESSED"
    assert alarms <= 8


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
    assert row.result == "REGRESSED"
    assert prose == row.reason
    same = answered(base, base, AccuracyRule())
    assert isinstance(same, Answered)
    assert predictions_row(same, gated=False).verdict == "OK"


def test_without_labels_only_sameness_can_be_told() -> None:
    """Without labels equal answers are OK, others UNDECIDED; the labels of one report are enough."""
    plain, other = (make_accuracy(items=ITEMS, predictions=[first] + [0] * (ITEMS - 1)) for first in (0, 1))
    assert _judged(make_result(accuracy=plain), make_result(accuracy=plain)).verdict == "OK"
    row = _judged(make_result(accuracy=plain), make_result(accuracy=other))
    assert (row.result, row.p) == ("UNDECIDED", None)
    labelled = msgspec.structs.replace(plain, labels=[0] * ITEMS)
    assert _judged(make_result(accuracy=labelled), make_result(accuracy=other)).lost == [0]


def test_the_floor_holds_whatever_the_baseline_says(prose: Prose) -> None:
    """By the policy, or by the candidate's own check: the same wrong answers as before are still wrong."""
    base, head = _result(0, 1), _result(0, 1)
    assert _judged(base, head, floor=0.998).verdict == "OK"
    row = _judged(base, head, floor=0.999)
    assert row.result == "REGRESSED"
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
    assert row.result == "REGRESSED"
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
        assert row.result == "UNDECIDED"
        assert prose == row.reason
    assert isinstance(other, Answered)
    assert rows([other], 0.95, "")[0].verdict == "UNDECIDED"
    assert predictions_row(other, gated=True).verdict == "REGRESSED"


def test_the_worst_of_launches_has_a_larger_p() -> None:
    """Five items lost in one launch of five, which was chosen as the worst: p is five times as large."""
    five = _result(*range(5))
    (typical,), (worst,) = (
        rows([_answered(_result(), head)], 0.95, "") for head in (five, _of_launches(*[_result()] * 4, five))
    )
    assert (typical.verdict, typical.p) == ("REGRESSED", 1 / 32)
    assert (worst.verdict, worst.p, worst.low) == ("UNDECIDED", 5 / 32, typical.low)


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
    """A series among twenty others that are reported only is judged alone; those are a family of their own."""
    shown = [_same(f"s{number}", gate=False) for number in range(20)]
    found = _answered(_result(), _result(*range(6)))
    assert rows([*shown[:1], found, *shown[1:]], 0.95, "")[1].verdict == "REGRESSED"


def test_answers_that_are_gone_or_of_other_items() -> None:
    """Gone is MISSING, other numbers of items are NOT_COMPARABLE, and new ones have nothing to compare with."""
    gone = answered(_result(), make_result(), AccuracyRule(gate=False))
    assert isinstance(gone, Row)
    assert (gone.verdict, gone.gated) == ("MISSING", False)
    fewer = answered(_result(), _result(items=10), AccuracyRule())
    assert isinstance(fewer, Row)
    assert fewer.result == "NOT_COMPARABLE"
    assert answered(make_result(), _result(), AccuracyRule()) == "only the candidate has it"
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
    base.accuracy_check = AccuracyCheck(
        metric="acc_norm", value=1.0, baseline=1.0, source="x", tolerance=0.01, ok=False, text="10 % off"
    )
    row = _judged(base, head)
    assert row.result == "IMPROVED"
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
    assert (row.result, row.p, row.lost, row.base) == ("OK", None, None, None)
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
        assert row.result == verdict
        assert words in row.reason
    unknown = make_result(accuracy=make_answers(right, []), load_format="dummy", dtype="float16")
    assert _judged(unknown, other).verdict == "UNDECIDED"


def test_random_weights_are_no_member_of_the_family() -> None:
    """Twenty series of them in a report do not change the verdict on a trained model."""
    found = _answered(_result(), _result(*range(5)))
    chance = [_answered(*[_numbers(-3.0, load_format="dummy", strategy=f"s{number}")] * 2) for number in range(20)]
    assert [row.result for row in rows([*chance[:1], found, *chance[1:]], 0.95, "")][:3] == ["OK", "REGRESSED", "OK"]


def test_numbers_that_are_not_finite_any_more(prose: Prose) -> None:
    """Are a regression; a baseline that has such numbers says nothing."""
    fine, broken = _numbers(-2.0), _numbers(float("nan"))
    row = _judged(fine, broken)
    assert row.result == "REGRESSED"
    assert prose == row.reason
    assert _judged(broken, fine).verdict == "OK"
