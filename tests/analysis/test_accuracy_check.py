from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import make_accuracy, make_answers, make_case, make_failed, make_result

from pytest_llmgpu.analysis.accuracy_check import (
    Decision,
    baseline,
    check,
    decide,
    decide_dummy,
    decide_mismatch,
    describe,
    describe_mismatch,
    smallest_batch_size,
)
from pytest_llmgpu.inference import bundled
from pytest_llmgpu.report.derived import encode
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult


def _baseline(given: float | None = None, metric: str = "acc_norm", **fields: Any) -> tuple[float, str] | None:
    return baseline(make_case(**{"model": "huggyllama/llama-7b", **fields}), given=given, metric=metric)


def _decide(
    result: CaseResult, earlier: Sequence[CaseResult], given: float | None = None, tolerance: float = 0.01
) -> Decision:
    found = decide(result, earlier, given=given, metric="acc_norm", tolerance=tolerance)
    assert found is not None
    return found


def _dummy(values: list[float], batch_size: int = 1, **fields: Any) -> CaseResult:
    accuracy = make_accuracy(0.25, items=len(values) // 4, loglikelihoods=values)
    return make_result(1.0, accuracy, batch_size=batch_size, load_format="dummy", **fields)


@pytest.mark.parametrize(
    ("model", "value", "name"),
    [
        ("huggyllama/llama-7b", 0.761, "7B"),
        ("huggyllama/llama-13b", 0.792, "13B"),
        ("huggyllama/llama-30b", 0.828, "33B"),
        ("huggyllama/llama-65b", 0.842, "65B"),
        ("decapoda-research/llama-30b-hf", 0.828, "33B"),
        ("yahma/llama-7b-hf", 0.761, "7B"),
        ("baffo32/decapoda-research-llama-7B-hf", 0.761, "7B"),
    ],
)
def test_published_values_of_known_hub_ids(model: str, value: float, name: str) -> None:
    """LLaMA has the accuracy that its authors published, under each of its hub ids."""
    assert _baseline(model=model) == (value, f"published for LLaMA {name}")


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "meta-llama/Llama-2-7b-hf"},
        {"model": "somebody/llama-7b"},
        {"model": "yahma/llama-65b-hf"},
        {"metric": "acc"},
        {"dataset": "items.jsonl"},
        {"limit": 100},
    ],
)
def test_a_published_value_holds_for_nothing_else(fields: dict[str, Any]) -> None:
    """Other models, metrics and datasets, and a part of HellaSwag have no published accuracy."""
    assert _baseline(**fields) is None


def test_a_given_baseline_wins() -> None:
    """The option comes before a published and a registered value; 0 counts."""
    assert _baseline(given=0.5) == (0.5, "--llmgpu-accuracy-baseline")
    assert _baseline(given=0.0, model="bundled", dataset="bundled") == (0.0, "--llmgpu-accuracy-baseline")


def test_a_given_baseline_is_not_for_random_weights() -> None:
    """Their accuracy is chance, and their log-likelihoods are checked."""
    assert _decide(_dummy([-1.0] * 4), [], given=0.5).baseline is None


