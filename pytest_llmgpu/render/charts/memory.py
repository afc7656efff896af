"""Memory by batch size beside what there is of it: what fits, what did not, and what should (the study's figure 6)."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.batch_sweeps import Figure, curves_of, points
from pytest_llmgpu.render.charts.chart import Chart, Spec, rounded, written
from pytest_llmgpu.render.charts.panels import Entry, Panel, fmean, memory_of

__all__ = ["charts"]

_GIB = 2**30
_LETTER = 6.5  # width of a letter of a note, in pixels, in the widest of the fonts
_ASIDE = 5  # pixels between a line and its text
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
    predicted = _predicted(panel)
    within: list[float] = []
    if limit is not None and near:
        within = [limit, _ground(min(point.value for point in drawn), limit, len(predicted))]
        layers = [
            *axes.limit(limit, f"{written(limit)} GiB of each GPU"),
            *_predictions(panel, predicted, limit),
        ]
        sizes = [size for size, _ in predicted]
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
            within=within,
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


def _predicted(panel: Panel) -> list[tuple[int, str]]:
    """Return the largest batch size that should fit, and whose, in the order of the sizes."""
    titles = {entry.result.case.series: entry.title for entry in panel.entries}
    return sorted(
        (capacity.prediction.max_batch_size, titles[capacity.series])
        for capacity in panel.capacity
        if capacity.prediction is not None and capacity.prediction.max_batch_size > 0
    )


def _ground(low: float, limit: float, lines: int) -> float:
    """Return where the axis begins, so that the texts of so many predictions have room below the curves, in GiB."""
    return max(0.0, min(low, limit) - lines * axes.LINE / axes.HEIGHT * abs(limit - low))


def _predictions(panel: Panel, predicted: list[tuple[int, str]], limit: float) -> list[Spec]:
    """Return a line up to the limit at the largest batch size that should fit, by strategy, then their texts.

    Each text has a line of letters of its own and stands beside its line where there is room for it, which only the
    browser knows: to the left, else to the right, else at the left edge. Lines of other strategies pass behind it.
    """
    shared = {"color": axes.curves(panel), "tooltip": {"field": "t", "type": "nominal", "title": "prediction"}}
    of_each = [
        [{"s": title, "b": size, "v": rounded(limit), "t": f"{title}: {size:,} should fit"}]
        for size, title in predicted
    ]
    rules: list[Spec] = [
        {
            "data": {"values": rows},
            "mark": {"type": "rule", "strokeDash": [2, 3], "strokeWidth": 2},
            "encoding": {**shared, "y": {"field": "v", "type": "quantitative"}, "y2": {"value": "height"}},
        }
        for rows in of_each
    ]
    place, room = "scale('x', datum.b)", f"({_LETTER} * length(datum.t) + {_ASIDE})"
    on_left, on_right = f"{place} > {room}", f"width - {place} > {room}"
    texts: list[Spec] = [
        {
            "data": {"values": rows},
            "mark": {
                "type": "text",
                "style": style,
                "align": {"expr": f"{on_left} ? 'right' : 'left'"},
                "dx": {"expr": f"{on_left} ? -{_ASIDE} : {on_right} ? {_ASIDE} : {_ASIDE} - {place}"},
                "dy": -9 - axes.LINE * level,
            },
            "encoding": {
                "y": {"value": axes.HEIGHT},
                "text": {"field": "t", "type": "nominal"},
                **({} if style == "halo" else shared),
            },
        }
        for level, rows in enumerate(of_each)
        for style in ("halo", "note")
    ]
    return [*rules, *texts]


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
