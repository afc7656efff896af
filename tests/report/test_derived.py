from __future__ import annotations

import msgspec
import pytest
from support.report_factory import make_accuracy, make_generation, make_profile, make_result

from pytest_llmgpu.report.derived import decode, derive, device_busy, predictions_of, proportion_stderr, upper_bound
from pytest_llmgpu.report.result import CaseResult, DeviceProfile, Outcome
from pytest_llmgpu.report.work import RankWork, Work


@pytest.mark.parametrize(("step_s", "busy"), [(None, 0.4), ([2.0, 4.0, 9.0], 0.2), ([], None)])
def test_a_gpu_is_busy_for_its_part_of_the_timed_batches(step_s: list[float] | None, busy: float | None) -> None:
    """The latencies are those of the batches that the work passes ran; a case that generates has its decode steps."""
    result = make_result(sequences=3)
    [launch] = result.launches
    launch.batches.latency_s = [1.0, 50.0, 3.0]
    first, second = (RankWork(uuids=[f"GPU-{rank}"], device_time_s=[0.4 + 2.4 * rank]) for rank in range(2))
    unknown = msgspec.structs.replace(first, device_time_s=None)
    launch.work = Work(batches=[0, 2], eager_batches=[0, 2], passes=1, ranks=[unknown, second])
    assert device_busy(result) is None
    launch.work = Work(batches=[0, 2], eager_batches=[0, 2], passes=1, ranks=[first, second])
    if step_s is not None:
        launch.generation = make_generation([[1]], [[-1.0]], [[-1.0]], step_s=step_s)
    assert device_busy(result) == (None if busy is None else pytest.approx(busy))


@pytest.mark.parametrize(("steps", "has_p99"), [(99, False), (100, True)])
def test_the_99th_percentile_needs_100_decode_steps(steps: int, *, has_p99: bool) -> None:
    """With fewer it would be the largest one."""
    result = make_result(workload="generate", prompt_tokens=9, new_tokens=steps + 1)
    step_s = [float(number + 1) for number in range(steps)]
    result.launches[0].generation = make_generation([[1]], [[-1.0]], [[-1.0]], step_s=step_s)
    derive(result)
    assert result.token_p50_s == (steps + 1) / 2
    assert (result.token_p99_s is not None) is has_p99


def test_figures_of_several_launches_are_medians_and_rates_those_of_the_median_time() -> None:
    """One slow launch does not move the figure; time and throughput agree where launches scatter."""
    result = make_result(2.0, make_accuracy(0.8, items=10))
    result.launches += make_result(3.0, make_accuracy(0.9, items=10)).launches
    derive(result)
    batches = result.launches[0].batches
    assert result.inference_s == pytest.approx(2.5)
    assert result.sequences_per_s == pytest.approx(sum(batches.sequences) / 2.5)
    assert result.tokens_per_s == pytest.approx(sum(batches.tokens) / 2.5)
    result.launches += make_result(100.0, make_accuracy(0.1, items=10)).launches
    derive(result)
    assert result.inference_s == pytest.approx(3.0)
    assert result.acc_norm == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("outcome", "latency_s", "time_s"), [("timeout", 1.0, None), ("completed", 0.0, 0.0), ("completed", None, None)]
)
def test_a_case_without_a_time_has_no_rates(outcome: Outcome, latency_s: float | None, time_s: float | None) -> None:
    """A total over some of the batches would look like a fast case; there is no division by 0.0 of a file."""
    result = make_result(2.0)
    latencies_s = result.launches[0].batches.latency_s
    result.launches[0].batches.latency_s = [] if latency_s is None else [latency_s for _ in latencies_s]
    result.outcome = outcome
    derive(result)
    assert (result.inference_s, result.sequences_per_s, result.tokens_per_s) == (time_s, None, None)


def test_the_standard_error_is_that_of_a_sample() -> None:
    """The divisor is n - 1, as in lm-evaluation-harness; one item has no standard error."""
    assert proportion_stderr(0.5, 101) == pytest.approx(0.05)
    assert proportion_stderr(0.5, 1) is None


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.99, 1.0])
def test_the_upper_bound_is_wilsons(fraction: float) -> None:
    """The score interval with z = 1.645: 0.5812 for 50 of 100; it approaches the fraction and is never above 1."""
    assert upper_bound(0.5, 100) == pytest.approx(0.5812, abs=1e-4)
    few, many = upper_bound(fraction, 10), upper_bound(fraction, 10_000)
    assert fraction <= many <= few <= 1.0
    assert many - fraction < 0.02


def test_loglikelihoods_are_little_endian_float32() -> None:
    """The report has the same format on every machine."""
    assert list(decode("AACAvwAAAMA=")) == [-1.0, -2.0]


def test_each_metric_counts_its_own_predictions() -> None:
    """`acc` counts predictions by log-likelihood, `acc_norm` those by log-likelihood per character."""
    accuracy = msgspec.structs.replace(make_accuracy(items=2), predictions=[1, 2], predictions_norm=[3, 0])
    assert predictions_of(accuracy, "acc") == [1, 2]
    assert predictions_of(accuracy, "acc_norm") == [3, 0]


def _with_energy(duration_s: float, *energies_j: float | None) -> CaseResult:
    devices = [DeviceProfile(index=0, uuid="GPU-0", energy_j=energy_j) for energy_j in energies_j]
    result = make_result(2.0, profile=make_profile(duration_s=duration_s, devices=devices))
    derive(result)
    return result


def test_energy_is_that_of_all_devices_per_sequence_and_token() -> None:
    """The sum over the devices is divided by what was computed."""
    result = _with_energy(2.0, 300.0, 100.0)
    batches = result.launches[0].batches
    assert result.energy_j_per_sequence == pytest.approx(400 / sum(batches.sequences))
    assert result.energy_j_per_token == pytest.approx(400 / sum(batches.tokens))


@pytest.mark.parametrize("result", [_with_energy(0.9, 300.0), _with_energy(2.0, 300.0, None), _with_energy(2.0)])
def test_energy_that_is_not_known_is_null(result: CaseResult) -> None:
    """The counter of a GPU is too slow for windows under 1 s, and some GPUs have none; `why` has the reason."""
    assert (result.energy_j_per_sequence, result.energy_j_per_token) == (None, None)
    assert {"energy_j_per_sequence", "energy_j_per_token"} <= set(result.why)
