"""Figures of each case as columns: the summary, and the work with device time, share of the bound and energy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pytest_llmgpu.render.device_columns import COMMUNICATION, Column, device_values, digits
from pytest_llmgpu.render.time_table import entries
from pytest_llmgpu.report.derived import batch_latency_s, device_busy, generated
from pytest_llmgpu.report.metrics import spec_of
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import GIB, MIB


@dataclass(frozen=True, kw_only=True)
class WorkColumn:
    """One figure of a case."""

    name: str
    """Name of the CSV column."""
    title: str
    """The first line is the name, the second line is the unit."""
    value: Callable[[CaseResult], float | None]
    """Returns the figure in the unit of the report; None where it was not measured."""
    unit: float = 1.0
    """A value is divided by this number in tables."""
    drop_order: int = 0
    """If the table is too wide, the column with the largest number is dropped first; 0 is never dropped."""


@dataclass(frozen=True, kw_only=True)
class WorkTable:
    """The table of some cases."""

    columns: Sequence[WorkColumn]
    """The columns in which a case has a figure."""
    rows: Sequence[tuple[str, str, Sequence[str]]]
    """Strategy, batch size and figures of each case with batches, work passes or energy."""
    title: str
    """The heading, which holds for every choice of columns."""


def _figure(metric: str) -> Callable[[CaseResult], float | None]:
    figure_of = spec_of(metric).figure
    assert figure_of is not None, f"{metric} has no figure"

    def value(result: CaseResult) -> float | None:
        figure = figure_of(result)
        return None if figure is None else figure.value

    return value


def _busy(result: CaseResult) -> float | None:
    found = [busy for launch in result.launches if (busy := device_busy(launch)) is not None]
    return statistics.fmean(found) if found else None


def _formula_bytes(result: CaseResult) -> float | None:
    texts = generated(result)
    return None if texts is None else texts.kv_cache_formula_bytes


def _share(bound_s: float | None, measured_s: float | None) -> float | None:
    return None if bound_s is None or not measured_s else bound_s / measured_s


def _mean_of(column: Column) -> Callable[[CaseResult], float | None]:
    return lambda result: statistics.fmean(found) if (found := device_values(result, column)) else None


def _fullest_bytes(result: CaseResult) -> float | None:
    """Return the memory of the fullest device: in use by NVML, else reserved by torch."""
    memories = [memory for launch in result.launches for memory in launch.memory]
    used = [memory.nvml_used_max_bytes for memory in memories]
    sizes = [memory.peak_reserved_bytes for memory in memories] if None in used else used
    return max((size for size in sizes if size is not None), default=None)


def _between_nodes_bytes(result: CaseResult) -> float | None:
    """Return the bytes that all ranks together send to other nodes for each sequence; None on one node."""
    sent = None if result.traffic is None else result.traffic.between_nodes_bytes
    return None if sent is None else sent / sum(result.launches[-1].batches.sequences)


def _threads(result: CaseResult) -> int | None:
    """Return the threads of the rank that has the fewest; None on a GPU."""
    hosts = [launch.host for launch in result.launches if launch.host is not None and launch.host.threads]
    return min((min(host.threads) for host in hosts), default=None) if result.case.device == "cpu" else None


_BUSY, *_, _SENT = COMMUNICATION
_BETWEEN_NODES = WorkColumn(
    name="between_nodes_bytes_per_sequence",
    title="between nodes\nMB/sequence, sum",
    value=_between_nodes_bytes,
    unit=1e6,
    drop_order=1,
)

SUMMARY: tuple[WorkColumn, ...] = (
    WorkColumn(name="sequences_per_s", title="sequences\n/s", value=lambda result: result.sequences_per_s),
    WorkColumn(
        name="tokens_per_s",
        title="new tokens\n/s",
        value=lambda result: result.tokens_per_s if result.case.generates else None,
    ),
    WorkColumn(name="memory_bytes", title="memory\nGiB/GPU", value=_fullest_bytes, unit=GIB),
    WorkColumn(name="sent_bytes", title="sent/device\nMB/sequence", value=_mean_of(_SENT), drop_order=2),
    _BETWEEN_NODES,
    WorkColumn(name="device_busy", title="computing\n%", value=_busy, unit=0.01, drop_order=3),
    WorkColumn(name="utilization_pct", title="GPU busy\n% (NVML)", value=_mean_of(_BUSY), drop_order=4),
    WorkColumn(name="threads", title="threads\nper rank", value=_threads, drop_order=5),
)
"""The columns of the summary beside time and accuracy. Memory is that of the fullest GPU, the others are means."""

WORK: tuple[WorkColumn, ...] = (
    WorkColumn(name="inference_s", title="time\ns", value=_figure("time")),
    WorkColumn(name="device_time_s", title="device time\ns/work pass", value=_figure("device_time")),
    WorkColumn(
        name="bound_share",
        title="of bound\n%",
        value=lambda result: None if result.bound is None else result.bound.share,
        unit=0.01,
    ),
    WorkColumn(name="device_busy", title="computing\n%", value=_busy, unit=0.01, drop_order=1),
    _BETWEEN_NODES,
    WorkColumn(
        name="energy_j_per_sequence",
        title="energy\nJ/sequence",
        value=lambda result: result.energy_j_per_sequence,
        drop_order=2,
    ),
    WorkColumn(
        name="energy_j_per_token", title="energy\nJ/token", value=lambda result: result.energy_j_per_token, drop_order=3
    ),
    *(
        WorkColumn(
            name=f"batch_p{percent}_s",
            title=f"batch p{percent}\nms",
            value=partial(batch_latency_s, share=percent / 100),
            unit=1e-3,
            drop_order=order,
        )
        for percent, order in ((50, 4), (95, 5), (99, 6))
    ),
)
"""The columns in their order."""

TOKENS: tuple[WorkColumn, ...] = (
    WorkColumn(name="token_p95_s", title="p95\nms", value=lambda result: result.token_p95_s, unit=1e-3, drop_order=2),
    WorkColumn(name="token_p99_s", title="p99\nms", value=lambda result: result.token_p99_s, unit=1e-3),
    WorkColumn(name="kv_cache_bytes", title="KV cache\nMiB", value=_figure("kv_cache"), unit=MIB),
    WorkColumn(name="kv_cache_formula_bytes", title="formula\nMiB", value=_formula_bytes, unit=MIB, drop_order=1),
    WorkColumn(name="wire_bytes_per_token", title="sent\nMB/token", value=_figure("token_traffic"), unit=1e6),
    WorkColumn(
        name="prefill_bound_share",
        title="of bound\n%, prefill",
        value=lambda result: _share(result.bound.prefill_s if result.bound else None, result.first_token_s),
        unit=0.01,
    ),
    WorkColumn(
        name="step_bound_share",
        title="of bound\n%, step",
        value=lambda result: _share(result.bound.step_s if result.bound else None, result.token_p50_s),
        unit=0.01,
    ),
)
"""The columns of cases that generate, in a table of their own."""


def make_work_tables(cases: Sequence[CaseResult]) -> list[WorkTable]:
    """Return the tables of one block of cases that have figures: the second one is that of generated tokens."""
    found = [
        make_work_table(cases),
        make_work_table(cases, TOKENS, "Decode steps, KV cache, and bytes that all ranks send"),
    ]
    return [table for table in found if table is not None]


def make_work_table(
    cases: Sequence[CaseResult], choice: Sequence[WorkColumn] = WORK, title: str = "More figures of each case"
) -> WorkTable | None:
    """Return a table of one block of cases; None if no case has more than the figure of the first column."""
    found = [(entry, [column.value(entry.result) for column in choice]) for entry in entries(cases)]
    found = [(entry, values) for entry, values in found if any(value is not None for value in values[1:])]
    if not found:
        return None
    columns = zip(choice, zip(*(values for _, values in found), strict=True), strict=True)
    used = {column: written(values, column.unit) for column, values in columns if any(v is not None for v in values)}
    cells = zip(*used.values(), strict=True)
    return WorkTable(
        title=title,
        columns=list(used),
        rows=[(entry.title, entry.row, texts) for (entry, _), texts in zip(found, cells, strict=True)],
    )


def written(values: Sequence[float | None], unit: float) -> list[str]:
    """Return the figures of a column with the decimals that the smallest one needs."""
    shown = [None if value is None else value / unit for value in values]
    known = [value for value in shown if value]
    places = 0 if all(float(value).is_integer() for value in known) else digits(min(known))
    return ["" if value is None else f"{value:.{places}f}" for value in shown]
