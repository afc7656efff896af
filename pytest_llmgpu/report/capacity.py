"""The records of the largest batch size that fits."""

from __future__ import annotations

import msgspec

from pytest_llmgpu.report.bounds import Count, Positive


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batch size that should fit, by a line through the memory peaks of smaller batch sizes."""

    max_batch_size: Count
    """Largest batch size that is predicted to fit every device; 0 if not even one sequence fits."""
    device_index: Count
    """NVML index of the device that is full first."""
    limit_bytes: int
    """Memory of that device that a case may use: the cap, or all memory without the share of the driver."""
    fixed_bytes: int
    """Memory that the device uses without any sequence: weights, CUDA context and NCCL buffers."""
    bytes_per_sequence: int
    """Memory that each sequence adds when it is padded to the longest one, allocator overhead included."""
    batch_sizes: list[Positive]
    """Batch sizes through which the line was fitted."""
    residual_bytes: Count
    """Largest distance of a measured peak from the line."""
    gaps: float = 0.0
    """Bytes that torch's allocator reserves beyond live tensors for each byte that sequences add, between the smallest
    and the largest batch size. It is 0 if this is unknown or does not grow with the batch size."""
    why: dict[str, str] = {}
    """Reason why memory outside torch's allocator is not included, under the key `rest_bytes`."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batch size of one series, as measured and as predicted."""

    series: str
    """Series of the cases: a hash over every property of a case except its batch size."""
    strategy: str
    """Strategy of the series."""
    largest_fit: Positive | None
    """Largest batch size that completed; null if none did."""
    smallest_oom: Positive | None
    """Smallest batch size that ran out of memory. Null means that none did, so that sizes above `largest_fit` may
    fit."""
    prediction: Prediction | None
    """Prediction from the cases that ran before the first one that ran out of memory."""
    text: str
    """Measured and predicted size in one sentence."""
    why: dict[str, str] = {}
    """Reason why there is no prediction, under the key `prediction`."""
