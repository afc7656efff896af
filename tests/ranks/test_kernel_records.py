from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pytest_llmgpu.ranks import work
from pytest_llmgpu.ranks.work import RANGE_PREFIX, Calls, Modules, NamedRow, PassKernels, Record
from pytest_llmgpu.report.kernel_families import family_of

_GEMM, _ADD = "nvjet_hsh_128x256_64x4", "vectorized_elementwise_kernel<CUDAFunctor_add>"
_REDUCED = "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def _kernel(name: str, start_ns: int, duration_ns: int, correlation: int = 0, device: int = 0) -> Record:
    return Record(name, device, start_ns, duration_ns, correlation)


def _call(name: str, start_ns: int, correlation: int) -> Record:
    return Record(name, None, start_ns, 1, correlation)


def _range(module: str, start_ns: int, end_ns: int) -> Record:
    return Record(RANGE_PREFIX + module, None, start_ns, end_ns - start_ns, 0)


def test_the_time_of_a_pass_is_that_of_its_kernels() -> None:
    """Collectives and copies are counted apart; idle is the time in which no kernel runs, overlaps counted once."""
    found = work.of_pass(
        [
            _kernel(_ADD, 500, 100),
            _kernel(_GEMM, 0, 200),
            _kernel(_GEMM, 100, 200, device=1),
            _kernel(_REDUCED, 250, 100),
            _kernel("Memcpy HtoD (Pinned -> Device)", 400, 50),
            _call("cudaLaunchKernel", 0, 1),
        ]
    )
    assert found.device_time_s == pytest.approx(500e-9)
    assert found.copy_s == pytest.approx(50e-9)
    assert found.covered_s == pytest.approx(450e-9)
    assert {name: calls.calls for name, calls in found.kernels.items()} == {_GEMM: 2, _REDUCED: 1, _ADD: 1}
    assert found.kernels[_GEMM].time_s == pytest.approx(400e-9)
    assert found.collective_s == {"all_reduce": pytest.approx([100e-9])}


def test_collectives_keep_the_order_of_their_start() -> None:
    """The n-th call of a rank is the n-th of every other."""
    records = [_kernel(_REDUCED, 30, 3), _kernel(_REDUCED, 10, 1), _kernel(_REDUCED, 20, 2)]
    assert work.of_pass(records).collective_s["all_reduce"] == pytest.approx([1e-9, 2e-9, 3e-9])


def test_an_empty_pass_has_no_time() -> None:
    """Whether that is an error is for the caller to decide."""
    assert work.of_pass([]) == PassKernels(0.0, 0.0, 0.0, {}, {})


def test_a_kernel_belongs_to_the_innermost_range_around_its_launch() -> None:
    """By the time of the call on the host, however late the kernel runs; siblings and parents get only their own."""
    records = [
        _range("model", 0, 100),
        _range("layers.*", 10, 60),
        _range("layers.*.mlp", 20, 40),
        _range("layers.*", 60, 90),
        _call("cudaLaunchKernel", 5, 1),
        _call("cuLaunchKernelEx", 25, 2),
        _call("cudaLaunchKernel", 45, 3),
        _call("cudaLaunchKernel", 60, 4),
        _call("cudaLaunchKernel", 95, 5),
        _call("cudaLaunchKernel", 100, 6),
        *(_kernel(_ADD, 1000 + number, 10 * number, correlation=number) for number in range(1, 7)),
    ]
    found = work.attribute(records)
    assert {module: calls.calls for (module, _), calls in found.kernels.items()} == {
        "model": 2,
        "layers.*.mlp": 1,
        "layers.*": 2,
        work.OUTSIDE: 1,
    }
    assert found.kernels["layers.*", _ADD].time_s == pytest.approx(70e-9)
    assert found.runtime_calls == {"cuLaunchKernelEx": 1, "cudaLaunchKernel": 4}


def test_host_synchronizations_are_counted_inside_the_ranges() -> None:
    """A scalar that is read back counts as a copy and a synchronization; the measurement itself does not count."""
    records = [
        _range("(scoring)", 0, 100),
        _call("cudaMemcpyAsync", 10, 1),
        _call("cudaStreamSynchronize", 11, 2),
        _call("cudaMemcpyAsync", 20, 3),
        _call("cudaEventQuery", 30, 4),
        _call("cudaStreamIsCapturing", 31, 5),
        _call("cudaDeviceSynchronize", 200, 6),
        _kernel("Memcpy DtoH (Device -> Pageable)", 12, 1, correlation=1),
        _kernel("Memcpy HtoD (Pinned -> Device)", 22, 1, correlation=3),
        _kernel("Memcpy DtoH (Device -> Pageable)", 300, 1, correlation=7),
    ]
    found = work.attribute(records)
    assert found.host_syncs == 2
    assert found.runtime_calls == {"cudaMemcpyAsync": 2, "cudaStreamSynchronize": 1}


