"""Traffic by NVML's counters and by the program's own count (Shin et al. 2024, figures 4 and 5)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.axes import Chart, Panel, Spec, formatted, rounded, value_range
from pytest_llmgpu.render.charts.sweeps import Figure, Point, curves_of, of_figure, points, row_of
from pytest_llmgpu.render.table import COLUMNS, Entry

_GB = 1e9
_MB = 1e6
_HEIGHT = 220  # pixels of a chart of one strategy


def charts(panel: Panel) -> Iterator[Chart | str]:
    """Yield the charts of a panel's communication, or a sentence with the reason why there is none."""
    for link, name in {"pcie": "PCIe", "nvlink": "NVLink"}.items():
        yield _rates(panel, link, name)
    yield _sent(panel)
    yield from _by_utilization(panel)


def _rates(panel: Panel, link: str, name: str) -> Chart | str:
    columns_of = {way: f"{link}_{way.lower()}_bytes_per_s" for way in ("TX", "RX")}
    figures: Mapping[str, Figure] = {way: partial(_rate, name, statistics.fmean) for way, name in columns_of.items()}
    found = points(panel.completed, figures)
    title = f"{name} traffic by batch size"
    drawn = [point for point in found if point.value > 0]
    if not drawn:
        return f"{title}: {'there was none' if found else 'it was not counted'}."
    sent = {one: [value for entry, way, value in drawn if (entry.title, way) == (one, "TX")] for one in panel.titles}
    rates = [f"{one} {value_range(values, 'GB/s')}" for one, values in sent.items() if values]
    # PCIe's counters include the traffic with the host, but not what GPUs send each other over NVLink.
    host = ", including host traffic" if link == "pcie" else ""
    summary = f"NVML's counters, mean over the GPUs{host}; TX of {', '.join(rates) or 'none'}"
    if link == "pcie":
        traffic = [(entry.title, entry.result.traffic) for entry in panel.completed]
        paths = [(one, found.path.link) for one, found in traffic if found is not None and found.path is not None]
        took = dict.fromkeys(one for one, link in paths if link in {"nvlink", "mixed"})
        summary += f"; not included, because it took NVLink: GPU-to-GPU traffic of {', '.join(took)}" if took else ""
    devices = ("mean over the GPUs", "largest GPU")
    columns: list[Figure] = [*figures.values(), *(partial(_rate, name, max) for name in columns_of.values())]
    return Chart(
        id=f"traffic-{link}",
        title=title,
        summary=f"{summary}.",
        spec=curves_of(panel, drawn, title=f"{name}, mean over the GPUs (GB/s)"),
        headers=["strategy", "batch size", *(f"{way}, {which} (GB/s)" for which in devices for way in figures)],
        rows=[row_of(entry, (figure(entry) for figure in columns)) for entry in panel.completed],
    )


def _sent(panel: Panel) -> Chart | str:
    def sent_mb(entry: Entry) -> float | None:
        traffic = entry.result.traffic
        return None if traffic is None else traffic.wire_bytes_per_sequence / _MB

    def summary(drawn: Sequence[Point]) -> str:
        values = {one: [point.value for point in drawn if point.entry.title == one] for one in panel.titles}
        ranges = ", ".join(f"{one} {value_range(found, 'MB')}" for one, found in values.items() if found)
        return f"Bytes that the program sends for one sequence, exact, sum of all ranks: {ranges}."

    title = "Bytes sent by batch size"
    if chart := of_figure(panel, title, ("sent", "MB/sequence"), sent_mb, summary):
        return chart
    reasons = [entry.result.why.get("traffic") for entry in panel.completed]
    default = "GPUs send each other nothing" if panel.several else "there is one device"
    return f"{title}: {next(filter(None, reasons), default).rstrip('.')}."


def _by_utilization(panel: Panel) -> Iterator[Chart | str]:
    """Yield one chart per strategy: their traffic differs by factors of 100, which one scale would flatten."""
    title = "Traffic by GPU utilisation"
    ways, busy_of = [COLUMNS[f"{link}_tx_bytes_per_s"] for link in ("nvlink", "pcie")], COLUMNS["utilization_pct"].value
    sums = ((entry, sum(way.value(entry.result) or 0.0 for way in ways)) for entry in panel.completed)
    both = [(entry, busy_of(entry.result), sent) for entry, sent in sums]
    # The utilisation of the GPUs in percent, and what a GPU sent in GB/s.
    found = [(entry, busy, sent / _GB) for entry, busy, sent in both if busy is not None and sent]
    if not found:
        yield f"{title}: traffic or utilisation was not sampled."
    nvlink = any(COLUMNS["nvlink_tx_bytes_per_s"].devices(entry.result) for entry in panel.completed)
    sent = "sent, NVLink and PCIe (GB/s)" if nvlink else "sent, PCIe (GB/s)"
    batch_size = {"field": "b", "type": "quantitative"}
    colour = {**axes.curves(panel), "legend": None}
    tooltip = axes.tooltip({"u": "GPU utilisation (%)", "v": sent})
    right = {"type": "text", "align": "left", "dx": 7, "dy": -7}
    size = {"text": {**batch_size, "format": ",d"}}
    # The halo separates the text from the line behind it.
    layers: list[Spec] = [
        {"mark": {"type": "line"}, "encoding": {"order": batch_size}},
        {"mark": {"type": "point"}, "encoding": {"shape": colour, "tooltip": tooltip}},
        *({"mark": {**right, "style": style}, "encoding": size} for style in ("halo", "note")),
    ]
    for place, strategy in enumerate(panel.titles, 1):
        rows = sorted((one for one in found if one[0].title == strategy), key=lambda one: one[0].batch_size)
        if not rows:
            continue
        ends = dict.fromkeys(
            f"{formatted(busy, digits=3)} % and {formatted(rate, digits=3)} GB/s at batch size {entry.batch_size}"
            for entry, busy, rate in (rows[0], rows[-1])
        )
        drawn: list[Spec] = [
            {"s": entry.title, "b": entry.batch_size, "u": rounded(busy), "v": rounded(rate)}
            for entry, busy, rate in rows
        ]
        x = axes.levels([row["u"] for row in drawn], "GPU utilisation (%)", log=False, field="u")
        y = axes.levels([row["v"] for row in drawn], sent, log=False)
        yield Chart(
            id=f"traffic-utilization-{place}",
            title=f"{title}: {strategy}",
            summary=f"Mean over the GPUs, in order of batch size: {' to '.join(ends)}.",
            spec=axes.layered(layers, drawn, height=_HEIGHT, x=x, y=y, color=colour),
            headers=["strategy", "batch size", "GPU utilisation (%)", sent],
            rows=[row_of(entry, (busy, rate)) for entry, busy, rate in rows],
        )


def _rate(name: str, of_devices: Callable[[Sequence[float]], float], entry: Entry) -> float | None:
    found = COLUMNS[name].devices(entry.result)
    return of_devices(found) / _GB if found else None
