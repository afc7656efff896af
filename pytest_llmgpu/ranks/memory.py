"""The memory of a rank's devices: the cap, the peaks, and the reset before each case (torch, in a rank).

`decide_out_of_memory` and `decide_killed` alone decide whether a failure means out of memory, which is an expected
outcome: they turn a failed test into an expected result. Every rule therefore has a name that the report keeps, and a
failure that matches no rule stays an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pytest_llmgpu.report.result import DeviceMemory, Failure
from pytest_llmgpu.report.text import GIB, MIB, gib
from pytest_llmgpu.strategies.protocol import DeviceMapSpillError, WorkspaceError

if TYPE_CHECKING:
    import torch

_CUDA_SUCCESS = 0
_OF_LOADING = ("weights_bytes", "loading_peak_bytes")
_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")
_NOT_LOADED = "the model was not loaded"
_ON_CPU = "torch does not count memory on a CPU"
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
"""VmHWM of the first is the peak of this process; a 5 in the second resets it (Linux 4.0 and newer)."""
_NO_WORKSPACE = "the strategy reported no workspace outside torch's allocator"
# Sources: torch's CUDACachingAllocator; the error strings of CUDA, Triton, cuBLAS, cuDNN and NCCL.
_MESSAGES = {
    "torch's allocator": r"(CUDA|HIP|XPU) out of memory",
    "CUDA": r"CUDA (driver )?error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
    "Triton": r"Triton Error \[CUDA\]: out of memory",
    "cuBLAS": r"CUBLAS_STATUS_ALLOC_FAILED",
    "cuDNN": r"CUDNN_STATUS_ALLOC_FAILED",
    "NCCL": r"Cuda failure[^\n]*out of memory",
    "host allocator": r"DefaultCPUAllocator: can't allocate memory",
}
"""Name of a rule to the pattern of the message."""
_CLASSES: dict[type[BaseException], str] = {
    DeviceMapSpillError: "the layers do not fit on the devices",
    WorkspaceError: "the workspace does not hold the longest sequence",
    MemoryError: "Python's allocator on the host",
}
"""Class of an exception to its rule."""
_LAST_LINES = 3
_TEXT_LETTERS = 2**16
"""A message is searched up to here; those of torch have some hundred letters."""
_CUBLAS_BYTES = 64 * MIB
"""The handle and the workspace of cuBLAS take tens of MiB."""
_BYTES = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": MIB, "GiB": GIB, "TiB": 2**40}
_SIZE = r"([\d.]+) (TiB|GiB|MiB|KiB|bytes|B)"


def hold(devices: Sequence[torch.device], cap_bytes: int | None) -> list[DeviceMemory]:
    """Take all memory of each device except `cap_bytes` out of use, until this process ends.

    The memory is allocated by cudaMalloc. torch's allocator would count it as its own and could hand it out. The cap
    includes CUDA contexts, NCCL buffers and workspaces. Return the memory of each device before a model is loaded; the
    index is the number of the device in the rank. RuntimeError if a device has too little free memory.
    """
    import torch

    if devices[0].type != "cuda":
        return [DeviceMemory(index=0, why=dict.fromkeys((*_OF_LOADING, *_PEAKS), _ON_CPU))]
    held = []
    for index, device in enumerate(devices):
        free, total = (0, 0) if cap_bytes is None else torch.cuda.mem_get_info(device)
        size = max(0, total - (cap_bytes or 0))
        held.append(DeviceMemory(index=index, held_bytes=size, why=dict.fromkeys(_OF_LOADING, _NOT_LOADED)))
        if cap_bytes is None or not size:
            continue
        assert torch.version.cuda is not None
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            status = runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))
        if status != _CUDA_SUCCESS:
            needed = f"the memory cap of {gib(cap_bytes)} needs {gib(size)} out of use"
            found = f"{gib(free)} of {gib(total)} are free (cudaMalloc returned {status})"
            remedy = "end other programs on this GPU, or raise --llmgpu-gpu-memory"
            raise RuntimeError(f"{device}: {needed}, but {found}: {remedy}")
    return held


def after_loading(devices: Sequence[torch.device], held: Sequence[DeviceMemory]) -> Sequence[DeviceMemory]:
    """Add the memory of the loaded model to what `hold` returned."""
    import torch

    if devices[0].type != "cuda":
        return held
    return [
        msgspec.structs.replace(
            one,
            weights_bytes=torch.cuda.memory_allocated(device),
            loading_peak_bytes=torch.cuda.max_memory_allocated(device),
            why={},
        )
        for device, one in zip(devices, held, strict=True)
    ]


def reset(devices: Sequence[torch.device], *, recorded: bool = False) -> None:
    """Empty caches and reset peaks, so that the memory of a case is the same alone and in a sweep.

    `recorded`: CUDA graphs of the case may use the workspaces of cuBLAS, which stay.
    """
    import torch

    gc.collect()
    if devices[0].type != "cuda":
        with contextlib.suppress(OSError):  # without this file the peak is that since the start of the process
            _CLEAR_REFS.write_text("5")
        return
    # No public call frees the workspaces of cuBLAS. After a larger batch size they are larger than this case needs.
    if not recorded:
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001
    torch.cuda.empty_cache()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)


def since_reset(
    devices: Sequence[torch.device], known: Sequence[DeviceMemory], workspace_bytes: int | None = None
) -> list[DeviceMemory]:
    """Add the peaks since the last `reset`, and the workspace if the strategy reported one."""
    import torch

    found = []
    for device, one in zip(devices, known, strict=True):
        on_gpu = device.type == "cuda"
        why = one.why if workspace_bytes is not None else {**one.why, "workspace_bytes": _NO_WORKSPACE}
        found.append(
            msgspec.structs.replace(
                one,
                peak_allocated_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
                peak_reserved_bytes=torch.cuda.max_memory_reserved(device) if on_gpu else None,
                workspace_bytes=workspace_bytes,
                peak_resident_bytes=_resident_bytes() if why.get(_PEAKS[0]) == _ON_CPU else None,
                why=why,
            )
        )
    return found


def _resident_bytes() -> int | None:
    with contextlib.suppress(OSError):
        if match := re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE):
            return int(match[1]) * 1024
    return None


def decide_killed(return_code: int, log: str, kills_before: int | None, kills_after: int | None) -> str | None:
    """Return the evidence that a process without an answer ended because it was out of memory; None if it did not.

    The return code is that of subprocess, negative for a signal, and the log is its end. The kills are `host_kills()`
    at the start of the command and after the end of the process.
    """
    if return_code == -signal.SIGKILL and kills_before is not None and kills_after is not None:
        grown = f"the host's out-of-memory killer (oom_kill {kills_before} -> {kills_after})"
        return grown if kills_after > kills_before else None
    # Only the last lines count: a shortage that was handled earlier did not end the process.
    name = _known_message("\n".join([line for line in log.splitlines() if line.strip()][-_LAST_LINES:]))
    return None if name is None else f"{name}, in the log of the process that died"


def decide_out_of_memory(failure: BaseException) -> Failure | None:
    """Return why an exception, or a cause of it, means out of memory, as evidence with the figures of its text.

    The phase and the message are the caller's to replace. None: it does not mean out of memory.
    """
    seen: set[int] = set()
    link: BaseException | None = failure
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text = str(link)[:_TEXT_LETTERS]
        if (rule := _rule(link, text)) is not None:
            return Failure(
                phase="forward",
                message="",
                evidence=rule,
                requested_bytes=_amount(rf"[Tt]ried to allocate {_SIZE}", text),
                free_bytes=_amount(rf"of which {_SIZE} is free", text),
                allocated_bytes=_amount(rf"{_SIZE} is allocated by PyTorch", text),
                tokens_requested=getattr(link, "tokens_requested", None),
                tokens_granted=getattr(link, "tokens_granted", None),
            )
        # An error of another class, raised while out of memory was handled, is a failure of its own.
        handled = link.__context__ if isinstance(link, RuntimeError) and not link.__suppress_context__ else None
        link = link.__cause__ or handled
    return None


def _rule(error: BaseException, text: str) -> str | None:
    """Return the rule that an exception matches."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "the host's kernel (ENOMEM)"
    rule = next((rule for cls, rule in _CLASSES.items() if isinstance(error, cls)), None)
    if rule is not None or not isinstance(error, RuntimeError):
        return rule  # Other exceptions may have a text about memory, such as a ValueError on a prompt.
    # torch raises RuntimeError for most failures.
    import torch
    from accelerate.utils.memory import should_reduce_batch_size

    rule = "torch's allocator" if type(error).__name__ == "OutOfMemoryError" else _known_message(text)
    if rule is None and "CUBLAS_STATUS_NOT_INITIALIZED" in text:  # cuBLAS has the same message for a broken driver
        with contextlib.suppress(RuntimeError):  # after an error of a kernel every call of CUDA fails
            if any(torch.cuda.mem_get_info(device)[0] < _CUBLAS_BYTES for device in range(torch.cuda.device_count())):
                rule = "cuBLAS could not start on a full device"
    # accelerate searches the first argument for its texts, and fails if it is no string.
    if rule is None and error.args and isinstance(error.args[0], str) and should_reduce_batch_size(error):
        rule = "accelerate's should_reduce_batch_size"
    return rule


def _known_message(text: str) -> str | None:
    return next((name for name, pattern in _MESSAGES.items() if re.search(pattern, text)), None)


def _amount(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return round(float(match[1]) * _BYTES[match[2]]) if match else None


def host_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many processes the host's out-of-memory killer has ended since boot; None where unknown.

    Source: `oom_kill` of /proc/vmstat (Linux 4.13 and newer), which counts cgroup kills too.
    """
    try:
        match = re.search(r"^oom_kill (\d+)$", vmstat.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
