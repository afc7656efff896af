"""Times (Table 2 of Shin et al. 2024) and memory (figure 6) by batch size and strategy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.axes import Chart, Panel, Spec, formatted, rounded
from pytest_llmgpu.render.summary import outcome
from pytest_llmgpu.render.table import COLUMNS, Entry, in_use_bytes
from pytest_llmgpu.report.derived import figures_of_launch
from pytest_llmgpu.report.text import GIB

Figure = Callable[[Entry], float | None]
"""A function that returns a case's figure in the unit of an axis; None where the case has none."""

_FAR = 2.5  # a capacity above this multiple of the memory in use is not drawn: it would flatten the curves

_OF_LAUNCHES = ("inference_s", "first_token_s", "token_p50_s")
"""Fields of which each launch has a value."""


class Point(NamedTuple):
    """One mark of a chart."""

    entry: Entry
    kind: str
    """The curve among several curves of one strategy, such as `TX`."""
    value: float
    """The figure in the unit of the axis, not rounded: rounding twice may change the last digit."""


def points(entries: Sequence[Entry], figures: Mapping[str, Figure]) -> list[Point]:
    """Return the points of completed cases; `figures` maps the name of a curve to its figure."""
    return [
        Point(entry, kind, value)
        for kind, figure in figures.items()
        for entry in entries
        if (value := figure(entry)) is not None
    ]


def curves_of(panel: Panel, drawn: Sequence[Point], *, title: str, log: bool = True, more: Sequence[Spec] = ()) -> Spec:
    """Return the specification of curves over batch sizes, with `more` layers below them."""
    kinds = list(dict.fromkeys(point.kind for point in drawn))
    several = len(kinds) > 1
    rows: list[Spec] = []
    for entry, kind, value in drawn:
        row = {"s": entry.title, "b": entry.batch_size, "v": rounded(value)}
        rows.append({**row, "k": kind} if several else row)
    dash: Spec = {}
    tooltip = axes.tooltip({"v": title})
    if several:
        dash = {"strokeDash": {**axes.text("k"), "scale": {"domain": kinds}}}
        tooltip.insert(1, axes.text("k", "curve"))
    colour = axes.curves(panel)
    batch_size = {"field": "b", "type": "quantitative"}
    layers = [
        *more,
        {"mark": {"type": "line"}, "encoding": {"color": colour, "order": batch_size, **dash}},
        {"mark": {"type": "point"}, "encoding": {"color": colour, "shape": colour, "tooltip": tooltip}},
        *axes.failures(panel),
    ]
    sizes = [entry.batch_size for entry in (*panel.completed, *panel.failed)]
    y = axes.levels([row["v"] for row in rows], title, log=log)
    return axes.layered(layers, rows, x=axes.batch_sizes(sizes), y=y)


def row_of(entry: Entry, values: Iterable[float | None]) -> list[str]:
    """Return a row of a table with one case per row: strategy, batch size, and these figures."""
    return [entry.title, str(entry.batch_size), *map(formatted, values)]


def times(panel: Panel) -> Iterator[Chart | str]:
    """Yield the charts of a panel's time and throughput, or a sentence with the reason why there is none."""
    if panel.entries[0].result.case.generates:
        yield _speed(panel, "time to first token", "ms", "first_token_s", min)
        yield _speed(panel, "time per token", "ms", "token_p50_s", min)
    else:
        yield _speed(panel, "time", "s", "inference_s", min)
    yield _speed(panel, "throughput", "sequences/s", "sequences_per_s", max)


def _speed(panel: Panel, name: str, unit: str, field: str, best: Callable[..., Point]) -> Chart | str:
    """Return the chart of a field of the result in this unit; times are in seconds in the report."""

    def figure(entry: Entry) -> float | None:
        value: float | None = getattr(entry.result, field)
        return 1000 * value if value is not None and unit == "ms" else value

    def summary(drawn: Sequence[Point]) -> str:
        texts = []
        for one in panel.titles:
            of_title = [point for point in drawn if point.entry.title == one]
            if right := [point for point in of_title if not point.entry.result.has_wrong_answers]:
                winner = best(right, key=lambda point: point.value)
                texts.append(f"{one} {formatted(winner.value, unit, digits=3)} at batch size {winner.entry.batch_size}")
            elif of_title:
                texts.append(f"{one} none, because all its answers are wrong")
        return f"Best of each strategy: {', '.join(texts)}.{' Dots: launches.' * bool(launches)}"

    launches = list[Spec]()
    for entry in panel.completed if field in _OF_LAUNCHES else ():
        found = [figures_of_launch(one, entry.result.case.new_tokens)[field] for one in entry.result.launches]
        at, scale = {"s": entry.title, "b": entry.batch_size}, 1000 if unit == "ms" else 1
        launches += [{**at, "v": rounded(scale * value)} for value in found if value and len(found) > 1]
    dot = {"type": "point", "size": 8, "opacity": 0.6}
    dots = [{"data": {"values": launches}, "mark": dot, "encoding": {"color": axes.curves(panel)}}] if launches else []
    title = f"{name.capitalize()} by batch size"
    return of_figure(panel, title, (name, unit), figure, summary, dots) or f"{title}: no completed case has one."


