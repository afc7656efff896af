"""The figures of each case as columns, and the tables of a block of cases, for terminal, page, CSV and Markdown.

`COLUMNS` has every figure once: a metric with its row of the table of metrics, any other with its function. `TABLES`
and `MARKDOWN` have the columns of each table in their order.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from pytest_llmgpu.analysis.capacity import split
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.derived import batch_latency_s, device_busy, generated, measured, of_window
from pytest_llmgpu.report.metrics import METRICS, Figure
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import GIB, MIB, percent, plural


class Column(NamedTuple):
    """One figure of a case."""

    name: str
    """Name of the CSV column, or of the field in the report."""
    title: str
    """The first line is the name, the second line is the unit."""
    unit: float
    """A value is divided by this number in tables."""
    value: Callable[[CaseResult], float | None]
    """Returns the figure in the unit of the report; None where it was not measured."""
    devices: Callable[[CaseResult], Sequence[float]] = lambda _: ()
    """Returns the figure of each device in each launch, in the unit of the report."""
    written: Callable[[float], str] = str
    """Returns the figure as text with its unit."""


def _of_metrics(titles: dict[str, tuple[str, float]]) -> list[Column]:
    """Return the columns of the exported metrics; those without title and unit are in CSV and Markdown only."""
    columns = []
    for spec in METRICS:
        if spec.exported is not None and spec.figure is not None:
            name = spec.exported.column
            title, unit = titles.get(name, ("", 1.0))

            def value(result: CaseResult, figure_of: Callable[..., Figure | None] = spec.figure) -> float | None:
                figure = figure_of(result) if result.outcome == "completed" else None
                return None if figure is None else figure.value

            columns.append(Column(name, title, unit, value, written=spec.written))
    return columns


def _of_devices(figure: Callable[[str, CaseResult], Sequence[float]], name: str, title: str, unit: float) -> Column:
    """Return a column with a figure of each device by its name; that of the case is their mean."""

    def value(result: CaseResult) -> float | None:
        return statistics.fmean(found) if (found := figure(name, result)) else None

    return Column(name, title, unit, value, partial(figure, name))


def _sampled(name: str, result: CaseResult) -> list[float]:
    """Return the mean of a metric of the profile over the window of each device and launch."""
    found = [of_window(profile, device, name) for profile in result.profiles for device in profile.devices]
    return [metric.mean for metric in found if not isinstance(metric, str) and metric.mean is not None]


def _of_memory(name: str, result: CaseResult) -> list[float]:
    """Return a field of `DeviceMemory` or `MemorySplit` of each device and launch."""
    memories = [memory for launch in result.launches for memory in launch.memory]
    found = [getattr(memory if hasattr(memory, name) else split(memory), name) for memory in memories]
    return [size for size in found if size is not None]


def _sent_bytes(_: str, result: CaseResult) -> list[float]:
    """Return the bytes that each device sends per sequence; one value if all send the same or share a process."""
    traffic = result.traffic
    if traffic is None:
        return []
    sent = [sum(one.sent_bytes for one in rank) for rank in traffic.ranks]
    if len(sent) != result.case.devices or len(set(sent)) == 1:
        return [traffic.wire_bytes_per_sequence / result.case.devices]
    return [traffic.wire_bytes_per_sequence * size / sum(sent) for size in sent]


def _between_nodes_bytes(result: CaseResult) -> float | None:
    """Return the bytes that all ranks together send to other nodes for each sequence; None on one node."""
    sent = None if result.traffic is None else result.traffic.between_nodes_bytes
    return None if sent is None else sent / sum(result.launches[-1].batches.sequences)


def _fullest_bytes(result: CaseResult) -> float | None:
    """Return the memory of the fullest device: in use by NVML, else reserved by torch."""
    memories = [memory for launch in result.launches for memory in launch.memory]
    used = [memory.nvml_used_max_bytes for memory in memories]
    sizes = [memory.peak_reserved_bytes for memory in memories] if None in used else used
    return max((size for size in sizes if size is not None), default=None)


def _busy(result: CaseResult) -> float | None:
    found = [busy for launch in result.launches if (busy := device_busy(launch)) is not None]
    return statistics.fmean(found) if found else None


def _threads(result: CaseResult) -> int | None:
    """Return the threads of the rank that has the fewest; None on a GPU."""
    hosts = [launch.host for launch in result.launches if launch.host is not None and launch.host.threads]
    return min((min(host.threads) for host in hosts), default=None) if result.case.device == "cpu" else None


def _bound_share(result: CaseResult, *, bound: str, measured: str) -> float | None:
    """Return the share of the bound in a measured time, by the names of their fields."""
    bound_s = None if result.bound is None else getattr(result.bound, bound)
    seconds = getattr(result, measured)
    return bound_s / seconds if bound_s is not None and seconds else None


COLUMNS = {
    column.name: column
    for column in (
        *_of_metrics(
            {
                "inference_s": ("time\ns", 1.0),
                "device_time_s": ("device time\ns/work pass", 1.0),
                "sequences_per_s": ("sequences\n/s", 1.0),
                "token_p95_s": ("p95\nms", 1e-3),
                "kv_cache_bytes": ("KV cache\nMiB", MIB),
                "wire_bytes_per_token": ("sent\nMB/token", 1e6),
            }
        ),
        Column("new_tokens_per_s", "new tokens\n/s", 1.0, lambda one: one.tokens_per_s if one.case.generates else None),
        Column("bound_share", "of bound\n%", 0.01, lambda one: None if one.bound is None else one.bound.share),
        Column("device_busy", "computing\n%", 0.01, _busy),
        Column("between_nodes_bytes_per_sequence", "between nodes\nMB/sequence, sum", 1e6, _between_nodes_bytes),
        Column("energy_j_per_sequence", "energy\nJ/sequence", 1.0, lambda one: one.energy_j_per_sequence),
        Column("energy_j_per_token", "energy\nJ/token", 1.0, lambda one: one.energy_j_per_token),
        Column("batch_p50_s", "batch p50\nms", 1e-3, partial(batch_latency_s, share=0.50)),
        Column("batch_p95_s", "batch p95\nms", 1e-3, partial(batch_latency_s, share=0.95)),
        Column("batch_p99_s", "batch p99\nms", 1e-3, partial(batch_latency_s, share=0.99)),
        Column("token_p99_s", "p99\nms", 1e-3, lambda one: one.token_p99_s),
        Column(
            "kv_cache_formula_bytes",
            "formula\nMiB",
            MIB,
            lambda one: getattr(generated(one), "kv_cache_formula_bytes", None),
        ),
        Column(
            "prefill_bound_share",
            "of bound\n%, prefill",
            0.01,
            partial(_bound_share, bound="prefill_s", measured="first_token_s"),
        ),
        Column(
            "step_bound_share", "of bound\n%, step", 0.01, partial(_bound_share, bound="step_s", measured="token_p50_s")
        ),
        Column("memory_bytes", "memory\nGiB/GPU", GIB, _fullest_bytes),
        Column("threads", "threads\nper rank", 1.0, _threads),
        _of_devices(_sent_bytes, "sent_bytes", "sent/device\nMB/sequence", 1e6),
        _of_devices(_sampled, "utilization_pct", "GPU busy\n% (NVML)", 1.0),
        _of_devices(_sampled, "pcie_tx_bytes_per_s", "PCIe TX\nGB/s", 1e9),
        _of_devices(_sampled, "pcie_rx_bytes_per_s", "PCIe RX\nGB/s", 1e9),
        _of_devices(_sampled, "nvlink_tx_bytes_per_s", "NVLink TX\nGB/s", 1e9),
        _of_devices(_sampled, "nvlink_rx_bytes_per_s", "NVLink RX\nGB/s", 1e9),
        _of_devices(_of_memory, "weights_bytes", "weights\nGiB", GIB),
        _of_devices(_of_memory, "activations_bytes", "activations\nGiB", GIB),
        _of_devices(_of_memory, "workspace_bytes", "workspace\nGiB", GIB),
        _of_devices(_of_memory, "cached_bytes", "cached\nGiB", GIB),
        _of_devices(_of_memory, "rest_bytes", "rest\nGiB", GIB),
        _of_devices(_of_memory, "peak_allocated_bytes", "torch peak\nGiB", GIB),
        _of_devices(_of_memory, "nvml_used_max_bytes", "NVML peak\nGiB", GIB),
    )
}
"""Each column by its name."""

Place = Literal["summary", "work", "tokens", "communication", "memory"]
"""A table of figures."""


def _columns(names: str) -> dict[str, int]:
    pairs = [name.partition(":") for name in names.split()]
    return {name: int(order or 0) for name, _, order in pairs}


TABLES: dict[Place, dict[str, int]] = {
    "summary": _columns(
        "sequences_per_s new_tokens_per_s memory_bytes sent_bytes:2 between_nodes_bytes_per_sequence:1 device_busy:3"
        " utilization_pct:4 threads:5"
    ),
    "work": _columns(
        "inference_s device_time_s bound_share device_busy:1 between_nodes_bytes_per_sequence:1"
        " energy_j_per_sequence:2 energy_j_per_token:3 batch_p50_s:4 batch_p95_s:5 batch_p99_s:6"
    ),
    "tokens": _columns(
        "token_p95_s:2 token_p99_s kv_cache_bytes kv_cache_formula_bytes:1 wire_bytes_per_token prefill_bound_share"
        " step_bound_share"
    ),
    "communication": _columns(
        "utilization_pct pcie_tx_bytes_per_s pcie_rx_bytes_per_s nvlink_tx_bytes_per_s sent_bytes:1"
    ),
    "memory": _columns(
        "weights_bytes activations_bytes workspace_bytes cached_bytes:3 rest_bytes:1 peak_allocated_bytes:2"
        " nvml_used_max_bytes"
    ),
}
"""The columns of each table: `name:3` is dropped before `name:2` if the table is too wide, and `name` never.

