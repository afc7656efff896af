from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import (
    make_accuracy,
    make_answers,
    make_case,
    make_failed,
    make_generation,
    make_report,
    make_result,
    paper_results,
)

from pytest_llmgpu.analysis.accuracy import baseline
from pytest_llmgpu.analysis.assess import assess
from pytest_llmgpu.analysis.comparison import by_chance, compare, lost_and_won, mcnemar, written
from pytest_llmgpu.analysis.generated_texts import check_texts
from pytest_llmgpu.inference import bundled
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.result import Accuracy, AccuracyCheck, CaseResult, Finding, Launch

_MACHINE = make_report().environment
_CPU: dict[str, Any] = {"device": "cpu", "devices": 1}
_MINE: dict[str, Any] = {"model": "mine", "dataset": "mine.jsonl", **_CPU}
_STOCK = [-1.3, -2.0, -1.7, -3.0]
"""Log-likelihoods of kernels that are wrong at every batch size in the same way."""


def _assess(results: Sequence[CaseResult], given: float | None = None, **options: Any) -> list[CaseResult]:
    """Assess results one after another, as a session does."""
    done: list[CaseResult] = []
    for result in results:
        chosen = Options(accuracy_baseline=given, **options)
        done.append(assess([result], earlier=done, environment=_MACHINE, options=chosen))
    return done


def _check(*results: CaseResult, given: float | None = None, **options: Any) -> AccuracyCheck:
    """Return the check of the last of these results."""
    found = _assess(results, given, **options)[-1].accuracy_check
    assert found is not None
    return found


def _codes(results: Sequence[CaseResult]) -> list[list[str]]:
    return [[finding.code for finding in result.findings] for result in results]


def _only(result: CaseResult) -> Finding:
    (found,) = result.findings
    return found


