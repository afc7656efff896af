from __future__ import annotations

import pytest
from support.report_factory import GIB, make_accuracy, make_answers, make_failed, make_memory, make_report, make_result
from support.verdict_factory import make_traffic

from pytest_llmgpu.gate.policy import AccuracyRule, Rules
from pytest_llmgpu.gate.selftest.injected_regressions import plants
from pytest_llmgpu.report.derived import decode, encode
from pytest_llmgpu.report.file import encode as written
from pytest_llmgpu.report.file import parse
from pytest_llmgpu.report.result import Batches, CaseResult, DeviceMemory

PLANTS = {plant.name: plant for plant in plants()}


def _sown(name: str, result: CaseResult, rules: Rules | None = None) -> CaseResult:
    before = written(make_report([result]), compressed=False)
    found = PLANTS[name].sow(result, rules or Rules())
    assert isinstance(found, CaseResult)
    assert written(make_report([result]), compressed=False) == before, "the original stays as it is"
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
    """And so does the total; how much more can be said."""
    found = _sown("time", _full())
    assert found.launches[0].batches.latency_s == [pytest.approx(60 / 64 * 1.05)] * 64
    assert found.inference_s == pytest.approx(63)
    slower = plants(0.08)[0].sow(_full(), Rules())
    assert isinstance(slower, CaseResult)
    assert slower.inference_s == pytest.approx(64.8)


def test_one_more_collective_is_a_call_per_batch_on_every_rank() -> None:
    """Each as large as the others; the account per sequence grows by what they send."""
    found = _sown("collective", _full())
    assert found.traffic is not None
    for rank in found.traffic.ranks:
        assert [(one.calls, one.payload_bytes, one.wire_bytes) for one in rank] == [(128, 131072, 131072)]
    assert found.traffic.wire_bytes_per_sequence == 16 * 64 * 2 + 2 * 64 * 1024 / 64


def test_a_case_that_sends_nothing_sends_something() -> None:
    """As one process alone would after a needless all-reduce."""
    found = _sown("collective", make_result(traffic=make_traffic(0, 1)))
    assert found.traffic is not None
    assert [[(one.collective, one.calls) for one in rank] for rank in found.traffic.ranks] == [[("all_reduce", 64)]]


def test_the_fullest_device_holds_more() -> None:
    """Workspace outside the allocator counts; the other devices stay as they are."""
    memory = [
        DeviceMemory(index=0, peak_allocated_bytes=GIB, workspace_bytes=2 * GIB, nvml_used_max_bytes=5 * GIB),
        DeviceMemory(index=1, peak_allocated_bytes=2 * GIB),
    ]
    found = _sown("memory", make_result(memory=memory)).launches[0].memory
    assert [device.peak_allocated_bytes for device in found] == [2 * GIB, 2 * GIB]
    assert (found[0].nvml_used_max_bytes, found[0].peak_reserved_bytes) == (6 * GIB, None)


def test_out_of_memory_leaves_nothing_of_a_case() -> None:
    """Neither figures nor launches: as a case that failed in its first forward."""
    found = _sown("batch-size", _full())
    assert (found.outcome, found.launches, found.inference_s, found.acc, found.traffic) == ("oom", [], None, None, None)
    assert found.failure is not None


@pytest.mark.parametrize("metric", ["acc", "acc_norm"])
def test_twenty_items_that_were_right_are_wrong(metric: str) -> None:
    """By the metric that the policy judges; no other item changes."""
    result = _full()
    found = _sown("answers", result, Rules(accuracy=AccuracyRule(metric=metric)))  # type: ignore[arg-type]
    before, after = result.launches[0].accuracy, found.launches[0].accuracy
    assert before is not None
    assert after is not None
    changed = [n for n, (a, b) in enumerate(zip(before.predictions, after.predictions, strict=True)) if a != b]
    assert len(changed) == 20
    assert all(number % 3 for number in changed), "items that were right"
    assert after.labels is not None
    hits = sum(choice == label for choice, label in zip(after.predictions, after.labels, strict=True))
    assert after.acc == after.acc_norm == found.acc == hits / 100 == pytest.approx(before.acc - 0.2)


def test_fewer_right_items_are_all_lost() -> None:
    """A case of ten items cannot lose twenty; without labels the first items change and the accuracy is not known."""
    found = _sown("answers", make_result(accuracy=make_answers([True] * 10))).launches[0].accuracy
    assert found is not None
    assert found.acc == 0
    unlabelled = _sown("answers", make_result(accuracy=make_accuracy(0.5, 100))).launches[0].accuracy
    assert unlabelled is not None
    assert (sum(unlabelled.predictions), unlabelled.acc) == (20, 0.5)
    assert unlabelled.loglikelihoods == encode([-1.0] * 400)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("time", "no batch was timed."),
        ("collective", "its traffic is not known: no counters."),
        ("memory", "its peak of memory is not known."),
        ("answers", "no items were scored."),
    ],
)
def test_what_cannot_hold_a_loss_says_why(name: str, reason: str) -> None:
    """In a sentence."""
    result = make_result(memory=[DeviceMemory(index=0)])
    result.launches[0].batches = Batches()
    result.why = {"traffic": "no counters"}
    assert PLANTS[name].sow(result, Rules()) == reason


def test_a_result_without_launches_holds_nothing() -> None:
    """As a report of another tool may have it: no crash."""
    result = make_failed("skipped_after_oom")
    assert isinstance(PLANTS["time"].sow(result, Rules()), str)
    assert isinstance(PLANTS["memory"].sow(result, Rules()), str)
    assert isinstance(PLANTS["answers"].sow(result, Rules()), str)


def test_random_weights_get_other_numbers() -> None:
    """Their answers are chance: what a wrong kernel changes is planted instead, into as many items."""
    result = make_result(accuracy=make_answers([True] * 30, [-2.0] * 120), load_format="dummy")
    found = _sown("answers", result).launches[0].accuracy
    assert found is not None
    assert decode(found.loglikelihoods).tolist() == pytest.approx([-2.2] * 80 + [-2.0] * 40)
    assert result.launches[0].accuracy is not None
    assert found.predictions == result.launches[0].accuracy.predictions
