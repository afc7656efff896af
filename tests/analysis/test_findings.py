from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from support.report_factory import (
    GIB,
    make_accuracy,
    make_answers,
    make_failed,
    make_profile,
    make_result,
    paper_results,
)

from pytest_llmgpu.analysis.accuracy_check import check
from pytest_llmgpu.analysis.findings import findings
from pytest_llmgpu.analysis.reference import compare, reference
from pytest_llmgpu.report.result import CaseResult, Failure, Finding, Outcome

_CPU: dict[str, Any] = {"device": "cpu", "devices": 1}


def _judge(results: Sequence[CaseResult], given: float | None = None) -> list[CaseResult]:
    """Check results and find what is to be said of them, one after another as a session does."""
    done: list[CaseResult] = []
    for result in results:
        mp = reference(result, done)
        result.comparison = compare(result, mp, "acc_norm") if mp else None
        result.accuracy_check = check(result, done, given=given, metric="acc_norm", tolerance=0.01)
        result.findings = findings(result, done)
        done.append(result)
    return done


def _codes(result: CaseResult) -> list[str]:
    return [finding.code for finding in result.findings]


def _only(results: Sequence[CaseResult], code: str) -> Finding:
    found = [finding for result in results for finding in result.findings if finding.code == code]
    assert len(found) == 1, found
    return found[0]


def test_a_good_case_says_nothing() -> None:
    """Silence means that there is nothing to do."""
    results = _judge([make_result(60.0 / size, make_accuracy(), make_profile(), batch_size=size) for size in (1, 2, 4)])
    assert [_codes(result) for result in results] == [[], [], []]


def test_the_studys_table_has_its_findings() -> None:
    """The accuracy that fused kernels lose is a failure; a batch size too slow or too large is news."""
    results = _judge(paper_results())
    by_id = {result.id: _codes(result) for result in results if result.findings}
    assert by_id == {
        "mp-bs64": ["batching-stopped-paying"],
        "iok-bs32": ["accuracy-collapsed"],
        "iok-bs64": ["out-of-memory"],
    }
    lost = _only(results, "accuracy-collapsed")
    assert lost.severity == "failure"
    assert "26.0 %, 56.8 points below the baseline of 82.8 %" in lost.text
    assert "iok-bs1 had 82.8 %" in lost.text
    assert "context that is cut" in lost.next_step


def test_every_finding_is_a_sentence_with_a_next_step() -> None:
    """People read them; each begins with a capital, ends with a stop and says what to do."""
    results = _judge([*paper_results(), make_failed("crashed", batch_size=128)])
    found = [finding for result in results for finding in result.findings]
    assert len(found) == 4
    for finding in found:
        for text in (finding.text, finding.next_step):
            assert text[0].isupper()
            assert text.endswith(".")
            assert "\n" not in text


def test_an_accuracy_below_its_baseline_fails() -> None:
    """Where the answers are worse, but no guesses."""
    results = _judge([make_result(1.0, make_accuracy(0.80), **_CPU)])
    finding = _only(results, "accuracy-below-baseline")
    assert finding.severity == "failure"
    assert finding.text.startswith("Accuracy (acc_norm) is 80.0 %, 2.8 points below the baseline")


def test_an_accuracy_without_a_baseline_warns_once() -> None:
    """The smallest batch size asks for a baseline; the others have it to be compared with."""
    results = _judge(
        [make_result(8.0 / size, make_accuracy(0.7), model="m", batch_size=size, **_CPU) for size in (1, 2)]
    )
    assert _codes(results[1]) == []
    finding = _only(results, "accuracy-unchecked")
    assert finding.severity == "warning"
    assert "--llmgpu-accuracy-baseline" in finding.next_step


def test_answers_lost_on_the_way_fail_without_a_baseline() -> None:
    """A smaller batch size of the same model is witness enough."""
    results = _judge(
        [
            make_result(8.0, make_accuracy(0.7), model="m", **_CPU),
            make_result(4.0, make_accuracy(0.26), model="m", batch_size=2, **_CPU),
        ]
    )
    assert _only(results, "accuracy-collapsed").severity == "failure"


