"""What a rank's devices hold: the cap, the peaks, and a clean start for every case (torch, in a rank)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceUse", "allocated", "hold", "peaks", "reset", "spare", "usage"]

_CUDA_SUCCESS = 0
_NOT_LOADED = "the model was not loaded"
_ON_CPU = "torch does not count memory on a CPU"


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device as torch counts it."""

    uuid: str | None
    """As NVML writes it; None on a CPU."""
    weights_bytes: int | None = None
    """Allocated after loading."""
    loading_peak_bytes: int | None = None
    """Largest sum of live tensors while the model was loaded."""
    peak_allocated_bytes: int | None = None
    """Since the last `reset`."""
    peak_reserved_bytes: int | None = None
    """Since the last `reset`."""
    held_bytes: int = 0
    """Taken out of use by `hold`."""
    why: dict[str, str] = {}
    """Name of a field that is None to the reason."""


def hold(devices: Sequence[torch.device], cap_bytes: int | None) -> list[int]:
    """Take all memory of each device but `cap_bytes` out of use, for the life of this process.

    By cudaMalloc itself and not by torch's allocator, which would count the bytes as its own and could lend them out.
    Contexts, NCCL buffers and workspaces then have to live inside the cap too.

    Returns:
        Bytes held per device; zeros without a cap.

    Raises:
        RuntimeError: The device has less than that free.
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
                f"{device}: {size} bytes cannot be held to cap it at {cap_bytes}: {free} of {total} are free "
                f"(cudaMalloc returned {status})"
            )
        held.append(size)
    return held


def allocated(devices: Sequence[torch.device]) -> list[int | None]:
    """Return the bytes of live tensors per device; None on a CPU."""
    import torch

    return [torch.cuda.memory_allocated(device) if device.type == "cuda" else None for device in devices]


def peaks(devices: Sequence[torch.device]) -> list[int | None]:
    """Return the largest sum of live tensors per device since the last `reset`; None on a CPU."""
    import torch

    return [torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None for device in devices]


def spare(devices: Sequence[torch.device]) -> list[int]:
    """Return the bytes of each CUDA device that live tensors could still take, caches given back."""
    import torch

    return [
        torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        for device in devices
    ]


def reset(devices: Sequence[torch.device]) -> None:
    """Empty caches and forget peaks, so that a case's memory is the same alone and in a sweep."""
    import torch

    gc.collect()
    if devices[0].type != "cuda":
        return
    # No public call frees cuBLAS workspaces, which an earlier batch size may have left larger than this one needs.
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001
    torch.cuda.empty_cache()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)


def usage(
    devices: Sequence[torch.device],
    weights_bytes: Sequence[int | None],
    loading_peak_bytes: Sequence[int | None],
    held_bytes: Sequence[int],
) -> list[DeviceUse]:
    """Return what each device held since the last `reset`."""
    import torch

    if devices[0].type != "cuda":
        counted = ("weights_bytes", "loading_peak_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
        why = dict.fromkeys(counted, _ON_CPU)
        return [DeviceUse(uuid=None, why=why)]
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
