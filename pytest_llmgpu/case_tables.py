"""The tables of one block of cases: time and accuracy as the study's Table 2, communication and memory per GPU."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence

import msgspec
from tabulate import tabulate

from pytest_llmgpu.case import Case
from pytest_llmgpu.metrics import measured
from pytest_llmgpu.report import Environment
from pytest_llmgpu.result import CaseResult

__all__ = ["WIDTH", "Painter", "Rows", "device_table", "layout", "painter", "time_table"]

WIDTH = 100
"""Columns of a terminal that everything fits in, with three strategies."""

Painter = Callable[[str, str], str]
"""Text and the number of an ANSI style to the text in that style."""

_GIB = 2**30
_LONG_S = 600  # from here on people think in minutes

_RED, _GREEN, _YELLOW = "31", "32", "33"
_WORDS = {"oom": "OoM", "skipped_after_oom": "-"}
_LEGEND = {
    "*": "* fastest of its strategy",
    "!": "! wrong answers",
    "g": "g: as CUDA graphs",
    "OoM": "OoM: out of memory",
    "-": "-: not run, a smaller batch size was out of memory",
}

_USUAL_BACKENDS = {"mp": "accelerate", "tp": "transformers", "iok": "deepspeed"}
"""Backends that a title need not name."""

Rows = dict[tuple[int, int], dict[str, CaseResult]]
"""Batch size and number of the measurement to the result of each column."""


class _Figure(msgspec.Struct, frozen=True):
    """A column of the devices' table."""

    title: str
    key: str
    """Name of the metric of the profile, or of the field of `DeviceMemory`."""
    unit: float
    """What one of the title's units is in the report's."""


_FIGURES = (
    _Figure("GPU busy\n%", "utilization_pct", 1),
    _Figure("PCIe TX\nGB/s", "pcie_tx_bytes_per_s", 1e9),
    _Figure("PCIe RX\nGB/s", "pcie_rx_bytes_per_s", 1e9),
    _Figure("torch peak\nGiB", "peak_allocated_bytes", _GIB),
    _Figure("NVML peak\nGiB", "nvml_used_max_bytes", _GIB),
)


def time_table(cases: Sequence[CaseResult], paint: Painter) -> str:
    """Return batch sizes down and strategies across: time and accuracy, or how a case ended without them."""
    columns, rows = layout(cases)
    show_s = _seconds_format([result.inference_s for result in cases if result.inference_s is not None])
    metric = next((check.metric for result in cases if (check := result.accuracy_check) is not None), "acc_norm")
    dummy = cases[0].case.load_format == "dummy"
    best = [_fastest([row[title] for row in rows.values() if title in row]) for title in columns]
    marks: set[str] = set()

    def cell(result: CaseResult | None) -> str:
        if result is None:
            return ""
        if result.outcome != "completed":
            word = _WORDS.get(result.outcome, result.outcome)
            marks.add(word)
            return paint(word, _YELLOW if result.outcome in _WORDS else _RED)
        text = "done" if result.inference_s is None else show_s(result.inference_s)
        value = result.acc if metric == "acc" else result.acc_norm
        if value is not None and not dummy:
            text += f" / {100 * value:.1f} %"
        if result.case.execution == "cuda_graphs":
            marks.add("g")
            text = f"g {text}"
        if _wrong(result):
            marks.add("!")
            return paint(f"! {text}", _RED)
        if any(result is fastest for fastest in best):
            marks.add("*")
            return paint(f"* {text}", _GREEN)
        return text

    body = [[_row_name(row), *(cell(results.get(title)) for title in columns)] for row, results in rows.items()]
    items = next((accuracy.items for result in cases if (accuracy := measured(result)) is not None), None)
    title = "Time" if items is None else f"Time for {items:,} items"
    if dummy:
        title += " (the accuracy of random weights is chance)"
    elif items is not None:
        title += f" / {metric}"
    legend = "   ".join(text for mark, text in _LEGEND.items() if mark in marks)
    table = _table(["batch size", *columns], body, ["right"] * (1 + len(columns)))
    return "\n".join([title, table, *textwrap.wrap(legend, WIDTH)])


def device_table(cases: Sequence[CaseResult], environment: Environment) -> str:
    """Return utilisation, communication and memory of the completed cases, or a line that says why there are none."""
    columns, rows = layout(cases)
    order = [(title, row, rows[row][title]) for title in columns for row in rows if title in rows[row]]
    order = [(title, row, result) for title, row, result in order if result.outcome == "completed"]
    if not order:
        return ""
    if cases[0].case.device == "cpu":
        return "No communication or memory table: this ran on a CPU, and NVML and torch's counters see GPUs only."
    values = {figure: [_values(result, figure) for _, _, result in order] for figure in _FIGURES}
    reasons: dict[str, list[str]] = {}
    for figure in [figure for figure in _FIGURES if not any(values[figure])]:
        del values[figure]
        reason = _reason([result for _, _, result in order], figure, environment)
        reasons.setdefault(reason, []).append(figure.title.partition("\n")[0])
    lines = []
    if values:
        written = [_column(column) for column in values.values()]
        titles = [
            title if number == 0 or order[number - 1][0] != title else "" for number, (title, *_) in enumerate(order)
        ]
        body = [
            [title, _row_name(row), *cells] for title, (_, row, _), *cells in zip(titles, order, *written, strict=True)
        ]
        several = any(len(of_devices) > 1 for column in values.values() for of_devices in column)
        lines.append("Communication and memory per GPU" + (": mean over the GPUs (largest)" if several else ""))
        headers = ["strategy", "batch\nsize", *(figure.title for figure in values)]
        lines.append(_table(headers, body, ["left"] + ["right"] * (len(headers) - 1)))
    for reason, names in reasons.items():
        lines += textwrap.wrap(f"No {', '.join(names)}: {reason}.", WIDTH)
    return "\n".join(lines)