def _dummy(
    values: Sequence[float], size: int = 1, strategy: str = "mp", tokens: tuple[int, int] | None = None, **fields: Any
) -> CaseResult:
    """Return a result of random weights with these log-likelihoods."""
    accuracy = make_accuracy(0.25, items=len(values) // 4, loglikelihoods=values)
    fields = {"strategy": strategy, "batch_size": size, "load_format": "dummy", **_CPU, **fields}
    return _clamped(make_result(8.0 / size, accuracy, **fields), tokens)


def _clamped(result: CaseResult, tokens: tuple[int, int] | None = (106, 23)) -> CaseResult:
    """Return a result whose workspace was asked for so many tokens and granted so many."""
    if tokens is not None:
        result.launches[0].tokens_requested, result.launches[0].tokens_granted = tokens
    return result


# Accuracy and its baseline.


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"model": "huggyllama/llama-7b"}, (0.761, "published for LLaMA 7B")),
        ({"model": "huggyllama/llama-65b"}, (0.842, "published for LLaMA 65B")),
        ({"model": "decapoda-research/llama-30b-hf"}, (0.828, "published for LLaMA 33B")),
        ({"model": "baffo32/decapoda-research-llama-7B-hf"}, (0.761, "published for LLaMA 7B")),
        ({"model": "meta-llama/Llama-2-7b-hf"}, None),
        ({"model": "yahma/llama-65b-hf"}, None),
        ({"metric": "acc"}, None),
        ({"dataset": "items.jsonl"}, None),
        ({"task": "mine"}, None),
        ({"limit": 100}, None),
        ({"given": 0.5}, (0.5, "--llmgpu-accuracy-baseline")),
        ({"given": 0.0, "model": "bundled", "dataset": "bundled"}, (0.0, "--llmgpu-accuracy-baseline")),
        ({"model": "bundled", "dataset": "bundled"}, (0.9, "registered for the bundled model")),
        (
            {"model": "bundled", "dataset": "bundled", "metric": "acc", "limit": 10},
            (0.8, "registered for the bundled model"),
        ),
        ({"model": "bundled"}, None),
    ],
)
def test_the_baseline_of_a_case(
    fields: dict[str, Any], found: tuple[float, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option comes first. A registered value holds on its own dataset, a published one on all of HellaSwag."""
    monkeypatch.setattr("pytest_llmgpu.inference.bundled.ACCURACY", {"acc": 0.8, "acc_norm": 0.9}, raising=False)
    given, metric = fields.pop("given", None), fields.pop("metric", "acc_norm")
    assert baseline(make_case(**fields), given=given, metric=metric) == found


@pytest.mark.parametrize(
    ("value", "given", "tolerance", "limit", "ok"),
    [
        (0.90, None, 0.01, None, True),
        (0.818, None, 0.01, None, True),
        (0.8179, None, 0.01, None, False),
        (0.205, 0.225, 0.02, None, True),  # in floating point 0.225 - 0.02 is slightly above 0.205
        (0.76, 0.828, 0.01, 100, True),  # upper bound of 100 items: 82.3 %
        (0.74, 0.828, 0.01, 100, False),  # 80.5 %
        (0.5, None, 0.01, 100, None),
    ],
)
def test_an_accuracy_may_be_below_its_baseline_by_the_tolerance(
    value: float, given: float | None, tolerance: float, limit: int | None, ok: bool | None
) -> None:
    """The first items of a dataset fail only where chance cannot explain it."""
    accuracy = make_accuracy(value, limit or 10_042)
    found = _check(make_result(1.0, accuracy, limit=limit), given=given, accuracy_tolerance=tolerance)
    assert (found.ok, found.value) == (ok, value)


def test_checks_read_as(prose: Prose) -> None:
    """Each kind of check has its sentence."""
    good, bad = make_accuracy(0.8, 100), make_accuracy(0.26, 100, [1] * 100)
    numbers = make_accuracy(1.0, 1, [0], [-1.1] * 4)
    one = make_accuracy(1.0, 1, [0], [-1.0] * 4)
    checks = [
        _check(make_result(1.0, make_accuracy())),
        _check(make_result(1.0, make_accuracy(0.5))),
        _check(make_result(1.0, good, limit=100)),
        _check(make_result(1.0, bad, limit=100), given=0.8),
        _check(make_result(1.0, good, **_MINE)),
        _check(make_result(1.0, good, **_MINE), make_result(1.0, bad, batch_size=2, **_MINE)),
        _check(make_result(1.0, one), make_result(1.0, numbers, strategy="tp")),
        _check(_dummy([-1.0] * 4)),
        _check(_dummy([-1.0] * 4), _dummy([-1.3] * 4, 2)),
        _check(_dummy([-1.0] * 4, strategy="tp"), _dummy([-1.000001] * 4, 2, "tp")),
        _check(_dummy([math.nan] * 4)),
        _check(_dummy([math.nan] * 4), _dummy([-1.0] * 4, 2)),
    ]
    assert prose == "\n".join(f"{found.ok}: {found.text}" for found in checks)


def test_the_worst_launch_counts() -> None:
    """One launch with wrong answers fails the case, in any order. A case without answers is not checked."""
    assert [one.accuracy_check for one in _assess([make_failed("oom"), make_result(1.0)], 0.8)] == [None, None]
    for values in ((0.828, 0.26, 0.828), (0.26, 0.828, 0.828)):
        launches = [make_result(1.0, make_accuracy(value)) for value in values]
        found = assess(launches, earlier=[], environment=_MACHINE, options=Options()).accuracy_check
        assert found is not None
        assert (found.ok, found.value) == (False, 0.26)
    result = _dummy([-1.0] * 4, 2)
    result.launches += _dummy([-2.0] * 4, 2).launches
    assert _check(_dummy([-1.0] * 4), result).ok is False


# Answers compared with those of another case.


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
def test_a_larger_batch_must_not_cost_answers(right_before: int, right_now: int, flipped: int, ok: bool | None) -> None:
    """Without a baseline and without labels, a lost answer beyond tolerance and chance fails."""
    before = make_result(1.0, make_accuracy(right_before / 200, 200), **_MINE)
    predictions = [1] * flipped + [0] * (200 - flipped)
    now = make_result(1.0, make_accuracy(right_now / 200, 200, predictions), batch_size=32, **_MINE)
    found = _check(before, now)
    assert (found.ok, found.source) == (ok, before.id)


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
    right = [False] * lost + [True] * (100 - lost) + [True] * won + [False] * (100 - won)
    now = make_answers(right)
    assert now.labels is not None
    still_wrong = [
        (label + 2) % 4 if not hit and number >= 100 else chosen
        for number, (label, hit, chosen) in enumerate(zip(now.labels, right, now.predictions_norm, strict=True))
    ]
    now = msgspec.structs.replace(now, predictions=still_wrong, predictions_norm=still_wrong)
    result = make_result(1.0, now, strategy=strategy, batch_size=8, **_MINE)
    assert _check(make_result(1.0, make_answers([True] * 100 + [False] * 100), **_MINE), result).ok is ok
    # A loss of 8 of 1,000 items with none won is not chance (0.4 %), but less than the tolerance of a point.
    before, now = (make_answers([False] * wrong + [True] * (1000 - wrong)) for wrong in (0, 8))
    assert (
        _check(make_result(1.0, before, **_MINE), make_result(1.0, now, strategy=strategy, batch_size=8, **_MINE)).ok
        is None
    )


def test_guesses_fail_against_mp_and_against_the_smallest_batch_size() -> None:
    """Agreement with a broken batch size of mp, or with itself, does not help; a known baseline decides."""
    good, bad = make_answers([True] * 160 + [False] * 40), make_answers([True, False, False, False] * 50)
    mp, broken, tp, iok, iok8, tp8 = (
        make_result(1.0, accuracy, strategy=strategy, batch_size=size, **_MINE)
        for strategy, accuracy, size in (
            *(("mp", good, 1), ("mp", bad, 8), ("tp", good, 1)),
            *(("iok", bad, 1), ("iok", bad, 8), ("tp", bad, 8)),
        )
    )
    for result in (iok, iok8):
        found = _check(mp, result)
        assert (found.ok, found.source, found.baseline) == (False, "mp-bs1", 0.8)
        assert _check(mp, result, given=0.2).ok is True
    assert _check(iok, iok8).ok is None
    beside_broken = assess([tp8], earlier=[mp, broken, tp], environment=_MACHINE, options=Options()).accuracy_check
    assert beside_broken is not None
    assert (beside_broken.ok, beside_broken.source) == (False, "tp-bs1")


@pytest.mark.parametrize(
    ("dtype", "off", "agrees"), [("float16", 4e-3, True), ("float16", 6e-3, False), ("float32", 2e-3, False)]
)
def test_wrong_log_likelihoods_fail_although_the_answers_are_right(dtype: str, off: float, agrees: bool) -> None:
    """A trained model is confident: a wrong kernel shows in the sum of all log-likelihoods."""
    values = [-1.0, -2.0, -3.0, -1e-9]
    answers = [make_accuracy(1.0, 1, [0], [value * (1 + change) for value in values]) for change in (0.0, off)]
    # A log-likelihood near 0 may differ by any factor.
    shaken = make_accuracy(1.0, 1, [0], [*(value * (1 + off) for value in values[:3]), -1e-6])
    for accuracy in (answers[1], shaken):
        for fields in ({"strategy": "iok"}, {"batch_size": 8}):
            result = make_result(1.0, accuracy, dtype=dtype, **fields)
            found = _check(make_result(1.0, answers[0], dtype=dtype), result, given=1.0, accuracy_tolerance=0.0)
            assert found.ok is agrees


def test_the_bundled_model_has_registered_log_likelihoods(prose: Prose) -> None:
    """They are compared with where mp was not measured; the first items suffice."""
    right = list(bundled.loglikelihoods()[:8])
    case: dict[str, Any] = {"model": "bundled", "dataset": "bundled", "dtype": "float32", "strategy": "iok"}
    wrong = make_accuracy(1.0, 2, [0, 0], [value * 1.1 for value in right])
    assert _check(make_result(1.0, make_accuracy(1.0, 2, [0, 0], right), **case)).ok is True
    found = _check(make_result(1.0, wrong, **case))
    assert found.ok is False
    assert prose == found.text
    assert _check(make_result(1.0, wrong, **{**case, "model": "another"})).ok is None


# Random weights.


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
    smallest = _dummy([-100.0, -50.0, -10.0, -1.0], dtype=dtype)
    found = _check(smallest, _dummy([-100.0, -50.0 * (1 - difference), -10.0, -1.0], 8, dtype=dtype))
    assert (found.ok, found.source, found.metric) == (ok, "mp-bs1", "loglikelihood_relative_difference")
    assert found.value == pytest.approx(difference, rel=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_fail(bad: float) -> None:
    """An overflow fails even at the smallest batch size; the report has no NaN. A zero agrees with a zero alone."""
    zeros = _dummy([0.0] * 4, dtype="float32")
    assert [_check(zeros, _dummy([value] * 4, 2, dtype="float32")).ok for value in (0.0, -1.0)] == [True, False]
    broken = _dummy([-1.0, bad, -1.0, -1.0])
    assert (_check(broken).ok, _check(broken).value) == (False, None)
    assert "1 of 4 " in _check(broken).text
    good = _dummy([-1.0] * 4, 2)
    found = _check(broken, good)
    assert (found.ok, found.value) == (False, None)
    # A comparison has no difference, in either direction.
    assert (compare(broken, good, "acc").largest_difference, compare(good, broken, "acc").typical_difference) == (
        None,
    ) * 2
    broken.launches += good.launches
    assert compare(broken, good, "acc").largest_difference is None


def test_the_smallest_batch_size_is_the_smallest_completed_one_of_the_series() -> None:
    """A case does not count if it failed, scored nothing, is larger, or belongs to another series."""
    earlier = [
        make_failed("oom", load_format="dummy", **_CPU),
        make_result(1.0, load_format="dummy", **_CPU),
        _dummy([-1.0] * 4, dtype="float32"),
        _dummy([-1.0] * 4, 64),
        _dummy([-1.0] * 4, 8),
        _dummy([-1.0] * 4, 4),
    ]
    assert _check(*earlier, _dummy([-1.0] * 4, 16)).source == "mp-bs4"
    assert _check(*earlier).source is None


def test_random_weights_agree_with_mp_not_with_themselves() -> None:
    """Wrong kernels agree with each other. Rounding is allowed; the same batch size of mp is compared with."""
    mp = [_dummy([-1.0, -2.0, -1.5, -3.0]), _dummy([-1.001, -2.0, -1.5, -3.0], 8)]
    assert _check(*mp).ok is True
    found = _check(*mp, _dummy([-1.005, -2.0, -1.5, -3.0], 8, "tp"))
    assert (found.ok, found.source) == (True, "mp-bs8")  # 4e-3; against mp-bs1 it would be 5e-3
    wrong = [_dummy(_STOCK, size, "iok") for size in (1, 8)]
    results = _assess([mp[0], *wrong])
    assert _codes(results) == [[], ["wrong-answers"], ["wrong-answers"]]
    assert "mp-bs1" in results[2].findings[0].text
    assert "iok" in results[2].findings[0].next_step
    alone = _assess(wrong)
    assert [one.accuracy_check.ok for one in alone if one.accuracy_check is not None] == [None, None]
    assert _codes(alone) == [["unchecked-answers"]] * 2
    assert "--strategy=mp,iok" in alone[1].findings[0].next_step
    assert _check(wrong[0], _dummy([-1.0] * 4, 8, "iok")).ok is False
    assert _codes(_assess([_dummy(_STOCK, 1, name) for name in ("mp", "tp")])) == [[], []]


# Findings on answers.


def test_the_results_of_shin_et_al_have_their_findings(prose: Prose) -> None:
    """The accuracy that fused kernels lose is a failure; a batch size that is too slow or too large is information."""
    results = _assess([*paper_results(), make_failed("crashed", batch_size=128)])
    found = {result.id: result.findings for result in results if result.findings}
    assert {name: [one.code for one in of_case] for name, of_case in found.items()} == {
        "mp-bs64": ["batching-stopped-paying"],
        "iok-bs32": ["wrong-answers"],
        "iok-bs64": ["out-of-memory"],
        "mp-bs128": ["failed"],
    }
    texts = [(one.code, text) for of_case in found.values() for one in of_case for text in (one.text, one.next_step)]
    assert all(text[0].isupper() and text.endswith(".") and "\n" not in text for _, text in texts)
    assert prose == "\n".join(f"{code}: {text}" for code, text in texts)


_NANS = make_accuracy(0.25, items=100, loglikelihoods=[math.nan, -1.0, -1.0, -1.0] * 100)


@pytest.mark.parametrize(
    ("results", "given", "code", "text", "advice"),
    [
        ([make_result(1.0, make_accuracy(0.80))], None, "wrong-answers", "2.8 points below", "`predictions`"),
        ([make_result(1.0, make_accuracy(0.7), **_MINE)], None, "unchecked-answers", "", "--llmgpu-accuracy-baseline"),
        ([make_result(1.0, make_accuracy(0.255), **_MINE)], None, "unchecked-answers", "Guess", "--llmgpu-tokenizer"),
        ([make_result(1.0, make_accuracy(0.4, 10), **_MINE)], None, "unchecked-answers", "", "--llmgpu-acc"),
        ([make_result(1.0, _NANS, **_MINE)], None, "wrong-answers", "100 of 400", "bfloat16"),
        (
            [make_result(1.0, make_accuracy(value), batch_size=size, **_MINE) for value, size in ((0.7, 1), (0.26, 2))],
            None,
            "wrong-answers",
            "mp-bs1 had 70.0 %, so the batch size loses the answers",
            "depends on the batch",
        ),
        (
            [
                make_result(4.0, make_accuracy(items=100, loglikelihoods=[value] * 400), batch_size=size)
                for value, size in ((-1.0, 1), (-1.001, 2), (-1.5, 4))
            ],
            0.828,
            "wrong-answers",
            "differ by 50.0 % from those of mp-bs1",
            "depends on the batch",
        ),
        (
            [_dummy([-1.0] * 4), _dummy([-1.001] * 4, 2), _dummy([-1.5] * 4, 4)],
            None,
            "wrong-answers",
            "",
            "depends on the batch",
        ),
        ([_dummy([math.nan] * 4)], None, "wrong-answers", "not finite", "bfloat16"),
    ],
)
def test_wrong_answers_have_their_cause_and_next_step(
    results: list[CaseResult], given: float | None, code: str, text: str, advice: str
) -> None:
    """Only what may be the model itself, or cannot be checked, is a warning; smaller differences are rounding."""
    found = _assess([msgspec.structs.replace(one, case=_on_cpu(one)) for one in results], given)
    assert _codes(found[:-1]) in ([[]] * (len(found) - 1), [["unchecked-answers"]])
    finding = _only(found[-1])
    assert (finding.code, finding.severity) == (code, "failure" if code == "wrong-answers" else "warning")
    assert text in finding.text
    assert advice in finding.next_step


def _on_cpu(result: CaseResult) -> Any:
    return msgspec.structs.replace(result.case, **_CPU)


def test_a_strategy_that_guesses_is_what_loses_the_answers() -> None:
    """Without a baseline mp is compared with; only mp itself has a finding that its accuracy is unchecked."""
    good, guesses = make_answers([True] * 160 + [False] * 40), make_answers([True, False, False, False] * 50)
    cases = (("mp", 1, good), ("iok", 1, guesses), ("iok", 8, guesses), ("tp", 1, good))
    results = _assess([make_result(8.0, a, strategy=name, batch_size=size, **_MINE) for name, size, a in cases])
    assert _codes(results) == [["unchecked-answers"], ["wrong-answers"], ["wrong-answers"], []]
    for result in results[1:3]:
        assert "mp-bs1 had 80.0 %, so iok loses the answers" in result.findings[0].text
        assert "120 items are lost and 10 won (p < 1e-06)" in result.findings[0].text


@pytest.mark.parametrize(("lost", "won", "named"), [(9, 0, True), (12, 8, False)])
def test_a_failure_names_lost_items_where_chance_does_not_explain_them(lost: int, won: int, named: bool) -> None:
    """They are named if McNemar's probability is below 1 %."""
    mp = make_answers([True] * 60 + [False] * 40)
    tp = make_answers([False] * lost + [True] * (60 - lost + won) + [False] * (40 - won))
    finding = _only(_assess([make_result(1.0, mp, **_CPU), make_result(1.0, tp, strategy="tp", **_CPU)], 0.7)[1])
    assert ("mp-bs1, 9 items are lost and 0 won (p = 0.0039)" in finding.text) is named
    assert (("; compared with" in finding.text), "points below the baseline" in finding.text) == (named, True)


@pytest.mark.parametrize(
    ("earlier", "result", "code", "words"),
    [
        # The collapse of Shin et al.: 82.8 % at batch size 16, 26 % at 32, where the workspace held 23 of 106 tokens.
        ([], make_result(1.0, make_accuracy(0.26), strategy="iok"), "wrong-answers", ("23 of 106", "Guessing")),
        (
            [],
            make_result(1.0, make_accuracy(0.25, 20), strategy="iok", **_MINE),
            "wrong-answers",
            ("23 of 106 tokens",),
        ),
        ([_dummy([-1.0] * 4, 8)], _dummy(_STOCK, 8, "iok"), "wrong-answers", ("23 of 106 tokens", "mp-bs8")),
        ([_dummy(_STOCK, 8)], _dummy(_STOCK, 8, "iok"), "unchecked-answers", ("DeepSpeed's workspace held 23 of 106",)),
        ([], make_result(1.0, make_accuracy(), strategy="mine", **_CPU), "unchecked-answers", ("Mine's workspace",)),
    ],
)
def test_a_workspace_that_is_too_small_is_the_cause(
    earlier: list[CaseResult], result: CaseResult, code: str, words: tuple[str, ...]
) -> None:
    """One finding names the workspace and the failure; where no check failed it warns. A large one has no finding."""
    assert _codes(_assess([_dummy(_STOCK), *(_dummy(_STOCK, 1, "iok", (106, n)) for n in (106, 128))])) == [[]] * 3
    finding = _assess([*earlier, _clamped(result)])[-1].findings[0]
    assert finding.code == code
    assert all(word in finding.text for word in words)
    assert ("--llmgpu-iok-min-tokens" in finding.next_step) is (result.case.strategy == "iok")


# Texts.

_TEXTS = [[1, 2, 3], [4, 5, 6]]
_VALUES = [[-2.0, -1.0, -3.0], [-0.5, -0.01, -0.2]]


def _generated(strategy: str = "mp", *launches: Any) -> CaseResult:
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
    found = check_texts(_generated("mp", _generation(), _generation(again=_changed(place, change / 3))), None)
    assert found is not None
    assert (found.check.ok, found.fault) == (ok, None if ok else "cache")


def test_texts_of_other_strategies_are_compared_with_mp() -> None:
    """A strategy that agrees with itself may be wrong: without mp it is unchecked, unlike mp it fails."""
    mp = _generated("mp", _generation())
    right = _generated("tp", _generation(reference=mp.key, reference_values=_VALUES))
    wrong = _generated("tp", _generation(reference=mp.key, reference_values=_changed(0, 0.5)))
    results = [_assess([mp, one])[1] for one in (right, wrong, _generated("tp", _generation()))]
    checks = [(one.accuracy_check.ok, one.accuracy_check.source) for one in results if one.accuracy_check is not None]
    assert checks == [(True, mp.id), (False, mp.id), (None, None)]
    assert _codes(results) == [[], ["wrong-answers"], []]
    assert "what tp computes" in results[1].findings[0].next_step
    # The check of texts that were not scored again has the reason, and neither passes nor fails.
    result = _generated("mp", msgspec.structs.replace(_generation(), prefill_loglikelihoods=None))
    result.launches[0].why["generation"] = "out of memory"
    found = _check(result)
    assert (found.ok, found.value) == (None, None)
    assert found.text == "2 texts are unchecked: out of memory"


def test_the_first_position_at_which_texts_diverge_is_found() -> None:
    """Texts that diverge are no failure; the comparison has their numbers and the number of equal tokens before."""
    mp = _generated("mp", _generation())
    other = make_generation(
        [[1, 2, 3], [4, 7, 6]], _VALUES, _VALUES, reference=mp.key, reference_values=_changed(1, 0.001)
    )
    found = compare(_generated("tp", other), mp, "acc")
    assert (found.reference, found.flipped, found.first_difference) == (mp.id, [1], 1)
    assert found.largest_difference == pytest.approx(0.001, rel=1e-3)
    same = compare(_generated("tp", _generation(reference=mp.key, reference_values=_VALUES)), mp, "acc")
    assert (same.flipped, same.first_difference, same.typical_difference) == ([], None, 0.0)


# Comparisons.


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
        (10_042, 0, 0.0),  # 2^-10041 is below what a float holds
    ],
)
def test_mcnemars_exact_probability(lost: int, won: int, p: float) -> None:
    """The expected values are computed independently; one lost item is as likely as one won."""
    assert mcnemar(lost, won) == pytest.approx(p, rel=1e-14, abs=0)
    assert by_chance(5041, 5001) == pytest.approx(0.3485711916691077, rel=1e-14, abs=0)  # scipy.stats.binomtest


def test_the_probability_counts_every_way_to_lose_and_win() -> None:
    """It is the sum over all outcomes that are at least as uneven, in exact fractions."""
    for lost, won in itertools.product(range(11), repeat=2):
        n = lost + won
        uneven = [k for k in range(n + 1) if min(k, n - k) <= min(lost, won)]
        assert mcnemar(lost, won) == float(sum((Fraction(math.comb(n, k), 2**n) for k in uneven), Fraction(0)))
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
    found = compare(make_result(1.0, accuracy, strategy="tp"), mp, "acc_norm")
    assert (found.reference, found.items, found.flipped) == ("mp-bs1", 5, [1, 2, 3, 4])
    assert (found.lost, found.won, found.mcnemar_p) == (2, 1, 1.0)
    assert found.largest_difference == pytest.approx(0.25)
    assert compare(make_result(1.0, accuracy, strategy="tp"), mp, "acc").flipped == [1, 2, 3]
    mp, tp = (make_result(1.0, make_accuracy(items=2, predictions=[0, n]), strategy="tp") for n in (0, 1))
    found = compare(tp, mp, "acc_norm")
    assert (found.flipped, found.lost, found.won, found.mcnemar_p) == ([1], None, None, None), "without labels"


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
