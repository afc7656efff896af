"""Time and throughput by batch size: Table 2 of Shin et al. 2024 as curves; of texts the times of a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pytest_llmgpu.render.charts.batch_sweeps import Figure, Point, curves_of, points, table
from pytest_llmgpu.render.charts.chart import Chart, formatted
from pytest_llmgpu.render.charts.panels import Panel


def charts(panel: Panel) -> Iterator[Chart | str]:
    """Yield the charts of a panel's time and throughput, or a sentence with the reason why there is none."""
    if panel.entries[0].result.case.generates:
        yield _chart(panel, "time per token", "ms", lambda entry: _ms(entry.result.token_p50_s), min)
        yield _chart(panel, "time to first token", "ms", lambda entry: _ms(entry.result.first_token_s), min)
    else:
        yield _chart(panel, "time", "s", lambda entry: entry.result.inference_s, min)
    yield _chart(panel, "throughput", "sequences/s", lambda entry: entry.result.sequences_per_s, max)


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else 1000 * time_s


def _chart(panel: Panel, name: str, unit: str, figure: Figure, best: Callable[..., Point]) -> Chart | str:
    title = f"{name.capitalize()} by batch size"
    drawn = [point for point in points(panel.completed, {name: figure}) if point.value > 0]
    if not drawn:
        return f"{title}: no completed case has one."
    texts = []
    for one in panel.titles:
        of_title = [point for point in drawn if point.entry.title == one]
        if right := [point for point in of_title if not point.entry.result.has_wrong_answers]:
            winner = best(right, key=lambda point: point.value)
            texts.append(f"{one} {formatted(winner.value, unit, digits=3)} at batch size {winner.entry.batch_size}")
        elif of_title:
            texts.append(f"{one} none, because all its answers are wrong")
    headers, rows = table(panel, figure, unit)
    return Chart(
        id=name.replace(" ", "-"),
        title=title,
        summary=f"Best of each strategy: {', '.join(texts)}.",
        spec=curves_of(panel, drawn, {name: figure}, title=f"{name} ({unit})"),
        headers=headers,
        rows=rows,
    )
