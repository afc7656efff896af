from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from support.prose import Prose
from support.report_factory import (
    GIB,
    make_accuracy,
    make_answers,
    make_failed,
    make_profile,
    make_report,
    make_result,
    paper_results,
)

from pytest_llmgpu.analysis.assess import assess
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.result import CaseResult, Failure, Finding, Outcome
from pytest_llmgpu.report.work import TRAFFIC_FAILED

_CPU: dict[str, Any] = {"device": "cpu", "devices": 1}
_MACHINE = make_report().environment


def _assess(results: Sequence[CaseResult], given: float | None = None) -> list[CaseResult]:
    """Assess results one after another, as a session does."""
    done: list[CaseResult] = []
    for result in results:
        options = Options(accuracy_baseline=given)
        done.append(assess([result], earlier=done, environment=_MACHINE, options=options))
    return done


def _codes(result: CaseResult) -> list[str]:
    return [finding.code for finding in result.findings]


def _words(results: Sequence[CaseResult]) -> str:
    """Return text and next step of all findings, one finding per line."""
    return "\n".join(f"{found.code}: {found.text} {found.next_step}" for one in results for found in one.findings)


def _only(results: Sequence[CaseResult], code: str) -> Finding:
    found = [finding for result in results for finding in result.findings if finding.code == code]
    assert len(found) == 1, found
    return found[0]


def test_a_good_case_has_no_finding() -> None:
    """Without a finding there is nothing to do."""
    results = _assess(
        [make_result(60.0 / size, make_accuracy(), make_profile(), batch_size=size) for size in (1, 2, 4)]
    )
    assert [_codes(result) for result in results] == [[], [], []]


def test_the_results_of_shin_et_al_have_their_findings(prose: Prose) -> None:
    """The accuracy that fused kernels lose is a failure; a batch size that is too slow or too large is information."""
    results = _assess([*paper_results(), make_failed("crashed", batch_size=128)])
    by_id = {result.id: _codes(result) for result in results if result.findings}
    assert by_id == {
        "mp-bs64": ["batching-stopped-paying"],
        "iok-bs32": ["accuracy-collapsed"],
        "iok-bs64": ["out-of-memory"],
        "mp-bs128": ["crashed"],
    }
    assert _only(results, "accuracy-collapsed").severity == "failure"
    assert prose == _words(results)


def test_every_finding_is_a_sentence_with_a_next_step() -> None:
    """Text and next step begin with a capital, end with a full stop and have one line."""
    results = _assess([*paper_results(), make_failed("crashed", batch_size=128)])
    found = [finding for result in results for finding in result.findings]
    assert len(found) == 4
    for finding in found:
        for text in (finding.text, finding.next_step):
            assert text[0].isupper()
            assert text.endswith(".")
            assert "\n" not in text


def test_an_accuracy_below_its_baseline_fails() -> None:
    """Answers that are worse, but no guesses, fail."""
    results = _assess([make_result(1.0, make_accuracy(0.80), **_CPU)])
    finding = _only(results, "accuracy-below-baseline")
    assert finding.severity == "failure"
    assert "80.0 %, 2.8 points below the baseline" in finding.text


def test_an_accuracy_without_a_baseline_warns_once() -> None:
    """Only the smallest batch size warns; the others are compared with it."""
    results = _assess(
        [make_result(8.0 / size, make_accuracy(0.7), model="m", batch_size=size, **_CPU) for size in (1, 2)]
    )
    assert _codes(results[1]) == []
    finding = _only(results, "accuracy-unchecked")
    assert finding.severity == "warning"
    assert "--llmgpu-accuracy-baseline" in finding.next_step


def test_answers_lost_at_a_larger_batch_size_fail_without_a_baseline() -> None:
    """A smaller batch size of the same model is compared with."""
    results = _assess(
        [
            make_result(8.0, make_accuracy(0.7), model="m", **_CPU),
            make_result(4.0, make_accuracy(0.26), model="m", batch_size=2, **_CPU),
        ]
    )
    assert _only(results, "accuracy-collapsed").severity == "failure"


