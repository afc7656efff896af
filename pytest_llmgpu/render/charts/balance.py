"""Utilisation and memory of each GPU of a case: how far the GPUs are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.batch_sweeps import row_of
from pytest_llmgpu.render.charts.chart import Chart, Spec, formatted, rounded
from pytest_llmgpu.render.charts.panels import Panel, device_means, memory_of
from pytest_llmgpu.render.time_table import Entry
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import GIB


class _Figure(NamedTuple):
    slug: str
    title: str
    axis: str
    unit: str
    of_devices: Callable[[CaseResult], dict[int, float]]


_FIGURES = (
    _Figure(
        "balance-utilization",
        "GPU utilisation of each GPU",
        "GPU utilisation",
        "%",
        lambda result: device_means(result, "utilization_pct"),
    ),
    _Figure(
        "balance-memory",
        "Memory of each GPU",
        "peak memory in use",
        "GiB",
        lambda result: {index: value / GIB for index, value in memory_of(result)[0].items()},
    ),
)


def charts(panel: Panel) -> Iterator[Chart | str]:
    """Yield the charts of the balance between a panel's GPUs, or a sentence with the reason why there is none."""
    for figure in _FIGURES:
        found = [(entry, figure.of_devices(entry.result)) for entry in panel.completed]
        # A case of one device has several figures if its launches ran on different GPUs. That is no imbalance.
        several = [pair for pair in found if pair[0].result.case.devices > 1 and len(pair[1]) > 1]
        if not several:
            yield f"{figure.title}: {'it was not measured' if panel.several else 'there is one device'}."
            continue
        rows = _rows(several)
        before = _rows([(entry, figure.of_devices(entry.result)) for entry in panel.before])
        entry, of_devices = max(several, key=lambda pair: max(pair[1].values()) - min(pair[1].values()))
        ends = {
            formatted(of_devices[index], figure.unit, digits=3): f"on GPU {index}"
            for index in (pick(of_devices, key=of_devices.__getitem__) for pick in (min, max))
        }
        devices = sorted({index for _, values in several for index in values})
        yield Chart(
            id=figure.slug,
            title=figure.title,
            summary=(
                f"Largest difference: {entry.title} at batch size {entry.batch_size}, "
                f"{' and '.join(map(' '.join, ends.items()))}."
                if len(ends) > 1
                else "The GPUs of each case are equal."
            ),
            spec=_spec(panel, f"{figure.axis} ({figure.unit})", rows, before),
            headers=["strategy", "batch size", *(f"GPU {index} ({figure.unit})" for index in devices)],
            rows=[row_of(entry, map(values.get, devices)) for entry, values in several],
        )


def _rows(found: Sequence[tuple[Entry, dict[int, float]]]) -> list[Spec]:
    return [
        {"s": entry.title, "b": entry.batch_size, "g": index, "v": rounded(value)}
        for entry, of_devices in found
        for index, value in of_devices.items()
    ]


def _spec(panel: Panel, title: str, rows: list[Spec], before: list[Spec]) -> Spec:
    shared = {"color": axes.curves(panel), "xOffset": axes.offset(panel)}
    value = {"field": "v", "type": "quantitative"}
    tooltip = axes.tooltip(axes.number("g", "GPU"), axes.number("v", title))
    layers: list[Spec] = [
        {
            "mark": {"type": "rule", "strokeWidth": 1.5},
            "encoding": {**shared, "y": {**value, "aggregate": "min"}, "y2": {"field": "v", "aggregate": "max"}},
        },
        {
            "mark": {"type": "point", "size": 45},
            "encoding": {**shared, "shape": axes.curves(panel), "tooltip": tooltip},
        },
    ]
    y = axes.levels([row["v"] for row in (*rows, *before)], f"{title}, one point per GPU", log=False)
    return axes.layered(axes.with_baseline(layers, before), rows, x=axes.ordinal_batch_sizes(panel), y=y)
