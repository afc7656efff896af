from __future__ import annotations

import itertools
import math
import time
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from support.report_factory import make_accuracy, make_answers, make_failed, make_result

from pytest_llmgpu.analysis.reference import compare, lost_and_won, reference, why_not
from pytest_llmgpu.analysis.sign_test import by_chance, mcnemar, written
from pytest_llmgpu.report.result import Accuracy, AccuracyCheck, CaseResult


def _scored(strategy: str = "mp", batch_size: int = 1, **fields: Any) -> CaseResult:
    return make_result(1.0, make_accuracy(items=5), strategy=strategy, batch_size=batch_size, **fields)


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (1, 2, 1.0),
        (5, 0, 2 / 32),
        (0, 5, 2 / 32),
        (9, 1, 22 / 1024),  # 2 (C(10, 0) + C(10, 1)) / 2^10
        (3, 3, 1.0),
        (59, 6, 4.964650327128616e-12),  # scipy.stats.binomtest(6, 65).pvalue
    ],
)
def test_mcnemars_exact_probability(lost: int, won: int, p: float) -> None:
    """By hand: nothing lost or won is no evidence, and one item is none either."""
    assert mcnemar(lost, won) == pytest.approx(p, rel=1e-14, abs=0)


def test_the_probability_is_that_of_every_way_to_lose_and_win() -> None:
    """Summed as fractions over all outcomes that are at least as uneven, and counted one by one where they are few."""
    for lost, won in itertools.product(range(12), repeat=2):
        n, fewer = lost + won, min(lost, won)
        uneven = [k for k in range(n + 1) if min(k, n - k) <= fewer]
        assert mcnemar(lost, won) == float(sum((Fraction(math.comb(n, k), 2**n) for k in uneven), Fraction(0)))
        if n <= 10:
            outcomes = [sum(ways) for ways in itertools.product((0, 1), repeat=n)]
            assert by_chance(lost, won) == float(Fraction(sum(count >= lost for count in outcomes), 2**n))


def test_half_of_hellaswag_may_flip() -> None:
    """Ten thousand items cost no time and no overflow."""
    began = time.process_time()
    assert by_chance(5041, 5001) == pytest.approx(0.3485711916691077, rel=1e-14, abs=0)  # scipy.stats.binomtest
    assert mcnemar(10_042, 0) == 0.0  # 2^-10041 is below what a float holds
    assert time.process_time() - began < 1


def test_lost_and_won_come_from_the_labels() -> None:
    """Right there and wrong here is lost, the reverse is won, wrong both times is neither; each by its metric."""
    before = make_answers([True, True, True, False, False])
    now = make_answers([True, False, False, True, False])
    assert lost_and_won(now, before, "acc_norm") == (2, 1)
    assert lost_and_won(before, now, "acc_norm") == (1, 2)
    assert lost_and_won(msgspec.structs.replace(now, predictions=before.predictions), before, "acc") == (0, 0)
    for pair in ((now, make_accuracy(items=5)), (make_accuracy(items=5), now)):
        assert lost_and_won(*pair, "acc") is None


def test_a_comparison_has_flips_losses_and_the_largest_difference() -> None:
    """Items are numbered as they were scored; a difference is relative to the reference's number."""
    numbers = [-1.0, -2.0, -4.0, -8.0] * 5
    mp = make_result(1.0, make_answers([True, True, True, False, False], numbers))
    numbers[9] = -2.5
    accuracy = make_answers([True, False, False, True, False], numbers)
    accuracy = msgspec.structs.replace(accuracy, predictions_norm=[*accuracy.predictions_norm[:4], 3])
    found = compare(make_result(1.0, accuracy, strategy="tp"), mp, "acc_norm")
    assert found.reference == "mp-bs1"
    assert (found.items, found.flipped, found.lost, found.won) == (5, [1, 2, 3, 4], 2, 1)
    assert found.mcnemar_p == 1.0
    assert found.largest_difference == pytest.approx(0.25)
    assert compare(make_result(1.0, accuracy, strategy="tp"), mp, "acc").flipped == [1, 2, 3]


