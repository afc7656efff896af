"""Time and throughput by batch size: the study's Table 2 as curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pytest_llmgpu.render.charts.batch_sweeps import Figure, Point, curves_of, points, table
from pytest_llmgpu.render.charts.chart import Chart, written
from pytest_llmgpu.render.charts.panels import Entry, Panel
from pytest_llmgpu.render.time_table import wrong

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
    told = []
    for one in panel.titles:
        of_title = [point for point in drawn if point.entry.title == one]
        if right := [point for point in of_title if not wrong(point.entry.result)]:
            winner = best(right, key=lambda point: point.value)
            told.append(f"{one} {written(winner.value, unit, digits=3)} at batch size {winner.entry.batch_size}")
        elif of_title:
            told.append(f"{one} none, as all its answers are wrong")
    headers, rows = table(panel, figure, unit)
    return Chart(
        id=name,
        title=title,
        summary=f"Best of each strategy: {', '.join(told)}.",
        spec=curves_of(panel, drawn, title=name, unit=unit),
        headers=headers,
        rows=rows,
    )


def _seconds(entry: Entry) -> float | None:
    return entry.result.inference_s


def _throughput(entry: Entry) -> float | None:
    return entry.result.sequences_per_s