def test_the_bundled_model_has_a_registered_value_on_its_own_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds by metric and with a limit, not on another dataset."""
    monkeypatch.setattr("pytest_llmgpu.inference.bundled.ACCURACY", {"acc": 0.8, "acc_norm": 0.9}, raising=False)
    bundled: dict[str, Any] = {"model": "bundled", "dataset": "bundled"}
    assert _baseline(**bundled) == (0.9, "registered for the bundled model")
    assert _baseline(**bundled, metric="acc", limit=10) == (0.8, "registered for the bundled model")
    assert _baseline(model="bundled") is None


@pytest.mark.parametrize(("value", "ok"), [(0.90, True), (0.818, True), (0.8179, False), (0.26, False)])
def test_the_whole_dataset_may_be_below_by_the_tolerance(value: float, ok: bool) -> None:
    """Exactly the tolerance below still passes."""
    found = _decide(make_result(1.0, make_accuracy(value)), [])
    assert (found.ok, found.value, found.baseline) == (ok, value, 0.828)
    assert found.source == "published for LLaMA 33B"
    assert ("points below the baseline of 82.8 %" in describe(found)) is not ok


def test_binary_fractions_do_not_fail_a_case() -> None:
    """In floating point 0.225 - 0.02 is slightly above 0.205."""
    assert _decide(make_result(1.0, make_accuracy(0.205)), [], given=0.225, tolerance=0.02).ok is True


@pytest.mark.parametrize(("value", "ok"), [(0.76, True), (0.74, False)])
def test_the_first_items_fail_only_where_chance_cannot_explain_it(value: float, ok: bool) -> None:
    """On 100 items 76 % is compatible with 82.8 % less 1 point (upper bound 82.3 %), 74 % is not (80.5 %)."""
    found = _decide(make_result(1.0, make_accuracy(value, items=100), limit=100), [], given=0.828)
    assert found.ok is ok
    assert found.upper_bound == pytest.approx(0.823 if ok else 0.805, abs=5e-4)


def test_without_a_baseline_the_check_is_open() -> None:
    """Neither the value nor another case decides."""
    found = _decide(make_result(1.0, make_accuracy(0.5), model="m", dataset="d"), [])
    assert (found.ok, found.baseline, found.source) == (None, None, None)


def test_checks_read_as(prose: Prose) -> None:
    """Each kind of check has its sentence."""
    mine: dict[str, Any] = {"model": "m", "dataset": "d"}
    good, bad = make_accuracy(0.8, 100), make_accuracy(0.26, 100, [1] * 100)
    numbers = make_accuracy(1.0, 1, [0], [-1.1] * 4)
    decisions = [
        _decide(make_result(1.0, make_accuracy()), []),
        _decide(make_result(1.0, make_accuracy(0.5)), []),
        _decide(make_result(1.0, good, limit=100), []),
        _decide(make_result(1.0, bad, limit=100), [], given=0.8),
        _decide(make_result(1.0, good, **mine), []),
        _decide(make_result(1.0, bad, batch_size=2, **mine), [make_result(1.0, good, **mine)]),
        _decide(make_result(1.0, numbers, strategy="tp"), [make_result(1.0, make_accuracy(1.0, 1, [0], [-1.0] * 4))]),
        _decide(_dummy([-1.0] * 4), []),
        _decide(_dummy([-1.3] * 4, 2), [_dummy([-1.0] * 4)]),
        _decide(_dummy([-1.000001] * 4, 2, strategy="tp"), [_dummy([-1.0] * 4, strategy="tp")]),
        _decide(_dummy([math.nan] * 4), []),
        _decide(_dummy([-1.0] * 4, 2), [_dummy([math.nan] * 4)]),
    ]
    assert prose == "\n".join(f"{found.ok}: {describe(found)}" for found in decisions)


def test_an_unknown_metric_is_refused() -> None:
    """The message names the value and the allowed ones."""
    with pytest.raises(ValueError, match="accuracy metric 'f1': allowed are acc, acc_norm"):
        check(make_result(1.0, make_accuracy()), [], given=None, metric="f1", tolerance=0.01)


@pytest.mark.parametrize(
    ("dtype", "difference", "ok"),
    [
        ("float32", 0.9e-5, True),
        ("float32", 2e-5, False),
        ("float16", 4.9e-3, True),
        ("float16", 5.1e-3, False),
        ("bfloat16", 3.9e-2, True),
        ("bfloat16", 4.1e-2, False),
    ],
)
def test_random_weights_must_score_alike_at_every_batch_size(dtype: str, difference: float, ok: bool) -> None:
    """Only the rounding of the dtype is allowed, relative to the value, in both directions."""
    smallest = _dummy([-100.0, -50.0, -10.0, -1.0])
    found = decide_dummy(encode([-100.0, -50.0 * (1 - difference), -10.0, -1.0]), smallest, make_case(dtype=dtype))
    assert found.ok is ok
    assert found.value == pytest.approx(difference, rel=0.1)
    assert found.source == "mp-bs1"
    assert found.metric == "loglikelihood_relative_difference"


def test_the_smallest_batch_size_is_not_compared() -> None:
    """Larger ones are compared with it."""
    found = decide_dummy(encode([-1.0] * 4), None, make_case())
    assert (found.ok, found.value) == (None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_fail(bad: float) -> None:
    """An overflow fails even at the smallest batch size; the report has no NaN."""
    alone = decide_dummy(encode([-1.0, bad, -1.0, -1.0]), None, make_case())
    assert (alone.ok, alone.value) == (False, None)
    assert (alone.not_finite, alone.loglikelihoods) == (1, 4)
    after = decide_dummy(encode([-1.0] * 4), _dummy([-1.0, bad, -1.0, -1.0]), make_case())
    assert (after.ok, after.value) == (False, None)


def test_zeros_agree() -> None:
    """A zero agrees with a zero and with nothing else."""
    assert decide_dummy(encode([0.0] * 4), _dummy([0.0] * 4), make_case(dtype="float32")).ok is True
    assert decide_dummy(encode([-1.0] * 4), _dummy([0.0] * 4), make_case(dtype="float32")).ok is False


def test_an_unknown_dtype_is_refused() -> None:
    """The message names the value and the allowed ones."""
    with pytest.raises(ValueError, match="dtype 'int8': allowed are float32, float16, bfloat16"):
        decide_dummy(encode([]), None, make_case(dtype="int8"))


def test_the_smallest_batch_size_is_the_smallest_completed_one_of_the_series() -> None:
    """A case does not count if it failed, scored nothing, is larger, or belongs to another series."""
    smallest = make_result(1.0, make_accuracy(items=5), batch_size=4)
    earlier = [
        make_failed("oom", batch_size=1),
        make_result(1.0, batch_size=1),
        make_result(1.0, make_accuracy(items=5), batch_size=1, dtype="float32"),
        make_result(1.0, make_accuracy(items=5), batch_size=64),
        make_result(1.0, make_accuracy(items=5), batch_size=8),
        smallest,
    ]
    result = make_result(1.0, make_accuracy(items=5), batch_size=16)
    assert smallest_batch_size(result, earlier) is smallest
    assert smallest_batch_size(smallest, [*earlier[:4], smallest]) is None


def test_a_case_is_checked_by_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights are compared with the smallest batch size, real ones with a baseline."""
    monkeypatch.setattr("pytest_llmgpu.inference.bundled.ACCURACY", {"acc": 0.8, "acc_norm": 0.9}, raising=False)
    smallest, larger = _dummy([-1.0] * 4), _dummy([-2.0] * 4, batch_size=2)
    random = check(larger, [smallest], given=0.9, metric="acc_norm", tolerance=0.01)
    assert random is not None
    assert (random.ok, random.source) == (False, "mp-bs1")
    real = check(
        make_result(1.0, make_accuracy(0.895), model="bundled", dataset="bundled"),
        [],
        given=None,
        metric="acc_norm",
        tolerance=0.01,
    )
    assert real is not None
    assert (real.ok, real.source) == (True, "registered for the bundled model")


