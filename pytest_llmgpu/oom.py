"""The only place that decides what is out of memory.

Out of memory is an expected outcome, so whatever is called so here turns a test from failed into expected: every rule
therefore names its evidence, and what no rule knows stays an error.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

__all__ = ["DeviceMapSpillError", "Evidence", "evidence_of", "evidence_of_death", "host_kills"]

_MESSAGES = {
    "torch's allocator": r"(CUDA|HIP|XPU) out of memory",
    "CUDA": r"CUDA error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
    "cuBLAS": r"CUBLAS_STATUS_ALLOC_FAILED",
    "cuDNN": r"CUDNN_STATUS_ALLOC_FAILED",
    "NCCL": r"(ncclUnhandledCudaError|NCCL)[\s\S]*out of memory",
    "host allocator": r"DefaultCPUAllocator: can't allocate memory|Cannot allocate memory",
}

_BYTES = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (TiB|GiB|MiB|KiB|bytes|B)"


class DeviceMapSpillError(RuntimeError):
    """The layers do not fit on the devices: accelerate would put some on the CPU or on disk."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Why something is called out of memory."""

    rule: str
    """Which rule said so, in words."""
    requested_bytes: int | None = None
    """Bytes the failed allocation asked for, where the message says so."""
    free_bytes: int | None = None
    """Bytes free on the device, where the message says so."""
    allocated_bytes: int | None = None
    """Bytes torch had allocated on it, where the message says so."""


def evidence_of(exception: BaseException) -> Evidence | None:
    """Return why an exception, or one that it came from, means out of memory; None if it does not.

    Source of the message forms: torch's CUDACachingAllocator, cuBLAS and NCCL error strings;
    accelerate.utils.memory.should_reduce_batch_size is asked last.
    """
    for link in _chain(exception):
        rule = _rule(link)
        if rule is not None:
            return Evidence(
                rule=rule,
                requested_bytes=_amount(rf"[Tt]ried to allocate {_SIZE}|you tried to allocate {_SIZE}", str(link)),
                free_bytes=_amount(rf"of which {_SIZE} is free", str(link)),
                allocated_bytes=_amount(rf"{_SIZE} is allocated by PyTorch", str(link)),
            )
    return None


def evidence_of_death(return_code: int, log: str, kills_before: int | None, kills_after: int | None) -> Evidence | None:
    """Return why a process that ended by itself ran out of memory; None if nothing says so.

    Args:
        return_code: As subprocess gives it: negative for a signal.
        log: What the process wrote.
        kills_before: `host_kills()` at its start.
        kills_after: `host_kills()` now.
    """
    if return_code == -signal.SIGKILL and kills_before is not None and kills_after is not None:
        if kills_after > kills_before:
            return Evidence(rule=f"the host's out-of-memory killer (oom_kill {kills_before} -> {kills_after})")
        return None
    for name, pattern in _MESSAGES.items():
        if re.search(pattern, log):
            return Evidence(rule=f"{name}, in the log of the process that died")
    return None


def host_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many processes the host's out-of-memory killer has ended since boot; None where unknown.

    Source: `oom_kill` of /proc/vmstat (Linux 4.13 and newer), which counts cgroup kills too.
    """
    try:
        match = re.search(r"^oom_kill (\d+)$", vmstat.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def _rule(exception: BaseException) -> str | None:
    if isinstance(exception, DeviceMapSpillError):
        return "the layers do not fit on the devices"
    if isinstance(exception, MemoryError):
        return "Python's allocator on the host"
    if type(exception).__name__ == "OutOfMemoryError" and type(exception).__module__.startswith("torch"):
        return "torch's allocator"
    text = str(exception)
    for name, pattern in _MESSAGES.items():
        if re.search(pattern, text):
            return name
    if isinstance(exception, RuntimeError):
        from accelerate.utils.memory import should_reduce_batch_size

        if should_reduce_batch_size(exception):
            return "accelerate's should_reduce_batch_size"
    return None


def _chain(exception: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = exception
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _amount(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    if match is None:
        return None
    number, unit = (group for group in match.groups() if group is not None)
    return round(float(number) * _BYTES[unit])
