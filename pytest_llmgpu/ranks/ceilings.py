"""The rates that the GPUs of a rank reach: a matrix product, a copy, an all-reduce (torch, in a rank).

What a case could reach at best on this machine and today is computed from them. They take at most 3 s: half a second of
warming for the clocks, then the median of 20 of each. Each rate is measured once a session.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from pytest_llmgpu.inference.scoring import synchronize
from pytest_llmgpu.report.work import Ceilings, DeviceCeilings

if TYPE_CHECKING:
    import torch

_SIZE = 8192
_REPEATS = 20
_WARMING_S = 0.5
_COPY_BYTES = 256 << 20
_LARGE_BYTES, _SMALL_BYTES = 64 << 20, 16
_WARM_REDUCTIONS = 5
_ALL_REDUCE = ("all_reduce_bytes_per_s", "all_reduce_latency_s")
_ALONE = "the strategy has one rank, and nothing to reduce"
_ON_CPU = "ceilings are measured on CUDA devices only"
_NO_MEMORY = "{} bytes were not free on the GPU"


def measure(devices: Sequence[torch.device], dtype: str, world_size: int, wanted: Collection[str]) -> Ceilings:
    """Measure the GPUs of this rank; every rank must do so at the same time, as in a case.

    Of `product` (of matrices of the dtype), `copy` and `all_reduce`, what is not wanted is missing in the record.
    """
    import torch

    if devices[0].type != "cuda":
        return Ceilings(why=dict.fromkeys(("devices", *_ALL_REDUCE), _ON_CPU))
    of_matrices: torch.dtype = getattr(torch, dtype)
    found: list[DeviceCeilings] = []

    def add(name: str, time_s: Callable[[], list[float]], rate: Callable[[float], object], needed_bytes: int) -> None:
        """Add a record per device with one rate, or with the reason why there is none."""
        uuids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices]
        try:
            rates = [{name: rate(one_s)} for one_s in time_s()]
        except torch.OutOfMemoryError:
            rates = [{"why": {name: _NO_MEMORY.format(needed_bytes)}} for _ in devices]
        found.extend(DeviceCeilings(uuid=uuid, **fields) for uuid, fields in zip(uuids, rates, strict=True))  # type: ignore[arg-type]  # the field has this type

    all_reduce: dict[str, Any] = {"why": dict.fromkeys(_ALL_REDUCE, _ALONE)} if world_size == 1 else {}
    with torch.inference_mode():
        if "product" in wanted:
            add(
                "gemm_flops_per_s",
                lambda: _gemm_s(devices, of_matrices),
                lambda one_s: {dtype: 2 * _SIZE**3 / one_s},
                3 * _SIZE**2 * of_matrices.itemsize,
            )
        if "copy" in wanted:
            add("copy_bytes_per_s", lambda: _copy_s(devices), lambda one_s: 2 * _COPY_BYTES / one_s, 2 * _COPY_BYTES)
        if "all_reduce" in wanted and world_size > 1:
            all_reduce = _all_reduce(devices[0], world_size)
    torch.cuda.empty_cache()
    return Ceilings(devices=found, **all_reduce)


def merged(several: Sequence[Ceilings]) -> Ceilings:
    """Return the ceilings of several ranks, or of several cases of one session, as one record.

    A GPU keeps its first rate of each kind and dtype. The slowest all-reduce counts.
    """
    devices: dict[str, DeviceCeilings] = {}
    for device in (device for one in several for device in one.devices):
        known = devices.get(device.uuid, device)
        rates = device.gemm_flops_per_s | known.gemm_flops_per_s
        copied = known.copy_bytes_per_s or device.copy_bytes_per_s
        had = {"gemm_flops_per_s": rates, "copy_bytes_per_s": copied}
        devices[device.uuid] = DeviceCeilings(
            uuid=device.uuid,
            gemm_flops_per_s=rates,
            copy_bytes_per_s=copied,
            why={name: reason for name, reason in (known.why | device.why).items() if not had[name]},
        )
    all_reduce = {
        "all_reduce_bytes_per_s": min(filter(None, (one.all_reduce_bytes_per_s for one in several)), default=None),
        "all_reduce_latency_s": max(filter(None, (one.all_reduce_latency_s for one in several)), default=None),
    }
    why = {name: reason for one in several for name, reason in one.why.items()}
    had_any = {"devices": devices, **all_reduce}
    return Ceilings(
        devices=list(devices.values()),
        **all_reduce,
        why={name: reason for name, reason in why.items() if not had_any[name]},
    )


def _gemm_s(devices: Sequence[torch.device], dtype: torch.dtype) -> list[float]:
    """Return the median duration of a product per device."""
    import torch

    # Random numbers, as weights are: products of zeros draw less power, and run faster.
    operands = [[torch.randn(_SIZE, _SIZE, dtype=dtype, device=device) for _ in range(2)] for device in devices]
    products = [torch.empty(_SIZE, _SIZE, dtype=dtype, device=device) for device in devices]

    def multiply(number: int) -> None:
        torch.mm(*operands[number], out=products[number])

    until_s = time.perf_counter() + _WARMING_S
    while time.perf_counter() < until_s:
        for number, device in enumerate(devices):
            with torch.cuda.device(device):
                multiply(number)
        synchronize(devices)
    return _medians_s(devices, multiply)


def _copy_s(devices: Sequence[torch.device]) -> list[float]:
    """Return the median duration of a copy per device."""
    import torch

    pairs = [[torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)] for device in devices]
    return _medians_s(devices, lambda number: pairs[number][0].copy_(pairs[number][1]))


def _all_reduce(device: torch.device, world_size: int) -> dict[str, Any]:
    """Return the fields of `Ceilings` from the median durations of a large and of a small all-reduce."""
    import torch
    from torch import distributed

    try:
        large = torch.zeros(_LARGE_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        large = torch.zeros(0, dtype=torch.uint8, device=device)
    small = torch.full((_SMALL_BYTES,), int(large.numel() > 0), dtype=torch.uint8, device=device)
    # A rank that has no room must not leave the others waiting.
    distributed.all_reduce(small)
    if int(small[0]) < world_size:
        return {"why": dict.fromkeys(_ALL_REDUCE, _NO_MEMORY.format(_LARGE_BYTES))}
    times_s = []
    for tensor in (large, small):
        for _ in range(_WARM_REDUCTIONS):
            distributed.all_reduce(tensor)
        times_s.append(_medians_s([device], lambda _, reduced=tensor: distributed.all_reduce(reduced))[0])  # type: ignore[misc]
    large_s, small_s = times_s
    rate = 2 * (world_size - 1) / world_size * _LARGE_BYTES / large_s
    return {"all_reduce_bytes_per_s": rate, "all_reduce_latency_s": small_s}


def _medians_s(devices: Sequence[torch.device], run: Callable[[int], object]) -> list[float]:
    """Return the median duration per device of `run(number of the device)`, on all devices at the same time."""
    import torch

    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in devices]
    for _ in range(_REPEATS):
        for number, device in enumerate(devices):
            with torch.cuda.device(device):
                began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                began.record()
                run(number)
                ended.record()
                events[number].append((began, ended))
    synchronize(devices)
    return [statistics.median(began.elapsed_time(ended) for began, ended in pairs) / 1e3 for pairs in events]