def test_guessing_from_the_start_warns() -> None:
    """Without a baseline or a better case the cause may be the model itself."""
    results = _assess([make_result(1.0, make_accuracy(0.255), model="m", **_CPU)])
    finding = _only(results, "accuracy-collapsed")
    assert finding.severity == "warning"
    assert "--llmgpu-tokenizer" in finding.next_step


def test_few_items_are_not_called_guesses() -> None:
    """Ten items are too few to call answers guesses."""
    results = _assess([make_result(1.0, make_accuracy(0.4, items=10), model="m", **_CPU)])
    assert _codes(results[0]) == ["accuracy-unchecked"]


def test_overflow_is_named_as_the_cause() -> None:
    """NaN among the log-likelihoods of guesses means an overflow of the dtype."""
    numbers = [math.nan, -1.0, -1.0, -1.0] * 100
    results = _assess([make_result(1.0, make_accuracy(0.25, items=100, loglikelihoods=numbers), model="m", **_CPU)])
    finding = _only(results, "accuracy-collapsed")
    assert finding.severity == "failure"
    assert "100 of 400" in finding.text
    assert "bfloat16" in finding.next_step


def test_log_likelihoods_of_another_batch_size_fail() -> None:
    """The answers are the same, but the smallest batch size has other log-likelihoods; rounding has no finding."""
    numbers = ([-1.0] * 400, [-1.001] * 400, [-1.5] * 400)
    results = _assess(
        [
            make_result(4.0 / size, make_accuracy(items=100, loglikelihoods=values), batch_size=size, **_CPU)
            for size, values in zip((1, 2, 4), numbers, strict=True)
        ],
        given=0.828,
    )
    assert [_codes(result) for result in results] == [[], [], ["loglikelihood-mismatch"]]
    assert "mp-bs1" in results[2].findings[0].text
    assert "batch" in results[2].findings[0].next_step


def test_random_weights_that_score_differently_fail() -> None:
    """The answers of random weights are chance and are not checked."""
    dummy: dict[str, Any] = {"load_format": "dummy", **_CPU}
    results = _assess(
        [
            make_result(4.0, make_accuracy(0.25, 1, [0], [-1.0] * 4), **dummy),
            make_result(2.0, make_accuracy(0.25, 1, [1], [-1.001] * 4), batch_size=2, **dummy),
            make_result(1.0, make_accuracy(0.25, 1, [2], [-1.5] * 4), batch_size=4, **dummy),
        ]
    )
    assert [_codes(result) for result in results] == [[], [], ["loglikelihood-mismatch"]]
    assert results[2].findings[0].severity == "failure"


_STOCK = [-1.3, -2.0, -1.7, -3.0]


def _dummy(strategy: str, size: int, numbers: Sequence[float], tokens: tuple[int, int] | None = None) -> CaseResult:
    accuracy = make_accuracy(0.25, 1, [0], numbers)
    fields: dict[str, Any] = {"strategy": strategy, "batch_size": size, "load_format": "dummy", **_CPU}
    return _clamped(make_result(8.0 / size, accuracy, **fields), tokens)


def _clamped(result: CaseResult, tokens: tuple[int, int] | None = (106, 23)) -> CaseResult:
    """Return a result whose workspace was asked for so many tokens and granted so many."""
    if tokens is not None:
        result.launches[0].tokens_requested, result.launches[0].tokens_granted = tokens
    return result


def test_random_weights_that_differ_from_mp_fail_at_every_batch_size() -> None:
    """Kernels that are wrong in the same way at every batch size do not pass."""
    results = _assess([_dummy("mp", 1, [-1.0] * 4), *(_dummy("iok", size, _STOCK) for size in (1, 8))])
    assert [_codes(result) for result in results] == [[], ["loglikelihood-mismatch"], ["loglikelihood-mismatch"]]
    finding = results[2].findings[0]
    assert finding.severity == "failure"
    assert "mp-bs1" in finding.text
    assert "iok" in finding.next_step