The summary has the memory of the fullest GPU, and means of the others. `communication` and `memory` are of each device.
"""

MARKDOWN = {
    "inference_s": "time",
    "sequences_per_s": "sequences/s",
    "first_token_s": "time to first token",
    "token_p50_s": "time per token",
    "accuracy": "accuracy",
    "peak_memory_bytes": "peak memory",
    "wire_bytes_per_sequence": "sent/sequence, all ranks",
}
"""The columns of the Markdown table and their titles; it has only these, so that it fits a page."""

LEGEND: dict[str, tuple[str, str]] = {
    "best": ("★", "most sequences/s of its strategy"),
    "wrong": ("✗", "wrong answers"),
    "oom": ("OOM", "out of memory"),
    "skipped": ("-", "not run, a smaller batch size was out of memory"),
    "failed": ("!", "did not complete"),
    "graphs": ("g", "run as CUDA graphs"),
}
"""The mark on the page and its meaning: one entry per kind of cell, and one for `graphs`."""

Kind = Literal["plain", "best", "wrong", "oom", "skipped", "failed", "absent"]
"""The state that a cell is marked with."""

_USUAL_BACKENDS = {"mp": "accelerate", "tp": "transformers", "iok": "deepspeed", "compile": "transformers"}
"""The title of a strategy names the backend only if it is not the usual one."""

_ENDED: dict[str, tuple[Kind, str]] = {"oom": ("oom", "OOM"), "skipped_after_oom": ("skipped", "-")}
"""The kind and the word of a cell by outcome; of another outcome than these the word is its name."""

_MINUTES_FROM_S = 600  # times are written in minutes if the smallest one is at least this long


class Entry(NamedTuple):
    """A case and its place in the tables and charts of its block."""

    title: str
    """The title of its column and of its curve: `mp`."""
    row: str
    """The name of its row: the batch size, and from the second measurement on its number."""
    result: CaseResult

    @property
    def batch_size(self) -> int:
        """The sequences per forward."""
        return self.result.case.batch_size


class FigureTable(NamedTuple):
    """A table with one row per case, and its heading."""

    title: str
    columns: Sequence[Column]
    """The columns in which a case has a figure."""
    rows: Sequence[tuple[str, str, Sequence[str]]]
    """Strategy, batch size and figures of each case."""


class Cell(NamedTuple):
    """One case in the table of times."""

    id: str = ""
    """The id of the case; empty if the cell has no case."""
    kind: Kind = "absent"
    """The state of the case, with which the cell is marked."""
    time: str = ""
    """The time with its unit, for a case that generates per token; empty if the case did not complete."""
    second: str = ""
    """The accuracy in percent, or the time to first token; empty if nothing was scored or the weights are random."""
    word: str = ""
    """How the case ended; empty if it completed."""
    graphs: bool = False
    """True if the forwards ran as CUDA graphs."""


class TimeTable(NamedTuple):
    """The times and accuracies of a block: batch sizes down, strategies across, as Table 2 of Shin et al. 2024."""

    title: str
    """The content of the cells: `Time for 10,042 items / acc_norm`."""
    time_title: str
    """The title of the times where they have a column of their own."""
    metric: str
    """The title of the second figure of each cell: the metric of the accuracies, or the time to first token."""
    columns: list[str]
    """The titles of the columns, one per strategy."""
    rows: list[tuple[str, list[Cell]]]
    """The name of each row (batch size and, from the second measurement on, its number) and a cell per column."""
    used: list[str]
    """The keys of `LEGEND` that occur in the table."""

    @property
    def marks(self) -> list[tuple[str, str]]:
        """The entries of `LEGEND` that occur in the table."""
        return [LEGEND[key] for key in self.used]


def figure_tables(cases: Sequence[CaseResult]) -> dict[Place, FigureTable]:
    """Return the tables of work and of generated tokens of one block that have figures.

    The first column alone, the time, makes no table: the summary has it.
    """
    found: dict[Place, FigureTable] = {}
    titles: dict[Place, str] = {
        "work": "More figures of each case",
        "tokens": "Decode steps, KV cache, and bytes that all ranks send",
    }
    for place, title in titles.items():
        columns = [COLUMNS[name] for name in TABLES[place]]
        rows = [(entry, [column.value(entry.result) for column in columns]) for entry in entries(cases)]
        rows = [(entry, values) for entry, values in rows if any(value is not None for value in values[1:])]
        if not rows:
            continue
        by_column = list(zip(*(values for _, values in rows), strict=True))
        used = [number for number, values in enumerate(by_column) if any(value is not None for value in values)]
        cells = zip(*(written(by_column[number], columns[number].unit) for number in used), strict=True)
        body = [(entry.title, entry.row, texts) for (entry, _), texts in zip(rows, cells, strict=True)]
        found[place] = FigureTable(title, [columns[number] for number in used], body)
    return found


def make_time_table(cases: Sequence[CaseResult]) -> TimeTable:
    """Return the table of times of cases that differ in strategy and batch size only."""
    columns, rows = _layout(cases)
    seconds = [result.inference_s for result in cases if result.inference_s is not None]
    # One unit, and the decimals of the smallest value: the times of a column then compare.
    unit, unit_name = (60, "min") if min(seconds, default=0.0) >= _MINUTES_FROM_S else (1, "s")
    places = digits(min(seconds, default=0.0) / unit)
    metric = next((check.metric for result in cases if (check := result.accuracy_check) is not None), "acc_norm")
    random_weights = cases[0].case.load_format == "dummy"
    generates = cases[0].case.generates
    best = set()  # the fastest right answers of each strategy with more than one time
    for title in columns:
        timed = [row[title] for row in rows.values() if title in row and row[title].inference_s is not None]
        if len(timed) > 1 and (right := [result for result in timed if not result.has_wrong_answers]):
            best.add(id(min(right, key=lambda result: result.inference_s or 0.0)))

    def cell(result: CaseResult | None) -> Cell:
        if result is None:
            return Cell()
        if result.outcome != "completed":
            kind, word = _ENDED.get(result.outcome, ("failed", result.outcome))
            return Cell(result.id, kind, word=word)
        if generates:
            # A text of one token has no time of the next one.
            times_ms = [
                None if time_s is None else 1000 * time_s for time_s in (result.token_p50_s, result.first_token_s)
            ]
            time, second = ("-" if ms is None else f"{ms:,.{digits(ms)}f} ms" for ms in times_ms)
        else:
            value = result.acc if metric == "acc" else result.acc_norm
            time = "done" if result.inference_s is None else f"{result.inference_s / unit:.{places}f} {unit_name}"
            second = "" if value is None or random_weights else percent(value)
        kind = "wrong" if result.has_wrong_answers else "best" if id(result) in best else "plain"
        return Cell(result.id, kind, time, second, graphs=result.case.execution == "cuda_graphs")

    body = [(row, [cell(found.get(title)) for title in columns]) for row, found in rows.items()]
    cells = [cell for _, cells in body for cell in cells]
    kinds = {*(cell.kind for cell in cells), *(["graphs"] if any(cell.graphs for cell in cells) else [])}
    return TimeTable(
        title=_table_title(cases, metric, random_weights=random_weights),
        time_title="time per token" if generates else "time",
        metric="time to first token" if generates else metric,
        columns=columns,
        rows=body,
        used=[key for key in LEGEND if key in kinds],
    )


def entries(cases: Sequence[CaseResult]) -> list[Entry]:
    """Return the cases of a block, strategy by strategy and in ascending batch size."""
    columns, rows = _layout(cases)
    return [Entry(title, row, found[title]) for title in columns for row, found in rows.items() if title in found]


def written(values: Sequence[float | None], unit: float) -> list[str]:
    """Return the figures of a column with the decimals that the smallest one needs."""
    shown = [None if value is None else value / unit for value in values]
    known = [value for value in shown if value]
    places = 0 if all(float(value).is_integer() for value in known) else digits(min(known))
    return ["" if value is None else f"{value:.{places}f}" for value in shown]


def digits(value: float) -> int:
    """Return the decimals, 3 at most, that leave about three significant digits."""
    return 3 if value <= 0 else min(3, max(0, 2 - math.floor(math.log10(value))))


def _layout(cases: Sequence[CaseResult]) -> tuple[list[str], dict[str, dict[str, CaseResult]]]:
    """Return the titles of the columns, and the results by row (batch size and number of the measurement) and title."""
    by_series = {result.case.series: result.case for result in cases}
    titles = {series: _strategy_title(case, list(by_series.values())) for series, case in by_series.items()}
    rows: dict[tuple[int, int], dict[str, CaseResult]] = {}
    for result in cases:
        title, number = titles[result.case.series], 1
        while title in rows.get((result.case.batch_size, number), {}):
            number += 1
        rows.setdefault((result.case.batch_size, number), {})[title] = result
    names = {(size, n): f"{size}" if n == 1 else f"{size} #{n}" for size, n in sorted(rows)}
    return list(titles.values()), {name: rows[row] for row, name in names.items()}


def _strategy_title(case: Case, columns: Sequence[Case]) -> str:
    """Return the strategy with its unusual settings and those that other columns of the same strategy do not share."""
    alike = [other for other in columns if other.strategy == case.strategy]
    unusual = _USUAL_BACKENDS.get(case.strategy, case.backend) != case.backend
    backend = case.backend if unusual or any(other.backend != case.backend for other in alike) else None
    options = [
        f"{name}={value}"
        for name, value in case.strategy_options.items()
        if value or any(name not in other.strategy_options or other.strategy_options[name] != value for other in alike)
    ]
    # On a CPU devices are processes, and cases of different numbers share a table.
    processes = plural(case.devices, "process") if any(other.devices != case.devices for other in alike) else None
    return " ".join(filter(None, [case.strategy, backend, *options, processes]))


def _table_title(cases: Sequence[CaseResult], metric: str, *, random_weights: bool) -> str:
    items = next((accuracy.items for result in cases if (accuracy := measured(result)) is not None), None)
    title = "Time" if items is None else f"Time for {items:,} items"
    if cases[0].case.generates:
        texts = next((len(found.new_tokens) for result in cases if (found := generated(result)) is not None), None)
        title = "Time per token / time to first token" + ("" if texts is None else f", {plural(texts, 'text')}")
    launches = [count for result in cases if (count := sum(bool(one.batches.latency_s) for one in result.launches))]
    if max(launches, default=1) > 1:
        fewest = f"{min(launches):,} to " if min(launches) < max(launches) else ""
        title += f", median of {fewest}{max(launches):,} launches"
    if cases[0].case.generates:
        return title
    if random_weights:
        return f"{title} (no accuracy: the weights are random)"
    return title if items is None else f"{title} / {metric}"
