"""Memory by batch size beside what there is of it: what fits, what did not, and what should (the study's figure 6)."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_llmgpu.capacity import Capacity
from pytest_llmgpu.charts import axes
from pytest_llmgpu.charts.chart import Chart, Spec, rounded, written
from pytest_llmgpu.charts.panels import Entry, Panel, fmean, memory_of
from pytest_llmgpu.charts.sweeps import Figure, curves_of, points

__all__ = ["charts"]

_GIB = 2**30
_REACH = 8  # how many times as large a batch size is where the text of a prediction no longer meets the one before
_FAR = 2.5  # a limit beyond so many times what is in use would press the curves to the ground


def charts(panel: Panel) -> Iterator[Chart | str]:
    """Yield the chart of a panel's memory, or in a sentence why there is none."""
    title = "Memory by batch size"
    figures: dict[str, Figure] = {"fullest GPU": _fullest}
    if panel.several:
        figures["mean of the GPUs"] = _mean
    drawn = points(panel, figures)
    if not drawn:
        yield f"{title}: it was not measured."
        return
    limit = _limit_gib(panel)
    near = limit is not None and limit <= _FAR * max(point.value for point in drawn)
    layers: list[Spec] = []
    sizes: list[int] = []
    if limit is not None and near:
        layers = [
            *axes.limit(limit, f"{written(limit)} GiB of each GPU"),
            *_predictions(panel, panel.capacity, limit),
        ]
        predictions = [capacity.prediction for capacity in panel.capacity]
        sizes = [one.max_batch_size for one in predictions if one is not None and one.max_batch_size > 0]
    yield Chart(
        id="memory",
        title=title,
        summary=_summary(panel, limit, near=near),
        spec=curves_of(
            panel,
            drawn,
            title=f"memory in use by {_source(panel)}",
            unit="GiB",
            log=False,
            within=[limit] if limit is not None and near else [],
            sizes=sizes,
            more=layers,
        ),
        headers=[
            "strategy",
            "batch size",
            *(f"{name} (GiB)" for name in figures),
            "capacity of each GPU (GiB)",
            "outcome",
        ],
        rows=[
            [
                entry.title,
                str(entry.batch_size),
                *(written(figure(entry)) for figure in figures.values()),
                written(limit),
                entry.result.outcome,
            ]
            for entry in panel.entries
        ],
    )


def _predictions(panel: Panel, capacities: list[Capacity], limit: float) -> list[Spec]:
    """Return a line up to the limit at the largest batch size that should fit, by strategy."""
    titles = {entry.result.case.series: entry.title for entry in panel.entries}
    layers: list[Spec] = []
    predicted = [
        (capacity.prediction.max_batch_size, titles[capacity.series])
        for capacity in capacities
        if capacity.prediction is not None and capacity.prediction.max_batch_size > 0
    ]
    left, level = 0, 0
    for size, title in sorted(predicted):
        # On the ground, where no curve is, unless the text meets that of another strategy.
        level = level + 1 if size < _REACH * left else 0
        left = size
        rows = [{"s": title, "b": size, "v": rounded(limit), "t": f"{title}: {size:,} should fit"}]
        shared = {"color": axes.curves(panel), "tooltip": {"field": "t", "type": "nominal", "title": "prediction"}}
        note = {"type": "text", "style": "note", "align": "right", "dx": -5, "dy": -9 - 15 * level}
        layers += [
            {
                "data": {"values": rows},
                "mark": {"type": "rule", "strokeDash": [2, 3], "strokeWidth": 2},
                "encoding": {**shared, "y": {"field": "v", "type": "quantitative"}, "y2": {"value": "height"}},
            },
            {
                "data": {"values": rows},
                "mark": note,
                "encoding": {**shared, "y": {"value": axes.HEIGHT}, "text": {"field": "t", "type": "nominal"}},
            },
        ]
    return layers


def _summary(panel: Panel, limit: float | None, *, near: bool) -> str:
    told = []
    for title in panel.titles:
        found = [(entry.batch_size, value) for entry in panel.of(title) if (value := _fullest(entry)) is not None]
        if found:
            (small, low), (large, high) = min(found), max(found)
            grows = f" to {written(high, digits=3)} GiB at {large}" if large > small else ""
            told.append(f"{title} {written(low, digits=3)} GiB at batch size {small}{grows}")
    text = f"Peak of the fullest GPU: {', '.join(told)}"
    if limit is not None:
        text += f"; {written(limit)} GiB of each GPU may be used{'' if near else ', far above this chart'}"
    sizes = [
        f"{capacity.strategy} {capacity.prediction.max_batch_size:,}"
        for capacity in panel.capacity
        if capacity.prediction is not None
    ]
    return f"{text}; the largest batch size that should fit: {', '.join(sizes)}." if sizes else f"{text}."


def _limit_gib(panel: Panel) -> float | None:
    """Return what a case may use of each GPU: its cap, else all; None where that is not known or the GPUs differ."""
    case = panel.entries[0].result.case
    if case.gpu_memory_bytes is not None:
        return case.gpu_memory_bytes / _GIB
    sizes = {gpu.memory_bytes for gpu in panel.report.environment.gpus}
    size = sizes.pop() if len(sizes) == 1 and case.device == "cuda" else None
    return None if size is None else size / _GIB


def _fullest(entry: Entry) -> float | None:
    found, _ = memory_of(entry.result)
    return max(found.values()) / _GIB if found else None


def _mean(entry: Entry) -> float | None:
    found, _ = memory_of(entry.result)
    return fmean(found) / _GIB if found else None


def _source(panel: Panel) -> str:
    return next((source for entry in panel.completed for found, source in [memory_of(entry.result)] if found), "NVML")
