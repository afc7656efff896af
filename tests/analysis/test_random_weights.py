from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from support.assessed import CPU, assessed, check_of, codes, finding_of
from support.prose import Prose
from support.report_factory import make_accuracy, make_failed, make_result

from pytest_llmgpu.analysis.answers import compare
from pytest_llmgpu.report.result import CaseResult

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


def test_checks_read_as(prose: Prose) -> None:
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
    """Only the rounding of the dtype is allowed, relative to the value; the worst launch counts."""
    smallest = _dummy([-100.0, -50.0, -10.0, -1.0], dtype=dtype)
    larger = _dummy([-100.0, -50.0, -10.0, -1.0], 8, dtype=dtype)
    larger.launches += _dummy([-100.0, -50.0 * (1 - difference), -10.0, -1.0]).launches
    found = check_of(smallest, larger)
    assert (found.ok, found.source, found.metric) == (ok, "mp-bs1", "loglikelihood_relative_difference")
    assert found.value == pytest.approx(difference, rel=0.1)
    wrong = assessed(smallest, larger)[1].findings
    assert [(one.code, "depends on the batch" in one.next_step) for one in wrong] == [("wrong-answers", True)] * (
        not ok
    )


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
    assert "--strategy=mp,iok" in finding_of(*wrong).next_step
    assert check_of(wrong[0], _dummy(size=8, strategy="iok")).ok is False
    assert codes(_dummy(_WRONG), _dummy(_WRONG, strategy="tp")) == [[], []]


def test_a_workspace_that_is_too_small_is_the_cause() -> None:
    """It is in the finding of a failure; where no check failed it warns. A large one has no finding."""
    assert codes(_dummy(), *(_dummy(strategy="iok", granted=tokens) for tokens in (106, 128))) == [[], [], []]
    for mp, code, words in ((_RIGHT, "wrong-answers", "mp-bs8"), (_WRONG, "unchecked-answers", "no check failed")):
        finding = finding_of(_dummy(mp, 8), _dummy(_WRONG, 8, "iok", granted=23))
        assert finding.code == code
        assert finding.text.startswith("DeepSpeed's workspace held 23 of 106 tokens")
        assert words in finding.text
