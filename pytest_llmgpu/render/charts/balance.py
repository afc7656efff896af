"""Whether the GPUs of a case do alike: utilisation and memory of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.chart import Chart, Spec, rounded, written
from pytest_llmgpu.render.charts.panels import Panel, device_means, memory_of
from pytest_llmgpu.report.result import CaseResult

__all__ = ["charts"]

_GIB = 2**30
_ASIDE = 0.22  # strategies of one batch size stand so many doublings apart


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
        "peak of memory in use",
        "GiB",
        lambda result: {index: value / _GIB for index, value in memory_of(result)[0].items()},
    ),
)


def charts(panel: Panel) -> Iterator[Chart | str]:
    """Yield the charts of how alike a panel's GPUs do, or in a sentence why there is none."""
    for figure in _FIGURES:
        found = [(entry, figure.of_devices(entry.result)) for entry in panel.completed]
        # A case of one device has several where its launches ran on several GPUs, none of them beside another.
        several = [pair for pair in found if pair[0].result.case.devices > 1 and len(pair[1]) > 1]
        if not several:
            yield f"{figure.title}: {'it was not measured' if panel.several else 'there is one device'}."
            continue
        rows: list[Spec] = []
        for entry, of_devices in several:
            place = panel.place(entry)
            b = rounded(entry.batch_size * 2 ** (_ASIDE * place))
            rows += [
                {"s": entry.title, "n": entry.batch_size, "b": b, "g": index, "v": rounded(value)}
                for index, value in of_devices.items()
            ]
        entry, of_devices = max(several, key=lambda pair: _spread(pair[1]))
        low, high = (pick(of_devices, key=of_devices.__getitem__) for pick in (min, max))
        devices = sorted({index for _, values in several for index in values})
        yield Chart(
            id=figure.slug,
            title=figure.title,
            summary=(
                f"Furthest apart in {entry.title} at batch size {entry.batch_size}: "
                f"{written(of_devices[low], figure.unit, digits=3)} on GPU {low} and "
                f"{written(of_devices[high], figure.unit, digits=3)} on GPU {high}."
            ),
            spec=_spec(panel, figure, rows),
            headers=["strategy", "batch size", *(f"GPU {index} ({figure.unit})" for index in devices)],
            rows=[
                [entry.title, str(entry.batch_size), *(written(values.get(index)) for index in devices)]
                for entry, values in several
            ],
        )


def _spec(panel: Panel, figure: _Figure, rows: list[Spec]) -> Spec:
    colour = axes.curves(panel)
    value = {"field": "v", "type": "quantitative"}
    tooltip = [
        {"field": "s", "type": "nominal", "title": "strategy"},
        {"field": "n", "type": "quantitative", "title": "batch size"},
        {"field": "g", "type": "nominal", "title": "GPU"},
        {**value, "title": f"{figure.axis} ({figure.unit})", "format": axes.NUMBER},
    ]
    ends = {"y": {**value, "aggregate": "min"}, "y2": {"field": "v", "aggregate": "max"}}
    layers: list[Spec] = [
        {"mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": {"color": colour, **ends}},
        {
            "mark": {"type": "point", "size": 45},
            "encoding": {"color": colour, "shape": axes.shapes(panel), "tooltip": tooltip},
        },
    ]
    shared = {
        "x": axes.batch_sizes([place for row in rows for place in (row["n"], row["b"])]),
        "y": axes.levels([row["v"] for row in rows], f"{figure.axis}, a point a GPU ({figure.unit})", log=False),
    }
    return {**axes.sized(layers, rows), "encoding": shared}


def _spread(of_devices: dict[int, float]) -> float:
    return max(of_devices.values()) - min(of_devices.values())
