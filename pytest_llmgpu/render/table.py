"""The figures of each case as columns, and the tables of a block of cases, for terminal, page, CSV and Markdown.

Cases that share a table differ in strategy and batch size only; the caption states what they have in common.
`COLUMNS` has every figure once: a metric with its row of the table of metrics, any other with its function. `TABLES`
and `MARKDOWN` have the columns of each table in their order. Below a table the answers are compared with those of mp.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from pytest_llmgpu.analysis.answers import written as probability
from pytest_llmgpu.analysis.capacity import capacities, split
from pytest_llmgpu.report import disturbances
from pytest_llmgpu.report.case import DEFAULT_TASK, REFERENCE_STRATEGY, Case
from pytest_llmgpu.report.derived import device_busy, generated, measured, of_window
from pytest_llmgpu.report.metrics import METRICS, Figure, own_metrics
from pytest_llmgpu.report.report import Environment, Report
from pytest_llmgpu.report.result import CaseResult, Comparison
from pytest_llmgpu.report.text import GIB, MIB, gib, percent, plural, significant


class Column(NamedTuple):
    """One figure of a case."""

    name: str
    """Name of the CSV column, or of the field in the report."""
    title: str
    """The first line is the name, the second line is the unit."""
    unit: float
    """A value is divided by this number in tables."""
    figure: Callable[[CaseResult], Figure | float | None] = lambda _: None
    """Returns the figure in the unit of the report; None where it was not measured."""
    devices: Callable[[CaseResult], Sequence[float]] = lambda _: ()
    """Returns the figure of each device in each launch, in the unit of the report."""
    written: Callable[[float], str] = str
    """Returns the figure as text with its unit."""

    def value(self, result: CaseResult) -> float | None:
        """Return the figure of a case, where devices have one their mean; None where it was not measured."""
        if of_devices := self.devices(result):
            return statistics.fmean(of_devices)
        figure = self.figure(result)
        return figure.value if isinstance(figure, Figure) else figure


def _sampled(name: str, result: CaseResult) -> list[float]:
    """Return the mean of a metric of the profile over the window of each device and launch."""
    found = [of_window(profile, device, name) for profile in result.profiles for device in profile.devices]
    return [metric.mean for metric in found if not isinstance(metric, str) and metric.mean is not None]


def _of_memory(name: str, result: CaseResult) -> list[float]:
    """Return a field of `DeviceMemory`, or a part of the memory, of each device and launch."""
    memories = [memory for launch in result.launches for memory in launch.memory]
    found = [getattr(memory, name) if hasattr(memory, name) else split(memory)[name] for memory in memories]
    return [size for size in found if isinstance(size, int)]


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


def in_use_bytes(result: CaseResult) -> list[float]:
    """Return the peak memory of each device and launch: in use by NVML, else reserved by torch."""
    used, reserved = (_of_memory(name, result) for name in ("nvml_used_max_bytes", "peak_reserved_bytes"))
    return used if len(used) >= len(reserved) else reserved


def _threads(result: CaseResult) -> int | None:
    """Return the threads of the rank that has the fewest; None on a GPU."""
    hosts = [launch.host for launch in result.launches if launch.host is not None and launch.host.threads]
    return min((min(host.threads) for host in hosts), default=None) if result.case.device == "cpu" else None


def _of_bound(bound: str, measured: str, result: CaseResult) -> float | None:
    """Return the share of the bound in a measured time, by the names of their fields."""
    bound_s = None if result.bound is None else getattr(result.bound, bound)
    seconds = getattr(result, measured)
    return bound_s / seconds if bound_s is not None and seconds else None


def _of_quantized(name: str, result: CaseResult) -> float | None:
    """Return a field of the comparison of a case whose weights are quantised: of answers that are lists, the number."""
    compared = None if result.case.quantization is None else result.comparison
    found = None if compared is None else getattr(compared, name)
    return len(found) if isinstance(found, list) else found


_TITLES = {
    "inference_s": ("time\ns", 1.0),
    "device_time_s": ("device time\ns/work pass", 1.0),
    "sequences_per_s": ("sequences\n/s", 1.0),
    "token_p95_s": ("p95\nms", 1e-3),
    "kv_cache_bytes": ("KV cache\nMiB", MIB),
    "wire_bytes_per_token": ("sent\nMB/token", 1e6),
    "flops_per_sequence": ("FLOPs\nG/sequence", 1e9),
}
"""Titles and units of metrics in tables; those without one are in CSV and Markdown only."""

COLUMNS = {
    column.name: column
    for column in (
        *(
            Column(one.exported.column, *_TITLES.get(one.exported.column, ("", 1.0)), one.of, written=one.written)
            for one in METRICS
            if one.exported is not None
        ),
        Column("new_tokens_per_s", "tokens\n/s", 1.0, lambda one: one.tokens_per_s if one.case.generates else None),
        Column("bound_share", "of bound\n%", 0.01, lambda one: None if one.bound is None else one.bound.share),
        Column("device_busy", "computing\n%", 0.01, device_busy),
        Column("between_nodes_bytes_per_sequence", "between nodes\nMB/sequence, sum", 1e6, _between_nodes_bytes),
        Column("energy_j_per_sequence", "energy\nJ/sequence", 1.0, lambda one: one.energy_j_per_sequence),
        Column("energy_j_per_token", "energy\nJ/token", 1.0, lambda one: one.energy_j_per_token),
        Column("token_p99_s", "p99\nms", 1e-3, lambda one: one.token_p99_s),
        Column("prefill_bound_share", "of bound\n%, prefill", 0.01, partial(_of_bound, "prefill_s", "first_token_s")),
        Column("step_bound_share", "of bound\n%, step", 0.01, partial(_of_bound, "step_s", "token_p50_s")),
        Column("speedup", "speed-up\nover mp", 1.0),  # of a block: see `columns_of`
        Column("flipped", "answers\nflipped", 1.0, partial(_of_quantized, "flipped")),
        Column("typical_difference", "log-likelihoods\ndiffer %", 0.01, partial(_of_quantized, "typical_difference")),
        Column(
            "compile_s",
            "compile\ns",
            1.0,
            lambda one: max(filter(None, (launch.compile_s for launch in one.launches)), default=None),
        ),
        Column("memory_bytes", "memory\nGiB/GPU", GIB, lambda one: max(in_use_bytes(one), default=None)),
        Column("threads", "threads\nper rank", 1.0, _threads),
        Column(
            "peak_resident_bytes",
            "peak RSS\nGiB/rank",
            GIB,
            lambda one: max(_of_memory("peak_resident_bytes", one), default=None),
        ),
        *(
            Column(name, title, unit, devices=partial(figure, name))
            for figure, name, title, unit in (
                (_sent_bytes, "sent_bytes", "sent/device\nMB/sequence", 1e6),
                (_sampled, "utilization_pct", "GPU busy\n% (NVML)", 1.0),
                (_sampled, "pcie_tx_bytes_per_s", "PCIe TX\nGB/s", 1e9),
                (_sampled, "pcie_rx_bytes_per_s", "PCIe RX\nGB/s", 1e9),
                (_sampled, "nvlink_tx_bytes_per_s", "NVLink TX\nGB/s", 1e9),
                (_sampled, "nvlink_rx_bytes_per_s", "NVLink RX\nGB/s", 1e9),
                (_of_memory, "weights_bytes", "weights\nGiB", GIB),
                (_of_memory, "activations_bytes", "activations\nGiB", GIB),
                (_of_memory, "workspace_bytes", "workspace\nGiB", GIB),
                (_of_memory, "cached_bytes", "cached\nGiB", GIB),
                (_of_memory, "rest_bytes", "rest\nGiB", GIB),
                (_of_memory, "peak_allocated_bytes", "torch peak\nGiB", GIB),
                (_of_memory, "nvml_used_max_bytes", "NVML peak\nGiB", GIB),
            )
        ),
    )
}
"""Each column by its name."""


def own_columns(cases: Sequence[CaseResult]) -> dict[str, Column]:
    """Return a column by name for each figure of their own that cases have."""
    titled = [(one, f"{one.name.replace('_', ' ')}\n{one.unit}".rstrip()) for one in own_metrics(cases)]
    return {one.name: Column(one.name, title, 1.0, one.of, written=one.written) for one, title in titled}


Place = Literal["summary", "work", "tokens", "communication", "memory"]
"""A table of figures."""

TABLES: dict[Place, Sequence[str]] = {
    "summary": (
        *("token_p95_s", "new_tokens_per_s", "sequences_per_s", "speedup", "flipped", "typical_difference"),
        *("compile_s", "memory_bytes", "peak_resident_bytes", "sent_bytes"),
        *("between_nodes_bytes_per_sequence", "device_busy", "utilization_pct", "flops_per_sequence", "threads"),
    ),
    "work": (
        *("inference_s", "speedup", "flipped", "typical_difference", "compile_s", "device_time_s"),
        *("flops_per_sequence", "bound_share", "device_busy"),
        *("between_nodes_bytes_per_sequence", "energy_j_per_sequence", "energy_j_per_token", "peak_resident_bytes"),
    ),
    "tokens": (
        *("token_p95_s", "token_p99_s", "kv_cache_bytes", "wire_bytes_per_token"),
        *("prefill_bound_share", "step_bound_share"),
    ),
    "communication": (
        *("utilization_pct", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s", "nvlink_tx_bytes_per_s", "sent_bytes"),
    ),
    "memory": (
        *("weights_bytes", "activations_bytes", "workspace_bytes", "rest_bytes", "cached_bytes"),
        *("peak_allocated_bytes", "nvml_used_max_bytes"),
    ),
}
"""The columns of each table.

