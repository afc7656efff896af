"""Splits the memory of a device into its parts, and predicts from their growth which batch size fits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from pytest_llmgpu.report.report import Gpu, Prediction
from pytest_llmgpu.report.result import CaseResult, DeviceMemory
from pytest_llmgpu.report.text import MIB

_NOT_LINEAR = 0.02  # a peak is not on a line if its distance is more than this part of the growth
_LEAST_GROWTH_BYTES = 256 * MIB  # if batches add less than this, gaps are rounding of torch's segments
_ROUNDING = 1e-6  # sequences by which floating point may miss a whole number


class MemorySplit(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the memory of a device in one case; they add up to NVML's largest sample."""

    index: int
    """NVML index of the device."""
    weights_bytes: int | None
    """Bytes of live tensors after loading."""
    activations_bytes: int | None
    """Bytes of further live tensors at the peak of the largest forward."""
    cached_bytes: int | None
    """Bytes that torch's allocator took beyond live tensors: rounding, fragmentation, freed tensors."""
    workspace_bytes: int | None
    """Bytes that the strategy keeps outside torch's allocator; None where it keeps none there."""
    rest_bytes: int | None
    """Bytes of everything else: the CUDA context, buffers of NCCL, other programs."""
    why: dict[str, str] = {}
    """Maps the name of a part that is None to the reason."""


def split(memory: DeviceMemory) -> MemorySplit:
    """Return the parts of the memory of a device.

    A part that would be negative is None: its figures are then of different moments, which is its reason.
    """
    why: dict[str, str] = {}

    def part(name: str, whole: str, *others: str) -> int | None:
        values = {field: getattr(memory, field) for field in (whole, *others)}
        # A strategy without a workspace has None there; nothing is missing then.
        missing = next((field for field in values if values[field] is None and field != "workspace_bytes"), None)
        if missing is not None:
            why[name] = memory.why.get(missing, f"{missing} is unknown")
            return None
        left: int = values[whole] - sum(values[field] or 0 for field in others)
        if left < 0:
            why[name] = f"{whole} is {-left:,} bytes less than {' and '.join(others)}: it was read at another moment"
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


def predict(results: Sequence[CaseResult], gpus: Sequence[Gpu]) -> Prediction | str:
    """Predict the largest batch size that fits from the completed cases of one series, or return the reason why not.

    For each device a line is fitted (least squares) to the peak of live tensors plus workspace, as a function of the
    tokens (rows x longest row) of the case's largest batch: activations and workspaces are proportional to it. A part
    of the memory that torch has cached lies in gaps of segments that are in use and cannot be given back: its growth
    from the smallest batch size to the largest is assumed to continue. (LLaMA-30B, mp on 4 H200: 318 without gaps, 240
    with them; 128 fitted and 256 did not.) Memory outside of torch (`rest_bytes`) is added. At small sizes rounding and
    buffers of a fixed size hide the growth: while the peaks are not on a line, the smallest size is dropped, until two
    are left. The device that is full first decides.

    Args:
        results: Results of one series, in any order. Cases whose workspace held too few tokens do not count. If the
            forwards ran in two executions, only one counts: that of the largest batch size, if it has two sizes.
        gpus: The devices; their memory is the limit where the cases have no cap.
    """
    completed = [result for result in results if result.outcome == "completed"]
    if not completed:
        return "no batch size completed"
    points = _points(completed)
    if not points.peaks:
        return points.why.get("peak_allocated_bytes", "memory was not measured")
    if len(points.batch_sizes) < 2:  # noqa: PLR2004 - a line needs two points
        return "two completed batch sizes with different largest batches are needed"
    cap = completed[0].case.gpu_memory_bytes
    limits = {gpu.index: gpu.memory_bytes - (gpu.reserved_bytes or 0) for gpu in gpus if gpu.memory_bytes is not None}
    found = []
    for index, peaks in points.peaks.items():
        limit = limits.get(index) if cap is None else cap
        if limit is None:
            return f"the memory of GPU {index} is unknown"
        line = _fit(peaks)
        if line is not None and line.slope > 0:
            found.append(_of_device(index, limit, line, points))
    if not found:
        return "memory does not grow with the batch size"
    return min(found, key=lambda each: each.max_batch_size)


