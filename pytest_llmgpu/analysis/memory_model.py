"""What a device's memory is in use for, and how that grows with the batch size: a prediction of what fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from pytest_llmgpu.report.capacity import Prediction
from pytest_llmgpu.report.machine import Gpu
from pytest_llmgpu.report.result import CaseResult, DeviceMemory

__all__ = ["MemorySplit", "predict", "split", "why_not"]

_NOT_LINEAR = 0.02  # peaks that are further from a line than this part of their growth are not on it
_TELLING_BYTES = 256 << 20  # what batches have to add for gaps to be more than the rounding of torch's segments
_ROUNDING = 1e-6  # of a sequence, by which floating point may miss a whole number


class MemorySplit(msgspec.Struct, frozen=True, kw_only=True):
    """What a device's memory is in use for in one case: the parts add up to NVML's largest sample."""

    index: int
    """NVML index of the device."""
    weights_bytes: int | None
    """Live tensors after loading."""
    activations_bytes: int | None
    """What the largest forward has beside them."""
    cached_bytes: int | None
    """What torch's allocator has taken beyond live tensors: rounding, fragmentation, freed tensors."""
    workspace_bytes: int | None
    """What the strategy keeps outside torch's allocator; None where it keeps nothing there."""
    rest_bytes: int | None
    """All else: CUDA context, buffers of NCCL, other programs."""
    why: dict[str, str] = {}
    """Name of a part that is None to the reason."""


def split(memory: DeviceMemory) -> MemorySplit:
    """Return what the memory of a device is in use for.

    A part that would be negative is None: its figures are of different times, which the reason says.
    """
    why: dict[str, str] = {}

    def part(name: str, whole: str, *others: str) -> int | None:
        values = {field: getattr(memory, field) for field in (whole, *others)}
        # A strategy that has no workspace leaves it out; nothing is missing then.
        missing = next((field for field in values if values[field] is None and field != "workspace_bytes"), None)
        if missing is not None:
            why[name] = memory.why.get(missing, f"{missing} is not known")
            return None
        left: int = values[whole] - sum(values[field] or 0 for field in others)
        if left < 0:
            why[name] = f"{whole} is {-left:,} bytes less than {' and '.join(others)}: it is of another moment"
            return None
        return left

    if memory.workspace_bytes is None and (reason := memory.why.get("workspace_bytes")):
        why["workspace_bytes"] = reason
    return MemorySplit(
        index=memory.index,
        weights_bytes=part("weights_bytes", "weights_bytes"),
        activations_bytes=part("activations_bytes", "peak_allocated_bytes", "weights_bytes"),
        cached_bytes=part("cached_bytes", "peak_reserved_bytes", "peak_allocated_bytes"),
        workspace_bytes=memory.workspace_bytes,
        rest_bytes=part("rest_bytes", "nvml_used_max_bytes", "peak_reserved_bytes", "workspace_bytes"),
        why=why,
    )


def predict(results: Sequence[CaseResult], gpus: Sequence[Gpu]) -> Prediction | None:
    """Predict the largest batch size that fits from the completed cases of one series; None where nothing tells.

    Per device a line is fitted (least squares) to the peak of live tensors plus workspace, against rows x longest row
    of the case's largest batch: activations and workspaces are proportional to it. What torch has cached lies in gaps
    of segments that are in use, for a part, and cannot be given back: by as much as it has grown from the smallest size
    to the largest, it goes on growing. (LLaMA-30B, mp on 4 H200: 318 without gaps, 240 with them; 128 fitted and 256
    did not.) What is in use outside of torch (`rest_bytes`) is added as it is. Small sizes hide their growth in
    rounding and in buffers of a fixed size: while the peaks are not on a line, the smallest size is dropped, down to
    two. The device that is full first decides.

    Args:
        results: of one series, in any order. Cases whose workspace had room for fewer tokens than there are do not
            count, and of those whose forwards ran in two ways only one kind: that of the largest, if it is two sizes.
        gpus: whose memory is the limit where the cases have no cap.
    """
    found = _prediction(results, gpus)
    return found if isinstance(found, Prediction) else None


def why_not(results: Sequence[CaseResult], gpus: Sequence[Gpu]) -> str:
    """Return why `predict` has nothing for these."""
    found = _prediction(results, gpus)
    return found if isinstance(found, str) else "there is a prediction"


class _Line(NamedTuple):
    """Bytes as a function of tokens."""

    fixed: float
    slope: float
    residual: float
    tokens: list[int]
    """Where the points are that it goes through."""


class _Points(NamedTuple):
    """What a series' completed cases tell of each device."""

    batch_sizes: dict[int, int]
    """Tokens of a case's largest batch, padding included, to its batch size."""
    row_tokens: float
    """Tokens of the longest row."""
    peaks: dict[int, dict[int, int]]
    """Device to tokens to bytes."""
    cached: dict[int, dict[int, int]]
    """Device to tokens to bytes that torch had taken beyond live tensors."""
    rest: dict[int, int]
    """Device to bytes outside torch's allocator and the workspace."""
    why: dict[str, str]