def painter(color: bool) -> Painter:
    """Return a function that styles text, or one that leaves it as it is."""
    return lambda text, style: f"\x1b[{style}m{text}\x1b[0m" if color and text else text


def layout(cases: Sequence[CaseResult]) -> tuple[list[str], Rows]:
    """Return the columns' titles, and the results by row."""
    by_series = {result.case.series: result.case for result in cases}
    titles = {series: _title(case, list(by_series.values())) for series, case in by_series.items()}
    rows: Rows = {}
    for result in cases:
        title, number = titles[result.case.series], 1
        while title in rows.get((result.case.batch_size, number), {}):
            number += 1
        rows.setdefault((result.case.batch_size, number), {})[title] = result
    return list(titles.values()), dict(sorted(rows.items()))


def _title(case: Case, columns: Sequence[Case]) -> str:
    """Return the strategy, with what is not usual of it and what tells it from other columns of the same strategy."""
    alike = [other for other in columns if other.strategy == case.strategy]
    unusual = _USUAL_BACKENDS.get(case.strategy, case.backend) != case.backend
    backend = case.backend if unusual or any(other.backend != case.backend for other in alike) else None
    options = [
        f"{name}={value}"
        for name, value in case.strategy_options.items()
        if value or any(name not in other.strategy_options or other.strategy_options[name] != value for other in alike)
    ]
    return " ".join(filter(None, [case.strategy, backend, *options]))


def _values(result: CaseResult, figure: _Figure) -> list[float]:
    """Return a figure of each device in each launch; of a sampled metric its mean over the window."""
    if figure.key.endswith("_bytes"):
        found = [getattr(memory, figure.key) for launch in result.launches for memory in launch.memory]
    else:
        profiles = [launch.profile for launch in result.launches if launch.profile is not None]
        metrics = [device.metrics.get(figure.key) for profile in profiles for device in profile.devices]
        found = [metric.mean for metric in metrics if metric is not None]
    return [value / figure.unit for value in found if value is not None]


def _column(values: Sequence[Sequence[float]]) -> list[str]:
    """Return `mean (largest)` per case, with the decimals that the column's smallest mean needs."""
    means = [statistics.fmean(of_devices) if of_devices else None for of_devices in values]
    digits = _digits(min((mean for mean in means if mean), default=1.0))
    return [
        ""
        if mean is None
        else f"{mean:.{digits}f} ({max(of_devices):.{digits}f})"
        if len(of_devices) > 1
        else f"{mean:.{digits}f}"
        for mean, of_devices in zip(means, values, strict=True)
    ]


def _reason(results: Sequence[CaseResult], figure: _Figure, environment: Environment) -> str:
    """Return why a figure is missing, from the nearest `why` that says so."""
    for launch in (launch for result in results for launch in result.launches):
        maps = [launch.why, *(memory.why for memory in launch.memory)]
        if launch.profile is not None:
            maps += [launch.profile.why, *(device.why for device in launch.profile.devices)]
        for why in maps:
            if reason := why.get(figure.key) or why.get("profile"):
                return reason.rstrip(".")
    return environment.why.get("nvml", "no sample was taken")


def _wrong(result: CaseResult) -> bool:
    return result.accuracy_check is not None and result.accuracy_check.ok is False


def _fastest(results: Iterable[CaseResult]) -> CaseResult | None:
    """Return the fastest result whose answers are not known to be wrong; None where there is no choice."""
    timed = [result for result in results if result.inference_s is not None]
    right = [result for result in timed if not _wrong(result)]
    return min(right, key=lambda result: result.inference_s or 0.0) if len(timed) > 1 and right else None


def _seconds_format(values_s: Sequence[float]) -> Callable[[float], str]:
    """Return a format with one unit and the decimals that the smallest value needs, so that a column compares."""
    smallest = min(values_s, default=0.0)
    unit, name = (60, "min") if smallest >= _LONG_S else (1, "s")
    digits = _digits(smallest / unit)
    return lambda value_s: f"{value_s / unit:.{digits}f} {name}"


def _digits(value: float) -> int:
    """Return the decimals, 3 at most, that leave about three significant digits."""
    return 3 if value <= 0 else min(3, max(0, 2 - math.floor(math.log10(value))))


def _table(headers: Sequence[str], body: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    return tabulate(body, headers=list(headers), colalign=list(align), disable_numparse=True)


def _row_name(row: tuple[int, int]) -> str:
    return f"{row[0]}" if row[1] == 1 else f"{row[0]} #{row[1]}"
