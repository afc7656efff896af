from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest
import torch

from pytest_llmgpu.ranks import oom
from pytest_llmgpu.strategies.errors import DeviceMapSpillError

_TORCH_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 31.74 GiB of which 512.00 MiB is "
    "free. Of the allocated memory 29.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch."
)


def test_torchs_own_class_is_out_of_memory_with_its_figures() -> None:
    """The bytes that torch names are kept as evidence."""
    evidence = oom.evidence_of(torch.cuda.OutOfMemoryError(_TORCH_MESSAGE))
    assert evidence == oom.Evidence(
        rule="torch's allocator", requested_bytes=5 * 2**29, free_bytes=2**29, allocated_bytes=29 * 2**30
    )


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
    ],
)
def test_each_known_form_names_its_rule(error: BaseException, rule: str) -> None:
    """Whatever is called out of memory says by which rule."""
    evidence = oom.evidence_of(error)
    assert evidence is not None
    assert evidence.rule == rule


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        ValueError("the prompt says: CUDA out of memory"),
        RuntimeError(5),
        RuntimeError(),
        RuntimeError("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory"),
        RuntimeError("NCCL WARN hint: if you run out of memory see the documentation"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_stay_errors(error: BaseException) -> None:
    """A failure that no rule knows is not excused as out of memory."""
    assert oom.evidence_of(error) is None


def _raised_while_handling(first: BaseException, second: BaseException, cause: BaseException | None) -> BaseException:
    second.__context__ = first
    second.__cause__ = cause
    second.__suppress_context__ = cause is None
    return second


def test_a_wrapped_out_of_memory_is_found() -> None:
    """Libraries wrap exceptions; the cause still counts."""
    inner = torch.cuda.OutOfMemoryError(_TORCH_MESSAGE)
    evidence = oom.evidence_of(_raised_while_handling(inner, ValueError("loading failed"), cause=inner))
    assert evidence is not None
    assert evidence.requested_bytes == 5 * 2**29


def test_a_suppressed_context_does_not_count() -> None:
    """An error raised `from None` has nothing to do with what was handled before it."""
    assert oom.evidence_of(_raised_while_handling(MemoryError(), ValueError("bad dtype"), cause=None)) is None


@pytest.mark.parametrize(("free", "full"), [(8 * 2**20, True), (2**30, False)])
def test_cublas_that_cannot_start_ran_out_only_on_a_full_device(
    free: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message is the same for a broken driver; the device's free memory tells."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2**35))
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert (oom.evidence_of(error) is not None) is full


def test_an_error_while_out_of_memory_is_handled_is_an_error() -> None:
    """A broken handler is not excused by what it was to handle."""
    shortage = torch.cuda.OutOfMemoryError(_TORCH_MESSAGE)
    broken = NameError("name 'cleanup' is not defined")
    broken.__context__ = shortage
    assert oom.evidence_of(broken) is None


def test_a_kill_counts_only_if_the_host_killed_for_memory() -> None:
    """SIGKILL alone is a crash; with the kernel's counter moved it is out of memory."""
    evidence = oom.evidence_of_death(-signal.SIGKILL, "", 3, 4)
    assert evidence is not None
    assert "oom_kill 3 -> 4" in evidence.rule
    assert oom.evidence_of_death(-signal.SIGKILL, "", 3, 3) is None
    assert oom.evidence_of_death(-signal.SIGKILL, "", None, None) is None


def test_the_log_of_a_dead_process_counts() -> None:
    """A library that aborts after an out-of-memory message ran out of memory."""
    assert oom.evidence_of_death(-signal.SIGABRT, "terminate: CUDA error: out of memory", 0, 0) is not None
    assert oom.evidence_of_death(-signal.SIGABRT, "Assertion failed", 0, 0) is None
    handled = "CUDA error: out of memory, handled\none\ntwo\nImportError: no module"
    assert oom.evidence_of_death(1, handled, 0, 0) is None


def test_host_kills_come_from_vmstat(tmp_path: Path) -> None:
    """The kernel's count is read, and its absence is told apart from none."""
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 1\noom_kill 12\nnr_dirty 3\n")
    assert oom.host_kills(vmstat) == 12
    vmstat.write_text("pgfault 1\n")
    assert oom.host_kills(vmstat) is None
    assert oom.host_kills(tmp_path / "absent") is None