def test_without_labels_flips_are_still_counted() -> None:
    """A record from before labels were kept."""
    mp, tp = (make_result(1.0, make_accuracy(items=2, predictions=[0, n]), strategy="tp") for n in (0, 1))
    found = compare(tp, mp, "acc_norm")
    assert (found.flipped, found.lost, found.won, found.mcnemar_p) == ([1], None, None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_have_no_difference(bad: float) -> None:
    """On either side: JSON holds no NaN, and an infinite difference says no more."""
    good = make_result(1.0, make_accuracy(items=1, loglikelihoods=[-1.0] * 4))
    broken = make_result(1.0, make_accuracy(items=1, loglikelihoods=[-1.0, bad, -1.0, -1.0]))
    assert compare(broken, good, "acc").largest_difference is None
    assert compare(good, broken, "acc").largest_difference is None
    broken.launches += good.launches
    assert compare(broken, good, "acc").largest_difference is None


def test_the_worst_launch_is_compared() -> None:
    """The fewest right answers, and the largest difference of any launch, whichever comes first."""
    mp = make_result(1.0, make_answers([True] * 4, [-1.0] * 16))
    launches: list[Accuracy] = [
        make_answers([True] * 4, [-1.5] * 16),
        make_answers([False] * 2 + [True] * 2, [-1.25] * 16),
    ]
    for first, second in (launches, launches[::-1]):
        result = make_result(1.0, first, strategy="tp")
        result.launches += make_result(1.0, second).launches
        found = compare(result, mp, "acc_norm")
        assert (found.flipped, found.lost, found.largest_difference) == ([0, 1], 2, 0.5)


@pytest.mark.parametrize(
    ("sizes", "size", "chosen"),
    [
        ([1, 8, 64], 8, 8),
        ([1, 4, 9], 8, 4),
        ([1, 9], 8, 1),
        ([64, 16], 8, 16),
        ([64], 1, 64),
        ([], 8, None),
    ],
)
def test_the_same_batch_size_of_mp_is_compared_with(sizes: list[int], size: int, chosen: int | None) -> None:
    """Else the largest smaller one, else the smallest."""
    found = reference(_scored("tp", size), [_scored(batch_size=one) for one in sizes])
    assert (found.case.batch_size if found else None) == chosen


def test_a_case_of_mp_that_is_wrong_is_the_last_to_compare_with() -> None:
    """What differs from it may be right: another batch size is the better witness, and a bad one better than none."""
    right, wrong = _scored(batch_size=1), _scored(batch_size=8)
    wrong.accuracy_check = AccuracyCheck(
        metric="acc", value=0.2, baseline=0.8, source="published", tolerance=0.01, ok=False, text="wrong"
    )
    assert reference(_scored("tp", 8), [right, wrong]) is right
    assert reference(_scored("tp", 8), [wrong]) is wrong


@pytest.mark.parametrize(
    "field",
    ["workload", "model", "revision", "load_format", "dtype", "dataset_sha256", "tokenizer_sha256"],
)
def test_another_thing_that_decides_the_numbers_does_not_compare(field: str) -> None:
    """Nothing is concluded from numbers that may differ for another reason."""
    fields: dict[str, Any] = {field: "other"}
    assert reference(_scored("tp"), [_scored(**fields)]) is None
    assert reference(_scored("tp"), [_scored(seed=1)]) is None
    assert reference(_scored("tp"), [_scored(limit=1)]) is None


@pytest.mark.parametrize(
    "fields",
    [{"devices": 1}, {"device": "cpu"}, {"backend": "other"}, {"gpu_memory_bytes": 1}, {"execution": "cuda_graphs"}],
)
def test_where_and_how_it_ran_does_not_matter(fields: dict[str, Any]) -> None:
    """A model that two GPUs run computes what one GPU computes; but rather what ran on the same devices."""
    other = _scored(**fields)
    assert reference(_scored("tp"), [other]) is other
    same = _scored()
    assert reference(_scored("tp"), [other, same]) is (same if {"devices", "device"} & set(fields) else other)


def test_random_weights_of_another_kind_of_device_do_not_compare() -> None:
    """A GPU makes other random numbers of the same seed than a CPU."""
    dummy: dict[str, Any] = {"load_format": "dummy"}
    assert reference(_scored("tp", **dummy), [_scored(device="cpu", **dummy)]) is None
    assert reference(_scored("tp", **dummy), [_scored(devices=1, **dummy)]) is not None


@pytest.mark.parametrize(
    ("result", "earlier", "reason"),
    [
        (_scored(), [_scored()], "it is mp itself"),
        (make_failed("oom", strategy="tp"), [_scored()], "the case did not complete"),
        (make_result(1.0, strategy="tp"), [_scored()], "the case scored nothing"),
        (_scored("tp"), [make_failed("oom"), make_result(1.0)], "no case of mp completed in this run"),
        (_scored("tp"), [_scored("tp"), _scored(dtype="float32")], "mp was not measured in this run"),
    ],
)
def test_a_case_without_a_comparison_says_why(result: CaseResult, earlier: list[CaseResult], reason: str) -> None:
    """What could not be had has its reason."""
    assert reference(result, earlier) is None
    assert why_not(result, earlier) == reason


def test_probabilities_are_written_for_people() -> None:
    """Two digits, and nothing that fills the line."""
    assert [written(p) for p in (1.0, 0.0214, 2e-6, 0.0)] == ["p = 1", "p = 0.021", "p = 2e-06", "p < 1e-06"]
