"""Time and throughput by batch size: the study's Table 2 as curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pytest_llmgpu.charts.chart import Chart, written
from pytest_llmgpu.charts.panels import Entry, Panel
from pytest_llmgpu.charts.sweeps import Figure, Point, curves_of, points, table

__all__ = ["charts"]


def charts(panel: Panel) -> Iterator[Chart | str]:
    """Yield the charts of a panel's time, or in a sentence why there is none."""
    yield _chart(panel, "time", "s", _seconds, min)
    yield _chart(panel, "throughput", "sequences/s", _throughput, max)


def _chart(panel: Panel, name: str, unit: str, figure: Figure, best: Callable[..., Point]) -> Chart | str:
    title = f"{name.capitalize()} by batch size"
    drawn = [point for point in points(panel, {name: figure}) if point.value > 0]
    if not drawn:
        return f"{title}: no case completed."
    winners = [
        best((point for point in drawn if point.entry.title == one), key=lambda point: point.value)
        for one in panel.titles
        if any(point.entry.title == one for point in drawn)
    ]
    told = ", ".join(
        f"{point.entry.title} {written(point.value, unit, digits=3)} at batch size {point.entry.batch_size}"
        for point in winners
    )
    headers, rows = table(panel, figure, unit)
    return Chart(
        id=name,
        title=title,
        summary=f"Best of each strategy: {told}.",
        spec=curves_of(panel, drawn, title=name, unit=unit),
        headers=headers,
        rows=rows,
    )


def _seconds(entry: Entry) -> float | None:
    return entry.result.inference_s


def _throughput(entry: Entry) -> float | None:
    return entry.result.sequences_per_s
