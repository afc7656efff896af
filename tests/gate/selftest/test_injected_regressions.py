from __future__ import annotations

import msgspec
import pytest
from support.report_factory import (
    GIB,
    make_accuracy,
    make_answers,
    make_failed,
    make_memory,
    make_report,
    make_result,
    make_work,
)
from support.verdict_factory import make_traffic

from pytest_llmgpu.gate.policy import AccuracyRule, Rules
from pytest_llmgpu.gate.selftest.injected_regressions import regressions
from pytest_llmgpu.report.derived import decode, encode
from pytest_llmgpu.report.file import encode as written
from pytest_llmgpu.report.file import parse
from pytest_llmgpu.report.result import Batches, CaseResult, DeviceMemory
from pytest_llmgpu.report.work import RankWork

REGRESSIONS = {one.name: one for one in regressions()}


def _injected(name: str, result: CaseResult, rules: Rules | None = None) -> CaseResult:
    before = written(make_report([result]), compressed=False)
    found = REGRESSIONS[name].inject(result, rules or Rules())
    assert isinstance(found, CaseResult)
    assert written(make_report([result]), compressed=False) == before, "the original does not change"
    parse(written(make_report([found]), compressed=False), name)
    return found


def _full(**fields: object) -> CaseResult:
    return make_result(
        accuracy=make_answers([number % 3 > 0 for number in range(100)]),
        memory=make_memory(2),
        traffic=make_traffic(),
        **fields,  # type: ignore[arg-type]
    )


def test_every_batch_takes_more_time() -> None:
    """The total grows by the same factor, which can be chosen."""
    found = _injected("time", _full())
    assert found.launches[0].batches.latency_s == [pytest.approx(60 / 64 * 1.05)] * 64
    assert found.inference_s == pytest.approx(63)
    slower = regressions(0.08)[0].inject(_full(), Rules())
    assert isinstance(slower, CaseResult)
    assert slower.inference_s == pytest.approx(64.8)


def test_one_more_collective_is_a_call_per_batch_on_every_rank() -> None:
    """Each call has the size of the others, and the bytes per sequence grow by the added bytes."""
    found = _injected("collective", _full())
    assert found.traffic is not None
    for rank in found.traffic.ranks:
        assert [(one.calls, one.payload_bytes, one.wire_bytes) for one in rank] == [(128, 131072, 131072)]
    assert found.traffic.wire_bytes_per_sequence == 16 * 64 * 2 + 2 * 64 * 1024 / 64


def test_a_case_without_traffic_gets_an_all_reduce() -> None:
    """Each rank gets one small all-reduce per batch."""
    found = _injected("collective", make_result(traffic=make_traffic(0, 1)))
    assert found.traffic is not None
    assert [[(one.collective, one.calls) for one in rank] for rank in found.traffic.ranks] == [[("all_reduce", 64)]]


def test_the_fullest_device_uses_more_memory() -> None:
    """Workspace outside the allocator counts, and the other devices do not change."""
    memory = [
        DeviceMemory(index=0, peak_allocated_bytes=GIB, workspace_bytes=2 * GIB, nvml_used_max_bytes=5 * GIB),
        DeviceMemory(index=1, peak_allocated_bytes=2 * GIB),
    ]
    found = _injected("memory", make_result(memory=memory)).launches[0].memory
    assert [device.peak_allocated_bytes for device in found] == [2 * GIB, 2 * GIB]
    assert (found[0].nvml_used_max_bytes, found[0].peak_reserved_bytes) == (6 * GIB, None)


def test_a_case_out_of_memory_has_no_figures() -> None:
    """It has no launches, like a case that failed in its first forward."""
    found = _injected("batch-size", _full())
    assert (found.outcome, found.launches, found.inference_s, found.acc, found.traffic) == ("oom", [], None, None, None)
    assert found.failure is not None


