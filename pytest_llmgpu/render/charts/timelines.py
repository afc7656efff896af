"""The time lines of one case: what was sampled of every GPU, six times a second."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from pytest_llmgpu.render.charts import axes
from pytest_llmgpu.render.charts.chart import Chart, Spec, rounded, span, written
from pytest_llmgpu.render.grouping import caption
from pytest_llmgpu.report.machine import Environment
from pytest_llmgpu.report.result import CaseResult, Profile, Series

__all__ = ["charts"]

_GIB = 2**30
_POINTS = 200  # a line of more is not seen as one, and makes a page of many cases heavy
_LINES = 20  # of the table: a longer one is not read
_FEW = 30  # points of which each is seen alone
_HEIGHT = 200
_DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]  # of GPUs: what is told apart by colour is told apart by dashes too
_LEGEND = {"symbolType": "stroke", "symbolSize": 700, "symbolStrokeWidth": 2, "labelExpr": "'GPU ' + datum.label"}


class _Figure(NamedTuple):
    slug: str
    title: str
    unit: str
    scale: float
    """What one of the unit is in the report's."""
    names: tuple[str, ...]
    """Metrics that are added up."""
    zero: bool = True


_FIGURES = (
    _Figure("utilization", "GPU utilisation", "%", 1, ("utilization_pct",)),
    _Figure("memory", "Memory in use", "GiB", _GIB, ("memory_used_bytes",), zero=False),
    _Figure("pcie", "PCIe, TX and RX", "GB/s", 1e9, ("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")),
    _Figure("nvlink", "NVLink, TX and RX", "GB/s", 1e9, ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")),
    _Figure("power", "Power", "W", 1, ("power_w",)),
)


class _Bins(NamedTuple):
    """A series in at most so many points."""

    t_s: list[float]
    values: list[list[float | None]]
    """[devices][points]; None where nothing was read."""
    samples: int
    """Of a bin."""


def charts(result: CaseResult, environment: Environment) -> Iterator[Chart]:
    """Yield the time lines of a case that there are, of its first launch with any."""
    kinds = {gpu.uuid: gpu.name for gpu in environment.gpus}
    profile = next((one.profile for one in result.launches if one.profile and one.profile.series), None)
    if profile is None or profile.series is None:
        return
    seen = {kinds.get(device.uuid) or "GPU" for device in profile.devices}
    where = f"{len(profile.devices)} x {seen.pop() if len(seen) == 1 else 'GPU'}"
    for figure in _FIGURES:
        columns = [_column(of_device, figure) for of_device in profile.series.devices]
        if any(value for column in columns for value in column if value is not None):
            drawn = _chart(result, profile, profile.series, figure, columns, where)
            yield msgspec.structs.replace(drawn, measured=caption(result.case, environment))


def _chart(
    result: CaseResult,
    profile: Profile,
    series: Series,
    figure: _Figure,
    columns: Sequence[list[float | None]],
    where: str,
) -> Chart:
    names = [f"GPU {device.index}" for device in profile.devices]
    bins, coarse = _extremes(series.t_s, columns, _POINTS), _binned(series.t_s, columns, _LINES)
    means = [
        statistics.fmean(known) for values in columns if (known := [value for value in values if value is not None])
    ]
    each = f"two points are the least and the largest of {bins.samples} samples"
    each = each if bins.samples > 1 else "each point is a sample"
    return Chart(
        id=f"timeline-{figure.slug}",
        title=f"{figure.title} of {result.id} over time",
        summary=(
            f"{figure.title} of {where} in {written(profile.duration_s, digits=3)} s, "
            f"sampled every {1000 * profile.period_s:.0f} ms ({each}): "
            f"{span(means, figure.unit)} on average."
        ),
        spec=_spec(figure, [str(device.index) for device in profile.devices], bins, profile.duration_s),
        headers=["time (s)", *(f"{name} ({figure.unit})" for name in names)],
        rows=[
            [written(t), *(written(value) for value in values)]
            for t, *values in zip(coarse.t_s, *coarse.values, strict=True)
        ],
    )


def _spec(figure: _Figure, indices: list[str], bins: _Bins, duration_s: float) -> Spec:
    times = [round(t, 3) for t in bins.t_s]
    time = {
        "field": "t",
        "type": "quantitative",
        "title": "time (s)",
        "scale": {"domain": [0, max(rounded(duration_s), times[-1])], "nice": False},
        "axis": {"tickCount": 8},
    }
    values = [value for column in bins.values for value in column if value is not None]
    lines = {
        "transform": [{"fold": indices, "as": ["g", "v"]}, {"filter": "isValid(datum.v)"}],
        "mark": {"type": "line", "strokeWidth": 1.5, **({"point": {"size": 30}} if len(times) <= _FEW else {})},
        "encoding": {
            "y": axes.levels(values, f"{figure.title} ({figure.unit})", log=False, zero=figure.zero),
            "color": {
                "field": "g",
                "type": "nominal",
                "title": None,
                "scale": {"domain": indices, "range": "category"},
                "legend": _LEGEND,
            },
            "strokeDash": {
                "field": "g",
                "type": "nominal",
                "title": None,
                "scale": {"domain": indices, "range": (_DASHES * len(indices))[: len(indices)]},
                "legend": _LEGEND,
            },
        },
    }
    tooltip = [
        {"field": "t", "type": "quantitative", "title": "time (s)", "format": axes.NUMBER},
        *(
            {"field": index, "type": "quantitative", "title": f"GPU {index} ({figure.unit})", "format": axes.NUMBER}
            for index in indices
        ),
    ]
    # A line under the pointer, invisible elsewhere, with the figures of all GPUs at that time.
    hover = {"param": "at", "empty": False, "value": 0.6}
    rule = {
        "params": [
            {
                "name": "at",
                "select": {
                    "type": "point",
                    "fields": ["t"],
                    "nearest": True,
                    "on": "pointerover",
                    "clear": "pointerout",
                },
            }
        ],
        "mark": {"type": "rule", "style": "quiet"},
        "encoding": {"opacity": {"condition": hover, "value": 0}, "tooltip": tooltip},
    }
    rows = [
        {"t": t, **{index: value for index, value in zip(indices, values, strict=True) if value is not None}}
        for t, *values in zip(times, *bins.values, strict=True)
    ]
    return {**axes.sized([lines, rule], rows, height=_HEIGHT), "encoding": {"x": time}}


def _column(of_device: dict[str, list[float | None]], figure: _Figure) -> list[float | None]:
    """Return the sum of a figure's metrics; None where one of them was not read."""
    columns = [of_device[name] for name in figure.names if name in of_device]
    if len(columns) < len(figure.names):
        return []
    return [
        None if None in values else sum(value for value in values if value is not None) / figure.scale
        for values in zip(*columns, strict=True)
    ]


def _extremes(t_s: Sequence[float], columns: Sequence[list[float | None]], most: int) -> _Bins:
    """Return the least and the largest value of each bin, in their order, so that what is short is seen."""
    if len(t_s) <= most:
        return _binned(t_s, columns, most)
    size = -(-len(t_s) // (most // 2))
    bins = [slice(start, start + size) for start in range(0, len(t_s), size)]
    return _Bins(
        t_s=[t for part in bins for t in (t_s[part][0], t_s[part][-1])],
        values=[[value for part in bins for value in _ends(column[part])] for column in columns],
        samples=size,
    )


def _ends(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Return the least and the largest of several values in the order in which they were read."""
    known = [(value, place) for place, value in enumerate(values) if value is not None]
    if not known:
        return None, None
    first, second = sorted((min(known), max(known)), key=lambda pair: pair[1])
    return rounded(first[0]), rounded(second[0])


def _binned(t_s: Sequence[float], columns: Sequence[list[float | None]], most: int) -> _Bins:
    """Return the means of bins, with the middle of each."""
    size = -(-len(t_s) // most)
    starts = range(0, len(t_s), size)
    return _Bins(
        t_s=[statistics.fmean(t_s[start : start + size]) for start in starts],
        values=[[_mean(column[start : start + size]) for start in starts] for column in columns],
        samples=size,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return rounded(statistics.fmean(known)) if known else None
