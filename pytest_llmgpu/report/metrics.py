"""The table of metrics: one row per metric. Verdicts, policy, terminal, page, exports and trend read it.

A new metric is a new row here, its key in the policy (`Rules` and `Override` of `gate.policy`), the function that
judges it, and its call in `gate.cases` or `gate.series`. A new wall time has a row in
`gate.time.WALL_TIMES`, a name in `gate.time` and a place in `gate.classify.TIMES` instead of a function.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from pytest_llmgpu.report.derived import counted_tokens, device_times_s, generated, inference_s, of_prefill, peaks_bytes
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.text import gib, percent, significant

Kind = Literal["exact", "quiet", "noisy"]
"""How a metric behaves between launches of one program.

exact: equal in every launch, so that one launch suffices. quiet: a standard deviation of at most 1 %. noisy: more.
"""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a completed case."""

    unit: str
    """Unit of the number, as the exports name it."""
    value: float
    """The number; the median where each launch has one."""
    low: float | None = None
    """Smallest number of a launch; None with fewer than two launches."""
    high: float | None = None
    """Largest number of a launch; None with fewer than two launches."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The names of a metric in the formats of other tools. A name never changes: their histories depend on it."""

    column: str
    """Column of the CSV table."""
    label: str | None
    """Name in github-action-benchmark; None: not exported there, since each case would repeat it."""
    measure: str | None
    """Measure in Bencher; None likewise."""
    measure_scale: float = 1.0
    """Bencher's unit per unit of the figure: 1e9 where seconds become nanoseconds."""


@dataclass(frozen=True, kw_only=True)
class Trended:
    """How a metric is followed over stored reports."""

    title: str
    """Title with the unit."""
    scale: float = 1.0
    """Divisor of the figure: 2**30 where bytes are shown in GiB."""


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric: what it is, how it is judged by default, and how it is written."""

    name: str
    """Name in verdicts and in the policy."""
    kind: Kind
    """How it behaves between launches."""
    judged: bool = True
    """True if the gate has a verdict on it; False for figures that are only shown."""
    scope: Literal["case", "series"] = "case"
    """Scope of a verdict: one case, or a series of cases over batch sizes."""
    gate: bool = True
    """True if a verdict can fail the gate by default."""
    threshold: float | None = None
    """Change that is allowed by default, as a fraction; None where any change counts or none is measured."""
    points: bool = False
    """True if a change is a difference in percentage points; else it is a ratio."""
    bigger_is_better: bool = False
    """True if a larger number is an improvement."""
    next_step: str = ""
    """Advice for the reader of a regression."""
    unit: str = ""
    """Unit of the numbers in a verdict's row; empty where a row has none."""
    written: Callable[[float], str] = significant
    """Returns a number as text with its unit."""
    figure: Callable[[CaseResult], Figure | None] | None = None
    """Returns the number of a completed case; None where it has none."""
    exported: Exported | None = None
    """Names in the formats of other tools; None where it is not exported as a number."""
    trended: Trended | None = None
    """How it is followed over reports; None where it is not."""

    @property
    def grows(self) -> bool:
        """True if a verdict's row has the ratio of two amounts, so that a growth can be stated."""
        return bool(self.unit) and not self.points and not self.bigger_is_better


def spec_of(name: str) -> MetricSpec:
    """Return the row of a metric; KeyError for a name that the table lacks."""
    return _BY_NAME[name]


def default_threshold(name: str) -> float:
    """Return the change of a metric that the built-in policy allows, as a fraction."""
    threshold = spec_of(name).threshold
    assert threshold is not None, f"{name} has no threshold"
    return threshold


def accuracy_metric(result: CaseResult) -> Literal["acc", "acc_norm"]:
    """Return the accuracy that a case was checked by."""
    return "acc" if result.accuracy_check is not None and result.accuracy_check.metric == "acc" else "acc_norm"


def launches_s(result: CaseResult) -> list[float]:
    """Return the seconds that each launch of a completed case spent in batches; without batches its one figure.

    The list is empty for a case that did not complete, since a total over some of its batches is not comparable.
    """
    if result.outcome != "completed":
        return []
    seconds = [inference_s(launch) for launch in _timed(result)]
    return seconds or ([result.inference_s] if result.inference_s is not None else [])


def loads_s(result: CaseResult) -> list[float]:
    """Return the seconds from the start of the processes to a loaded model, for each launch that has them."""
    return [launch.load_s for launch in result.launches if launch.load_s]