def test_random_weights_without_mp_are_unverified_once() -> None:
    """Agreement with itself proves nothing; the next step is to measure mp."""
    results = _assess([_dummy("iok", size, _STOCK) for size in (1, 8)])
    assert [_codes(result) for result in results] == [["unverified"], []]
    finding = results[0].findings[0]
    assert finding.severity == "warning"
    assert "--strategy=mp,iok" in finding.next_step


def test_the_reference_strategy_is_never_unverified() -> None:
    """A strategy that agrees with mp is verified, too."""
    results = _assess([_dummy("mp", 1, _STOCK), _dummy("mp", 8, _STOCK), _dummy("tp", 1, _STOCK)])
    assert [_codes(result) for result in results] == [[], [], []]


def test_a_clamped_workspace_is_the_cause_of_a_collapse() -> None:
    """The collapse of Shin et al.: 82.8 % at batch size 16, 26 % at 32, where the workspace held 23 of 106 tokens."""
    results = [result for result in paper_results() if result.id in ("mp-bs32", "iok-bs16", "iok-bs32")]
    results = _assess([results[0], _clamped(results[1], (106, 106)), _clamped(results[2])])
    finding = _only(results, "accuracy-collapsed")
    assert finding.severity == "failure"
    assert "23 of 106 tokens" in finding.text
    assert "--llmgpu-iok-min-tokens" in finding.next_step
    assert [_codes(result) for result in results] == [[], [], ["accuracy-collapsed"]]


def test_a_clamp_alone_is_enough_to_fail_guesses() -> None:
    """This holds without a baseline, without another case and with few items."""
    result = make_result(1.0, make_accuracy(0.25, items=20), model="m", strategy="iok", **_CPU)
    finding = _only(_assess([_clamped(result)]), "accuracy-collapsed")
    assert finding.severity == "failure"
    assert "23 of 106 tokens" in finding.text


def test_a_clamp_is_the_cause_of_random_weights_that_differ() -> None:
    """One finding names the workspace and the difference."""
    results = _assess([_dummy("mp", 8, [-1.0] * 4), _dummy("iok", 8, _STOCK, (1106, 23))])
    assert _codes(results[1]) == ["loglikelihood-mismatch"]
    finding = results[1].findings[0]
    assert "23 of 1,106 tokens" in finding.text
    assert "mp-bs8" in finding.text
    assert "--llmgpu-iok-min-tokens" in finding.next_step


def test_a_clamp_without_a_failed_check_warns(prose: Prose) -> None:
    """Short prompts may fit a workspace that is too small."""
    results = _assess([_dummy("mp", 8, _STOCK), _dummy("iok", 8, _STOCK, (106, 23))])
    finding = _only(results, "workspace-clamped")
    assert finding.severity == "warning"
    other = _assess([_clamped(make_result(1.0, make_accuracy(), strategy="mine", **_CPU))])
    assert "--llmgpu-iok" not in _only(other, "workspace-clamped").next_step
    assert prose == _words([*results, *other])


def test_a_workspace_that_is_large_enough_has_no_finding() -> None:
    """It holds as many tokens as needed, or more."""
    results = _assess([_dummy("mp", 1, _STOCK), *(_dummy("iok", 1, _STOCK, (106, n)) for n in (106, 128))])
    assert [_codes(result) for result in results] == [[], [], []]


def test_a_strategy_that_guesses_is_what_loses_the_answers() -> None:
    """Without a baseline mp is compared with; only mp itself has a finding that its accuracy is unchecked."""
    good, guesses = make_answers([True] * 160 + [False] * 40), make_answers([True, False, False, False] * 50)
    cases = (("mp", 1, good), ("iok", 1, guesses), ("iok", 8, guesses), ("tp", 1, good))
    results = _assess(
        [make_result(8.0, a, model="m", strategy=name, batch_size=size, **_CPU) for name, size, a in cases]
    )
    assert [_codes(result) for result in results] == [
        ["accuracy-unchecked"],
        ["accuracy-collapsed"],
        ["accuracy-collapsed"],
        [],
    ]
    for result in results[1:3]:
        assert result.findings[0].severity == "failure"
        assert "mp-bs1 had 80.0 %" in result.findings[0].text
        assert "120 items are lost and 10 won (p < 1e-06)" in result.findings[0].text


