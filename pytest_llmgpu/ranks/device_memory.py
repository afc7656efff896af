"""The memory of a rank's devices: the cap, the peaks, and the reset before each case (torch, in a rank)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pytest_llmgpu.report.text import gib

if TYPE_CHECKING:
    import torch

_CUDA_SUCCESS = 0
_NOT_LOADED = "the model was not loaded"
_ON_CPU = "torch does not count memory on a CPU"


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one device as torch counts it."""

    uuid: str | None
    """The UUID of the device as NVML writes it; None on a CPU."""
    weights_bytes: int | None = None
    """The tensors that were alive after loading take this many bytes."""
    loading_peak_bytes: int | None = None
    """The live tensors took at most this many bytes while the model was loaded."""
    peak_allocated_bytes: int | None = None
    """The live tensors took at most this many bytes since the last `reset`."""
    peak_reserved_bytes: int | None = None
    """torch's allocator reserved at most this many bytes since the last `reset`."""
    held_bytes: int = 0
    """`hold` took this many bytes out of use."""
    why: dict[str, str] = {}
    """Each field that is None has its reason here, by name."""


def hold(devices: Sequence[torch.device], cap_bytes: int | None) -> list[int]:
    """Take all memory of each device except `cap_bytes` out of use, until this process ends.

    The memory is allocated by cudaMalloc. torch's allocator would count it as its own and could hand it out. The cap
    includes CUDA contexts, NCCL buffers and workspaces.

    Args:
        devices: The devices of this rank.
        cap_bytes: Bytes that stay usable on each device; None for all.

    Returns:
        Bytes taken out of use per device; 0 without a cap.

    Raises:
        RuntimeError: A device has too little free memory.
    """
    import torch

    if cap_bytes is None or devices[0].type != "cuda":
        return [0 for _ in devices]
    assert torch.version.cuda is not None
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    held = []
    for device in devices:
        free, total = torch.cuda.mem_get_info(device)
        size = total - cap_bytes
        if size <= 0:
            held.append(0)
            continue
        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            status = runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))
        if status != _CUDA_SUCCESS:
            raise RuntimeError(
                f"{device}: the memory cap of {gib(cap_bytes)} needs {gib(size)} out of use, but {gib(free)} of "
                f"{gib(total)} are free (cudaMalloc returned {status}): end other programs on this GPU, or raise "
                "--llmgpu-gpu-memory"
            )
        held.append(size)
    return held


def allocated(devices: Sequence[torch.device]) -> list[int | None]:
    """Return the bytes of the live tensors per device; None on a CPU."""
    import torch

    return [torch.cuda.memory_allocated(device) if device.type == "cuda" else None for device in devices]


def peaks(devices: Sequence[torch.device]) -> list[int | None]:
    """Return the largest number of bytes of live tensors per device since the last `reset`; None on a CPU."""
    import torch

    return [torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None for device in devices]


def reset(devices: Sequence[torch.device]) -> None:
    """Empty caches and reset peaks, so that the memory of a case is the same alone and in a sweep."""
    import torch

    gc.collect()
    if devices[0].type != "cuda":
        return
    # No public call frees the workspaces of cuBLAS. After a larger batch size they are larger than this case needs.
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001
    torch.cuda.empty_cache()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)


def usage(
    devices: Sequence[torch.device],
    *,
    weights_bytes: Sequence[int | None],
    loading_peak_bytes: Sequence[int | None],
    held_bytes: Sequence[int],
) -> list[DeviceUse]:
    """Return the memory use of each device since the last `reset`."""
    import torch

    if devices[0].type != "cuda":
        counted = ("weights_bytes", "loading_peak_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
        return [DeviceUse(uuid=None, why=dict.fromkeys(counted, _ON_CPU))]
    return [
        DeviceUse(
            uuid=f"GPU-{torch.cuda.get_device_properties(device).uuid}",
            weights_bytes=weights,
            loading_peak_bytes=loading,
            why={} if weights is not None else dict.fromkeys(("weights_bytes", "loading_peak_bytes"), _NOT_LOADED),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(device),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(device),
            held_bytes=held,
        )
        for device, weights, loading, held in zip(devices, weights_bytes, loading_peak_bytes, held_bytes, strict=True)
    ]
