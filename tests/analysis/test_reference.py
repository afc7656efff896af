from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from support.report_factory import make_accuracy, make_answers, make_failed, make_result

from pytest_llmgpu.analysis.reference import compare, lost_and_won, missing, reference
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
    """The expected values are computed independently; one lost item is as likely as one won."""
    assert mcnemar(lost, won) == pytest.approx(p, rel=1e-14, abs=0)


def test_the_probability_counts_every_way_to_lose_and_win() -> None:
    """It is the sum over all outcomes that are at least as uneven, in exact fractions."""
    for lost, won in itertools.product(range(12), repeat=2):
        n, fewer = lost + won, min(lost, won)
        uneven = [k for k in range(n + 1) if min(k, n - k) <= fewer]
        assert mcnemar(lost, won) == float(sum((Fraction(math.comb(n, k), 2**n) for k in uneven), Fraction(0)))
        if n <= 10:
            outcomes = [sum(ways) for ways in itertools.product((0, 1), repeat=n)]
            assert by_chance(lost, won) == float(Fraction(sum(count >= lost for count in outcomes), 2**n))


def test_half_of_hellaswag_may_flip() -> None:
    """Ten thousand items do not overflow."""
    assert by_chance(5041, 5001) == pytest.approx(0.3485711916691077, rel=1e-14, abs=0)  # scipy.stats.binomtest
    assert mcnemar(10_042, 0) == 0.0  # 2^-10041 is below what a float holds


def test_lost_and_won_come_from_the_labels() -> None:
    """An item that was right and is wrong now is lost, the reverse is won; each metric has its own predictions."""
    before = make_answers([True, True, True, False, False])
    now = make_answers([True, False, False, True, False])
    assert lost_and_won(now, before, "acc_norm") == (2, 1)
    assert lost_and_won(before, now, "acc_norm") == (1, 2)
    assert lost_and_won(msgspec.structs.replace(now, predictions=before.predictions), before, "acc") == (0, 0)
    for pair in ((now, make_accuracy(items=5)), (make_accuracy(items=5), now)):
        assert lost_and_won(*pair, "acc") is None


def test_a_comparison_has_flips_losses_and_the_largest_difference() -> None:
    """Items are numbered as they were scored; a difference is relative to the number of the reference."""
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
    """Old reports have no labels."""
    mp, tp = (make_result(1.0, make_accuracy(items=2, predictions=[0, n]), strategy="tp") for n in (0, 1))
    found = compare(tp, mp, "acc_norm")
    assert (found.flipped, found.lost, found.won, found.mcnemar_p) == ([1], None, None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_have_no_difference(bad: float) -> None:
    """This holds for the case and for its reference: JSON has no NaN."""
    good = make_result(1.0, make_accuracy(items=1, loglikelihoods=[-1.0] * 4))
    broken = make_result(1.0, make_accuracy(items=1, loglikelihoods=[-1.0, bad, -1.0, -1.0]))
    assert compare(broken, good, "acc").largest_difference is None
    assert compare(good, broken, "acc").largest_difference is None
    broken.launches += good.launches
    assert compare(broken, good, "acc").largest_difference is None


def test_the_worst_launch_is_compared() -> None:
    """The launch with the fewest right answers counts, and the largest difference of any launch, in any order."""
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
    """Without it, the largest smaller batch size comes next, then the smallest larger one."""
    found = reference(_scored("tp", size), [_scored(batch_size=one) for one in sizes])
    assert (found.case.batch_size if found else None) == chosen


def test_a_case_of_mp_that_is_wrong_is_the_last_to_compare_with() -> None:
    """Another batch size is preferred; a wrong case is better than none."""
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
def test_cases_that_compute_other_numbers_are_not_compared(field: str) -> None:
    """Their log-likelihoods may differ for another reason than the strategy."""
    fields: dict[str, Any] = {field: "other"}
    assert reference(_scored("tp"), [_scored(**fields)]) is None
    assert reference(_scored("tp"), [_scored(seed=1)]) is None
    assert reference(_scored("tp"), [_scored(limit=1)]) is None
    assert reference(_scored("tp"), [_scored(add_bos=False)]) is None


@pytest.mark.parametrize(
    "fields",
    [{"devices": 1}, {"device": "cpu"}, {"backend": "other"}, {"gpu_memory_bytes": 1}, {"execution": "cuda_graphs"}],
)
def test_devices_and_execution_do_not_matter(fields: dict[str, Any]) -> None:
    """Two GPUs compute the same as one; a case on the same devices is preferred."""
    other = _scored(**fields)
    assert reference(_scored("tp"), [other]) is other
    same = _scored()
    assert reference(_scored("tp"), [other, same]) is (same if {"devices", "device"} & set(fields) else other)


def test_random_weights_of_a_cpu_and_a_gpu_are_not_compared() -> None:
    """A GPU draws other random numbers than a CPU from the same seed."""
    dummy: dict[str, Any] = {"load_format": "dummy"}
    assert reference(_scored("tp", **dummy), [_scored(device="cpu", **dummy)]) is None
    assert reference(_scored("tp", **dummy), [_scored(devices=1, **dummy)]) is not None


@pytest.mark.parametrize(
    ("result", "earlier", "reason"),
    [
        (_scored(), [_scored()], "it is mp itself"),
        (make_failed("oom", strategy="tp"), [_scored()], "did not complete"),
        (make_result(1.0, strategy="tp"), [_scored()], "scored nothing"),
        (_scored("tp"), [make_failed("oom"), make_result(1.0)], "no case of mp completed"),
        (_scored("tp"), [_scored("tp"), _scored(dtype="float32")], "mp was not measured"),
    ],
)
def test_a_missing_reference_has_its_reason(result: CaseResult, earlier: list[CaseResult], reason: str) -> None:
    """The reason is that of the case itself first."""
    assert reference(result, earlier) is None
    assert reason in missing(result, earlier)


def test_probabilities_have_two_digits() -> None:
    """The smallest are below a limit."""
    assert [written(p) for p in (1.0, 0.0214, 2e-6, 0.0)] == ["p = 1", "p = 0.021", "p = 2e-06", "p < 1e-06"]
