"""The memory of a device by part, and the largest batch size that fits: as measured, and by a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pytest_llmgpu.analysis.reference import by_series
from pytest_llmgpu.report.report import Capacity
from pytest_llmgpu.report.result import CaseResult, DeviceMemory


class MemorySplit(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the memory of a device in one case; they add up to NVML's largest sample."""

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
        weights_bytes=part("weights_bytes", "weights_bytes"),
        activations_bytes=part("activations_bytes", "peak_allocated_bytes", "weights_bytes"),
        cached_bytes=part("cached_bytes", "peak_reserved_bytes", "peak_allocated_bytes"),
        workspace_bytes=memory.workspace_bytes,
        rest_bytes=part("rest_bytes", "nvml_used_max_bytes", "peak_reserved_bytes", "workspace_bytes"),
        why=why,
    )


def capacities(results: Sequence[CaseResult]) -> list[Capacity]:
    """Return the largest batch size of each series, in the order in which they appear."""
    found = []
    for series in by_series(results):
        fit = max((result.case.batch_size for result in series if result.outcome == "completed"), default=None)
        oom = min((result.case.batch_size for result in series if result.outcome == "oom"), default=None)
        if fit is None and any(map(_while_loading, series)):
            text = "The model itself does not fit"
        elif fit is None:
            text = f"The largest batch size is {'unknown: none completed' if oom is None else f'below {oom}'}"
        elif oom is None:
            text = f"The largest batch size is {fit} or above: nothing was out of memory"
        elif oom <= fit:
            text = f"The largest batch size is not clear: {oom} ran out of memory and {fit} completed"
        elif oom == fit + 1:
            text = f"The largest batch size is {fit}: {oom} runs out of memory"
        else:
            text = f"The largest batch size is between {fit}, which fits, and {oom}, which does not"
        name, strategy = series[0].case.series, series[0].case.strategy
        found.append(Capacity(series=name, strategy=strategy, largest_fit=fit, smallest_oom=oom, text=f"{text}."))
    return found


def search(results: Sequence[CaseResult], probe: Callable[[int], CaseResult | None]) -> None:
    """Measure batch sizes until the largest that fits and the smallest that does not are neighbours.

    The interval is halved. The search ends early if a case ends in another way than completed or out of memory: that is
    no information on memory. It does not begin if the model itself does not fit.
    """
    if any(map(_while_loading, results)):
        return
    high = min(result.case.batch_size for result in results if result.outcome == "oom")
    fitted = [result.case.batch_size for result in results if result.outcome == "completed"]
    low = max((size for size in fitted if size < high), default=0)
    while high - low > 1:
        size = (low + high) // 2
        result = probe(size)
        if result is not None and result.outcome == "completed":
            low = size
        elif result is not None and result.outcome == "oom" and not _while_loading(result):
            high = size
        else:
            return


def _while_loading(result: CaseResult) -> bool:
    return result.outcome == "oom" and result.failure is not None and result.failure.phase == "load"
