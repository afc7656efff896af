"""The largest batch size that fits: the records."""

from __future__ import annotations

import msgspec

__all__ = ["Capacity", "Prediction"]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batch size that should fit, by a line through the peaks of smaller ones."""

    max_batch_size: int
    """It fits every device; 0 where not even one sequence does."""
    device_index: int
    """NVML index of the device that is full first."""
    limit_bytes: int
    """What a case may use of that device: its cap, else all of its memory but the driver's own share."""
    fixed_bytes: int
    """What the device holds without a sequence: weights, CUDA context, buffers of NCCL."""
    bytes_per_sequence: int
    """What each sequence adds, padded to the longest, gaps included."""
    batch_sizes: list[int]
    """Those that the line goes through."""
    residual_bytes: int
    """Largest distance of a measured peak from the line."""
    gaps: float = 0.0
    """What torch's allocator takes beyond live tensors for each byte that sequences add, from the smallest batch size
    to the largest; 0 where that is not known, or does not grow with the batch."""
    why: dict[str, str] = {}
    """`rest_bytes` to the reason why what is outside torch's allocator counts as nothing."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batch size of one series, as measured and as predicted."""

    series: str
    """`Case.series`: all that decides a measurement but its batch size."""
    strategy: str
    largest_fit: int | None
    """Largest batch size that completed."""
    smallest_oom: int | None
    """Smallest that was out of memory; None where none was: larger ones than `largest_fit` may fit."""
    prediction: Prediction | None
    """Made of the cases that ran before the first that was out of memory: what came later is the truth."""
    text: str
    """Both in a sentence."""
    why: dict[str, str] = {}
    """`prediction` to the reason why there is none."""
