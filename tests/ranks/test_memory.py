from __future__ import annotations

import errno
import gc
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import torch
from support import tiny_model
from support.report_factory import make_case

from pytest_llmgpu.inference import models, tasks
from pytest_llmgpu.inference.tasks.hellaswag import HellaSwag
from pytest_llmgpu.ranks import memory, worker
from pytest_llmgpu.ranks.memory import Death
from pytest_llmgpu.ranks.worker import RankState
from pytest_llmgpu.report.result import DeviceMemory
from pytest_llmgpu.strategies.mp import LayerParallel
from pytest_llmgpu.strategies.protocol import DeviceMapSpillError, Loaded

_CPU = (torch.device("cpu"),)
_GPU = (torch.device("cuda", 0),)
_WEIGHTS = 1000
_TORCH_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 31.74 GiB of which 512.00 MiB is "
    "free. Of the allocated memory 29.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch."
)


def test_a_cpu_has_no_cap_and_no_figures() -> None:
    """A figure that torch does not count on a CPU is None with a reason, never 0."""
    held = memory.hold(_CPU, 2**30)
    memory.reset(_CPU)
    (found,) = memory.since_reset(_CPU, memory.after_loading(_CPU, held))
    assert found.held_bytes == 0
    counted = {"weights_bytes", "loading_peak_bytes", "peak_allocated_bytes", "peak_reserved_bytes"}
    assert {getattr(found, name) for name in counted} == {None}
    assert set(found.why) == {*counted, "workspace_bytes"}


class _Allocator:
    """torch's caching allocator, reduced to the figures of a case: freed memory stays reserved, peaks stay.

    cuBLAS keeps a workspace among the live tensors, as large as the largest batch needed.
    """

    def __init__(self) -> None:
        self.cublas = 0
        self.allocated = self.peak_allocated = _WEIGHTS
        self.reserved = self.peak_reserved = _WEIGHTS
        self.collected: list[bool] = []

    def forward(self, batch_size: int) -> None:
        self.cublas = max(self.cublas, 8 * batch_size)
        self.allocated = _WEIGHTS + self.cublas
        self.peak_allocated = max(self.peak_allocated, self.allocated + 100 * batch_size)
        self.reserved = max(self.reserved, self.peak_allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def clear_cublas_workspaces(self) -> None:
        self.cublas = 0
        self.allocated = _WEIGHTS

    def empty_cache(self) -> None:
        assert self.collected, "tensors in reference cycles are freed first"
        self.reserved = self.allocated

    def reset_peaks(self, _device: torch.device) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> _Allocator:
    """The allocator of an emulated GPU."""
    emulated = _Allocator()
    cuda = torch.cuda
    # A wheel without CUDA lacks it.
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", emulated.clear_cublas_workspaces, raising=False)
    monkeypatch.setattr(gc, "collect", lambda: emulated.collected.append(True))
    monkeypatch.setattr(cuda, "empty_cache", emulated.empty_cache)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", emulated.reset_peaks)
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda _: emulated.peak_allocated)
    monkeypatch.setattr(cuda, "max_memory_reserved", lambda _: emulated.peak_reserved)
    return emulated


def _sweep(allocator: _Allocator, batch_sizes: Sequence[int]) -> dict[int, DeviceMemory]:
    found = {}
    for batch_size in batch_sizes:
        memory.reset(_GPU)
        allocator.forward(batch_size)
        loaded = DeviceMemory(index=0, weights_bytes=_WEIGHTS, loading_peak_bytes=_WEIGHTS)
        (found[batch_size],) = memory.since_reset(_GPU, [loaded], workspace_bytes=3)
    return found


@pytest.mark.parametrize("order", [(1, 2, 4, 8), (8, 4, 2, 1), (4, 8, 4)])
def test_a_case_has_the_same_memory_alone_and_in_a_sweep(allocator: _Allocator, order: tuple[int, ...]) -> None:
    """Peaks, cached blocks, garbage and workspaces of cuBLAS from earlier cases do not count."""
    for batch_size, found in _sweep(allocator, order).items():
        peak = _WEIGHTS + 108 * batch_size
        assert found == DeviceMemory(
            index=0,
            weights_bytes=_WEIGHTS,
            loading_peak_bytes=_WEIGHTS,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak,
            workspace_bytes=3,
        )


class Preparing(LayerParallel):
    """A strategy that records its calls of `prepare`."""

    name = "preparing"
    events: ClassVar[list[object]] = []

    def prepare(self, loaded: Loaded, batch_size: int, tokens: int) -> None:
        """Record the number of rows."""
        assert loaded.devices
        assert tokens
        self.events.append(batch_size)