@pytest.mark.parametrize("metric", ["acc", "acc_norm"])
def test_twenty_right_answers_become_wrong(metric: str) -> None:
    """They are right by the metric of the policy, and no other item changes."""
    result = _full()
    found = _injected("answers", result, Rules(accuracy=AccuracyRule(metric=metric)))  # type: ignore[arg-type]
    before, after = result.launches[0].accuracy, found.launches[0].accuracy
    assert before is not None
    assert after is not None
    changed = [n for n, (a, b) in enumerate(zip(before.predictions, after.predictions, strict=True)) if a != b]
    assert len(changed) == 20
    assert all(number % 3 for number in changed), "items that were right"
    assert after.labels is not None
    hits = sum(choice == label for choice, label in zip(after.predictions, after.labels, strict=True))
    assert after.acc == after.acc_norm == found.acc == hits / 100 == pytest.approx(before.acc - 0.2)


def test_a_case_with_few_right_answers_loses_all() -> None:
    """Without labels the answers of the first items change, and the accuracy stays."""
    found = _injected("answers", make_result(accuracy=make_answers([True] * 10))).launches[0].accuracy
    assert found is not None
    assert found.acc == 0
    unlabelled = _injected("answers", make_result(accuracy=make_accuracy(0.5, 100))).launches[0].accuracy
    assert unlabelled is not None
    assert (sum(unlabelled.predictions), unlabelled.acc) == (20, 0.5)
    assert unlabelled.loglikelihoods == encode([-1.0] * 400)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("time", "No batch was timed."),
        ("collective", "The traffic is not known: no counters."),
        ("memory", "The peak memory is not known."),
        ("answers", "No items were scored."),
    ],
)
def test_a_result_without_the_figure_has_a_reason(name: str, reason: str) -> None:
    """Nothing is injected, and the reason is a sentence."""
    result = make_result(memory=[DeviceMemory(index=0)])
    result.launches[0].batches = Batches()
    result.why = {"traffic": "no counters"}
    assert REGRESSIONS[name].inject(result, Rules()) == reason


def test_a_result_without_launches_gets_no_regression() -> None:
    """A failed case has no launches."""
    result = make_failed("skipped_after_oom")
    assert isinstance(REGRESSIONS["time"].inject(result, Rules()), str)
    assert isinstance(REGRESSIONS["memory"].inject(result, Rules()), str)
    assert isinstance(REGRESSIONS["answers"].inject(result, Rules()), str)


def test_every_rank_computes_more() -> None:
    """One per cent more FLOPs, one host synchronization or one kernel call; nothing else changes."""
    result = make_result()
    result.launches[0].work = make_work()
    (before, _) = make_work().ranks
    for name, field, value in (
        ("flops", "flops", 1_010_000_000_000),
        ("host-sync", "host_syncs", 5),
        ("kernel", "kernels", 1001),
    ):
        work = _injected(name, result).launches[0].work
        assert work is not None
        assert {getattr(rank, field) for rank in work.ranks} == {value}
        same = {"runtime_calls": before.runtime_calls, field: getattr(before, field)}
        assert msgspec.structs.replace(work.ranks[0], **same) == before


def _suits(name: str, result: CaseResult) -> bool:
    suits = REGRESSIONS[name].suits
    assert suits is not None
    return suits(result)


def test_a_case_that_cannot_have_the_figure_is_left_out() -> None:
    """A CPU has no host synchronizations and no kernel calls."""
    cpu, gpu = make_result(), make_result()
    cpu.launches[0].work = msgspec.structs.replace(make_work(), ranks=[RankWork(uuids=[], flops=10**9)])
    gpu.launches[0].work = make_work()
    for name, suited in (("flops", [True, True]), ("host-sync", [False, True]), ("kernel", [False, True])):
        assert [_suits(name, result) for result in (cpu, gpu)] == suited
    assert not _suits("flops", make_result())


def test_random_weights_get_other_log_likelihoods() -> None:
    """Their answers are random, so the log-likelihoods of twenty items change instead."""
    result = make_result(accuracy=make_answers([True] * 30, [-2.0] * 120), load_format="dummy")
    found = _injected("answers", result).launches[0].accuracy
    assert found is not None
    assert decode(found.loglikelihoods).tolist() == pytest.approx([-2.2] * 80 + [-2.0] * 40)
    assert result.launches[0].accuracy is not None
    assert found.predictions == result.launches[0].accuracy.predictions
