from __future__ import annotations

import errno
import gc
import signal
from pathlib import Path

import pytest
import torch

from pytest_llmgpu.ranks import memory
from pytest_llmgpu.report.result import DeviceMemory
from pytest_llmgpu.strategies.protocol import DeviceMapSpillError

_CPU = (torch.device("cpu"),)
_GPU = (torch.device("cuda", 0),)
_SHORTAGE = torch.cuda.OutOfMemoryError(
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


def test_a_rank_on_a_cpu_has_the_peak_of_its_process_since_the_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a case is that of the case, in a sweep too; a server computes in another process."""
    loaded, big = memory.hold(_CPU, None), 2**26

    def peak() -> int:
        return memory.since_reset(_CPU, loaded)[0].peak_resident_bytes or 0

    memory.reset(_CPU)
    before, content = peak(), b"x" * big
    during = peak()
    del content
    assert during > before + big // 2
    assert peak() > during - big // 2  # the kernel counts threads in steps
    memory.reset(_CPU)
    assert peak() < during - big // 2
    elsewhere = [DeviceMemory(index=0, why={"peak_allocated_bytes": "the server computes"})]
    assert memory.since_reset(_CPU, elsewhere)[0].peak_resident_bytes is None
    monkeypatch.setattr(memory, "_STATUS", Path("/no/such/file"))
    assert memory.since_reset(_CPU, loaded)[0].peak_resident_bytes is None


def test_a_reset_frees_what_earlier_cases_left_before_peaks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage, workspaces of cuBLAS and cached blocks do not count: a case has the same memory alone and in a sweep."""
    did: list[str] = []
    for owner, name in (
        (gc, "collect"),
        (torch._C, "_cuda_clearCublasWorkspaces"),  # a wheel without CUDA lacks it
        (torch.cuda, "empty_cache"),
        (torch.cuda, "reset_peak_memory_stats"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, name=name: did.append(name), raising=False)
    memory.reset(_GPU)
    assert did == ["collect", "_cuda_clearCublasWorkspaces", "empty_cache", "reset_peak_memory_stats"]


def test_a_gpu_has_its_memory_after_loading_and_its_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace outside of torch's allocator is that of the strategy, or missing with the reason."""
    for number, name in enumerate(("memory_allocated", "max_memory_allocated", "max_memory_reserved")):
        monkeypatch.setattr(torch.cuda, name, lambda _, number=number: 100 + number)
    loaded = memory.after_loading(_GPU, [DeviceMemory(index=0, held_bytes=5, why={"weights_bytes": "not loaded"})])
    (found,) = memory.since_reset(_GPU, loaded, workspace_bytes=3)
    assert found == DeviceMemory(
        index=0,
        weights_bytes=100,
        loading_peak_bytes=101,
        peak_allocated_bytes=101,
        peak_reserved_bytes=102,
        workspace_bytes=3,
        held_bytes=5,
    )
    assert set(memory.since_reset(_GPU, loaded)[0].why) == {"workspace_bytes"}


def _raised_from(error: BaseException, first: BaseException, *, cause: bool | None = None) -> BaseException:
    """Return an error that was raised while another was handled: `from` it, `from None`, or without a word."""
    error.__context__ = first
    error.__cause__ = first if cause else None
    error.__suppress_context__ = cause is not None
    return error


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
        (_raised_from(RuntimeError("the layer is broken"), _SHORTAGE), "torch's allocator"),
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
        (_raised_from(ValueError("bad dtype"), MemoryError(), cause=False), None),
        (_raised_from(NameError("name 'cleanup' is not defined"), _SHORTAGE), None),
    ],
)
def test_each_known_message_has_its_rule(error: BaseException, rule: str | None) -> None:
    """The report keeps the rule; an error in a handler of out of memory is a failure of its own."""
    found = memory.decide_out_of_memory(error)
    assert (None if found is None else found.evidence) == rule


def test_the_figures_of_torch_are_kept_also_where_a_library_wraps_its_exception() -> None:
    """The cause of an exception decides."""
    for error in (_SHORTAGE, _raised_from(ValueError("loading failed"), _SHORTAGE, cause=True)):
        found = memory.decide_out_of_memory(error)
        assert found is not None
        assert found.evidence == "torch's allocator"
        assert (found.requested_bytes, found.free_bytes, found.allocated_bytes) == (5 * 2**29, 2**29, 29 * 2**30)


@pytest.mark.parametrize(("free", "full"), [(8 * 2**20, True), (2**30, False)])
def test_cublas_cannot_start_on_a_full_device(free: int, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert memory.decide_killed(return_code, log, *kills) == rule


def test_host_kills_come_from_vmstat(tmp_path: Path) -> None:
    """The count of the kernel is read; a missing count is None, not 0."""
    vmstat = tmp_path / "vmstat"
    for text, expected in (("pgfault 1\noom_kill 12\nnr_dirty 3\n", 12), ("pgfault 1\n", None)):
        vmstat.write_text(text)
        assert memory.host_kills(vmstat) == expected
    assert memory.host_kills(tmp_path / "absent") is None