def test_every_case_of_a_sweep_begins_with_a_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each case, larger or smaller than the one before, caches are emptied and the workspace is rebuilt."""
    events: list[object] = []
    monkeypatch.setattr(Preparing, "events", events)
    monkeypatch.setattr(memory, "reset", lambda _: events.append("reset"))
    tiny_model.write_model(tmp_path / "tiny")
    tiny_model.write_dataset(tmp_path / "items.jsonl")
    dataset = HellaSwag().load(str(tmp_path / "items.jsonl"), rootdir=tmp_path)
    source = models.resolve(str(tmp_path / "tiny"), texts=dataset.texts(), rootdir=tmp_path)
    case = make_case(dtype="float32", device="cpu", devices=1, dataset_sha256=dataset.sha256)
    state = RankState(on_batch=lambda _: None)
    worker.load(state, case, source, f"{__name__}:Preparing")
    worker.give(state, dataset.sha256, dataset.items, tasks.BUILT_IN["hellaswag"])
    for batch_size in (2, 8, 2):
        events.clear()
        launch = worker.score(state, msgspec.structs.replace(case, batch_size=batch_size))
        assert sum(launch.batches.sequences) == tiny_model.SEQUENCES
        assert events[:2] == ["reset", batch_size]


def _while_handling(first: BaseException, second: BaseException, cause: BaseException | None = None) -> BaseException:
    """Return an exception that was raised while another one was handled; `from None` without a cause."""
    second.__context__ = first
    second.__cause__ = cause
    second.__suppress_context__ = cause is None
    return second


def _in_a_handler(second: BaseException) -> BaseException:
    second.__context__ = torch.cuda.OutOfMemoryError(_TORCH_MESSAGE)
    return second


@pytest.mark.parametrize(
    ("error", "rule"),
    [
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be..."), "CUDA"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "cuBLAS"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "cuDNN"),
        (RuntimeError("NCCL error: ncclUnhandledCudaError\nLast error:\nCuda failure 2 'out of memory'"), "NCCL"),
        (RuntimeError("CUDA driver error: out of memory"), "CUDA"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "Triton"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "the host's kernel (ENOMEM)"),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to"), "host allocator"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), "accelerate's should_reduce_batch_size"),
        (MemoryError(), "Python's allocator on the host"),
        (DeviceMapSpillError("3 of 9 modules fit on no GPU"), "the layers do not fit on the devices"),
        (_in_a_handler(RuntimeError("the layer is broken")), "torch's allocator"),
        # Errors of their own.
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), None),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), None),
        (ValueError("the prompt says: CUDA out of memory"), None),
        (RuntimeError(5), None),
        (RuntimeError(), None),
        (RuntimeError("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory"), None),
        (RuntimeError("NCCL WARN hint: if you run out of memory see the documentation"), None),
        (KeyboardInterrupt(), None),
        (OSError(errno.ENOENT, "CUDA out of memory"), None),
        (_while_handling(MemoryError(), ValueError("bad dtype")), None),
        (_in_a_handler(NameError("name 'cleanup' is not defined")), None),
    ],
)
def test_each_known_message_has_its_rule(error: BaseException, rule: str | None) -> None:
    """The report keeps the rule; an error in a handler of out of memory is a failure of its own."""
    found = memory.decide_out_of_memory(error)
    assert (None if found is None else found.evidence) == rule


def test_the_figures_of_torch_are_kept_also_where_a_library_wraps_its_exception() -> None:
    """The cause of an exception decides."""
    inner = torch.cuda.OutOfMemoryError(_TORCH_MESSAGE)
    for error in (inner, _while_handling(inner, ValueError("loading failed"), cause=inner)):
        found = memory.decide_out_of_memory(error)
        assert found is not None
        assert found.evidence == "torch's allocator"
        assert (found.requested_bytes, found.free_bytes, found.allocated_bytes) == (5 * 2**29, 2**29, 29 * 2**30)


@pytest.mark.parametrize(("free", "full"), [(8 * 2**20, True), (2**30, False)])
def test_a_cublas_start_failure_is_out_of_memory_only_on_a_full_device(
    free: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken driver gives the same message, so that the free memory of the device decides."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2**35))
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert (memory.decide_out_of_memory(error) is not None) is full


@pytest.mark.parametrize(
    ("return_code", "log", "kills", "rule"),
    [
        (-signal.SIGKILL, "", (3, 4), "the host's out-of-memory killer (oom_kill 3 -> 4)"),
        (-signal.SIGKILL, "", (3, 3), None),
        (-signal.SIGKILL, "", (None, None), None),
        (-signal.SIGKILL, "CUDA error: out of memory", (3, 3), None),
        (-signal.SIGABRT, "terminate: CUDA error: out of memory", (0, 0), "CUDA, in the log of the process that died"),
        (-signal.SIGABRT, "Assertion failed", (0, 0), None),
        (1, "CUDA error: out of memory, handled\none\ntwo\nImportError: no module", (0, 0), None),
    ],
)
def test_a_process_that_died_ran_out_of_memory_by_its_kill_or_the_end_of_its_log(
    return_code: int, log: str, kills: tuple[int | None, int | None], rule: str | None
) -> None:
    """SIGKILL alone is a crash, and earlier messages of the log do not count."""
    before, after = kills
    death = Death(return_code=return_code, log=log, kills_before=before, kills_after=after)
    found = memory.decide_out_of_memory(death)
    assert (None if found is None else found.evidence) == rule


def test_host_kills_come_from_vmstat(tmp_path: Path) -> None:
    """The count of the kernel is read; a missing count is None, not 0."""
    vmstat = tmp_path / "vmstat"
    for text, expected in (("pgfault 1\noom_kill 12\nnr_dirty 3\n", 12), ("pgfault 1\n", None)):
        vmstat.write_text(text)
        assert memory.host_kills(vmstat) == expected
    assert memory.host_kills(tmp_path / "absent") is None
