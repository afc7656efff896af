"""The time lines of one case: the samples of every GPU."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.chart import Chart, Spec, formatted, rounded, value_range
from pytest_llmgpu.render.grouping import caption
from pytest_llmgpu.report.report import Environment
from pytest_llmgpu.report.result import CaseResult, Profile, Series
from pytest_llmgpu.report.text import GIB

_POINTS = 200
"""Most points of a line: more cannot be distinguished, and a page with many cases would become large."""
_LINES = 20
"""Most lines of the table."""
_FEW = 30
"""Up to this number of points each point has a mark."""
_HEIGHT = 200
_DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]
"""Dashes of the GPUs, in turn: lines differ in more than colour (WCAG 2.2, 1.4.1)."""


class _Figure(NamedTuple):
    slug: str
    title: str
    unit: str
    scale: float
    """The size of one unit of the chart in the unit of the report."""
    names: tuple[str, ...]
    """The metrics of the profile that are summed."""
    zero: bool = True
    """True if the axis begins at 0."""


_FIGURES = (
    _Figure("utilization", "GPU utilisation", "%", 1, ("utilization_pct",)),
    _Figure("memory", "Memory in use", "GiB", GIB, ("memory_used_bytes",), zero=False),
    _Figure("pcie", "PCIe, TX and RX", "GB/s", 1e9, ("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")),
    _Figure("nvlink", "NVLink, TX and RX", "GB/s", 1e9, ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")),
    _Figure("power", "Power", "W", 1, ("power_w",)),
)


class _Bins(NamedTuple):
    """A series with a limited number of points."""

    t_s: list[float]
    """[points]: seconds since the start of the window."""
    values: list[list[float | None]]
    """[devices][points]: the figures; None where nothing was sampled."""
    samples: int
    """The number of samples in a bin."""


def charts(result: CaseResult, environment: Environment, before: CaseResult | None = None) -> Iterator[Chart]:
    """Yield the time lines of a case, from its first launch that has any, with those of the baseline."""
    profile, then = _sampled(result), None if before is None else _sampled(before)
    if profile is None or profile.series is None:
        return
    kinds = {gpu.uuid: gpu.name for gpu in environment.gpus}
    names = {kinds.get(device.uuid) or "GPU" for device in profile.devices}
    where = f"{len(profile.devices)} x {names.pop() if len(names) == 1 else 'GPU'}"
    measured = caption(result.case, environment)
    for figure in _FIGURES:
        columns = [_column(of_device, figure) for of_device in profile.series.devices]
        means = [statistics.fmean(known) for values in columns if (known := _known(values))]
        if any(any(_known(column)) for column in columns):
            bins, table = _extremes(profile.series, columns, _POINTS), _binned(profile.series, columns, _LINES)
            point = (
                f"two points are the extremes of {bins.samples} samples"
                if bins.samples > 1
                else "each point is one sample"
            )
            yield Chart(
                id=f"timeline-{figure.slug}",
                title=f"{figure.title} of {result.id} over time",
                summary=(
                    f"{figure.title} of {where} during {formatted(profile.duration_s, digits=3)} s, "
                    f"one sample per {1000 * profile.period_s:.0f} ms ({point}): "
                    f"mean {value_range(means, figure.unit)}."
                    f"{'' if then is None else f' {axes.FAINT}'}"
                ),
                spec=_spec(profile, figure, bins, then),
                headers=["time (s)", *(f"GPU {device.index} ({figure.unit})" for device in profile.devices)],
                rows=[
                    [formatted(t), *(formatted(value) for value in values)]
                    for t, *values in zip(table.t_s, *table.values, strict=True)
                ],
                measured=measured,
            )


def _sampled(result: CaseResult) -> Profile | None:
    # A window without a sample inside has the nearest one, which is before or after it: it is no line over time.
    found = (one.profile for one in result.launches if one.profile and one.profile.series and one.profile.samples)
    return next(found, None)


def _rows(indices: Sequence[str], bins: _Bins) -> list[Spec]:
    """Return one row per time, with a field per GPU; the GPUs of a baseline have the names of the candidate's."""
    return [
        {"t": round(t, 3), **{name: value for name, value in zip(indices, values, strict=False) if value is not None}}
        for t, *values in zip(bins.t_s, *bins.values, strict=True)
    ]


