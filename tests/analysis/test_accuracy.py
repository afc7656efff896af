from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from support.assessed import CPU, as_one, assessed, check_of, codes, finding_of
from support.prose import Prose
from support.report_factory import make_accuracy, make_answers, make_case, make_failed, make_result, paper_results

from pytest_llmgpu.analysis.answers import baseline
from pytest_llmgpu.inference import bundled

_MINE: dict[str, Any] = {"model": "mine", "dataset": "mine.jsonl", **CPU}
_GOOD = make_answers([True] * 160 + [False] * 40)
_GUESSES = make_answers([True, False, False, False] * 50)


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
def test_an_accuracy_may_be_below_its_baseline_by_the_tolerance(
    value: float, given: float | None, limit: int | None, ok: bool | None
) -> None:
    """The first items of a dataset fail only where chance cannot explain it."""
    result = make_result(1.0, make_accuracy(value, limit or 10_042), limit=limit)
    found = check_of(result, accuracy_baseline=given)
    assert (found.ok, found.value) == (ok, value)


def test_checks_read_as(prose: Prose) -> None:
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
        found = as_one([make_result(1.0, make_accuracy(value)) for value in values]).accuracy_check
        assert found is not None
        assert (found.ok, found.value) == (False, 0.26)


# Compared with mp, and with the smallest batch size.


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
    assert after.labels is not None
    twice_wrong = [
        (label + 2) % 4 if number >= right + won else chosen
        for number, (label, chosen) in enumerate(zip(after.labels, after.predictions_norm, strict=True))
    ]
    after = msgspec.structs.replace(after, predictions_norm=twice_wrong if labelled else after.predictions_norm)
    first, second = (
        msgspec.structs.replace(answers, labels=answers.labels if labelled else None) for answers in (before, after)
    )
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
        assert result.accuracy_check is not None
        assert (result.accuracy_check.ok, result.accuracy_check.source) == (False, "mp-bs1")
        (finding,) = result.findings
        assert finding.code == "wrong-answers"
        assert "mp-bs1 had 80.0 %, so iok loses the answers" in finding.text
        assert "120 items are lost and 10 won (p < 1e-06)" in finding.text
    assert codes(mp, tp) == [["unchecked-answers"], []], "only mp itself is unchecked"
    assert check_of(mp, iok, accuracy_baseline=0.2).ok is True
    assert check_of(iok, iok8).ok is None
    beside_broken = as_one([tp8], [mp, broken, tp]).accuracy_check
    assert beside_broken is not None
    assert (beside_broken.ok, beside_broken.source, beside_broken.baseline) == (False, "tp-bs1", 0.8)


@pytest.mark.parametrize(
    ("dtype", "off", "agrees"), [("float16", 4e-3, True), ("float16", 6e-3, False), ("float32", 2e-3, False)]
)
@pytest.mark.parametrize("fields", [{"strategy": "iok"}, {"batch_size": 8}], ids=str)
def test_wrong_log_likelihoods_fail_although_the_answers_are_right(
    fields: dict[str, Any], dtype: str, off: float, agrees: bool
) -> None:
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
    assert check_of(make_result(1.0, wrong, **{**case, "model": "another"})).ok is None


# Findings.


def test_the_results_of_shin_et_al_have_their_findings(prose: Prose) -> None:
    """The accuracy that fused kernels lose is a failure; a batch size that is too slow or too large is information."""
    results = assessed(*paper_results(), make_failed("crashed", batch_size=128))
    found = [(result.id, one) for result in results for one in result.findings]
    assert [(name, one.code) for name, one in found] == [
        ("mp-bs64", "batching-stopped-paying"),
        ("iok-bs32", "wrong-answers"),
        ("iok-bs64", "out-of-memory"),
        ("mp-bs128", "failed"),
    ]
    assert prose == "\n".join(f"{one.code}: {text}" for _, one in found for text in (one.text, one.next_step))


def test_findings_on_answers_read_as(prose: Prose) -> None:
    """Wrong answers are a failure with their cause and next step; answers without a baseline are a warning.

    Lost items are named if McNemar's probability is below 1 %. A workspace that is too small is named as the cause.
    """
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