@pytest.mark.parametrize("result", [make_failed("oom"), make_result(1.0)])
def test_a_case_without_answers_is_not_checked(result: CaseResult) -> None:
    """It is neither right nor wrong."""
    assert check(result, [], given=0.8, metric="acc_norm", tolerance=0.01) is None


def test_the_worst_launch_counts() -> None:
    """One launch with wrong answers fails the case, in any order."""
    for values in ((0.828, 0.26, 0.828), (0.26, 0.828, 0.828)):
        result = make_result(1.0, make_accuracy(values[0]))
        for value in values[1:]:
            result.launches += make_result(1.0, make_accuracy(value)).launches
        found = check(result, [], given=0.82, metric="acc_norm", tolerance=0.01)
        assert found is not None
        assert (found.ok, found.value) == (False, 0.26)
    smallest, result = _dummy([-1.0] * 4), _dummy([-1.0] * 4, batch_size=2)
    result.launches += _dummy([-2.0] * 4, batch_size=2).launches
    found = check(result, [smallest], given=None, metric="acc_norm", tolerance=0.01)
    assert found is not None
    assert found.ok is False


@pytest.mark.parametrize(
    ("right_before", "right_now", "flipped", "ok"),
    [
        (180, 90, 90, False),  # 90 % to 45 %: half of the answers are lost
        (180, 172, 8, False),  # 8 lost, none won
        (180, 176, 20, None),  # 4 more lost than won, of 20 that differ: chance
        (180, 179, 1, None),  # within the tolerance
        (180, 185, 5, None),  # better is not worse
    ],
)
def test_without_a_baseline_a_larger_batch_must_not_cost_answers(
    right_before: int, right_now: int, flipped: int, ok: bool | None
) -> None:
    """A lost answer beyond tolerance and chance fails also where no baseline is known."""
    fields: dict[str, Any] = {"model": "mine", "dataset": "mine.jsonl"}
    before = make_result(1.0, make_accuracy(right_before / 200, 200), batch_size=1, **fields)
    predictions = [1] * flipped + [0] * (200 - flipped)
    now = make_result(1.0, make_accuracy(right_now / 200, 200, predictions), batch_size=32, **fields)
    found = check(now, [before], given=None, metric="acc_norm", tolerance=0.01)
    assert found is not None
    assert found.ok is ok
    assert found.source == before.id


