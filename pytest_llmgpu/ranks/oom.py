"""The only place that decides what is out of memory.

Out of memory is an expected outcome, so whatever is called so here turns a test from failed into expected: every rule
therefore names its evidence, and what no rule knows stays an error.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pytest_llmgpu.strategies.errors import DeviceMapSpillError, WorkspaceError

__all__ = ["Evidence", "evidence_of", "evidence_of_death", "host_kills"]

_MESSAGES = {
    "torch's allocator": r"(CUDA|HIP|XPU) out of memory",
    "CUDA": r"CUDA (driver )?error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
    "Triton": r"Triton Error \[CUDA\]: out of memory",
    "cuBLAS": r"CUBLAS_STATUS_ALLOC_FAILED",
    "cuDNN": r"CUDNN_STATUS_ALLOC_FAILED",
    "NCCL": r"Cuda failure[^\n]*out of memory",
    "host allocator": r"DefaultCPUAllocator: can't allocate memory",
}

_LAST_LINES = 3
_CUBLAS_BYTES = 64 * 2**20

_BYTES = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (TiB|GiB|MiB|KiB|bytes|B)"


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
    tokens_requested: int | None = None
    """Tokens of the longest sequence, where a workspace for them was refused."""
    tokens_granted: int | None = None
    """Tokens there was memory for."""


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
                tokens_requested=getattr(link, "tokens_requested", None),
                tokens_granted=getattr(link, "tokens_granted", None),
            )
    return None


def evidence_of_death(return_code: int, log: str, kills_before: int | None, kills_after: int | None) -> Evidence | None:
    """Return why a process that ended by itself ran out of memory; None if nothing says so.

    Of its log only the last lines count: a shortage that was handled earlier did not end it.

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
    last = "\n".join([line for line in log.splitlines() if line.strip()][-_LAST_LINES:])
    for name, pattern in _MESSAGES.items():
        if re.search(pattern, last):
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
    if isinstance(exception, RuntimeError):
        return _rule_of_text(exception)
    if isinstance(exception, MemoryError):
        return "Python's allocator on the host"
    if isinstance(exception, OSError) and exception.errno == errno.ENOMEM:
        return "the host's kernel (ENOMEM)"
    return None  # a text about memory in a ValueError is no shortage of it


def _rule_of_text(exception: RuntimeError) -> str | None:
    """Return the rule of a RuntimeError, which is what torch raises for everything."""
    from accelerate.utils.memory import should_reduce_batch_size

    text = str(exception)
    rules = (
        (isinstance(exception, DeviceMapSpillError), "the layers do not fit on the devices"),
        (isinstance(exception, WorkspaceError), "the workspace does not hold the longest sequence"),
        (type(exception).__name__ == "OutOfMemoryError", "torch's allocator"),
        *((re.search(pattern, text), name) for name, pattern in _MESSAGES.items()),
        ("CUBLAS_STATUS_NOT_INITIALIZED" in text and _is_full(), "cuBLAS could not start on a full device"),
        # accelerate looks for its texts in the first argument, which need not be one.
        (
            isinstance(exception.args[0] if exception.args else None, str) and should_reduce_batch_size(exception),
            "accelerate's should_reduce_batch_size",
        ),
    )
    return next((rule for holds, rule in rules if holds), None)


def _is_full() -> bool:
    """Return whether a device of this process has no room for cuBLAS, whose handle and workspace take tens of MiB."""
    import torch

    devices = range(torch.cuda.device_count())
    return any(torch.cuda.mem_get_info(device)[0] < _CUBLAS_BYTES for device in devices)


def _chain(exception: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = exception
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        # What was raised while an out-of-memory was handled is a failure of its own, unless it is of torch's kind.
        handled = link.__context__ if isinstance(link, RuntimeError) and not link.__suppress_context__ else None
        link = link.__cause__ or handled


def _amount(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    if match is None:
        return None
    number, unit = (group for group in match.groups() if group is not None)
    return round(float(number) * _BYTES[unit])