def test_guessing_from_the_start_warns() -> None:
    """Without a baseline or a better batch size it may be the model itself: look at what was loaded."""
    results = _judge([make_result(1.0, make_accuracy(0.255), model="m", **_CPU)])
    finding = _only(results, "accuracy-collapsed")
    assert finding.severity == "warning"
    assert "--llmgpu-tokenizer" in finding.next_step


def test_few_items_are_not_called_guesses() -> None:
    """Four right out of ten says nothing about a model."""
    results = _judge([make_result(1.0, make_accuracy(0.4, items=10), model="m", **_CPU)])
    assert _codes(results[0]) == ["accuracy-unchecked"]


def test_overflow_is_named_as_the_cause() -> None:
    """Guesses with NaN among the log-likelihoods are a matter of the dtype."""
    numbers = [math.nan, -1.0, -1.0, -1.0] * 100
    results = _judge([make_result(1.0, make_accuracy(0.25, items=100, loglikelihoods=numbers), model="m", **_CPU)])
    finding = _only(results, "accuracy-collapsed")
    assert finding.severity == "failure"
    assert "100 of 400 log-likelihoods are not finite: numbers overflow in float16" in finding.text
    assert "bfloat16" in finding.next_step


def test_flipped_answers_are_counted() -> None:
    """Against the smallest batch size, by the metric that is checked."""
    first = make_accuracy(items=100, predictions=[0] * 100)
    second = make_accuracy(items=100, predictions=[1] * 3 + [0] * 97)
    results = _judge([make_result(2.0, first, **_CPU), make_result(1.0, second, batch_size=2, **_CPU)], given=0.828)
    finding = _only(results, "predictions-differ")
    assert finding.severity == "info"
    assert finding.text == "3 of 100 answers differ from those of mp-bs1."


