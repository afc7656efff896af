"""Traffic by counters (the study's figure 4), by the program, and beside how busy the GPUs were (its figure 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.batch_sweeps import Figure, curves_of, points, table
from pytest_llmgpu.render.charts.chart import Chart, Spec, rounded, span, written
from pytest_llmgpu.render.charts.panels import Entry, Panel, counted, device_means, fmean, saw

__all__ = ["charts"]

_GB = 1e9
_MB = 1e6
_HEIGHT = 220  # of a chart of one strategy, in pixels
_LINKS = {"pcie": "PCIe", "nvlink": "NVLink"}


def charts(panel: Panel) -> Iterator[Chart | str]:
    """Yield the charts of a panel's communication, or in a sentence why there is none."""
    for link, name in _LINKS.items():
        yield _rates(panel, link, name)
    yield _sent(panel)
    yield from _against_utilization(panel)


def _rates(panel: Panel, link: str, name: str) -> Chart | str:
    figures: dict[str, Figure] = {way.upper(): _rate(link, way, fmean) for way in ("tx", "rx")}
    largest = [_rate(link, way, _max) for way in ("tx", "rx")]
    found = points(panel, figures)
    title = f"{name} traffic by batch size"
    drawn = [point for point in found if point.value > 0]
    if not drawn:
        return f"{title}: {'nothing went over it' if found else 'it was not counted'}."
    headers = ["strategy", "batch size", *(f"{way}, mean over the GPUs (GB/s)" for way in figures)]
    headers += [f"{way}, largest GPU (GB/s)" for way in figures]
    rows = [
        [
            entry.title,
            str(entry.batch_size),
            *(written(figure(entry)) for figure in [*figures.values(), *largest]),
        ]
        for entry in panel.completed
    ]
    sent = {
        one: [point.value for point in drawn if (point.entry.title, point.kind) == (one, "TX")] for one in panel.titles
    }
    told = ", ".join(f"{one} {span(values, 'GB/s')}" for one, values in sent.items() if values)
    host = ", what comes from the host and goes there included" if link == "pcie" else ""
    elsewhere = _elsewhere(panel) if link == "pcie" else ""
    return Chart(
        id=f"traffic-{link}",
        title=title,
        summary=f"Mean over the GPUs of what NVML's counters saw{host}; TX of {told or 'none'}{elsewhere}.",
        spec=curves_of(panel, drawn, title=f"{name}, mean over the GPUs", unit="GB/s"),
        headers=headers,
        rows=rows,
    )


def _elsewhere(panel: Panel) -> str:
    """Return whose traffic from GPU to GPU PCIe's counters did not see, for the end of a sentence."""
    told = []
    for title in panel.titles:
        traffic = [entry.result.traffic for entry in panel.of(title)]
        links = {one.path.link for one in traffic if one is not None and one.path is not None}
        if links & {"nvlink", "mixed"}:
            told.append(f"{'' if links <= {'nvlink', None} else 'a part of '}what {title} sends from GPU to GPU")
    text = f"; not in it, as it went over NVLink: {', '.join(told)}" if told else ""
    return text + "".join(_unseen(panel, title) for title in panel.titles)


def _unseen(panel: Panel, title: str) -> str:
    """Return of which batch sizes the counters saw too little, for the end of a sentence; empty for none."""
    entries = panel.of(title)
    sizes = [entry.batch_size for entry in entries if not saw(entry.result)]
    if not sizes:
        return ""
    *others, last = map(str, dict.fromkeys(sizes))
    several = f"s {', '.join(others)} and" if others else ""
    where = "" if len(sizes) == len(entries) else f" at batch size{several} {last}"
    return f"; less than half of what {title} sent{where} was seen, as it took a link that was not counted"


def _sent(panel: Panel) -> Chart | str:
    title = "Bytes sent by batch size"
    drawn = [point for point in points(panel, {"sent": _sent_mb}) if point.value > 0]
    if not drawn:
        reasons = [entry.result.why.get("traffic") for entry in panel.completed]
        reason = next(filter(None, reasons), "nothing is sent from GPU to GPU" if panel.several else "it is one device")
        return f"{title}: {reason.rstrip('.')}."
    values = {one: [point.value for point in drawn if point.entry.title == one] for one in panel.titles}
    told = ", ".join(f"{one} {span(found, 'MB')}" for one, found in values.items() if found)
    headers, rows = table(panel, _sent_mb, "MB/sequence")
    return Chart(
        id="sent",
        title=title,
        summary=f"What the program itself sends for one sequence, all ranks together and exactly: {told}.",
        spec=curves_of(panel, drawn, title="sent", unit="MB/sequence"),
        headers=headers,
        rows=rows,
    )