def of_figure(
    panel: Panel,
    title: str,
    axis: tuple[str, str],
    figure: Figure,
    summary: Callable[[Sequence[Point]], str],
    more: Sequence[Spec] = (),
) -> Chart | None:
    """Return the chart of a figure above 0, with the name and the unit of its axis; None if no case has it."""
    (name, unit), drawn = axis, [point for point in points(panel.completed, {"": figure}) if point.value > 0]
    if not drawn:
        return None
    return Chart(
        id=name.replace(" ", "-"),
        title=title,
        summary=summary(drawn),
        spec=curves_of(panel, drawn, title=f"{name} ({unit})", more=more),
        headers=["strategy", "batch size", f"{name} ({unit})", "outcome"],
        rows=[[*row_of(entry, [figure(entry)]), outcome(entry.result)] for entry in panel.entries],
    )


def memory(panel: Panel) -> Iterator[Chart | str]:
    """Yield the chart of a panel's memory with its capacity, or the reason why there is none."""

    def gib(of_devices: Callable[[Sequence[float]], float], entry: Entry) -> float | None:
        found = in_use_bytes(entry.result)
        return of_devices(found) / GIB if found else None

    fullest: Figure = partial(gib, max)
    figures = {"fullest GPU": fullest}
    if panel.several:
        figures["mean of the GPUs"] = partial(gib, statistics.fmean)
    drawn = points(panel.completed, figures)
    if not drawn:
        yield "Memory by batch size: it was not measured."
        return
    capacity = _capacity_gib(panel)
    near = capacity is not None and capacity <= _FAR * max(point.value for point in drawn)
    texts = []
    for title in panel.titles:
        of_title = [entry for entry in panel.completed if entry.title == title]
        found = [(entry.batch_size, value) for entry in of_title if (value := fullest(entry)) is not None]
        if found:
            (small, low), (large, high) = min(found), max(found)
            grows = f" to {formatted(high, digits=3)} GiB at {large}" if large > small else ""
            texts.append(f"{title} {formatted(low, digits=3)} GiB at batch size {small}{grows}")
    summary = f"Peak of the fullest GPU: {', '.join(texts)}"
    if capacity is not None:
        summary += f"; capacity {formatted(capacity)} GiB per GPU{'' if near else ', far above this chart'}"
    layers = axes.limit(capacity, f"{formatted(capacity)} GiB per GPU") if capacity is not None and near else []
    by_nvml = any(COLUMNS["nvml_used_max_bytes"].devices(entry.result) for entry in panel.completed)
    axis = f"memory in use by {'NVML' if by_nvml else 'torch'} (GiB)"
    yield Chart(
        id="memory",
        title="Memory by batch size",
        summary=f"{summary}.",
        spec=curves_of(panel, drawn, title=axis, log=False, more=layers),
        headers=["strategy", "batch size", *(f"{name} (GiB)" for name in figures), "capacity per GPU (GiB)", "outcome"],
        rows=[
            [*row_of(entry, [*(figure(entry) for figure in figures.values()), capacity]), outcome(entry.result)]
            for entry in panel.entries
        ],
    )


def _capacity_gib(panel: Panel) -> float | None:
    """Return what a case may use of each GPU: its cap, else all of it; None if it is not known or the GPUs differ."""
    case = panel.entries[0].result.case
    if case.gpu_memory_bytes is not None:
        return case.gpu_memory_bytes / GIB
    sizes = {gpu.memory_bytes for gpu in panel.report.environment.gpus}
    size = sizes.pop() if len(sizes) == 1 and case.device == "cuda" else None
    return None if size is None else size / GIB
