from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from support.report_factory import GIB, make_failed, make_result

from pytest_llmgpu.analysis.memory_model import predict, split
from pytest_llmgpu.report.report import Gpu, Prediction
from pytest_llmgpu.report.result import CaseResult, DeviceMemory

MIB = 2**20
_WEIGHTS, _CONTEXT = 13 * GIB, GIB // 2
_PER_SEQUENCE = 50 * MIB
_GPUS = [Gpu(index=index, uuid=f"GPU-{index}", name="H", memory_bytes=32 * GIB) for index in range(2)]


def _memory(peak: int, *, index: int = 0, workspace: int | None = None, cached: int = 0, **fields: Any) -> DeviceMemory:
    reserved = peak + cached
    defaults: dict[str, Any] = {
        "weights_bytes": _WEIGHTS,
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": reserved,
        "workspace_bytes": workspace,
        "nvml_used_max_bytes": reserved + (workspace or 0) + _CONTEXT,
    }
    return DeviceMemory(index=index, **{**defaults, **fields})


def _case(size: int, memory: Sequence[DeviceMemory], **fields: Any) -> CaseResult:
    return make_result(60.0, memory=memory, sequences=128, batch_size=size, **fields)


def _line(size: int) -> int:
    return _WEIGHTS + size * _PER_SEQUENCE


def _series(sizes: Sequence[int] = (1, 2, 4, 8), peak: Callable[[int], int] = _line, **fields: Any) -> list[CaseResult]:
    return [_case(size, [_memory(peak(size))], **fields) for size in sizes]


def _predicted(results: Sequence[CaseResult], gpus: Sequence[Gpu] = _GPUS) -> Prediction:
    prediction = predict(results, gpus)
    assert isinstance(prediction, Prediction), prediction
    return prediction


def test_the_parts_of_a_devices_memory_add_up() -> None:
    """Weights, activations, cache, workspace and the rest are NVML's bytes in use."""
    parts = split(_memory(_WEIGHTS + 3 * GIB, workspace=GIB, cached=2 * GIB))
    assert (parts.weights_bytes, parts.activations_bytes, parts.cached_bytes) == (_WEIGHTS, 3 * GIB, 2 * GIB)
    assert (parts.workspace_bytes, parts.rest_bytes, parts.why) == (GIB, _CONTEXT, {})


def test_a_strategy_without_a_workspace_has_all_other_parts() -> None:
    """Nothing is missing then; the reason stays."""
    parts = split(_memory(_WEIGHTS + GIB, why={"workspace_bytes": "it has none"}))
    assert (parts.workspace_bytes, parts.rest_bytes) == (None, _CONTEXT)
    assert parts.why == {"workspace_bytes": "it has none"}


def test_a_part_without_a_figure_is_unknown_with_the_reason() -> None:
    """The reason of the missing figure is the reason of the part."""
    parts = split(_memory(_WEIGHTS, nvml_used_max_bytes=None, why={"nvml_used_max_bytes": "no sample"}))
    assert parts.rest_bytes is None
    assert parts.why["rest_bytes"] == "no sample"
    on_cpu = split(DeviceMemory(index=0))
    assert {on_cpu.weights_bytes, on_cpu.activations_bytes, on_cpu.cached_bytes, on_cpu.rest_bytes} == {None}
    assert "peak_allocated_bytes" in on_cpu.why["activations_bytes"]


@pytest.mark.parametrize(
    ("fields", "part"),
    [({"nvml_used_max_bytes": _WEIGHTS - 1}, "rest_bytes"), ({"weights_bytes": _WEIGHTS + 1}, "activations_bytes")],
)
def test_no_part_is_negative(fields: dict[str, Any], part: str) -> None:
    """NVML's samples may miss a peak, and tensors may be freed after loading: then the part is unknown."""
    parts = split(_memory(_WEIGHTS, **fields))
    assert getattr(parts, part) is None
    assert "1 bytes less" in parts.why[part]


def test_a_line_through_the_peaks_predicts_the_largest_batch_size() -> None:
    """It is the memory without weights and context, divided by the bytes of a sequence."""
    prediction = _predicted(_series())
    free = 32 * GIB - _WEIGHTS - _CONTEXT
    assert prediction.max_batch_size == free // _PER_SEQUENCE == 378
    assert (prediction.device_index, prediction.limit_bytes) == (0, 32 * GIB)
    assert prediction.fixed_bytes == pytest.approx(_WEIGHTS + _CONTEXT, abs=MIB)
    assert prediction.bytes_per_sequence == pytest.approx(_PER_SEQUENCE, rel=1e-6)
    assert (prediction.batch_sizes, prediction.why) == ([1, 2, 4, 8], {})


