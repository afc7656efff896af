"""The time lines of one case: the samples of every GPU."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.axes import Chart, Spec, formatted, rounded, value_range
from pytest_llmgpu.render.table import caption
from pytest_llmgpu.report.report import Environment
from pytest_llmgpu.report.result import CaseResult, Profile
from pytest_llmgpu.report.text import GIB

_POINTS = 200  # most points of a line: more cannot be distinguished, and a page with many cases would become large
_LINES = 20  # most lines of the table
_FEW = 30  # up to this number of points each point has a mark
_HEIGHT = 200
_DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]
"""Dashes of the GPUs, in turn: lines differ in more than colour (WCAG 2.2, 1.4.1)."""

_FIGURES = {
    "utilization_pct": ("utilization", "GPU utilisation", "%", 1),
    "memory_used_bytes": ("memory", "Memory in use", "GiB", GIB),
    "power_w": ("power", "Power", "W", 1),
}
"""The metrics of the profile: end of the chart's id, title, unit, and the size of that unit in the report's unit."""


def charts(result: CaseResult, environment: Environment) -> Iterator[Chart]:
    """Yield the time lines of a case, from its first launch that has any."""
    # A window without a sample inside has the nearest one, which is before or after it: it is no line over time.
    profiles = (one.profile for one in result.launches if one.profile and one.profile.series and one.profile.samples)
    profile = next(profiles, None)
    if profile is None or profile.series is None:
        return
    kinds = {gpu.uuid: gpu.name for gpu in environment.gpus}
    names = {kinds.get(device.uuid) or "GPU" for device in profile.devices}
    where = f"{len(profile.devices)} x {names.pop() if len(names) == 1 else 'GPU'}"
    times = profile.series.t_s
    for metric, (slug, title, unit, scale) in _FIGURES.items():
        columns: list[list[float | None]] = [
            [None if value is None else value / scale for value in of_device.get(metric, ())]
            for of_device in profile.series.devices
        ]
        if not any(value for column in columns for value in column):
            continue
        means = [statistics.fmean(known) for column in columns if (known := _known(column))]
        # The smallest and the largest of several samples: short peaks stay visible.
        bins = _bins(len(times), _POINTS if len(times) <= _POINTS else _POINTS // 2)
        size = bins[0].stop
        points = f"two points are the extremes of {size} samples" if size > 1 else "each point is one sample"
        sampled = f"one sample per {1000 * profile.period_s:.0f} ms ({points})"
        rows: list[list[float | None]] = []
        for part in bins:
            places = sorted({part.start, min(part.stop, len(times)) - 1})
            of_devices = [_extremes(column[part], len(places)) for column in columns]
            rows += [[times[place], *(ends[number] for ends in of_devices)] for number, place in enumerate(places)]
        table: list[list[float | None]] = []
        for part in _bins(len(times), _LINES):
            mean = [statistics.fmean(known) if (known := _known(column[part])) else None for column in columns]
            table.append([statistics.fmean(times[part]), *mean])
        yield Chart(
            id=f"timeline-{slug}",
            title=f"{title} of {result.id} over time",
            summary=f"{title} of {where} during {formatted(profile.duration_s, digits=3)} s, {sampled}: "
            f"mean {value_range(means, unit)}.",
            spec=_spec(profile, f"{title} ({unit})", unit, rows, zero=metric != "memory_used_bytes"),
            headers=["time (s)", *(f"GPU {device.index} ({unit})" for device in profile.devices)],
            rows=[[formatted(value) for value in line] for line in table],
            measured=caption(result.case, environment),
        )


def _spec(profile: Profile, title: str, unit: str, points: Sequence[Sequence[float | None]], *, zero: bool) -> Spec:
    """Return the lines of the GPUs; each point has its time and the figure of each GPU."""
    indices = [str(device.index) for device in profile.devices]
    rows: list[Spec] = []
    for t, *of_devices in points:
        known = {name: rounded(value) for name, value in zip(indices, of_devices, strict=True) if value is not None}
        rows.append({"t": round(t or 0.0, 3), **known})
    stroke = {"symbolType": "stroke", "symbolSize": 700, "symbolStrokeWidth": 2, "symbolOpacity": 1}
    gpu = {**axes.text("g"), "scale": {"domain": indices}, "legend": {**stroke, "labelExpr": "'GPU ' + datum.label"}}
    values = [row[index] for row in rows for index in indices if index in row]
    lines = {
        "transform": [{"fold": indices, "as": ["g", "v"]}, {"filter": "isValid(datum.v)"}],
        "mark": {"type": "line", "strokeWidth": 1.5, **({"point": {"size": 30}} if len(rows) <= _FEW else {})},
        "encoding": {
            "y": axes.levels(values, title, log=False, zero=zero),
            "color": gpu,
            "strokeDash": {**gpu, "scale": {"domain": indices, "range": _DASHES}},
        },
    }
    # A line at the pointer, invisible elsewhere, whose tooltip has the figures of all GPUs at that time.
    select = {"type": "point", "fields": ["t"], "nearest": True, "on": "pointerover", "clear": "pointerout"}
    tooltip = [axes.number("t", "time (s)"), *(axes.number(one, f"GPU {one} ({unit})") for one in indices)]
    opacity = {"condition": {"param": "at", "empty": False, "value": 0.6}, "value": 0}
    rule = {
        "params": [{"name": "at", "select": select}],
        "mark": {"type": "rule", "style": "muted"},
        "encoding": {"opacity": opacity, "tooltip": tooltip},
    }
    time = {
        "field": "t",
        "type": "quantitative",
        "title": "time (s)",
        "scale": {"domain": [0, max(rounded(profile.duration_s), rows[-1]["t"])], "nice": False},
        "axis": {"tickCount": 8},
    }
    return axes.layered([lines, rule], rows, height=_HEIGHT, x=time)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _bins(samples: int, most: int) -> list[slice]:
    size = -(-samples // most)
    return [slice(start, start + size) for start in range(0, samples, size)]


def _extremes(values: Sequence[float | None], number: int) -> list[float | None]:
    """Return the smallest and the largest of several values, the earlier one first; of a single one itself."""
    known = [(value, place) for place, value in enumerate(values) if value is not None]
    if number == 1 or not known:
        return [known[0][0] if known else None] * number
    return [value for value, _ in sorted((min(known), max(known)), key=lambda pair: pair[1])]
