"""Decide whether a failure means out of memory: `decide_out_of_memory`, and no other function of the package.

Out of memory is an expected outcome: it turns a failed test into an expected result. Every rule therefore has a name
that the report keeps, and a failure that matches no rule stays an error.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pytest_llmgpu.report.text import GIB, MIB
from pytest_llmgpu.strategies.protocol import DeviceMapSpillError, WorkspaceError

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

_LAST_LINES = 3
_TEXT_LETTERS = 2**16
"""A message is searched up to here; those of torch have some hundred letters."""
_CUBLAS_BYTES = 64 * MIB
"""The handle and the workspace of cuBLAS take tens of MiB."""

_BYTES = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": MIB, "GiB": GIB, "TiB": 2**40}
_SIZE = r"([\d.]+) (TiB|GiB|MiB|KiB|bytes|B)"


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a process that sent no answer."""

    return_code: int
    """The exit status; for a signal its number, negative (as in subprocess)."""
    log: str
    """The end of the log of the process."""
    kills_before: int | None
    """`host_kills()` at the start of the command."""
    kills_after: int | None
    """`host_kills()` after the end of the process."""


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for which a failure is out of memory."""

    rule: str
    """This rule matched."""
    requested_bytes: int | None = None
    """The failed allocation requested this many bytes; None if the message has no figure."""
    free_bytes: int | None = None
    """The device had this many free bytes; None if the message has no figure."""
    allocated_bytes: int | None = None
    """PyTorch had allocated this many bytes of the device; None if the message has no figure."""
    tokens_requested: int | None = None
    """The longest sequence has this many tokens; None if no workspace was refused."""
    tokens_granted: int | None = None
    """The memory suffices for this many tokens; None if no workspace was refused."""


def decide_out_of_memory(failure: BaseException | Death) -> OutOfMemory | None:
    """Return why a failure, or a cause of an exception, means out of memory; None if it does not."""
    return _of_death(failure) if isinstance(failure, Death) else _of_exception(failure)


def host_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many processes the host's out-of-memory killer has ended since boot; None where unknown.

    Source: `oom_kill` of /proc/vmstat (Linux 4.13 and newer), which counts cgroup kills too.
    """
    try:
        match = re.search(r"^oom_kill (\d+)$", vmstat.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def _of_exception(exception: BaseException) -> OutOfMemory | None:
    for link in _chain(exception):
        if (rule := _rule(link)) is not None:
            text = _text(link)
            return OutOfMemory(
                rule=rule,
                requested_bytes=_amount(rf"[Tt]ried to allocate {_SIZE}", text),
                free_bytes=_amount(rf"of which {_SIZE} is free", text),
                allocated_bytes=_amount(rf"{_SIZE} is allocated by PyTorch", text),
                tokens_requested=getattr(link, "tokens_requested", None),
                tokens_granted=getattr(link, "tokens_granted", None),
            )
    return None


def _of_death(death: Death) -> OutOfMemory | None:
    before, after = death.kills_before, death.kills_after
    if death.return_code == -signal.SIGKILL and before is not None and after is not None:
        if after > before:
            return OutOfMemory(rule=f"the host's out-of-memory killer (oom_kill {before} -> {after})")
        return None
    # Only the last lines count: a shortage that was handled earlier did not end the process.
    last = "\n".join([line for line in death.log.splitlines() if line.strip()][-_LAST_LINES:])
    for name, pattern in _MESSAGES.items():
        if re.search(pattern, last):
            return OutOfMemory(rule=f"{name}, in the log of the process that died")
    return None


def _rule(exception: BaseException) -> str | None:
    if isinstance(exception, DeviceMapSpillError):
        return "the layers do not fit on the devices"
    if isinstance(exception, WorkspaceError):
        return "the workspace does not hold the longest sequence"
    if isinstance(exception, RuntimeError):
        return _rule_of_runtime_error(exception)
    if isinstance(exception, MemoryError):
        return "Python's allocator on the host"
    if isinstance(exception, OSError) and exception.errno == errno.ENOMEM:
        return "the host's kernel (ENOMEM)"
    return None  # Other exceptions may have a text about memory, such as a ValueError on a prompt.


def _rule_of_runtime_error(error: RuntimeError) -> str | None:
    """Return the rule that matches a RuntimeError, the class that torch raises for most failures."""
    from accelerate.utils.memory import should_reduce_batch_size

    text = _text(error)
    if type(error).__name__ == "OutOfMemoryError":
        return "torch's allocator"
    for name, pattern in _MESSAGES.items():
        if re.search(pattern, text):
            return name
    # cuBLAS has the same message for a broken driver.
    if "CUBLAS_STATUS_NOT_INITIALIZED" in text and _is_a_device_full():
        return "cuBLAS could not start on a full device"
    # accelerate searches the first argument for its texts, and fails if it is no string.
    if error.args and isinstance(error.args[0], str) and should_reduce_batch_size(error):
        return "accelerate's should_reduce_batch_size"
    return None


def _text(error: BaseException) -> str:
    return str(error)[:_TEXT_LETTERS]


def _is_a_device_full() -> bool:
    import torch

    devices = range(torch.cuda.device_count())
    try:
        return any(torch.cuda.mem_get_info(device)[0] < _CUBLAS_BYTES for device in devices)
    except RuntimeError:
        return False  # after an error of a kernel every call of CUDA fails


def _chain(exception: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = exception
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        # An error of another class, raised while out of memory was handled, is a failure of its own.
        handled = link.__context__ if isinstance(link, RuntimeError) and not link.__suppress_context__ else None
        link = link.__cause__ or handled


def _amount(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return round(float(match[1]) * _BYTES[match[2]]) if match else None