def test_a_batch_size_that_fits_to_the_byte_fits() -> None:
    """Rounding in floating point costs no sequence."""
    results = _series((1, 2, 3, 5, 7, 11), lambda size: _WEIGHTS + size * 14_680_073)
    for size in range(1, 300):
        gpu = Gpu(index=0, uuid="GPU-0", name="H", memory_bytes=_WEIGHTS + size * 14_680_073 + _CONTEXT)
        assert _predicted(results, [gpu]).max_batch_size == size


def test_a_cap_is_the_limit() -> None:
    """The limit is that of --llmgpu-gpu-memory, without NVML, too."""
    cap = 20 * GIB
    prediction = _predicted(_series(gpu_memory_bytes=cap))
    assert (prediction.limit_bytes, prediction.max_batch_size) == (cap, (cap - _WEIGHTS - _CONTEXT) // _PER_SEQUENCE)
    assert _predicted(_series(gpu_memory_bytes=cap), []) == prediction


def test_the_reserve_of_the_driver_is_no_part_of_the_limit() -> None:
    """Without a cap the limit is the memory that programs can get."""
    (gpu, _) = _GPUS
    reserved = _predicted(_series(), [msgspec.structs.replace(gpu, reserved_bytes=GIB)])
    assert reserved.limit_bytes == 31 * GIB
    assert reserved.max_batch_size == (31 * GIB - _WEIGHTS - _CONTEXT) // _PER_SEQUENCE


def test_the_device_that_is_full_first_decides() -> None:
    """Devices are not averaged: the one that computes the logits is full before the others."""
    results = [_case(size, [_memory(_line(size)), _memory(_line(3 * size), index=1)]) for size in (1, 2, 4)]
    prediction = _predicted(results)
    assert (prediction.device_index, prediction.max_batch_size) == (1, 378 // 3)
    roomy = [_GPUS[0], msgspec.structs.replace(_GPUS[1], memory_bytes=200 * GIB)]
    assert _predicted(results, roomy).device_index == 0


def test_workspace_counts() -> None:
    """Memory outside torch's allocator counts, too."""
    kept = [_case(size, [_memory(_line(size), workspace=size * _PER_SEQUENCE)]) for size in (1, 2, 4)]
    assert _predicted(kept).max_batch_size == _predicted(_series()).max_batch_size // 2


def test_gaps_grow_with_the_batch() -> None:
    """Their growth between the smallest and the largest batch size continues; at small sizes it is rounding."""

    def with_gaps(*sizes: int) -> Prediction:
        return _predicted([_case(size, [_memory(_line(size), cached=size * _PER_SEQUENCE // 4)]) for size in sizes])

    for sizes in ((1, 2, 4, 8, 16), (4, 16), (8, 16, 32)):
        found = with_gaps(*sizes)
        assert found.max_batch_size == 303, "378.9 without them"
        assert found.gaps == pytest.approx(0.25)
        assert found.bytes_per_sequence == pytest.approx(1.25 * _PER_SEQUENCE, rel=1e-6)
    few = with_gaps(1, 2)
    assert (few.max_batch_size, few.gaps) == (378, 0)


def test_a_small_change_of_the_gaps_is_a_small_change_of_the_prediction() -> None:
    """One MiB more at the largest size counts as one MiB; a decrease is no gap."""

    def at_the_end(cached: int) -> int:
        sizes = {1: 900 * MIB, 16: cached}
        found = _predicted([_case(size, [_memory(_line(size), cached=gaps)]) for size, gaps in sizes.items()])
        return found.max_batch_size

    assert [at_the_end(mib * MIB) for mib in (500, 900, 901, 1799, 1800)] == [378, 378, 378, 172, 172]


def test_memory_that_loading_left_behind_is_no_gap() -> None:
    """It is there at every batch size, and torch gives it back."""
    sizes = (1, 2, 4, 8, 16)
    found = _predicted([_case(size, [_memory(_line(size), cached=900 * MIB)]) for size in sizes])
    assert (found.max_batch_size, found.gaps) == (378, 0)


def test_small_sizes_that_hide_their_growth_are_left_out() -> None:
    """Below the size of a fixed buffer nothing grows: the line is fitted to the sizes above it."""
    results = _series((1, 2, 4, 8, 16, 32, 64), lambda size: max(_line(size), _line(12)))
    prediction = _predicted(results)
    assert prediction.max_batch_size == 378
    assert prediction.batch_sizes == [16, 32, 64]


def test_rounding_of_the_allocator_leaves_every_size_in() -> None:
    """Blocks of some MiB do not drop a batch size."""
    results = _series((1, 2, 4, 8, 16), lambda size: -(-_line(size) // (7 * MIB)) * 7 * MIB)
    prediction = _predicted(results)
    assert prediction.batch_sizes == [1, 2, 4, 8, 16]
    assert 0 < prediction.residual_bytes < 7 * MIB
    assert prediction.max_batch_size == pytest.approx(378, abs=2)


def test_the_order_and_repeats_of_cases_do_not_matter() -> None:
    """The largest peak of a size counts."""
    again = _case(4, [_memory(_line(4) - GIB)])
    assert predict([again, *reversed(_series()), again], _GPUS) == predict(_series(), _GPUS)


def test_cases_that_did_not_complete_do_not_count() -> None:
    """The peak of a case that ran out of memory is the limit of the device."""
    failed = make_failed("oom", batch_size=16)
    failed.launches[0].memory = [_memory(32 * GIB)]
    assert predict([*_series(), failed], _GPUS) == predict(_series(), _GPUS)


def test_each_execution_has_its_own_line() -> None:
    """CUDA graphs keep memory of their own."""
    graphed = _series((1, 2), lambda size: _line(size) + 4 * GIB, execution="cuda_graphs")
    eager = _series((4, 8))
    assert _predicted([*graphed, *eager]).batch_sizes == [4, 8]
    assert _predicted([*graphed, *eager[:1]]).batch_sizes == [1, 2], "one size is no line"
    assert isinstance(predict([graphed[0], eager[0]], _GPUS), str)


def test_a_workspace_that_is_too_small_does_not_count() -> None:
    """Its peak is smaller than the memory that the case needs."""
    results = _series((1, 2, 4))
    cut = _case(8, [_memory(_line(4))])
    cut.launches[0].tokens_requested, cut.launches[0].tokens_granted = 100, 23
    assert _predicted([*results, cut]).batch_sizes == [1, 2, 4]


def test_a_prediction_without_nvml_names_the_missing_part() -> None:
    """Torch does not count contexts and buffers of NCCL."""
    cap = 20 * GIB
    results = [
        _case(size, [_memory(_line(size), nvml_used_max_bytes=None, why={"nvml_used_max_bytes": "no NVML"})])
        for size in (1, 2)
    ]
    for result in results:
        result.case = msgspec.structs.replace(result.case, gpu_memory_bytes=cap)
    prediction = _predicted(results, [])
    assert prediction.max_batch_size == (cap - _WEIGHTS) // _PER_SEQUENCE
    assert prediction.why == {"rest_bytes": "no NVML"}


def test_a_model_that_barely_fits_predicts_zero() -> None:
    """No predicted batch size is negative."""
    gpu = Gpu(index=0, uuid="GPU-0", name="H", memory_bytes=_WEIGHTS)
    assert _predicted(_series(), [gpu]).max_batch_size == 0


@pytest.mark.parametrize(
    ("results", "gpus", "reason"),
    [
        ([make_failed("error")], _GPUS, "completed"),
        (_series((4,)), _GPUS, "two completed"),
        ([make_result(), make_result(batch_size=2)], _GPUS, "not measured"),
        (
            [_case(1, [DeviceMemory(index=0, why={"peak_allocated_bytes": "torch does not count on a CPU"})])],
            [],
            "torch does not count on a CPU",
        ),
        (_series(), [], "GPU 0"),
        (_series(peak=lambda _: _WEIGHTS), _GPUS, "grow"),
    ],
)
def test_a_missing_prediction_has_its_reason(results: Sequence[CaseResult], gpus: Sequence[Gpu], reason: str) -> None:
    """The reason stands in place of the prediction."""
    found = predict(results, gpus)
    assert isinstance(found, str)
    assert reason in found