@pytest.mark.parametrize(("lost", "won", "named"), [(9, 0, True), (12, 8, False)])
def test_a_failure_names_lost_items_where_chance_does_not_explain_them(lost: int, won: int, named: bool) -> None:
    """They are named if McNemar's probability is below 1 %."""
    mp = make_answers([True] * 60 + [False] * 40)
    tp = make_answers([False] * lost + [True] * (60 - lost + won) + [False] * (40 - won))
    results = [make_result(1.0, mp, **_CPU), make_result(1.0, tp, strategy="tp", **_CPU)]
    finding = _assess(results, given=0.7)[1].findings[0]
    assert finding.code == "accuracy-below-baseline"
    assert ("9 items are lost and 0 won (p = 0.0039)" in finding.text) is named
    assert ("mp-bs1" in finding.text) is named


def test_out_of_memory_of_a_workspace_names_its_tokens() -> None:
    """A workspace may hold no token at all."""
    failure = Failure(phase="forward", message="x", evidence="rule", tokens_requested=1106, tokens_granted=0)
    finding = _only(_assess([make_failed("oom", failure, strategy="iok", batch_size=32)]), "out-of-memory")
    assert "0 of 1,106 tokens" in finding.text


def test_out_of_memory_names_the_limit_and_the_bytes(prose: Prose) -> None:
    """It is an expected outcome: information with the largest batch size, the bytes, and the next step."""
    failure = Failure(phase="forward", message="x", requested_bytes=5 * GIB // 2, free_bytes=GIB // 2)
    results = _assess([make_result(1.0, batch_size=8, **_CPU), make_failed("oom", failure, batch_size=32, **_CPU)])
    finding = _only(results, "out-of-memory")
    assert finding.severity == "info"
    assert "--llmgpu-find-max-batch" in finding.next_step
    assert prose == _words(results)


def test_out_of_memory_below_a_larger_one_has_no_finding() -> None:
    """The larger batch size has the finding; the smaller one ran to find the limit."""
    results = _assess([make_failed("oom", batch_size=8, **_CPU), make_failed("oom", batch_size=4, **_CPU)])
    assert [_codes(result) for result in results] == [["out-of-memory"], []]


@pytest.mark.parametrize(
    ("phase", "fields", "text", "advice"),
    [
        ("load", {}, "while loading the model (torch's allocator).", "--llmgpu-devices"),
        (
            "forward",
            {},
            "at batch size 4; no smaller batch size completed (torch's allocator).",
            "--llmgpu-devices",
        ),
        ("load", {"gpu_memory_bytes": 18 * GIB}, "while loading", "Raise --llmgpu-gpu-memory (18.0 GiB in force)"),
        ("load", {"dtype": "float32"}, "while loading", "--llmgpu-dtype=float16"),
    ],
)
def test_out_of_memory_advises_by_what_is_in_force(phase: Any, fields: dict[str, Any], text: str, advice: str) -> None:
    """The next step names only options that may help."""
    failure = Failure(phase=phase, message="x", evidence="torch's allocator")
    finding = _only(_assess([make_failed("oom", failure, batch_size=4, **fields)]), "out-of-memory")
    assert text in finding.text
    assert advice in finding.next_step
    assert "--llmgpu-find-max-batch" not in finding.next_step


def test_a_skipped_case_has_no_finding() -> None:
    """The out-of-memory case before it has the finding."""
    assert _codes(_assess([make_failed("skipped_after_oom")])[0]) == []


@pytest.mark.parametrize(
    ("outcome", "failure", "text", "advice"),
    [
        (
            "timeout",
            Failure(phase="forward", message="no batch finished within 600 s"),
            "Timed out at batch size 1: no batch finished within 600 s.",
            "--llmgpu-timeout",
        ),
        (
            "timeout",
            Failure(phase="load", message="x"),
            "Timed out while loading the model: x.",
            "--llmgpu-load-timeout",
        ),
        (
            "crashed",
            Failure(phase="forward", rank=2, message="ended by signal 9", signal=9),
            "Crashed at batch size 1 on rank 2: ended by signal 9.",
            "dmesg",
        ),
        (
            "error",
            Failure(phase="load", message="boom", log_tail="boom"),
            "Failed while loading the model: boom.",
            "`llmgpu show REPORT --log CASE`",
        ),
        (
            "crashed",
            Failure(phase="forward", message="x", signal=signal.SIGTERM),
            "Crashed at batch size 1: x.",
            "scheduler",
        ),
        (
            "interrupted",
            Failure(phase="forward", message="by KeyboardInterrupt"),
            "Interrupted at",
            "Continue it with the same options and --llmgpu-resume=REPORT, its path or latest.",
        ),
        (
            "interrupted",
            Failure(phase="load", message="x"),
            "Interrupted while loading the model: x.",
            "Continue it with the same options and --llmgpu-resume=REPORT, its path or latest.",
        ),
        ("error", None, "no reason was recorded", "run it again"),
    ],
)
def test_a_failure_names_place_cause_and_next_step(
    outcome: Outcome, failure: Failure | None, text: str, advice: str
) -> None:
    """Each outcome has its own next step."""
    finding = _only(_assess([make_failed(outcome, failure)]), outcome)
    assert finding.severity == "failure"
    assert text in finding.text
    assert advice in finding.next_step


@pytest.mark.parametrize(
    ("log", "last"),
    [
        (
            'Traceback (most recent call last):\n  File "a.py"\nRuntimeError: NCCL error\n[W] shutting down\n',
            "RuntimeError: NCCL error",
        ),
        ("torch.cuda.AcceleratorError: illegal access\n  hint\n", "torch.cuda.AcceleratorError: illegal access"),
        ("loading\nterminate called without an active exception\n\n", "terminate called without an active exception"),
        (
            "ValueError: x\nFatal Python error: Aborted\n\nCurrent thread 0x7f (most recent call first):\n  File\n",
            "Fatal Python error: Aborted",
        ),
        ("x" * 1000, "x" * 199 + "…"),
    ],
)
def test_the_decisive_line_of_a_log_is_shown(log: str, last: str) -> None:
    """It is the exception, not what a library prints when it ends; a long line is cut."""
    failure = Failure(phase="forward", message="exit status 1", log_tail=log)
    assert _assess([make_failed("crashed", failure)])[0].findings[0].text.endswith(f"Its log ends: {last}.")


def test_stacks_alone_are_not_shown() -> None:
    """The log of a rank that hangs is a dump of its threads, which names no cause."""
    stacks = (
        "Extension modules: numpy.linalg (total: 1)\n"
        'Thread 0x00007f (most recent call first):\n  File "a.py", line 3 in f\n\n'
        'Current thread 0x00007e [python] (most recent call first):\n  File "b.py", line 4 in g\n'
    )
    failure = Failure(phase="load", message="no loaded model for 5 s", log_tail=stacks)
    text = _assess([make_failed("timeout", failure)])[0].findings[0].text
    assert text.endswith(": no loaded model for 5 s.")


def test_an_interrupted_case_names_finished_batches_if_there_are_any() -> None:
    """Without a finished batch there is nothing in the report to look at."""
    result = make_failed("interrupted", Failure(phase="forward", message="x"))
    assert (
        _assess([result])[0].findings[0].next_step
        == "Continue it with the same options and --llmgpu-resume=REPORT, its path or latest."
    )
    result.launches[0].batches.latency_s.append(1.0)
    assert "batches that finished" in _assess([result])[0].findings[0].next_step


@pytest.mark.parametrize("log", ["ValueError: bad shape\n", "a.module.ValueError: bad shape\n"])
def test_a_log_that_repeats_the_message_is_not_shown(log: str) -> None:
    """The same text is shown once."""
    failure = Failure(phase="forward", message="ValueError: bad shape", log_tail=log)
    assert "log ends" not in _assess([make_failed("error", failure)])[0].findings[0].text


def test_the_first_slower_batch_size_is_a_finding() -> None:
    """A difference of 2 % is noise."""
    seconds = {1: 10.0, 2: 5.0, 4: 5.05, 8: 5.5, 16: 6.0}
    results = _assess([make_result(s, batch_size=size) for size, s in seconds.items()])
    assert [_codes(result) for result in results] == [["no-profile"], [], [], ["batching-stopped-paying"], []]
    finding = results[3].findings[0]
    assert all(figure in finding.text for figure in ("9 %", "batch size 2", "11.6", "12.8"))
    assert "batch size 2" in finding.text


def test_batch_sizes_of_different_executions_are_not_compared() -> None:
    """A large eager batch may be slower than a small one with CUDA graphs; that is no limit of the batch size."""
    graphed = make_result(5.0, batch_size=2, execution="cuda_graphs")
    results = _assess([graphed, make_result(6.0, batch_size=4, execution="eager")])
    assert "batching-stopped-paying" not in _codes(results[1])


def test_the_profile_of_a_completed_case_is_assessed() -> None:
    """Gaps in the profile of a failed case are no finding."""
    gaps = make_profile(samples=90, missed=10)
    failed = make_failed("crashed", Failure(phase="forward", message="x"))
    failed.launches[0].profile = gaps
    assert [_codes(result) for result in _assess([make_result(1.0, None, gaps), failed])] == [
        ["profile-gaps"],
        ["crashed"],
    ]


@pytest.mark.parametrize("outcome", ["oom", "crashed"])
def test_a_disturbance_is_reported_with_the_failure(outcome: Outcome) -> None:
    """Memory of another program, or a lost GPU, may be the cause of the failure."""
    disturbed = make_profile(invalid=["memory in use before the start: GPU 0 had 90.00 GiB"])
    failed = make_failed(outcome, Failure(phase="forward", message="x"), batch_size=2)
    failed.launches[0].profile = disturbed
    results = _assess([make_result(1.0, None, disturbed), failed])
    expected = "out-of-memory" if outcome == "oom" else outcome
    assert [_codes(result) for result in results] == [["profile-invalid"], [expected, "profile-invalid"]]


def test_a_slower_batch_size_on_a_cpu_is_no_finding() -> None:
    """Other programs share the CPU."""
    results = _assess([make_result(s, batch_size=size, **_CPU) for size, s in {1: 5.0, 2: 10.0}.items()])
    assert [_codes(result) for result in results] == [[], []]


@pytest.mark.parametrize(
    ("seconds", "far"),
    [
        ({1: 300.0, 2: 4.0}, True),
        ({1: 4.0, 2: 300.0}, True),
        ({1: 4.0, 2: 19.0}, False),
        ({1: 40.0, 8: 1.01}, False),
        ({1: 40.0, 8: 0.9}, True),
    ],
)
def test_batch_sizes_whose_throughput_is_far_apart_are_a_finding(seconds: dict[int, float], far: bool) -> None:
    """No model gets 75 times as fast by one batch size; eight times the sequences may be up to 40 times as fast."""
    results = _assess([make_result(s, batch_size=size, **_CPU) for size, s in seconds.items()])
    assert [_codes(result) for result in results] == [[], ["batch-sizes-far-apart"] * far]


def test_the_factor_between_batch_sizes_is_named(prose: Prose) -> None:
    """The reader looks for what else the machine did."""
    results = _assess([make_result(s, batch_size=size, **_CPU) for size, s in {1: 300.0, 2: 4.0}.items()])
    assert prose == f"{results[1].findings[0].text}\n{results[1].findings[0].next_step}"


def test_a_rank_that_fails_while_traffic_is_counted_is_a_warning() -> None:
    """The times are complete, and the missing traffic has its reason."""
    result = make_result()
    result.traffic = None
    result.why["traffic"] = f"{TRAFFIC_FAILED}: rank 1 ended with signal SIGKILL"
    found = _only(_assess([result]), "traffic-failed")
    assert found.severity == "warning"
    assert "rank 1 ended with signal SIGKILL" in found.text