def _against_utilization(panel: Panel) -> Iterator[Chart | str]:
    """Yield a chart of each strategy: two orders apart, on one scale none would show how it moves."""
    title = "Traffic against GPU utilisation"
    rows: list[Spec] = []
    for entry in panel.completed:
        traffic, busy = counted(entry.result, "tx"), device_means(entry.result, "utilization_pct")
        if traffic and busy and fmean(traffic) > 0:
            rows.append({"s": entry.title, "b": entry.batch_size, "u": fmean(busy), "v": fmean(traffic) / _GB})
    if not rows:
        yield f"{title}: traffic or utilisation was not sampled."
    what = "sent, NVLink and PCIe" if _knows_nvlink(panel) else "sent, PCIe"
    for number, strategy in enumerate(panel.titles, 1):
        of_strategy = sorted((row for row in rows if row["s"] == strategy), key=lambda row: row["b"])
        if not of_strategy:
            continue
        ends = dict.fromkeys(
            f"{written(row['u'], digits=3)} % and {written(row['v'], digits=3)} GB/s at batch size {row['b']}"
            for row in (of_strategy[0], of_strategy[-1])
        )
        yield Chart(
            id=f"traffic-utilization-{number}",
            title=f"{title}: {strategy}",
            summary=f"Means over the GPUs, points joined by batch size: {' to '.join(ends)}{_unseen(panel, strategy)}.",
            spec=_path(panel, of_strategy, what),
            headers=["strategy", "batch size", "GPU utilisation (%)", f"{what} (GB/s)"],
            rows=[[strategy, str(row["b"]), written(row["u"]), written(row["v"])] for row in of_strategy],
        )


def _path(panel: Panel, rows: list[Spec], what: str) -> Spec:
    rows = [{**row, "u": rounded(row["u"]), "v": rounded(row["v"])} for row in rows]
    batch = {"field": "b", "type": "quantitative"}
    shared: Spec = {
        "x": axes.levels([row["u"] for row in rows], "GPU utilisation (%)", log=False, field="u"),
        "y": axes.levels([row["v"] for row in rows], f"{what} (GB/s)", log=False),
        "color": {**axes.curves(panel), "legend": None},
    }
    tooltip = [
        {"field": "s", "type": "nominal", "title": "strategy"},
        {**batch, "title": "batch size"},
        {"field": "u", "type": "quantitative", "title": "GPU utilisation (%)", "format": axes.NUMBER},
        {"field": "v", "type": "quantitative", "title": f"{what} (GB/s)", "format": axes.NUMBER},
    ]
    layers: list[Spec] = [
        {"mark": {"type": "line"}, "encoding": {"order": batch}},
        {"mark": {"type": "point"}, "encoding": {"shape": {**axes.shapes(panel), "legend": None}, "tooltip": tooltip}},
        *(
            {
                "mark": {"type": "text", "style": style, "align": "left", "dx": 7, "dy": -7},
                "encoding": {"text": {**batch, "format": ",d"}},
            }
            for style in ("halo", "note")  # on the lines, the letters are read by the ground around them
        ),
    ]
    return {**axes.sized(layers, rows, height=_HEIGHT), "encoding": shared}


def _knows_nvlink(panel: Panel) -> bool:
    return any(device_means(entry.result, "nvlink_tx_bytes_per_s") for entry in panel.completed)


def _sent_mb(entry: Entry) -> float | None:
    traffic = entry.result.traffic
    return None if traffic is None else traffic.wire_bytes_per_sequence / _MB


def _rate(link: str, way: str, of_devices: Callable[[dict[int, float]], float]) -> Figure:
    def figure(entry: Entry) -> float | None:
        found = device_means(entry.result, f"{link}_{way}_bytes_per_s")
        return of_devices(found) / _GB if found else None

    return figure


def _max(of_devices: dict[int, float]) -> float:
    return max(of_devices.values())