def _prediction(results: Sequence[CaseResult], gpus: Sequence[Gpu]) -> Prediction | str:
    """Return a prediction, or the reason why there is none."""
    completed = [result for result in results if result.outcome == "completed"]
    if not completed:
        return "no batch size completed"
    points = _points(completed)
    if not points.peaks:
        return points.why.get("peak_allocated_bytes", "memory was not measured")
    if len(points.batch_sizes) < 2:  # noqa: PLR2004 - a line needs two points
        return "it takes two batch sizes that completed, of different largest batches"
    cap = completed[0].case.gpu_memory_bytes
    limits = {gpu.index: gpu.memory_bytes - (gpu.reserved_bytes or 0) for gpu in gpus if gpu.memory_bytes is not None}
    found = []
    for index, peaks in points.peaks.items():
        limit = limits.get(index) if cap is None else cap
        if limit is None:
            return f"the memory of GPU {index} is not known"
        line = _fit(peaks)
        if line is not None and line.slope > 0:
            found.append(_of_device(index, limit, line, points))
    return min(found, key=lambda each: each.max_batch_size, default="memory does not grow with the batch size")


def _of_device(index: int, limit_bytes: int, line: _Line, points: _Points) -> Prediction:
    cached = points.cached[index]
    least, most = min(cached), max(line.tokens)
    # Growth alone counts: what loading has left behind is there at every size, and torch gives it back.
    added = line.slope * (most - least)
    gaps = max(0, cached[most] - cached[least]) / added if added >= _TELLING_BYTES else 0.0
    fixed, per_sequence = line.fixed + points.rest.get(index, 0), line.slope * (1 + gaps) * points.row_tokens
    why = {} if index in points.rest else {"rest_bytes": points.why.get("rest_bytes", "it is not known")}
    return Prediction(
        max_batch_size=max(0, math.floor((limit_bytes - fixed) / per_sequence + _ROUNDING)),
        device_index=index,
        limit_bytes=limit_bytes,
        fixed_bytes=round(fixed),
        bytes_per_sequence=round(per_sequence),
        batch_sizes=sorted({points.batch_sizes[tokens] for tokens in line.tokens}),
        residual_bytes=round(line.residual),
        gaps=gaps,
        why=why,
    )


def _points(completed: Sequence[CaseResult]) -> _Points:
    # CUDA graphs keep memory of their own: each way to run the forwards is a line.
    ways: dict[str, list[CaseResult]] = {}
    for result in sorted(completed, key=lambda result: -result.case.batch_size):
        ways.setdefault(result.case.execution, []).append(result)
    several = [results for results in ways.values() if len({result.case.batch_size for result in results}) > 1]
    chosen = several[0] if several else completed[:1]
    points = _Points({}, 0.0, {}, {}, {}, {})
    for result in chosen:
        for launch in result.launches:
            granted, batches = launch.tokens_granted, launch.batches
            clamped = granted is not None and launch.tokens_requested is not None and granted < launch.tokens_requested
            if clamped or not batches.padded_tokens:
                continue
            tokens, rows = max(zip(batches.padded_tokens, batches.sequences, strict=True))
            points = points._replace(row_tokens=max(points.row_tokens, tokens / rows))
            for memory in launch.memory:
                parts = split(memory)
                points.why.update(memory.why | parts.why)
                if memory.peak_allocated_bytes is None:
                    continue
                peaks = points.peaks.setdefault(memory.index, {})
                peak = memory.peak_allocated_bytes + (memory.workspace_bytes or 0)
                if peak > peaks.get(tokens, 0):
                    peaks[tokens] = peak
                    points.cached.setdefault(memory.index, {})[tokens] = parts.cached_bytes or 0
                points.batch_sizes[tokens] = result.case.batch_size
                if parts.rest_bytes is not None:
                    points.rest[memory.index] = max(parts.rest_bytes, points.rest.get(memory.index, 0))
    return points


def _fit(peaks: Mapping[int, int]) -> _Line | None:
    """Return the line through the upper points; None for fewer than two."""
    tokens = sorted(peaks)
    line = None
    while len(tokens) > 1:
        line = _least_squares(tokens, [peaks[each] for each in tokens])
        if line.residual <= _NOT_LINEAR * abs(peaks[tokens[-1]] - peaks[tokens[0]]):
            break
        tokens = tokens[1:]
    return line


def _least_squares(tokens: list[int], peaks: Sequence[int]) -> _Line:
    mean_tokens, mean_peak = math.fsum(tokens) / len(tokens), math.fsum(peaks) / len(peaks)
    spread = math.fsum((each - mean_tokens) ** 2 for each in tokens)
    together = math.fsum((each - mean_tokens) * (peak - mean_peak) for each, peak in zip(tokens, peaks, strict=True))
    slope = together / spread
    fixed = mean_peak - slope * mean_tokens
    residual = max(abs(fixed + slope * each - peak) for each, peak in zip(tokens, peaks, strict=True))
    return _Line(fixed, slope, residual, tokens)