The summary has the memory of the fullest GPU, and means of the others. `communication` and `memory` are of each device.
"""

DROPPABLE = (
    *("flipped", "typical_difference", "peak_resident_bytes", "sent_bytes", "between_nodes_bytes_per_sequence"),
    *("device_busy", "utilization_pct", "flops_per_sequence", "threads", "energy_j_per_sequence"),
    *("energy_j_per_token", "rest_bytes", "cached_bytes"),
)
"""The columns that are dropped if a table is too wide: one after the other, the last one first."""

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
    "best": ("★", "fastest of its strategy"),
    "wrong": ("✗", "wrong answers"),
    "oom": ("OOM", "out of memory"),
    "skipped": ("-", "not run, a smaller batch size was out of memory"),
    "failed": ("!", "did not complete"),
    "disturbed": ("?", "disturbed: not the time of the case alone, measure again"),
    "graphs": ("g", "run as CUDA graphs"),
}
"""The mark on the page and its meaning: one entry per kind of cell, `disturbed` and `graphs`."""

Kind = Literal["plain", "best", "wrong", "oom", "skipped", "failed", "absent"]
"""The state that a cell is marked with."""

_USUAL_BACKENDS = {"mp": "accelerate", "tp": "transformers", "iok": "deepspeed", "compile": "transformers"}
"""The title of a strategy names the backend only if it is not the usual one."""

_PLACES = ("function", "server_url", "server_command")
"""Options of a case that have the place of an engine."""

_ENDED: dict[str, tuple[Kind, str]] = {"oom": ("oom", "OOM"), "skipped_after_oom": ("skipped", "-")}
"""The kind and the word of a cell by outcome; of another outcome than these the word is its name."""

_MINUTES_FROM_S = 600  # times are written in minutes if the smallest one is at least this long

_DEFAULT_WORDS = {
    "gpu_memory_bytes": "no memory limit",
    "workload": "logits of the endings only",
    "attention": "attention chosen by transformers",
}
"""A caption leaves these defaults out. They are written where another block has another value."""

_COLUMN_FIELDS = ("strategy", "backend", "strategy_options", "quantization", "execution")
"""Fields of a case that may differ within a table. `execution` is one of them: each batch size may run differently."""


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
    """The time with its unit, of a case that generates to the first token; empty if the case did not complete."""
    second: str = ""
    """The accuracy in percent, or the time per token; empty if nothing was scored or the weights are random."""
    rate: str = ""
    """The new tokens per second of a case that generates, which `best` marks; that of another one marks its time."""
    word: str = ""
    """How the case ended; empty if it completed."""
    disturbed: bool = False
    """True if the times are not those of the case alone."""
    graphs: bool = False
    """True if the forwards ran as CUDA graphs."""


class TimeTable(NamedTuple):
    """The times and accuracies of a block: batch sizes down, strategies across, as Table 2 of Shin et al. 2024."""

    title: str
    """The content of the cells: `Time for 10,042 items / acc_norm`."""
    time_title: str
    """The title of the times where they have a column of their own."""
    metric: str
    """The title of the second figure of each cell: the metric of the accuracies, or the time per token."""
    columns: list[str]
    """The titles of the columns, one per strategy."""
    rows: list[tuple[str, list[Cell]]]
    """The name of each row (batch size and, from the second measurement on, its number) and a cell per column."""
    legend: dict[str, tuple[str, str]]
    """The entries of `LEGEND` that occur in the table."""


def blocks(cases: Sequence[CaseResult]) -> list[list[CaseResult]]:
    """Return the cases of each table, in the order in which they ran."""
    found: dict[str, list[CaseResult]] = {}
    for result in cases:
        fields = msgspec.to_builtins(result.case)
        for name in (*_COLUMN_FIELDS, "batch_size"):
            del fields[name]
        if result.case.device == "cpu":
            # On a CPU devices are processes, and strategies use different numbers of them.
            del fields["devices"], fields["nodes"]
        found.setdefault(json.dumps(fields, sort_keys=True), []).append(result)
    return list(found.values())


def caption(case: Case, environment: Environment) -> str:
    """Return the caption of a case and of all cases in its block."""
    return ", ".join(filter(None, _caption_parts(case, environment).values()))


def captions(tables: Sequence[Sequence[CaseResult]], report: Report) -> list[tuple[str, str]]:
    """Return the caption of each block, and those of its parts that differ between blocks ("" if there is one block).

    Blocks with equal captions also get the fields in which they differ.
    """
    cases = [block[0].case for block in tables]
    parts = [_caption_parts(case, report.environment) for case in cases]
    plain = [", ".join(filter(None, one.values())) for one in parts]
    fields = [msgspec.to_builtins(case) for case in cases]
    differing = [name for name in parts[0] if len({one[name] for one in parts}) > 1] if parts else []
    found = []
    for text, own, of_case in zip(plain, fields, parts, strict=True):
        alike = [other for other, others in zip(fields, plain, strict=True) if others == text]
        more = [
            f"{name} {value[:12] if isinstance(value, str) else value}"
            for name, value in own.items()
            if name not in (*_COLUMN_FIELDS, "batch_size") and any(other[name] != value for other in alike)
        ]
        short = [of_case[name] or _DEFAULT_WORDS[name] for name in differing]
        found.append((", ".join([text, *more]), ", ".join([*short, *more])))
    return found


def model(case: Case) -> str:
    """Return the name of the model, with a note if its weights are random."""
    return f"{case.model} (random weights)" if case.load_format == "dummy" else case.model


def dataset(case: Case) -> str:
    """Return the task unless it is the default, the dataset, and the number of items if the run was limited."""
    task = "" if case.task == DEFAULT_TASK else f"task {case.task}, "
    return f"{task}{case.dataset} dataset" + ("" if case.limit is None else f" (first {case.limit:,} items)")


def _caption_parts(case: Case, environment: Environment) -> dict[str, str]:
    """Return the parts of a caption by field; the text of a default value is empty."""
    names = list(dict.fromkeys(gpu.name for gpu in environment.gpus))
    devices = f"{case.devices} x {names[0] if len(names) == 1 else 'GPU'}" if case.device == "cuda" else "CPU"
    # On a CPU strategies of one table use different numbers of nodes.
    nodes = case.nodes if case.device == "cuda" else len(environment.nodes)
    devices += f" on {nodes} nodes" * (nodes > 1)
    limit_bytes = case.gpu_memory_bytes
    workload = "every logit and a KV cache" if case.scoring == "harness" else ""
    if case.generates:
        workload = f"{plural(case.new_tokens or 0, 'new token')} after prompts of at most {case.prompt_tokens}"
    return {
        "model": model(case),
        "dtype": case.dtype,
        "devices": devices,
        "dataset": dataset(case),
        "gpu_memory_bytes": "" if limit_bytes is None else f"memory limit {gib(limit_bytes, 1)} per GPU",
        "workload": workload,
        "attention": "" if case.attention is None else f"{case.attention} attention",
    }


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
        columns = columns_of(place, cases)
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


def columns_of(place: Place, cases: Sequence[CaseResult]) -> list[Column]:
    """Return the columns of a table of one block; the speed-up is that over its mp at the same batch size.

    It is over mp with plain weights if there is one.
    """
    mp = {(one.case.quantization, one.case.batch_size): one for one in cases if one.case.strategy == REFERENCE_STRATEGY}

    def speedup(result: CaseResult) -> float | None:
        base = mp.get((None, result.case.batch_size)) or mp.get((result.case.quantization, result.case.batch_size))
        rate = None if base is None or base.case == result.case else base.sequences_per_s
        return result.sequences_per_s / rate if rate and result.sequences_per_s else None

    own = own_columns(cases).values() if place in {"summary", "work"} else ()
    found = [*(COLUMNS[name] for name in TABLES[place]), *own]
    return [column._replace(figure=speedup) if column.name == "speedup" else column for column in found]


def make_time_table(cases: Sequence[CaseResult]) -> TimeTable:
    """Return the table of times of cases that differ in strategy and batch size only."""
    order = entries(cases)
    columns = list(dict.fromkeys(entry.title for entry in order))
    seconds = [result.inference_s for result in cases if result.inference_s is not None]
    # One unit, and the decimals of the smallest value: the times of a column then compare.
    unit, unit_name = (60, "min") if min(seconds, default=0.0) >= _MINUTES_FROM_S else (1, "s")
    places = digits(min(seconds, default=0.0) / unit)
    metric = next((check.metric for result in cases if (check := result.accuracy_check) is not None), "acc_norm")
    random_weights = cases[0].case.load_format == "dummy"
    generates = cases[0].case.generates
    best = set()  # the fastest right answers of each strategy with more than one time
    for title in columns:
        timed = [one.result for one in order if one.title == title and one.result.inference_s is not None]
        right = [one for one in timed if not one.has_wrong_answers and disturbances.of_case(one) is None]
        if len(timed) > 1 and right:
            best.add(id(min(right, key=lambda result: result.inference_s or 0.0)))

    def cell(result: CaseResult | None) -> Cell:
        if result is None:
            return Cell()
        if result.outcome != "completed":
            kind, word = _ENDED.get(result.outcome, ("failed", result.outcome))
            return Cell(result.id, kind, word=word)
        if generates:
            # A text of one token has no time of the next one.
            times_s = (result.first_token_s, result.token_p50_s)
            time, second = ("-" if one is None else f"{1000 * one:,.{digits(1000 * one)}f} ms" for one in times_s)
        else:
            value = result.acc if metric == "acc" else result.acc_norm
            time = "done" if result.inference_s is None else f"{result.inference_s / unit:.{places}f} {unit_name}"
            second = "" if value is None or random_weights else percent(value)
        rate = f"{significant(result.tokens_per_s)} tokens/s" if generates and result.tokens_per_s else ""
        kind = "wrong" if result.has_wrong_answers else "best" if id(result) in best else "plain"
        disturbed = disturbances.of_case(result) is not None
        graphs = result.case.execution == "cuda_graphs"
        return Cell(result.id, kind, time, second, rate, disturbed=disturbed, graphs=graphs)

    found = {(entry.row, entry.title): entry.result for entry in order}
    rows = dict.fromkeys(entry.row for entry in sorted(order, key=lambda entry: entry.result.case.batch_size))
    body = [(row, [cell(found.get((row, title))) for title in columns]) for row in rows]
    cells = [cell for _, cells in body for cell in cells]
    kinds: set[str] = {cell.kind for cell in cells}
    kinds |= {name for name in ("disturbed", "graphs") if any(getattr(cell, name) for cell in cells)}
    return TimeTable(
        title=_table_title(cases, metric, random_weights=random_weights),
        time_title="time to\nfirst token" if generates else "time",
        metric="time\nper token" if generates else metric,
        columns=columns,
        rows=body,
        legend={kind: LEGEND[kind] for kind in LEGEND if kind in kinds}
        | ({"best": (LEGEND["best"][0], "most new tokens/s of its strategy")} if generates and best else {}),
    )


def entries(cases: Sequence[CaseResult]) -> list[Entry]:
    """Return the cases of a block, strategy by strategy and in ascending batch size.

    A title has unusual settings of the strategy, and those that other columns of the same strategy do not share.
    """
    by_series = {result.case.series: result.case for result in cases}
    titles = {}
    for series, case in by_series.items():
        alike = [other for other in by_series.values() if other.strategy == case.strategy]
        unusual = _USUAL_BACKENDS.get(case.strategy, case.backend) != case.backend
        backend = case.backend if unusual or any(other.backend != case.backend for other in alike) else None
        options = [
            f"{name}={value}"
            for name, value in case.strategy_options.items()
            # The place of an engine says no more than its name.
            if (value and name not in _PLACES) or any(other.strategy_options.get(name, ...) != value for other in alike)
        ]
        # On a CPU devices are processes, and cases of different numbers share a table.
        processes = plural(case.devices, "process") if any(other.devices != case.devices for other in alike) else None
        titles[series] = " ".join(filter(None, [case.strategy, case.quantization, backend, *options, processes]))
    numbers: Counter[tuple[str, int]] = Counter()
    found = []
    for result in sorted(cases, key=lambda result: result.case.batch_size):
        title, size = titles[result.case.series], result.case.batch_size
        numbers[title, size] += 1
        number = numbers[title, size]
        found.append(Entry(title, f"{size}" if number == 1 else f"{size} #{number}", result))
    order = list(titles.values())
    return sorted(found, key=lambda entry: order.index(entry.title))


def written(values: Sequence[float | None], unit: float) -> list[str]:
    """Return the figures of a column with the decimals that the smallest one needs."""
    shown = [None if value is None else value / unit for value in values]
    known = [value for value in shown if value]
    places = 0 if all(float(value).is_integer() for value in known) else digits(min(known))
    return ["" if value is None else f"{value:.{places}f}" for value in shown]


def digits(value: float) -> int:
    """Return the decimals, 3 at most, that leave about three significant digits."""
    return 3 if value <= 0 else min(3, max(0, 2 - math.floor(math.log10(value))))


def _table_title(cases: Sequence[CaseResult], metric: str, *, random_weights: bool) -> str:
    items = next((accuracy.items for result in cases if (accuracy := measured(result)) is not None), None)
    title = "Time" if items is None else f"Time for {items:,} items"
    if cases[0].case.generates:
        texts = next((len(found.new_tokens) for result in cases if (found := generated(result)) is not None), None)
        of = "" if texts is None else f", {plural(texts, 'text')}"
        title = f"Time to first token / time per token / new tokens/s{of}"
    launches = [count for result in cases if (count := sum(bool(one.batches.latency_s) for one in result.launches))]
    if max(launches, default=1) > 1:
        fewest = f"{min(launches):,} to " if min(launches) < max(launches) else ""
        title += f", median of {fewest}{max(launches):,} launches"
    if cases[0].case.generates:
        return title
    if random_weights:
        return f"{title} (no accuracy: the weights are random)"
    return title if items is None else f"{title} / {metric}"


def with_reference(cases: Sequence[CaseResult], *, verbose: bool) -> Iterator[str]:
    """Yield how much each strategy differs from mp, at the batch size with the largest difference.

    Strategies that do not differ are left out unless `verbose`.
    """
    found = [(one.title, one.result, one.result.comparison) for one in entries(cases)]
    titles = {result.id: title for title, result, _ in found}
    for title in dict.fromkeys(title for title, *_ in found):
        compared = [(result, one) for other, result, one in found if other == title and one is not None]
        if not compared:
            continue
        result, worst = max(compared, key=lambda pair: _severity(pair[1]))
        if not verbose and not any(_severity(worst)):
            continue
        where = f" at batch size {result.case.batch_size}"
        if len(compared) > 1:
            where = f", worst{where}" if any(_severity(worst)) else " at every batch size"
        other = titles.get(worst.reference, REFERENCE_STRATEGY)
        yield f"{title} compared with {other}{where}: {', '.join(_differences(result, worst))}"


def limits(cases: Sequence[CaseResult], report: Report) -> list[str]:
    """Return the largest batch size of each series that was searched or is limited, and why times are absent."""
    searched = report.options.get("--llmgpu-find-max-batch") is True
    series = {result.case.series for result in cases}
    found = [one for one in capacities(report.cases) if one.series in series]
    largest = [f"{one.strategy}: {one.text}" for one in found if searched or one.smallest_oom is not None]
    whys = [launch.why for result in cases if (result.case.new_tokens or 0) > 1 for launch in result.launches]
    absent = dict.fromkeys(why[name] for why in whys for name in ("first_token_s", "step_s") if name in why)
    return [*largest, *(f"No time: {why}." for why in absent)]


def _severity(comparison: Comparison) -> tuple[bool, int, int, float]:
    """Return the sort key of the worst case."""
    difference = comparison.largest_difference
    return difference is None, comparison.lost or 0, len(comparison.flipped), difference or 0.0


def _differences(result: CaseResult, comparison: Comparison) -> list[str]:
    dummy = result.case.load_format == "dummy"
    parts = []
    if result.case.generates:
        text = f"{len(comparison.flipped):,} of {plural(comparison.items, 'text')} diverge"
        if comparison.first_difference is not None:
            text += f", the first at token {comparison.first_difference + 1}"
        parts.append(text)
    elif not dummy:
        text = f"{len(comparison.flipped):,} of {comparison.items:,} items flipped"
        if comparison.mcnemar_p is not None:
            text += f" ({comparison.lost:,} lost, {comparison.won:,} won, {probability(comparison.mcnemar_p)})"
        parts.append(text)
    # The accuracy check uses the same figures: the largest difference of random weights, and the typical difference of
    # trained weights, because the relative difference of a log-likelihood near 0 is always large.
    difference = comparison.largest_difference if dummy else comparison.typical_difference
    # Each text has log-likelihoods of its own: those of the reference's texts are compared.
    name = f"eager log-likelihoods of {REFERENCE_STRATEGY}'s texts" if result.case.generates else "log-likelihoods"
    if difference is None and result.case.execution == "engine":
        largest = comparison.largest_difference
        known = f"differ by at most {100 * largest:.2g} %" if largest is not None else "are not known"
        parts.append(f"log-likelihoods up to the first other token {known}")
    elif difference is None:
        parts.append(f"not all {name} are finite")
    elif not difference:
        parts.append(f"{name} equal")
    else:
        parts.append(f"{name} differ by {100 * difference:.2g} % ({'largest' if dummy else 'typical'})")
    return parts