def _check(result: CaseResult, earlier: Sequence[CaseResult], given: float | None = None) -> AccuracyCheck:
    found = check(result, earlier, given=given, metric="acc_norm", tolerance=0.01)
    assert found is not None
    return found


def _wrong_alike(size: int) -> CaseResult:
    """Return a result of kernels that are wrong at every batch size in the same way."""
    return _dummy([-1.3, -2.0, -1.7, -3.0], size, strategy="iok")


def test_the_same_wrong_numbers_at_every_batch_size_fail_against_mp() -> None:
    """Random weights under a wrong kernel agree with each other, and not with mp."""
    session = [_dummy([-1.0, -2.0, -1.5, -3.0])]
    for size in (1, 8, 64):
        found = _check(_wrong_alike(size), session)
        assert (found.ok, found.source) == (False, "mp-bs1")
        assert found.value == pytest.approx(0.3)
        session.append(_wrong_alike(size))


def test_agreement_of_a_strategy_with_itself_proves_nothing() -> None:
    """Without mp a strategy's random weights never pass, but they fail if its batches differ."""
    smallest = _wrong_alike(1)
    assert _check(smallest, []).ok is None
    same = _check(_wrong_alike(8), [smallest])
    assert (same.ok, same.source) == (None, "iok-bs1")
    assert _check(_dummy([-1.0] * 4, 8, strategy="iok"), [smallest]).ok is False


def test_agreement_with_mp_passes() -> None:
    """Rounding is allowed; mp itself is compared with its smallest batch size."""
    mp = [_dummy([-1.0, -2.0, -1.5, -3.0]), _dummy([-1.001, -2.0, -1.5, -3.0], 8)]
    assert _check(mp[1], mp[:1]).ok is True
    found = _check(_dummy([-1.005, -2.0, -1.5, -3.0], 8, strategy="tp"), mp)
    assert (found.ok, found.source) == (True, "mp-bs8")  # 4e-3; against mp-bs1 it would be 5e-3


_MINE: dict[str, Any] = {"model": "mine", "dataset": "mine.jsonl"}


def test_guesses_without_a_baseline_fail_against_mp() -> None:
    """They fail at every batch size, the smallest included, once mp was measured."""
    mp = make_result(1.0, make_answers([True] * 160 + [False] * 40), **_MINE)
    session = [mp]
    for size in (1, 8):
        guesses = make_answers([True, False, False, False] * 50)
        result = make_result(1.0, guesses, strategy="iok", batch_size=size, **_MINE)
        found = _check(result, session)
        assert (found.ok, found.source, found.baseline) == (False, "mp-bs1", 0.8)
        assert _check(result, session, given=0.2).ok is True  # a known baseline decides
        session.append(result)
    assert _check(session[2], session[1:2]).ok is None


@pytest.mark.parametrize(
    ("lost", "won", "ok"),
    [
        (8, 1, None),  # 10/512 = 2 %
        (9, 1, None),  # 11/1024 = 1.07 %
        (10, 1, False),  # 12/2048 = 0.6 %
        (18, 8, None),  # as many lost on balance as with 10 and 0, but 8.4 % by chance
        (10, 0, False),
        (2, 0, None),  # 1 point: within the tolerance
        (0, 10, None),  # better is not worse
    ],
)
@pytest.mark.parametrize("strategy", ["mp", "tp"])
def test_items_that_are_wrong_both_times_do_not_count(strategy: str, lost: int, won: int, ok: bool | None) -> None:
    """With labels only lost and won items decide, by the exact sign test."""
    before = make_answers([True] * 100 + [False] * 100)
    right = [False] * lost + [True] * (100 - lost) + [True] * won + [False] * (100 - won)
    now = make_answers(right)
    assert now.labels is not None
    still_wrong = [
        (label + 2) % 4 if not hit and number >= 100 else chosen
        for number, (label, hit, chosen) in enumerate(zip(now.labels, right, now.predictions_norm, strict=True))
    ]
    now = msgspec.structs.replace(now, predictions=still_wrong, predictions_norm=still_wrong)
    result = make_result(1.0, now, strategy=strategy, batch_size=8, **_MINE)
    assert _check(result, [make_result(1.0, before, **_MINE)]).ok is ok