def test_equal_kernels_have_an_equal_hash() -> None:
    """Times and order play no part, numbers of calls do."""
    first = {_GEMM: Calls(2, 1.0), _ADD: Calls(1, 1.0)}
    same = {_ADD: Calls(1, 3.0), _GEMM: Calls(2, 2.0)}
    assert work.kernels_sha256(first) == work.kernels_sha256(same)
    more = {**first, _ADD: Calls(2, 1.0)}
    assert work.kernels_sha256(first) != work.kernels_sha256(more)


@pytest.mark.parametrize(
    ("module", "prefix", "folded"),
    [
        ("model.layers.31.mlp.down_proj", "model", "layers.*.mlp.down_proj"),
        ("model.layers.0", "model", "layers.*"),
        ("transformer.h.3.attn.0.c", "transformer", "h.*.attn.*.c"),
        ("lm_head", "model", "lm_head"),
        ("model.norm", "model", "norm"),
        ("model", "model", "model"),
        ("", "model", "model"),
        ("layers.1", "", "layers.*"),
        ("model.norm1", "model", "norm1"),
    ],
)
def test_layer_numbers_are_folded(module: str, prefix: str, folded: str) -> None:
    """All layers share a row."""
    assert work.folded(module, prefix) == folded


def _pass(**time_s: float) -> PassKernels:
    return PassKernels(0.0, 0.0, 0.0, {name: Calls(2, value) for name, value in time_s.items()}, {})


def test_the_time_of_a_row_is_the_median_over_the_passes() -> None:
    """Rows are sorted by time; names are cut."""
    long = "gemm" * 100
    passes = [_pass(add=0.1, **{long: value}) for value in (3.0, 1.0, 2.0)]
    found = work.largest_rows(passes, Modules({("lm_head", long): Calls(1, 5.0)}, {}, 0))
    assert found == [
        (None, long[:120], "GEMM", 2, 2.0),
        (None, "add", "other", 2, 0.1),
        ("lm_head", long[:120], "GEMM", 1, 5.0),
    ]


_KINDS = ("gemm", "sdpa", "elementwise", "copy_kernel", "rms_norm", "nccl", "x")


def _by_family(rows: Sequence[NamedRow], *, modules: bool) -> dict[str, tuple[int, int]]:
    """Return the calls and microseconds of each family in the rows of modules, or in those of whole passes."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        if (row.module is not None) is modules:
            calls, time_us = found.get(row.family, (0, 0))
            found[row.family] = calls + row.calls, time_us + round(1e6 * row.time_s)
    return found


@pytest.mark.parametrize("modules", [1, 5, 200])
def test_a_rank_has_at_most_100_rows_that_sum_up_to_all(modules: int) -> None:
    """Small kernels and small modules are summed by family: a change of a family is seen whole in either half."""
    names = [f"{kind}{number}" for kind in _KINDS for number in range(50)]
    kernels = {name: Calls(1, 1.0 + number) for number, name in enumerate(names)}
    in_modules = {(f"mlp{n % modules}", name): Calls(1, 1.0 + n) for n, name in enumerate(names)}
    attributed = Modules(in_modules, {}, 0)
    found = work.largest_rows([PassKernels(0.0, 0.0, 0.0, kernels, {})], attributed)
    assert len(found) <= 100
    every = [NamedRow(None, name, family_of(name), *calls) for name, calls in kernels.items()]
    assert _by_family(found, modules=False) == _by_family(every, modules=False)
    assert _by_family(found, modules=True) == _by_family(every, modules=False)
    named = {row.module for row in found if row.module is not None}
    # A model has fewer modules and families than rows: none of them is lost.
    assert ("other" in named) is (modules == 200)


class _Event:
    """A kineto record of a device, which no machine without a GPU gives."""

    def __init__(self, name: str, *, annotation: bool = False) -> None:
        self._name, self._annotation = name, annotation

    def name(self) -> str:
        return self._name

    def device_type(self) -> Any:
        return torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]

    def is_user_annotation(self) -> bool:
        return self._annotation

    def device_index(self) -> int:
        return 1

    def start_ns(self) -> int:
        return 10

    def duration_ns(self) -> int:
        return 5

    def correlation_id(self) -> int:
        return 7


def test_records_are_read_from_torchs_profiler() -> None:
    """Ranges of the host and records of the device are kept; ops, and ranges that a device repeats, are left out."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function(RANGE_PREFIX + "lm_head"):
        torch.ones(3) + 1
    results: Any = recorded.profiler
    events: Sequence[Any] = results.kineto_results.events()
    (host,) = work.read_records(events)
    assert (host.name, host.device) == ("llmgpu:lm_head", None)
    assert host.duration_ns > 0
    device = work.read_records([_Event(_GEMM), _Event("nccl:all_reduce", annotation=True)])
    assert device == [Record(_GEMM, 1, 10, 5, 7)]
