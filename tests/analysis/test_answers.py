from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from support.assessed import CPU, as_one, assessed, check_of, codes, finding_of
from support.prose import Prose
from support.report_factory import (
    known,
    make_accuracy,
    make_answers,
    make_case,
    make_failed,
    make_generation,
    make_result,
    paper_results,
)

from pytest_llmgpu.analysis.answers import baseline, by_chance, check_texts, compare, lost_and_won, written
from pytest_llmgpu.inference import bundled
from pytest_llmgpu.report.result import CaseResult, Generation, Launch

_MINE: dict[str, Any] = {"model": "mine", "dataset": "mine.jsonl", **CPU}
_GOOD = make_answers([True] * 160 + [False] * 40)
_GUESSES = make_answers([True, False, False, False] * 50)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"model": "huggyllama/llama-7b"}, (0.761, "published for LLaMA 7B")),
        ({"model": "huggyllama/llama-65b"}, (0.842, "published for LLaMA 65B")),
        ({"model": "huggyllama/LLaMA-30b"}, (0.828, "published for LLaMA 33B")),
        ({"model": "meta-llama/Llama-2-7b-hf"}, None),
        ({"model": "yahma/llama-65b-hf"}, None),
        ({"metric": "acc"}, None),
        ({"dataset": "items.jsonl"}, None),
        ({"task": "mine"}, None),
        ({"limit": 100}, None),
        ({"given": 0.5}, (0.5, "--llmgpu-accuracy-baseline")),
        ({"given": 0.0, "model": "bundled", "dataset": "bundled"}, (0.0, "--llmgpu-accuracy-baseline")),
        ({"model": "bundled", "dataset": "bundled"}, (0.9, "registered for the bundled model")),
        ({"model": "bundled", "dataset": "bundled", "metric": "acc"}, (0.8, "registered for the bundled model")),
        ({"model": "bundled", "dataset": "bundled", "limit": 10}, (0.9, "registered for the bundled model")),
        ({"model": "bundled"}, None),
    ],
)
def test_the_baseline_of_a_case(
    fields: dict[str, Any], found: tuple[float, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option comes first. A registered value holds on its own dataset, a published one on all of HellaSwag."""
    monkeypatch.setattr(bundled, "ACCURACY", {"acc": 0.8, "acc_norm": 0.9})
    given, metric = fields.pop("given", None), fields.pop("metric", "acc_norm")
    assert baseline(make_case(**fields), given=given, metric=metric) == found


@pytest.mark.parametrize(
    ("value", "given", "limit", "ok"),
    [
        (0.90, None, None, True),
        (0.818, None, None, True),
        (0.8179, None, None, False),
        (0.2408, 0.2508, None, True),  # in floating point 0.2508 - 0.01 is slightly above 0.2408
        (0.76, 0.828, 100, True),  # upper bound of 100 items: 82.3 %
        (0.74, 0.828, 100, False),  # 80.5 %
        (0.5, None, 100, None),
    ],
)
def test_an_accuracy_has_a_tolerance(value: float, given: float | None, limit: int | None, ok: bool | None) -> None:
    """The first items of a dataset fail only where chance cannot explain it."""
    result = make_result(1.0, make_accuracy(value, limit or 10_042), limit=limit)
    found = check_of(result, accuracy_baseline=given)
    assert (found.ok, found.value) == (ok, value)


def test_checks_of_trained_weights_read_as(prose: Prose) -> None:
    """Each kind of check of trained weights has its sentence."""
    good, bad = make_accuracy(0.8, 100), make_accuracy(0.26, 100, [1] * 100)
    one, other = (make_accuracy(1.0, 1, [0], [value] * 4) for value in (-1.0, -1.1))
    checks = [
        check_of(make_result(1.0, make_accuracy())),
        check_of(make_result(1.0, make_accuracy(0.5))),
        check_of(make_result(1.0, good, limit=100)),
        check_of(make_result(1.0, bad, limit=100), accuracy_baseline=0.8),
        check_of(make_result(1.0, good, **_MINE)),
        check_of(make_result(1.0, good, **_MINE), make_result(1.0, bad, batch_size=2, **_MINE)),
        check_of(make_result(1.0, one), make_result(1.0, other, strategy="tp")),
    ]
    assert prose == "\n".join(f"{found.ok}: {found.text}" for found in checks)


def test_the_worst_launch_counts() -> None:
    """One launch with wrong answers fails the case, in any order. A case without answers is not checked."""
    unscored = assessed(make_failed("oom"), make_result(1.0), accuracy_baseline=0.8)
    assert [one.accuracy_check for one in unscored] == [None, None]
    for values in ((0.828, 0.26, 0.828), (0.26, 0.828, 0.828)):
        found = known(as_one([make_result(1.0, make_accuracy(value)) for value in values]).accuracy_check)
        assert (found.ok, found.value) == (False, 0.26)


@pytest.mark.parametrize(
    ("labelled", "right", "lost", "won", "ok"),
    [
        (True, 100, 8, 1, None),  # 10/512 = 2 %
        (True, 100, 9, 1, None),  # 11/1024 = 1.07 %
        (True, 100, 10, 1, False),  # 12/2048 = 0.6 %
        (True, 100, 18, 8, None),  # as many lost on balance as with 10 and 0, but 8.4 % by chance
        (True, 100, 10, 0, False),
        (True, 100, 2, 0, None),  # 1 point: within the tolerance
        (True, 500, 8, 0, None),  # 0.4 % is no chance, but 0.8 points are within the tolerance
        (True, 100, 0, 10, None),  # better is not worse
        (False, 100, 90, 0, False),
        (False, 100, 8, 0, False),
        (False, 100, 12, 8, None),  # 4 more lost than won, of 20 that differ: chance
        (False, 100, 1, 0, None),
        (False, 100, 0, 5, None),
    ],
)
@pytest.mark.parametrize("strategy", ["mp", "tp"])
def test_lost_answers_beyond_tolerance_and_chance_fail(
    strategy: str, labelled: bool, right: int, lost: int, won: int, ok: bool | None
) -> None:
    """Lost and won items decide, by the exact sign test; without labels all that differ, else not those wrong twice."""
    before = make_answers([True] * right + [False] * right)
    after = make_answers([False] * lost + [True] * (right - lost + won) + [False] * (right - won))
    twice_wrong = [
        (label + 2) % 4 if number >= right + won else chosen
        for number, (label, chosen) in enumerate(zip(known(after.labels), after.predictions_norm, strict=True))
    ]
    after = msgspec.structs.replace(after, predictions_norm=twice_wrong if labelled else after.predictions_norm)
    first, second = (msgspec.structs.replace(one, labels=one.labels if labelled else None) for one in (before, after))
    smallest = make_result(1.0, first, **_MINE)
    found = check_of(smallest, make_result(1.0, second, strategy=strategy, batch_size=32, **_MINE))
    assert (found.ok, found.source) == (ok, smallest.id)


def test_a_strategy_that_guesses_is_what_loses_the_answers() -> None:
    """Agreement with a broken batch size of mp, or with itself, does not help; a known baseline decides."""
    mp, broken, iok, iok8, tp, tp8 = (
        make_result(8.0, accuracy, strategy=strategy, batch_size=size, **_MINE)
        for strategy, sizes in (("mp", (1, 8)), ("iok", (1, 8)), ("tp", (1, 8)))
        for size, accuracy in zip(sizes, (_GUESSES if strategy == "iok" else _GOOD, _GUESSES), strict=True)
    )
    for result in assessed(mp, iok, iok8)[1:]:
        check = known(result.accuracy_check)
        assert (check.ok, check.source) == (False, "mp-bs1")
        (finding,) = result.findings
        assert finding.code == "wrong-answers"
        assert "mp-bs1 had 80.0 %, so iok loses the answers" in finding.text
        assert "120 items are lost and 10 won (p < 1e-06)" in finding.text
    assert codes(mp, tp) == [["unchecked-answers"], []], "only mp itself is unchecked"
    assert check_of(mp, iok, accuracy_baseline=0.2).ok is True
    assert check_of(iok, iok8).ok is None
    beside_broken = known(as_one([tp8], [mp, broken, tp]).accuracy_check)
    assert (beside_broken.ok, beside_broken.source, beside_broken.baseline) == (False, "tp-bs1", 0.8)


@pytest.mark.parametrize(
    ("dtype", "off", "agrees"), [("float16", 4e-3, True), ("float16", 6e-3, False), ("float32", 2e-3, False)]
)
@pytest.mark.parametrize("fields", [{"strategy": "iok"}, {"batch_size": 8}], ids=str)
def test_wrong_log_likelihoods_fail(fields: dict[str, Any], dtype: str, off: float, agrees: bool) -> None:
    """A trained model is confident: a wrong kernel shows in the sum of all log-likelihoods."""
    values = [-1.0, -2.0, -3.0]
    # A log-likelihood near 0 may differ by any factor.
    shaken = [*(value * (1 + off) for value in values), -1e-6]
    right, wrong = (make_accuracy(1.0, 1, [0], numbers) for numbers in ([*values, -1e-9], shaken))
    results = make_result(1.0, right, dtype=dtype), make_result(1.0, wrong, dtype=dtype, **fields)
    assert check_of(*results, accuracy_baseline=1.0).ok is agrees


def test_the_bundled_model_has_registered_log_likelihoods(prose: Prose) -> None:
    """They are compared with where mp was not measured; the first items suffice."""
    right = list(bundled.loglikelihoods()[:8])
    case: dict[str, Any] = {"model": "bundled", "dataset": "bundled", "dtype": "float32", "strategy": "iok"}
    wrong = make_accuracy(1.0, 2, [0, 0], [value * 1.1 for value in right])
    assert check_of(make_result(1.0, make_accuracy(1.0, 2, [0, 0], right), **case)).ok is True
    found = check_of(make_result(1.0, wrong, **case))
    assert found.ok is False
    assert prose == found.text
    of_mp = assessed(make_result(1.0, wrong, **{**case, "strategy": "mp"}))[0].findings[0]
    assert of_mp.next_step.startswith("Look for what changed the model"), "mp does not differ from mp"
    assert check_of(make_result(1.0, wrong, **{**case, "model": "another"})).ok is None
    assert check_of(make_result(1.0, wrong, **case, quantization="int8")).ok is True, "the accuracy alone is checked"


def test_the_results_of_shin_et_al_have_their_findings(prose: Prose) -> None:
    """The accuracy that fused kernels lose is a failure; a batch size that is too large is information."""
    results = assessed(*paper_results(), make_failed("crashed", batch_size=128))
    found = [(result.id, one) for result in results for one in result.findings]
    assert [(name, one.code) for name, one in found] == [
        ("iok-bs32", "wrong-answers"),
        ("iok-bs64", "out-of-memory"),
        ("mp-bs128", "failed"),
    ]
    assert prose == "\n".join(f"{one.code}: {text}" for _, one in found for text in (one.text, one.next_step))


def test_findings_on_answers_read_as(prose: Prose) -> None:
    """Wrong answers are a failure with their cause and next step; answers without a baseline are a warning."""
    nans = make_accuracy(0.25, items=100, loglikelihoods=[math.nan, -1.0, -1.0, -1.0] * 100)
    by_size = [make_result(1.0, make_accuracy(value), batch_size=n, **_MINE) for n, value in ((1, 0.7), (2, 0.26))]
    rounding = [
        make_result(4.0, make_accuracy(items=100, loglikelihoods=[value] * 400), batch_size=size, **CPU)
        for value, size in ((-1.0, 1), (-1.001, 2), (-1.5, 4))
    ]
    mp = make_result(1.0, make_answers([True] * 60 + [False] * 40), **CPU)
    after = ([False] * lost + [True] * (60 - lost + won) + [False] * (40 - won) for lost, won in ((9, 0), (12, 8)))
    tp = [make_result(1.0, make_answers(right), strategy="tp", **CPU) for right in after]
    # The collapse of Shin et al.: 82.8 % at batch size 16, 26 % at 32, where the workspace held 23 of 106 tokens.
    small = [
        make_result(1.0, make_accuracy(0.26), strategy="iok", **CPU),
        make_result(1.0, make_accuracy(0.25, 20), strategy="iok", model="mine", **CPU),
        make_result(1.0, make_accuracy(), strategy="mine", **CPU),
    ]
    for result in small:
        result.launches[0].tokens_requested, result.launches[0].tokens_granted = 106, 23
    found = [
        finding_of(make_result(1.0, make_accuracy(0.80), **CPU)),
        finding_of(make_result(1.0, nans, **_MINE)),
        finding_of(*by_size),
        finding_of(*rounding, accuracy_baseline=0.828),
        *(finding_of(mp, result, accuracy_baseline=0.7) for result in tp),
        *map(finding_of, small),
        # On a few items a trained model may score like guesses.
        *(
            finding_of(make_result(1.0, make_accuracy(*one), **_MINE))
            for one in ((0.7, 9999), (0.255, 9999), (0.4, 10))
        ),
    ]
    assert prose == "\n".join(f"{one.severity} {one.code}: {one.text} {one.next_step}" for one in found)


def test_the_exact_probability_of_a_loss_by_chance() -> None:
    """It is the sum over all outcomes with as many items lost, in exact fractions; many items do not overflow."""
    for lost, won in itertools.product(range(11), repeat=2):
        n = lost + won
        worse = (Fraction(math.comb(n, k), 2**n) for k in range(lost, n + 1))
        assert by_chance(lost, won) == float(sum(worse, Fraction(0)))
    assert 2 * by_chance(59, 6) == pytest.approx(
        4.964650327128616e-12, rel=1e-14
    )  # scipy.stats.binomtest(6, 65).pvalue
    assert by_chance(10_042, 0) == 0.0  # 2^-10041 is below what a float holds
    assert by_chance(5041, 5001) == pytest.approx(0.3485711916691077, rel=1e-14)  # scipy.stats.binomtest
    assert [written(p) for p in (1.0, 0.0214, 2e-6, 0.0)] == ["p = 1", "p = 0.021", "p = 2e-06", "p < 1e-06"]


def test_a_comparison_has_flips_losses_and_the_largest_difference() -> None:
    """Items are numbered as they were scored; a difference is relative to the number of the reference."""
    numbers = [-1.0, -2.0, -4.0, -8.0] * 5
    before = make_answers([True, True, True, False, False], numbers)
    mp = make_result(1.0, before)
    numbers[9] = -2.5
    accuracy = make_answers([True, False, False, True, False], numbers)
    assert lost_and_won(before, accuracy, "acc_norm") == (1, 2)
    accuracy = msgspec.structs.replace(accuracy, predictions_norm=[*accuracy.predictions_norm[:4], 3])
    tp = make_result(1.0, accuracy, strategy="tp")
    found = compare(tp, mp, "acc_norm")
    assert (found.reference, found.items, found.flipped) == ("mp-bs1", 5, [1, 2, 3, 4])
    assert (found.lost, found.won, found.mcnemar_p) == (2, 1, 1.0)
    assert found.largest_difference == pytest.approx(0.25)
    assert compare(tp, mp, "acc").flipped == [1, 2, 3]
    unlabelled = make_result(1.0, msgspec.structs.replace(accuracy, labels=None))
    found = compare(unlabelled, mp, "acc")
    assert (found.flipped, found.lost, found.won, found.mcnemar_p) == ([1, 2, 3], None, None, None)


def test_the_worst_launch_is_compared() -> None:
    """The launch with the fewest right answers counts, and the largest difference of any launch, in any order."""
    mp = make_result(1.0, make_answers([True] * 4, [-1.0] * 16))
    launches = make_answers([True] * 4, [-1.5] * 16), make_answers([False] * 2 + [True] * 2, [-1.25] * 16)
    for first, second in (launches, launches[::-1]):
        result = make_result(1.0, first, strategy="tp")
        result.launches += make_result(1.0, second).launches
        found = compare(result, mp, "acc_norm")
        assert (found.flipped, found.lost, found.largest_difference) == ([0, 1], 2, 0.5)


_RIGHT = [-1.0, -2.0, -1.5, -3.0]
_WRONG = [-1.3, -2.0, -1.7, -3.0]
"""Log-likelihoods of kernels that are wrong at every batch size in the same way."""


def _dummy(
    values: Sequence[float] = _RIGHT, size: int = 1, strategy: str = "mp", granted: int | None = None, **fields: Any
) -> CaseResult:
    """Return a result with these log-likelihoods; its workspace was granted so many of 106 tokens."""
    accuracy = make_accuracy(0.25, items=len(values) // 4, loglikelihoods=values)
    fields = {"strategy": strategy, "batch_size": size, "load_format": "dummy", **CPU, **fields}
    result = make_result(8.0 / size, accuracy, **fields)
    if granted is not None:
        result.launches[0].tokens_requested, result.launches[0].tokens_granted = 106, granted
    return result


def test_checks_of_random_weights_read_as(prose: Prose) -> None:
    """Each kind of check of random weights has its sentence."""
    checks = [
        check_of(_dummy([-1.0] * 4)),
        check_of(_dummy([-1.0] * 4), _dummy([-1.3] * 4, 2)),
        check_of(_dummy([-1.0] * 4, strategy="tp"), _dummy([-1.000001] * 4, 2, "tp")),
        check_of(_dummy([math.nan] * 4)),
        check_of(_dummy([math.nan] * 4), _dummy([-1.0] * 4, 2)),
    ]
    assert prose == "\n".join(f"{found.ok}: {found.text}" for found in checks)


@pytest.mark.parametrize(
    ("dtype", "difference", "ok", "experts", "quantization"),
    [
        ("float32", 0.9e-5, True, {}, None),
        ("float32", 2e-5, False, {}, None),
        ("float16", 4.9e-3, True, {}, None),
        ("float16", 5.1e-3, False, {}, None),
        ("bfloat16", 3.9e-2, True, {}, None),
        ("bfloat16", 4.1e-2, False, {}, None),
        ("bfloat16", 0.11, True, {"experts": "eager"}, None),
        ("bfloat16", 0.13, False, {"experts": "eager"}, None),
        ("bfloat16", 0.11, True, {}, "fp8"),
        ("bfloat16", 0.13, False, {}, "fp8"),
        ("bfloat16", 4.1e-2, False, {}, "int4"),
        ("bfloat16", 4.1e-2, False, {}, "mxfp4-checkpoint"),
    ],
)
def test_random_weights_must_score_alike_at_every_batch_size(
    dtype: str, difference: float, ok: bool, experts: dict[str, str], quantization: str | None
) -> None:
    """Only the rounding of the dtype is allowed, relative to the value; the worst launch counts."""
    smallest = _dummy([-100.0, -50.0, -10.0, -1.0], dtype=dtype, quantization=quantization)
    larger = _dummy([-100.0, -50.0, -10.0, -1.0], 8, dtype=dtype, quantization=quantization)
    larger.launches += _dummy([-100.0, -50.0 * (1 - difference), -10.0, -1.0]).launches
    larger.launches[0].implementations = experts
    found = check_of(smallest, larger)
    assert (found.ok, found.source, found.metric) == (ok, smallest.id, "loglikelihood_relative_difference")
    assert found.value == pytest.approx(difference, rel=0.1)
    wrong = assessed(smallest, larger)[1].findings
    assert [(one.code, "on the batch" in one.next_step) for one in wrong] == [("wrong-answers", True)] * (not ok)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_fail(bad: float) -> None:
    """An overflow fails even at the smallest batch size; the report has no NaN. A zero agrees with a zero alone."""
    zeros = _dummy([0.0] * 4, dtype="float32")
    assert [check_of(zeros, _dummy([value] * 4, 2, dtype="float32")).ok for value in (0.0, -1.0)] == [True, False]
    broken, good = _dummy([-1.0, bad, -1.0, -1.0]), _dummy([-1.0] * 4, 2)
    for results in ((broken,), (broken, good)):
        found = check_of(*results)
        assert (found.ok, found.value, found.baseline) == (False, None, None)
    finding = finding_of(broken)
    assert finding.text.startswith("1 of 4 log-likelihoods")
    assert "bfloat16" in finding.next_step
    broken.launches += good.launches
    comparison = compare(broken, good, "acc")
    assert (comparison.largest_difference, comparison.typical_difference) == (None, None)


def test_the_smallest_batch_size_is_the_smallest_completed_one_of_the_series() -> None:
    """A case does not count if it failed, scored nothing, is larger, or belongs to another series."""
    unscored = [make_failed("oom", load_format="dummy", **CPU), make_result(1.0, load_format="dummy", **CPU)]
    earlier = [*unscored, _dummy(dtype="float32"), *(_dummy(size=size) for size in (64, 8, 4))]
    assert check_of(*earlier, _dummy(size=16)).source == "mp-bs4"
    assert check_of(_dummy(), _dummy()).source == "mp-bs1", "a second measurement is compared with the first"
    assert check_of(*earlier).source is None


def test_random_weights_agree_with_mp_not_with_themselves() -> None:
    """Wrong kernels agree with each other. Rounding is allowed; the same batch size of mp is compared with."""
    mp = [_dummy(), _dummy([-1.001, *_RIGHT[1:]], 8)]
    assert check_of(*mp).ok is True
    found = check_of(*mp, _dummy([-1.005, *_RIGHT[1:]], 8, "tp"))
    assert (found.ok, found.source) == (True, "mp-bs8")  # 4e-3; against mp-bs1 it would be 5e-3
    wrong = [_dummy(_WRONG, size, "iok") for size in (1, 8)]
    results = assessed(mp[0], *wrong)
    assert codes(mp[0], *wrong) == [[], ["wrong-answers"], ["wrong-answers"]]
    assert "mp-bs1" in results[2].findings[0].text
    assert "iok" in results[2].findings[0].next_step
    # Without mp.
    assert [check_of(*wrong[:number]).ok for number in (1, 2)] == [None, None]
    assert codes(*wrong) == [["unchecked-answers"]] * 2
    assert finding_of(*wrong).next_step.startswith("Add mp to --llmgpu-strategy if iok runs the model of")
    assert check_of(wrong[0], _dummy(size=8, strategy="iok")).ok is False
    assert codes(_dummy(_WRONG), _dummy(_WRONG, strategy="tp")) == [[], []]


@pytest.mark.parametrize(("off", "ok"), [(0.09, True), (0.12, False)])
def test_ranks_that_quantise_their_parts_may_differ_from_mp_twice_as_far_as_mp_from_plain_weights(
    off: float, ok: bool
) -> None:
    """Without mp of plain weights the case is unchecked; one rank, and a checkpoint, have the scales of mp."""
    two: dict[str, Any] = {"devices": 2, "quantization": "int8"}
    plain, mp, tp = (
        _dummy([-1.0 - far, *_RIGHT[1:]], strategy=name, **fields)
        for far, name, fields in ((0, "mp", {}), (0.05, "mp", {"quantization": "int8"}), (0.05 + off, "tp", two))
    )
    assert check_of(plain, mp, tp).ok is ok
    assert check_of(plain, mp, tp).tolerance == pytest.approx(0.005 + 2 * 0.05)
    for others in ((mp,), (plain,)):
        found = finding_of(*others, tp)
        assert (found.code, check_of(*others, tp).ok) == ("unchecked-answers", None)
        assert found.next_step == "Add mp to --llmgpu-strategy with --llmgpu-quantization=none,int8."
    same = {**two, "quantization": "torchao-checkpoint"}
    assert (
        check_of(_dummy(quantization=same["quantization"]), _dummy([-1.02, *_RIGHT[1:]], strategy="tp", **same)).ok
        is False
    )


def test_a_workspace_that_is_too_small_is_the_cause() -> None:
    """It is in the finding of a failure; where no check failed it warns. A large one has no finding."""
    assert codes(_dummy(), *(_dummy(strategy="iok", granted=tokens) for tokens in (106, 128))) == [[], [], []]
    for mp, code, words in ((_RIGHT, "wrong-answers", "mp-bs8"), (_WRONG, "unchecked-answers", "no check failed")):
        finding = finding_of(_dummy(mp, 8), _dummy(_WRONG, 8, "iok", granted=23))
        assert finding.code == code
        assert finding.text.startswith("DeepSpeed's workspace held 23 of 106 tokens")
        assert words in finding.text


_TEXTS = [[1, 2, 3], [4, 5, 6]]
_VALUES = [[-2.0, -1.0, -3.0], [-0.5, -0.01, -0.2]]


def _texts(strategy: str = "mp", *launches: Generation) -> CaseResult:
    case = make_case(strategy=strategy, workload="generate", prompt_tokens=96, new_tokens=3)
    result = make_result(strategy=strategy)
    return msgspec.structs.replace(
        result, id=case.id, key=case.key, case=case, launches=[Launch(generation=one) for one in launches]
    )


def _generation(again: Sequence[Sequence[float]] = _VALUES, **fields: Any) -> Generation:
    return make_generation(_TEXTS, _VALUES, again, **fields)


def _changed(place: int, change: float) -> list[list[float]]:
    return [[value + change * (number == place) for value in row] for number, row in enumerate(_VALUES)]


_MP = _texts("mp", _generation())


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
    check, fault = check_texts(_texts("mp", _generation(), _generation(_changed(place, change / 3))), None)
    assert (check.ok, fault) == (ok, None if ok else "cache")


def test_texts_of_other_strategies_are_compared_with_mp() -> None:
    """A strategy that agrees with itself may be wrong: without mp it is unchecked, unlike mp it fails."""
    right, wrong, alone = (
        _texts("tp", _generation(reference=_MP.key if values else None, reference_values=values))
        for values in (_VALUES, _changed(0, 0.5), None)
    )
    checks = [check_of(_MP, one) for one in (right, wrong, alone)]
    assert [(one.ok, one.source) for one in checks] == [(True, _MP.id), (False, _MP.id), (None, None)]
    results = [assessed(_MP, one)[1] for one in (right, wrong, alone)]
    codes = [[], ["wrong-answers"], ["unchecked-answers"]]
    assert [[one.code for one in result.findings] for result in results] == codes
    assert "what tp computes" in results[1].findings[0].next_step
    assert assessed(alone)[0].findings[0].next_step.startswith("Add mp to --llmgpu-strategy")
    # Without the forward over prompt and text the check has the reason, and neither passes nor fails.
    result = _texts("mp", msgspec.structs.replace(_generation(), prefill_loglikelihoods=None))
    result.launches[0].why["generation"] = "out of memory"
    found = check_of(result)
    assert (found.ok, found.value, found.text) == (None, None, "2 texts are unchecked: out of memory")
    assert assessed(result)[0].findings[0].next_step.startswith("Use a smaller batch size")


def test_the_first_position_at_which_texts_diverge_is_found() -> None:
    """Texts that diverge are no failure; the comparison has their numbers and the number of equal tokens before."""
    fields: dict[str, Any] = {"reference": _MP.key, "reference_values": _changed(1, 0.001)}
    other = make_generation([[1, 2, 3], [4, 7, 6]], _VALUES, _VALUES, **fields)
    found = compare(_texts("tp", other), _MP, "acc")
    assert (found.reference, found.flipped, found.first_difference) == (_MP.id, [1], 1)
    assert found.largest_difference == pytest.approx(0.001, rel=1e-3)
    same = compare(_texts("tp", _generation(reference=_MP.key, reference_values=_VALUES)), _MP, "acc")
    assert (same.flipped, same.first_difference, same.typical_difference) == ([], None, 0.0)


@pytest.mark.parametrize(
    ("tokens", "values", "ok", "words"),
    [
        ([[1, 2, 9], [4, 5, 6]], _VALUES, True, "0 begin with another token, and up to the first token that differs"),
        ([[9, 2, 3], [4, 5, 6]], _changed(0, 0.5), False, "1 begin with another token"),
        # The engine returns no numbers: most texts have to begin alike.
        ([[9, 2, 3], [4, 5, 6]], None, None, "the engine returns no log-likelihoods"),
        ([[9, 2, 3], [9, 5, 6]], None, False, "2 begin with another token"),
    ],
)
def test_texts_of_an_engine_that_scores_none_are_compared_up_to_the_first_other_token(
    tokens: list[list[int]], values: list[list[float]] | None, ok: bool | None, words: str
) -> None:
    """Up to it, and with it, both chose the likeliest of the same texts. What follows does not count."""
    own = make_generation(tokens, values or _VALUES, _VALUES, reference=_MP.key, reference_values=None)
    own = msgspec.structs.replace(own, prefill_loglikelihoods=None)
    own = msgspec.structs.replace(own, loglikelihoods=None) if values is None else own
    result = _texts("engine", own)
    result.case = msgspec.structs.replace(result.case, execution="engine")
    found = check_of(_MP, result)
    assert (found.ok, found.source) == (ok, _MP.id)
    assert words in found.text
    steps = [one.next_step for one in assessed(_MP, result)[1].findings]
    assert [step.startswith("Let the engine return token ids") for step in steps if ok is None] == [True] * (ok is None)
