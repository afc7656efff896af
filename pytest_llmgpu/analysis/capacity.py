"""The memory of a device by part, and the largest batch size that fits: as measured, and by a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_llmgpu.analysis.reference import by_series
from pytest_llmgpu.report.report import Capacity
from pytest_llmgpu.report.result import CaseResult, DeviceMemory

_PARTS = {
    "weights_bytes": ("weights_bytes",),
    "activations_bytes": ("peak_allocated_bytes", "weights_bytes"),
    "cached_bytes": ("peak_reserved_bytes", "peak_allocated_bytes"),
    "workspace_bytes": ("workspace_bytes",),
    "rest_bytes": ("nvml_used_max_bytes", "peak_reserved_bytes", "workspace_bytes"),
}
"""Part of the memory of a device to the figure that it is of, and the figures that it is without.

weights: live tensors after loading. activations: further ones at the peak of the largest forward. cached: what torch's
allocator took beyond them. workspace: what the strategy keeps outside of the allocator. rest: the CUDA context, buffers
of NCCL, other programs. They add up to NVML's largest sample."""


def split(memory: DeviceMemory) -> dict[str, int | str]:
    """Return the parts of the memory of a device in bytes, or the reason why one is not known.

    A part that would be negative has figures of different moments, which is its reason.
    """
    found: dict[str, int | str] = {}
    for name, (whole, *others) in _PARTS.items():
        # A strategy without a workspace has None there; nothing is missing then.
        needed = [field for field in (whole, *others) if field != "workspace_bytes" or field == whole]
        missing = next((field for field in needed if getattr(memory, field) is None), None)
        left = (getattr(memory, whole) or 0) - sum(getattr(memory, field) or 0 for field in others)
        if missing is not None:
            found[name] = memory.why.get(missing, f"{missing} is unknown")
        elif left < 0:
            found[name] = f"{whole} is {-left:,} bytes less than {' and '.join(others)}: it was read at another moment"
        else:
            found[name] = left
    return found


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