def test_random_weights_that_score_differently_fail() -> None:
    """That is all random weights can tell; their chance answers are not judged."""
    dummy: dict[str, Any] = {"load_format": "dummy", **_CPU}
    results = _judge(
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
    """Kernels that are wrong in the same way everywhere do not pass, and the strategy is what to look at."""
    results = _judge([_dummy("mp", 1, [-1.0] * 4), *(_dummy("iok", size, _STOCK) for size in (1, 8))])
    assert [_codes(result) for result in results] == [[], ["loglikelihood-mismatch"], ["loglikelihood-mismatch"]]
    finding = results[2].findings[0]
    assert finding.severity == "failure"
    assert "from mp-bs1's" in finding.text
    assert "what iok computes otherwise" in finding.next_step


def test_random_weights_without_mp_are_unverified_once() -> None:
    """A strategy that agrees with itself is not known to be right; the step that tells is named."""
    results = _judge([_dummy("iok", size, _STOCK) for size in (1, 8)])
    assert [_codes(result) for result in results] == [["unverified"], []]
    finding = results[0].findings[0]
    assert finding.severity == "warning"
    assert "nothing independent to compare" in finding.text
    assert "(mp was not measured in this run)" in finding.text
    assert finding.next_step == "Add mp: --strategy=mp,iok."


def test_the_yardstick_is_never_unverified() -> None:
    """Mp has nothing to be compared with but its own batch sizes, and a strategy that agrees with it is verified."""
    results = _judge([_dummy("mp", 1, _STOCK), _dummy("mp", 8, _STOCK), _dummy("tp", 1, _STOCK)])
    assert [_codes(result) for result in results] == [[], [], []]


def test_a_clamped_workspace_is_the_cause_of_a_collapse() -> None:
    """The studied collapse: 82.8 % at batch size 16, 26 % at 32, where the workspace held 23 tokens of 106."""
    results = [result for result in paper_results() if result.id in ("mp-bs32", "iok-bs16", "iok-bs32")]
    _clamped(results[1], (106, 106))
    finding = _only(_judge([results[0], results[1], _clamped(results[2])]), "accuracy-collapsed")
    assert finding.severity == "failure"
    assert finding.text.startswith(
        "DeepSpeed's workspace held 23 of 106 tokens, so keys and values of neighbouring heads overlap: "
        "accuracy (acc_norm) is 26.0 %, 56.8 points below the baseline of 82.8 %"
    )
    assert finding.text.endswith("Guessing gives 25 %.")
    assert finding.next_step == (
        "Drop --llmgpu-iok-min-tokens (DeepSpeed then raises, and it is out of memory), or give it more memory or a "
        "smaller batch size."
    )
    assert [_codes(result) for result in results] == [[], [], ["accuracy-collapsed"]]


def test_a_clamp_alone_is_enough_to_fail_guesses() -> None:
    """Neither a baseline nor another case knows better, nor are the items many: the workspace tells."""
    result = make_result(1.0, make_accuracy(0.25, items=20), model="m", strategy="iok", **_CPU)
    finding = _only(_judge([_clamped(result)]), "accuracy-collapsed")
    assert finding.severity == "failure"
    assert finding.text.startswith("DeepSpeed's workspace held 23 of 106 tokens")


def test_a_clamp_is_the_cause_of_random_weights_that_differ() -> None:
    """The numbers differ from mp's because rows overlap; one finding says both."""
    results = _judge([_dummy("mp", 8, [-1.0] * 4), _dummy("iok", 8, _STOCK, (1106, 23))])
    assert _codes(results[1]) == ["loglikelihood-mismatch"]
    finding = results[1].findings[0]
    assert finding.text.startswith("DeepSpeed's workspace held 23 of 1,106 tokens")
    assert "differ by up to 1.0e+00" not in finding.text
    assert "from mp-bs8's" in finding.text
    assert "--llmgpu-iok-min-tokens" in finding.next_step


def test_a_clamp_that_cost_nothing_yet_warns() -> None:
    """Right answers of a workspace too small are luck: short prompts."""
    results = _judge([_dummy("mp", 8, _STOCK), _dummy("iok", 8, _STOCK, (106, 23))])
    finding = _only(results, "workspace-clamped")
    assert finding.severity == "warning"
    assert finding.text == (
        "DeepSpeed's workspace held 23 of 106 tokens, so keys and values of neighbouring heads overlap, whatever the "
        "accuracy says."
    )
    other = _judge([_clamped(make_result(1.0, make_accuracy(), strategy="mine", **_CPU))])
    assert _only(other, "workspace-clamped").text.startswith("Mine's workspace held 23 of 106")
    assert _only(other, "workspace-clamped").next_step == "Give it more memory or a smaller batch size."


def test_a_workspace_with_room_says_nothing() -> None:
    """As many tokens as were asked for, or more."""
    results = _judge([_dummy("mp", 1, _STOCK), *(_dummy("iok", 1, _STOCK, (106, n)) for n in (106, 128))])
    assert [_codes(result) for result in results] == [[], [], []]


def test_a_strategy_that_guesses_is_what_loses_the_answers() -> None:
    """Without a baseline, mp is the witness; that nothing is known of mp's own accuracy is said once, of mp."""
    good, guesses = make_answers([True] * 160 + [False] * 40), make_answers([True, False, False, False] * 50)
    cases = (("mp", 1, good), ("iok", 1, guesses), ("iok", 8, guesses), ("tp", 1, good))
    results = _judge(
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
        assert "mp-bs1 had 80.0 %, so it is iok that loses the answers" in result.findings[0].text
        assert "; against mp-bs1 120 items are lost and 10 won (p < 1e-06)" in result.findings[0].text


@pytest.mark.parametrize(("lost", "won", "named"), [(9, 0, True), (12, 8, False)])
def test_a_failure_names_lost_items_where_chance_does_not_explain_them(lost: int, won: int, named: bool) -> None:
    """What was lost against mp is told where McNemar's probability is below 1 %."""
    mp = make_answers([True] * 60 + [False] * 40)
    tp = make_answers([False] * lost + [True] * (60 - lost + won) + [False] * (40 - won))
    results = [make_result(1.0, mp, **_CPU), make_result(1.0, tp, strategy="tp", **_CPU)]
    finding = _judge(results, given=0.7)[1].findings[0]
    assert finding.code == "accuracy-below-baseline"
    assert finding.text.endswith("against mp-bs1 9 items are lost and 0 won (p = 0.0039).") is named
    assert ("against" in finding.text) is named


def test_out_of_memory_of_a_workspace_says_how_many_tokens_it_holds() -> None:
    """None at all included."""
    failure = Failure(phase="forward", message="x", evidence="rule", tokens_requested=1106, tokens_granted=0)
    finding = _only(_judge([make_failed("oom", failure, strategy="iok", batch_size=32)]), "out-of-memory")
    assert finding.text == (
        "Out of memory at batch size 32; no smaller batch size completed. The workspace has room for 0 of 1,106 tokens."
    )


def test_out_of_memory_says_what_fitted_and_what_was_asked() -> None:
    """An expected outcome: information, with the threshold, the bytes, and what would help."""
    failure = Failure(phase="forward", message="x", requested_bytes=5 * GIB // 2, free_bytes=GIB // 2)
    results = _judge([make_result(1.0, batch_size=8, **_CPU), make_failed("oom", failure, batch_size=32, **_CPU)])
    finding = _only(results, "out-of-memory")
    assert finding.severity == "info"
    assert finding.text == (
        "Out of memory at batch size 32; 8 is the largest that completed. It asked for 2.50 GiB with 0.50 GiB free."
    )
    assert "between 8 and 32" in finding.next_step


@pytest.mark.parametrize(
    ("phase", "fields", "text", "advice"),
    [
        ("load", {}, "while loading the model (torch's allocator).", "Spread it over more GPUs"),
        (
            "forward",
            {},
            "at batch size 4; no smaller batch size completed (torch's allocator).",
            "Spread it over more GPUs",
        ),
        ("load", {"gpu_memory_bytes": 18 * GIB}, "while loading", "Raise --llmgpu-gpu-memory (18.0 GiB in force)"),
        ("load", {"dtype": "float32"}, "while loading", "--llmgpu-dtype=float16"),
    ],
)
def test_out_of_memory_advises_by_what_is_in_force(phase: Any, fields: dict[str, Any], text: str, advice: str) -> None:
    """Only steps that this case leaves open."""
    failure = Failure(phase=phase, message="x", evidence="torch's allocator")
    finding = _only(_judge([make_failed("oom", failure, batch_size=4, **fields)]), "out-of-memory")
    assert text in finding.text
    assert advice in finding.next_step
    assert "narrow" not in finding.next_step


def test_a_skipped_case_says_nothing() -> None:
    """The out-of-memory case before it has said all."""
    assert _codes(_judge([make_failed("skipped_after_oom")])[0]) == []


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
        ("error", Failure(phase="load", message="boom"), "Failed while loading the model: boom.", "failure.log_tail"),
        (
            "crashed",
            Failure(phase="forward", message="x", signal=signal.SIGTERM),
            "Crashed at batch size 1: x.",
            "Somebody ended it",
        ),
        ("interrupted", Failure(phase="forward", message="by KeyboardInterrupt"), "Interrupted at", "Run it again."),
        ("interrupted", Failure(phase="load", message="x"), "Interrupted while loading the model: x.", "Run it again."),
        ("error", None, "no reason was recorded", "failure.log_tail"),
    ],
)
def test_what_failed_says_where_why_and_what_next(
    outcome: Outcome, failure: Failure | None, text: str, advice: str
) -> None:
    """Each way to fail has its own next step."""
    finding = _only(_judge([make_failed(outcome, failure)]), outcome)
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
def test_the_logs_last_meaningful_line_is_shown(log: str, last: str) -> None:
    """The exception, not what a library prints when it goes down; nothing that fills the screen."""
    failure = Failure(phase="forward", message="exit status 1", log_tail=log)
    assert _judge([make_failed("crashed", failure)])[0].findings[0].text.endswith(f"Its log ends: {last}.")


def test_stacks_alone_say_nothing_in_one_line() -> None:
    """Of a rank that hangs the log is a dump of its threads, none of whose headings is a reason."""
    stacks = (
        "Extension modules: numpy.linalg (total: 1)\n"
        'Thread 0x00007f (most recent call first):\n  File "a.py", line 3 in f\n\n'
        'Current thread 0x00007e [python] (most recent call first):\n  File "b.py", line 4 in g\n'
    )
    failure = Failure(phase="load", message="no loaded model for 5 s", log_tail=stacks)
    text = _judge([make_failed("timeout", failure)])[0].findings[0].text
    assert text == "Timed out while loading the model: no loaded model for 5 s."


def test_an_interrupted_case_tells_of_batches_only_where_some_finished() -> None:
    """Nobody looks for what is not there."""
    result = make_failed("interrupted", Failure(phase="forward", message="x"))
    assert _judge([result])[0].findings[0].next_step == "Run it again."
    result.launches[0].batches.latency_s.append(1.0)
    assert "batches that finished" in _judge([result])[0].findings[0].next_step


@pytest.mark.parametrize("log", ["ValueError: bad shape\n", "a.module.ValueError: bad shape\n"])
def test_a_log_that_repeats_the_message_is_not_shown(log: str) -> None:
    """Nothing is said twice."""
    failure = Failure(phase="forward", message="ValueError: bad shape", log_tail=log)
    assert "log ends" not in _judge([make_failed("error", failure)])[0].findings[0].text


def test_batching_that_stopped_paying_is_said_once() -> None:
    """At the first batch size that is slower a sequence than a smaller one; 2 % are noise."""
    seconds = {1: 10.0, 2: 5.0, 4: 5.05, 8: 5.5, 16: 6.0}
    results = _judge([make_result(s, batch_size=size) for size, s in seconds.items()])
    assert [_codes(result) for result in results] == [["no-profile"], [], [], ["batching-stopped-paying"], []]
    finding = results[3].findings[0]
    assert "9 % fewer sequences a second than at batch size 2 (11.6 against 12.8)" in finding.text
    assert "batch size 2" in finding.next_step


def test_batching_is_judged_among_cases_that_ran_alike() -> None:
    """Few large batches do not pay for CUDA graphs: that they are slower than graphed small ones is no limit."""
    graphed = make_result(5.0, batch_size=2, execution="cuda_graphs")
    results = _judge([graphed, make_result(6.0, batch_size=4, execution="eager")])
    assert "batching-stopped-paying" not in _codes(results[1])


def test_a_profile_is_judged_with_the_rest() -> None:
    """What is wrong with the profile of a completed case is among its findings; of one that failed nobody asks."""
    gaps = make_profile(samples=90, missed=10)
    failed = make_failed("crashed", Failure(phase="forward", message="x"))
    failed.launches[0].profile = gaps
    assert [_codes(result) for result in _judge([make_result(1.0, None, gaps), failed])] == [
        ["profile-gaps"],
        ["crashed"],
    ]


@pytest.mark.parametrize("outcome", ["oom", "crashed"])
def test_what_disturbed_a_case_stands_beside_its_failure(outcome: Outcome) -> None:
    """Somebody else's memory, or a GPU that is lost, may be why it failed; whatever came of the case it is told."""
    disturbed = make_profile(invalid=["memory in use before the start: GPU 0 had 90.00 GiB"])
    failed = make_failed(outcome, Failure(phase="forward", message="x"), batch_size=2)
    failed.launches[0].profile = disturbed
    results = _judge([make_result(1.0, None, disturbed), failed])
    expected = "out-of-memory" if outcome == "oom" else outcome
    assert [_codes(result) for result in results] == [["profile-invalid"], [expected, "profile-invalid"]]


def test_a_cpus_seconds_are_no_ground_for_advice() -> None:
    """On a CPU, which other programs share, a slower batch size is not news."""
    results = _judge([make_result(s, batch_size=size, **_CPU) for size, s in {1: 5.0, 2: 10.0}.items()])
    assert [_codes(result) for result in results] == [[], []]