class _Line(NamedTuple):
    """Memory as a function of the tokens of a batch."""

    fixed_bytes: float
    slope: float
    """Bytes per token."""
    residual_bytes: float
    """The largest distance of a point from the line."""
    tokens: list[int]
    """The tokens of the points that the line was fitted to."""


class _Points(NamedTuple):
    """The figures of the completed cases of a series, by device."""

    batch_sizes: dict[int, int]
    """Maps the tokens of a case's largest batch, padding included, to its batch size."""
    row_tokens: float
    """Tokens of the longest row."""
    peaks: dict[int, dict[int, int]]
    """Maps device and tokens to the peak in bytes."""
    cached: dict[int, dict[int, int]]
    """Maps device and tokens to the bytes that torch took beyond live tensors."""
    rest: dict[int, int]
    """Maps a device to the bytes outside torch's allocator and the workspace."""
    why: dict[str, str]
    """Maps the name of a missing figure to the reason."""


def _of_device(index: int, limit_bytes: int, line: _Line, points: _Points) -> Prediction:
    cached = points.cached[index]
    least, most = min(cached), max(line.tokens)
    # Only growth counts: torch gives back the memory that loading left behind, which is there at every size.
    added = line.slope * (most - least)
    gaps = max(0, cached[most] - cached[least]) / added if added >= _LEAST_GROWTH_BYTES else 0.0
    fixed, per_sequence = line.fixed_bytes + points.rest.get(index, 0), line.slope * (1 + gaps) * points.row_tokens
    why = {} if index in points.rest else {"rest_bytes": points.why.get("rest_bytes", "no reason was recorded")}
    return Prediction(
        max_batch_size=max(0, math.floor((limit_bytes - fixed) / per_sequence + _ROUNDING)),
        device_index=index,
        limit_bytes=limit_bytes,
        fixed_bytes=round(fixed),
        bytes_per_sequence=round(per_sequence),
        batch_sizes=sorted({points.batch_sizes[tokens] for tokens in line.tokens}),
        residual_bytes=round(line.residual_bytes),
        gaps=gaps,
        why=why,
    )


def _points(completed: Sequence[CaseResult]) -> _Points:
    # CUDA graphs keep memory of their own: each execution has a line of its own.
    executions: dict[str, list[CaseResult]] = {}
    for result in sorted(completed, key=lambda result: -result.case.batch_size):
        executions.setdefault(result.case.execution, []).append(result)
    several = [results for results in executions.values() if len({result.case.batch_size for result in results}) > 1]
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
                if (peak := memory.peak_bytes) is None:
                    continue
                peaks = points.peaks.setdefault(memory.index, {})
                if peak > peaks.get(tokens, 0):
                    peaks[tokens] = peak
                    points.cached.setdefault(memory.index, {})[tokens] = parts.cached_bytes or 0
                points.batch_sizes[tokens] = result.case.batch_size
                if parts.rest_bytes is not None:
                    points.rest[memory.index] = max(parts.rest_bytes, points.rest.get(memory.index, 0))
    return points


def _fit(peaks: Mapping[int, int]) -> _Line | None:
    """Return the line through the points with the most tokens; None for fewer than two points."""
    tokens = sorted(peaks)
    line = None
    while len(tokens) > 1:
        line = _least_squares(tokens, [peaks[each] for each in tokens])
        if line.residual_bytes <= _NOT_LINEAR * abs(peaks[tokens[-1]] - peaks[tokens[0]]):
            break
        tokens = tokens[1:]
    return line


def _least_squares(tokens: list[int], peaks: Sequence[int]) -> _Line:
    slope, fixed = statistics.linear_regression(tokens, peaks)
    residual = max(abs(fixed + slope * each - peak) for each, peak in zip(tokens, peaks, strict=True))
    return _Line(fixed, slope, residual, tokens)