def _devices_s(result: CaseResult) -> list[float]:
    """Return the device time of the slowest rank, for each launch that has it."""
    return [max(times) for launch in result.launches if (times := device_times_s(launch))]


def _timed(result: CaseResult) -> list[Launch]:
    return [launch for launch in result.launches if launch.batches.latency_s]


def _figure(unit: str, value: float | None, launches: Sequence[float] = ()) -> Figure | None:
    if value is None or not math.isfinite(value):
        return None
    several = len(launches) > 1 and all(map(math.isfinite, launches))
    return Figure(
        unit=unit, value=value, low=min(launches) if several else None, high=max(launches) if several else None
    )


def _median(unit: str, launches: Sequence[float]) -> Figure | None:
    return _figure(unit, statistics.median(launches), launches) if launches else None


def _rate(result: CaseResult, value: float | None, count: Callable[[Launch], int], unit: str) -> Figure | None:
    launches = zip(_timed(result), launches_s(result), strict=False)
    return _figure(unit, value, [count(launch) / s for launch, s in launches if s])


def _accuracy(result: CaseResult) -> Figure | None:
    """Return the accuracy; None for random weights, whose accuracy is chance."""
    metric = accuracy_metric(result)
    value = result.acc if metric == "acc" else result.acc_norm
    return None if result.case.load_format == "dummy" else _figure(metric, value)


def _traffic(result: CaseResult) -> Figure | None:
    return None if result.traffic is None else _figure("bytes/sequence", result.traffic.wire_bytes_per_sequence)


def _medians(result: CaseResult, name: str) -> list[float]:
    """Return the median of a column of the generation for each launch that has it."""
    columns = [getattr(launch.generation, name) for launch in result.launches if launch.generation is not None]
    return [statistics.median(column) for column in columns if column]


def _kv_cache(result: CaseResult) -> Figure | None:
    texts = generated(result)
    return None if texts is None else _figure("bytes", float(texts.kv_cache_bytes))


def _token_traffic(result: CaseResult) -> Figure | None:
    """Return the bytes that all ranks send for each token of a decode step of the largest batch."""
    rows = max((count for launch in result.launches for count in launch.batches.sequences), default=0)
    if result.traffic is None or result.traffic.step is None or not rows:
        return None
    sent = sum(one.sent_bytes for rank in result.traffic.step for one in rank)
    return _figure("bytes/token", sent / rows)


def _of_work(result: CaseResult, name: str, unit: str, count: Callable[[Launch], int]) -> Figure | None:
    """Return a figure of the work of all ranks divided by a count, in the first launch that has both."""
    for launch in result.launches:
        amount, number = _of_ranks(launch, name), count(launch)
        if amount is not None and number:
            return _figure(unit, amount / number)
    return None


def _flops(result: CaseResult) -> Figure | None:
    """Return the FLOPs of a sequence over all ranks; of a text those of its prefill and of all its decode steps."""
    unit = "FLOP/sequence"
    found = _of_work(result, "flops", unit, _sequences)
    if found is None or not result.case.generates:
        return found
    prefill = _of_work(of_prefill(result), "flops", unit, _sequences)
    steps = (result.case.new_tokens or 1) - 1
    return None if prefill is None else _figure(unit, prefill.value + steps * found.value)


def _of_ranks(launch: Launch, name: str) -> int | None:
    """Return the sum of a figure of the work over the ranks; None where a rank lacks it."""
    figures: list[int | None] = [getattr(rank, name) for rank in launch.ranks]
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known and len(known) == len(figures) else None


def _sequences(launch: Launch) -> int:
    """Return the number of sequences of the eager pass; 0 where its batches were not timed."""
    sequences, batches = launch.batches.sequences, _eager_batches(launch)
    return sum(sequences[number] for number in batches) if max(batches, default=0) < len(sequences) else 0


def _eager_batches(launch: Launch) -> list[int]:
    """Return the batches of the eager pass; none where there was no work pass."""
    if launch.work is None:
        return []
    return launch.work.batches if launch.work.eager_batches is None else launch.work.eager_batches


def _seconds(value: float) -> str:
    return f"{significant(value)} s"


def _points(value: float) -> str:
    return percent(value, 2)


def _sent(value: float) -> str:
    unit, name = (1e9, "GB") if value >= 1e9 else (1e6, "MB")  # noqa: PLR2004 - the unit's own size
    return f"{value / unit:,.4g} {name}" if value else "0"