def test_a_loss_within_the_tolerance_passes() -> None:
    """A loss of 8 of 1,000 items with none won is not chance (0.4 %), but less than the tolerance of a point."""
    before, now = (make_answers([False] * lost + [True] * (1000 - lost)) for lost in (0, 8))
    result = make_result(1.0, now, strategy="tp", **_MINE)
    assert _check(result, [make_result(1.0, before, **_MINE)]).ok is None


def test_a_batch_size_that_loses_answers_fails_although_mp_lost_them_too() -> None:
    """Agreement with a broken batch size of mp does not help."""
    good, bad = make_answers([True] * 160 + [False] * 40), make_answers([True, False, False, False] * 50)
    session = [
        make_result(1.0, accuracy, strategy=strategy, batch_size=size, **_MINE)
        for strategy, accuracy, size in (("mp", good, 1), ("mp", bad, 8), ("tp", good, 1))
    ]
    found = _check(make_result(1.0, bad, strategy="tp", batch_size=8, **_MINE), session)
    assert (found.ok, found.source) == (False, "tp-bs1")


@pytest.mark.parametrize(
    ("dtype", "off", "agrees"), [("float16", 4e-3, True), ("float16", 6e-3, False), ("float32", 2e-3, False)]
)
def test_wrong_log_likelihoods_fail_although_the_answers_are_right(dtype: str, off: float, agrees: bool) -> None:
    """A trained model is confident: a wrong kernel shows in the sum of all log-likelihoods."""
    values = [-1.0, -2.0, -3.0, -1e-9]
    answers = [make_accuracy(1.0, 1, [0], [value * (1 + change) for value in values]) for change in (0.0, off)]
    # A log-likelihood near 0 may differ by any factor.
    shaken = make_accuracy(1.0, 1, [0], [*(value * (1 + off) for value in values[:3]), -1e-6])
    mp = make_result(1.0, answers[0], dtype=dtype)
    for accuracy in (answers[1], shaken):
        result = make_result(1.0, accuracy, strategy="iok", dtype=dtype)
        found = check(result, [mp], given=1.0, metric="acc_norm", tolerance=0.0)
        assert found is not None
        assert found.ok is agrees
        assert (decide_mismatch(result, mp, None) is None) is agrees


def test_batch_sizes_of_one_strategy_have_equal_log_likelihoods() -> None:
    """Without mp and a registered value the smallest batch size is compared with."""
    numbers = [-1.0, -2.0, -3.0, -4.0]
    smallest = make_result(1.0, make_accuracy(1.0, 1, [0], numbers))
    for off, ok in ((1e-3, True), (0.1, False)):
        accuracy = make_accuracy(1.0, 1, [0], [value * (1 + off) for value in numbers])
        found = _decide(make_result(1.0, accuracy, batch_size=8), [smallest])
        assert found.ok is ok
        assert (found.mismatch is not None and found.mismatch.source == smallest.id) is not ok


def test_the_bundled_model_has_registered_log_likelihoods(prose: Prose) -> None:
    """They are compared with where mp was not measured; the first items suffice."""
    right = list(bundled.loglikelihoods()[:8])
    case: dict[str, Any] = {"model": "bundled", "dataset": "bundled", "dtype": "float32", "strategy": "iok"}
    wrong = [value * 1.1 for value in right]
    assert decide_mismatch(make_result(1.0, make_accuracy(1.0, 2, [0, 0], right), **case), None, None) is None
    found = decide_mismatch(make_result(1.0, make_accuracy(1.0, 2, [0, 0], wrong), **case), None, None)
    assert found is not None
    assert found.source is None
    assert found.typical_difference == pytest.approx(0.1)
    assert prose == describe_mismatch(found)
    case["model"] = "another"
    assert decide_mismatch(make_result(1.0, make_accuracy(1.0, 2, [0, 0], wrong), **case), None, None) is None