def _spec(profile: Profile, figure: _Figure, bins: _Bins, then: Profile | None) -> Spec:
    indices = [str(device.index) for device in profile.devices]
    rows = _rows(indices, bins)
    before: list[Spec] = []
    duration_s = profile.duration_s
    if then is not None and then.series is not None:
        columns = [_column(of_device, figure) for of_device in then.series.devices]
        if all(columns):
            before = _rows(indices, _extremes(then.series, columns, _POINTS))
            duration_s = max(duration_s, then.duration_s)
    legend = {
        "symbolType": "stroke",
        "symbolSize": 700,
        "symbolStrokeWidth": 2,
        "symbolOpacity": 1,
        "labelExpr": "'GPU ' + datum.label",
    }
    gpu = {**axes.text("g"), "scale": {"domain": indices}, "legend": legend}
    values = [row[index] for row in (*rows, *before) for index in indices if index in row]
    lines = {
        "transform": [{"fold": indices, "as": ["g", "v"]}, {"filter": "isValid(datum.v)"}],
        "mark": {"type": "line", "strokeWidth": 1.5, **({"point": {"size": 30}} if len(rows) <= _FEW else {})},
        "encoding": {
            "y": axes.levels(values, f"{figure.title} ({figure.unit})", log=False, zero=figure.zero),
            "color": gpu,
            "strokeDash": {**gpu, "scale": {"domain": indices, "range": _DASHES}},
        },
    }
    # A line at the pointer, invisible elsewhere, whose tooltip has the figures of all GPUs at that time.
    select = {"type": "point", "fields": ["t"], "nearest": True, "on": "pointerover", "clear": "pointerout"}
    rule = {
        "params": [{"name": "at", "select": select}],
        "mark": {"type": "rule", "style": "muted"},
        "encoding": {
            "opacity": {"condition": {"param": "at", "empty": False, "value": 0.6}, "value": 0},
            "tooltip": [
                axes.number("t", "time (s)"),
                *(axes.number(index, f"GPU {index} ({figure.unit})") for index in indices),
            ],
        },
    }
    time = {
        "field": "t",
        "type": "quantitative",
        "title": "time (s)",
        "scale": {"domain": [0, max(rounded(duration_s), rows[-1]["t"])], "nice": False},
        "axis": {"tickCount": 8},
    }
    return axes.layered([*axes.with_baseline([lines], before), rule], rows, height=_HEIGHT, x=time)


def _column(of_device: dict[str, list[float | None]], figure: _Figure) -> list[float | None]:
    """Return the sum of a figure's metrics; None where one of them was not sampled."""
    columns = [of_device[name] for name in figure.names if name in of_device]
    if len(columns) < len(figure.names):
        return []
    return [
        None if None in values else sum(value for value in values if value is not None) / figure.scale
        for values in zip(*columns, strict=True)
    ]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _extremes(series: Series, columns: Sequence[list[float | None]], most: int) -> _Bins:
    """Return the smallest and the largest value of each bin in the order of their times: short peaks stay visible."""
    if len(series.t_s) <= most:
        return _binned(series, columns, most)
    size = -(-len(series.t_s) // (most // 2))
    bins = [slice(start, start + size) for start in range(0, len(series.t_s), size)]
    return _Bins(
        t_s=[t for part in bins for t in (series.t_s[part][0], series.t_s[part][-1])],
        values=[[value for part in bins for value in _ends(column[part])] for column in columns],
        samples=size,
    )


def _ends(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Return the smallest and the largest of several values, the earlier one first."""
    known = [(value, place) for place, value in enumerate(values) if value is not None]
    if not known:
        return None, None
    first, second = sorted((min(known), max(known)), key=lambda pair: pair[1])
    return rounded(first[0]), rounded(second[0])


def _binned(series: Series, columns: Sequence[list[float | None]], most: int) -> _Bins:
    """Return the mean value and the mean time of each bin."""
    size = -(-len(series.t_s) // most)
    bins = [slice(start, start + size) for start in range(0, len(series.t_s), size)]
    return _Bins(
        t_s=[statistics.fmean(series.t_s[part]) for part in bins],
        values=[
            [rounded(statistics.fmean(known)) if (known := _known(column[part])) else None for part in bins]
            for column in columns
        ],
        samples=size,
    )