def _operations(value: float) -> str:
    unit, name = next(
        ((unit, name) for unit, name in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")) if value >= unit),
        (1.0, "FLOP"),
    )
    return f"{value / unit:,.5g} {name}"


def _counted(value: float) -> str:
    return f"{value:,.0f}"


_ITEMS = "Read the items in `lost` of the verdict's row in the report."

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        name="outcome",
        kind="exact",
        next_step="Read `failure` of the case in the report: it has the message and the end of the log.",
    ),
    MetricSpec(
        name="execution",
        kind="exact",
        next_step="Read `execution_choice` of the launch in the report: it names what could not be recorded.",
    ),
    MetricSpec(
        name="largest_batch",
        kind="exact",
        scope="series",
        unit="sequences",
        bigger_is_better=True,
        next_step="Read memory by batch size: which part of it grew.",
    ),
    MetricSpec(
        name="device_time",
        kind="quiet",
        threshold=0.01,
        unit="s",
        written=_seconds,
        next_step="Read which kernels became slower: `work.ranks` of both reports.",
        figure=lambda result: _median("s", _devices_s(result)),
        exported=Exported(column="device_time_s", label="device time", measure="device-time", measure_scale=1e9),
        trended=Trended(title="device time of a work pass (s)"),
    ),
    MetricSpec(
        name="time",
        kind="noisy",
        threshold=0.04,
        unit="s",
        written=_seconds,
        next_step="Read what changed between the two commits, and the ratio of each batch size: one of them or all.",
        figure=lambda result: _figure("s", result.inference_s, launches_s(result)),
        exported=Exported(column="inference_s", label="time", measure="latency", measure_scale=1e9),
        trended=Trended(title="time (s)"),
    ),
    MetricSpec(
        name="first_token",
        kind="noisy",
        threshold=0.04,
        unit="s",
        written=_seconds,
        next_step="Compare the prefill: `first_token_s` of `generation` in both reports, and the time of scoring.",
        figure=lambda result: _figure("s", result.first_token_s, _medians(result, "first_token_s")),
        exported=Exported(
            column="first_token_s", label="time to first token", measure="first-token", measure_scale=1e9
        ),
        trended=Trended(title="time to first token (s)"),
    ),
    MetricSpec(
        name="token_time",
        kind="noisy",
        threshold=0.04,
        unit="s",
        written=_seconds,
        next_step="Compare the decode steps: `step_s` of `generation` in both reports, and their traffic.",
        figure=lambda result: _figure("s", result.token_p50_s, _medians(result, "step_s")),
        exported=Exported(column="token_p50_s", label="time per token", measure="token-time", measure_scale=1e9),
        trended=Trended(title="time per token (s)"),
    ),
    MetricSpec(
        name="token_p95",
        kind="noisy",
        judged=False,
        figure=lambda result: _figure("s", result.token_p95_s),
        exported=Exported(column="token_p95_s", label=None, measure=None),
    ),
    MetricSpec(
        name="kv_cache",
        kind="exact",
        judged=False,
        figure=_kv_cache,
        exported=Exported(column="kv_cache_bytes", label=None, measure=None),
    ),
    MetricSpec(
        name="token_traffic",
        kind="exact",
        judged=False,
        figure=_token_traffic,
        exported=Exported(column="wire_bytes_per_token", label=None, measure=None),
    ),
    MetricSpec(
        name="sequences",
        kind="noisy",
        judged=False,
        bigger_is_better=True,
        figure=lambda result: _rate(
            result, result.sequences_per_s, lambda launch: sum(launch.batches.sequences), "sequences/s"
        ),
        exported=Exported(column="sequences_per_s", label="sequences per second", measure="throughput"),
        trended=Trended(title="throughput (sequences/s)"),
    ),
    MetricSpec(
        name="tokens",
        kind="noisy",
        judged=False,
        bigger_is_better=True,
        figure=lambda result: _rate(
            result,
            result.tokens_per_s,
            lambda launch: counted_tokens(launch.batches, result.case.new_tokens),
            "tokens/s",
        ),
        exported=Exported(column="tokens_per_s", label="tokens per second", measure="tokens-per-second"),
    ),
    MetricSpec(
        name="accuracy",
        kind="exact",
        scope="series",
        threshold=0.005,
        points=True,
        bigger_is_better=True,
        unit="acc",
        written=_points,
        next_step=_ITEMS,
        figure=_accuracy,
        exported=Exported(column="accuracy", label="accuracy", measure="accuracy"),
        trended=Trended(title="accuracy (%)", scale=0.01),
    ),
    MetricSpec(
        name="predictions", kind="exact", gate=False, points=True, unit="acc", written=_points, next_step=_ITEMS
    ),
    MetricSpec(
        name="flops",
        kind="exact",
        threshold=0.001,
        unit="FLOP",
        written=_operations,
        next_step="Read the ops that changed (`ops` of `work` in the report): the model computes more per token.",
        figure=_flops,
        exported=Exported(column="flops_per_sequence", label="FLOPs per sequence", measure="flops-per-sequence"),
        trended=Trended(title="computed (TFLOP/sequence, all ranks)", scale=1e12),
    ),
    MetricSpec(
        name="host_syncs",
        kind="exact",
        unit="calls",
        written=_counted,
        next_step="Find what reads a value back from the GPU: `.item()`, `.cpu()`, a condition on a tensor.",
        figure=lambda result: _of_work(
            result, "host_syncs", "calls/forward", lambda launch: len(_eager_batches(launch))
        ),
        exported=Exported(column="host_syncs_per_forward", label=None, measure=None),
    ),
    MetricSpec(
        name="kernels",
        kind="exact",
        gate=False,
        unit="calls",
        written=_counted,
        next_step="Read the kernels that were added in `work` of the two reports.",
        figure=lambda result: _of_work(
            result, "kernels", "calls/forward", lambda launch: len(launch.work.batches) if launch.work else 0
        ),
        exported=Exported(column="kernels_per_forward", label=None, measure=None),
        trended=Trended(title="kernel calls (per forward, all ranks)"),
    ),
    MetricSpec(
        name="ops",
        kind="exact",
        gate=False,
        unit="calls",
        written=_counted,
        next_step="Read `ops` of `work` in the two reports.",
    ),
    MetricSpec(
        name="runtime_calls",
        kind="exact",
        gate=False,
        unit="calls",
        written=_counted,
        next_step="Read `runtime_calls` of `work` in the two reports.",
    ),
    MetricSpec(
        name="traffic",
        kind="exact",
        threshold=0.001,
        unit="wire bytes",
        written=_sent,
        next_step="Exact counts do not vary by chance: find what sends more since the baseline.",
        figure=_traffic,
        exported=Exported(
            column="wire_bytes_per_sequence", label="sent per sequence", measure="wire-bytes-per-sequence"
        ),
        trended=Trended(title="sent (MB/sequence, all ranks)", scale=1e6),
    ),
    MetricSpec(name="path", kind="exact", next_step="Compare `topology` and the NCCL variables of the two reports."),
    MetricSpec(
        name="memory",
        kind="exact",
        threshold=0.005,
        unit="bytes",
        written=gib,
        next_step="Read memory by batch size: weights, workspace or live tensors.",
        figure=lambda result: _median("bytes", list(map(float, peaks_bytes(result)))),
        exported=Exported(column="peak_memory_bytes", label="peak memory", measure="peak-memory-bytes"),
        trended=Trended(title="peak of the fullest GPU (GiB)", scale=float(2**30)),
    ),
    MetricSpec(
        name="load_time",
        kind="noisy",
        scope="series",
        gate=False,
        threshold=0.25,
        unit="s",
        written=_seconds,
        next_step="Find what loading the model does since the baseline: files, their cache, kernels that are built.",
        figure=lambda result: _median("s", loads_s(result)),
        exported=Exported(column="load_s", label=None, measure=None),
    ),
    *(
        MetricSpec(
            name=name,
            kind="noisy",
            scope="series",
            gate=False,
            threshold=0.25,
            unit=unit,
            written=lambda value, unit=unit: f"{significant(value)} {unit}",  # type: ignore[misc]
            next_step=next_step,
        )
        for name, unit, next_step in (
            ("warmup_time", "s", "Read `execution_choice` of the launches: it has the number of recorded shapes."),
            ("transfer_time", "s", "Read the traffic, its path, and `collectives` of `work` in the two reports."),
            ("energy", "J", "Compare the time, and the power limit and the clocks of the GPUs."),
        )
    ),
)
"""Every metric, in the order in which a reader meets them: outcome before numbers."""

_BY_NAME = {spec.name: spec for spec in METRICS}

JUDGED: tuple[str, ...] = tuple(spec.name for spec in METRICS if spec.judged)
"""Names of the metrics that the gate has verdicts on."""

if TYPE_CHECKING:
    MetricName = str
else:
    MetricName = Literal[JUDGED]
"""Name of a metric that the gate has verdicts on."""
