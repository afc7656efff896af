"""Memory by batch size with the capacity of a GPU (Shin et al. 2024, figure 6)."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.batch_sweeps import Figure, curves_of, points, row_of
from pytest_llmgpu.render.charts.chart import Chart, Spec, formatted
from pytest_llmgpu.render.charts.panels import Panel, fmean, memory_of
from pytest_llmgpu.render.time_table import Entry
from pytest_llmgpu.report.text import GIB

_FAR = 2.5
"""A capacity above this multiple of the memory in use is not drawn: it would flatten the curves."""


def charts(panel: Panel) -> Iterator[Chart | str]:
    """Yield the chart of a panel's memory, or a sentence with the reason why there is none."""
    title = "Memory by batch size"
    figures: dict[str, Figure] = {"fullest GPU": _fullest}
    if panel.several:
        figures["mean of the GPUs"] = _mean
    drawn = points(panel.completed, figures)
    if not drawn:
        yield f"{title}: it was not measured."
        return
    capacity = _capacity_gib(panel)
    near = capacity is not None and capacity <= _FAR * max(point.value for point in drawn)
    layers: list[Spec] = []
    if capacity is not None and near:
        layers = [*axes.limit(capacity, f"{formatted(capacity)} GiB per GPU")]
    spec = curves_of(
        panel,
        drawn,
        figures,
        title=f"memory in use by {_source(panel)} (GiB)",
        log=False,
        more=layers,
    )
    yield Chart(
        id="memory",
        title=title,
        summary=_summary(panel, capacity, near=near),
        spec=spec,
        headers=[
            "strategy",
            "batch size",
            *(f"{name} (GiB)" for name in figures),
            "capacity per GPU (GiB)",
            "outcome",
        ],
        rows=[
            [*row_of(entry, [*(figure(entry) for figure in figures.values()), capacity]), entry.result.outcome]
            for entry in panel.entries
        ],
    )


def _summary(panel: Panel, limit: float | None, *, near: bool) -> str:
    texts = []
    for title in panel.titles:
        found = [(entry.batch_size, value) for entry in panel.of(title) if (value := _fullest(entry)) is not None]
        if found:
            (small, low), (large, high) = min(found), max(found)
            grows = f" to {formatted(high, digits=3)} GiB at {large}" if large > small else ""
            texts.append(f"{title} {formatted(low, digits=3)} GiB at batch size {small}{grows}")
    text = f"Peak of the fullest GPU: {', '.join(texts)}"
    if limit is not None:
        text += f"; capacity {formatted(limit)} GiB per GPU{'' if near else ', far above this chart'}"
    return f"{text}."


def _capacity_gib(panel: Panel) -> float | None:
    """Return what a case may use of each GPU: its cap, else all of it; None if it is not known or the GPUs differ."""
    case = panel.entries[0].result.case
    if case.gpu_memory_bytes is not None:
        return case.gpu_memory_bytes / GIB
    sizes = {gpu.memory_bytes for gpu in panel.report.environment.gpus}
    size = sizes.pop() if len(sizes) == 1 and case.device == "cuda" else None
    return None if size is None else size / GIB


def _source(panel: Panel) -> str:
    return next(source for entry in panel.completed for found, source in [memory_of(entry.result)] if found)


def _fullest(entry: Entry) -> float | None:
    found, _ = memory_of(entry.result)
    return max(found.values()) / GIB if found else None


def _mean(entry: Entry) -> float | None:
    found, _ = memory_of(entry.result)
    return fmean(found) / GIB if found else None
