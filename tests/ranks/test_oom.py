from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest
import torch

from pytest_llmgpu.ranks import oom
from pytest_llmgpu.ranks.oom import Death
from pytest_llmgpu.strategies.protocol import DeviceMapSpillError

_TORCH_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 31.74 GiB of which 512.00 MiB is "
    "free. Of the allocated memory 29.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch."
)


def test_the_exception_of_torch_is_out_of_memory_with_its_figures() -> None:
    """The bytes in the message of torch are kept."""
    found = oom.decide_out_of_memory(torch.cuda.OutOfMemoryError(_TORCH_MESSAGE))
    assert found == oom.OutOfMemory(
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
def test_each_known_message_has_its_rule(error: BaseException, rule: str) -> None:
    """Each known message matches one rule, which the report keeps."""
    found = oom.decide_out_of_memory(error)
    assert found is not None
    assert found.rule == rule


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
    """A failure that matches no rule is no out of memory."""
    assert oom.decide_out_of_memory(error) is None


def _raised_while_handling(first: BaseException, second: BaseException, cause: BaseException | None) -> BaseException:
    second.__context__ = first
    second.__cause__ = cause
    second.__suppress_context__ = cause is None
    return second


def test_a_wrapped_out_of_memory_is_found() -> None:
    """Libraries wrap exceptions; the cause of the exception decides."""
    inner = torch.cuda.OutOfMemoryError(_TORCH_MESSAGE)
    found = oom.decide_out_of_memory(_raised_while_handling(inner, ValueError("loading failed"), cause=inner))
    assert found is not None
    assert found.requested_bytes == 5 * 2**29


def test_a_suppressed_context_does_not_count() -> None:
    """An error raised `from None` is independent of the exception that was handled before it."""
    assert oom.decide_out_of_memory(_raised_while_handling(MemoryError(), ValueError("bad dtype"), cause=None)) is None


@pytest.mark.parametrize(("free", "full"), [(8 * 2**20, True), (2**30, False)])
def test_a_cublas_start_failure_is_out_of_memory_only_on_a_full_device(
    free: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken driver gives the same message, so that the free memory of the device decides."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2**35))
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert (oom.decide_out_of_memory(error) is not None) is full


def test_an_error_while_out_of_memory_is_handled_is_an_error() -> None:
    """An error in a handler of out of memory is a failure of its own."""
    shortage = torch.cuda.OutOfMemoryError(_TORCH_MESSAGE)
    broken = NameError("name 'cleanup' is not defined")
    broken.__context__ = shortage
    assert oom.decide_out_of_memory(broken) is None


def test_a_kill_counts_only_if_the_host_killed_for_memory() -> None:
    """SIGKILL alone is a crash; if the kernel's counter grew, it is out of memory."""
    found = _decide_death(-signal.SIGKILL, kills=(3, 4))
    assert found is not None
    assert "oom_kill 3 -> 4" in found.rule
    assert _decide_death(-signal.SIGKILL, kills=(3, 3)) is None
    assert _decide_death(-signal.SIGKILL, kills=(None, None)) is None


def test_the_end_of_the_log_of_a_dead_process_decides() -> None:
    """A process that aborts after a message of out of memory ran out of memory; earlier messages do not count."""
    assert _decide_death(-signal.SIGABRT, "terminate: CUDA error: out of memory") is not None
    assert _decide_death(-signal.SIGABRT, "Assertion failed") is None
    assert _decide_death(1, "CUDA error: out of memory, handled\none\ntwo\nImportError: no module") is None


def _decide_death(
    return_code: int, log: str = "", kills: tuple[int | None, int | None] = (0, 0)
) -> oom.OutOfMemory | None:
    before, after = kills
    return oom.decide_out_of_memory(Death(return_code=return_code, log=log, kills_before=before, kills_after=after))


def test_host_kills_come_from_vmstat(tmp_path: Path) -> None:
    """The count of the kernel is read; a missing count is None, not 0."""
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 1\noom_kill 12\nnr_dirty 3\n")
    assert oom.host_kills(vmstat) == 12
    vmstat.write_text("pgfault 1\n")
    assert oom.host_kills(vmstat) is None
    assert oom.host_kills(tmp_path / "absent") is None
