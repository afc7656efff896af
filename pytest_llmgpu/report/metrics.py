"""The table of metrics: one row per metric. Verdicts, policy, terminal, page, exports and trend read it.

A column of a table has its title in `render.table`.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from pytest_llmgpu.report.derived import counted_tokens, device_times_s, generated, inference_s, of_prefill, peaks_bytes
from pytest_llmgpu.report.result import CaseResult, Declared, Launch
from pytest_llmgpu.report.text import gib, percent, significant

Rule = Literal["outcome", "execution", "program", "time", "answers", "exact", "traffic", "path", "memory", "creep"]
"""How the gate judges a metric.

outcome, execution, path: by their order. program: calls by name, and the
price of their change. time: launches are the replicates. answers: item by item, or token by token. exact: equal in
every launch, so that one launch suffices. traffic: exact, by collective. memory: exact up to the allocator's rounding.
creep: the growth of other metrics over several promotions.
"""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a completed case."""

    unit: str
    """Unit of the number, as the exports name it."""
    value: float
    """The number; the median where each launch has one."""
    low: float | None = None
    high: float | None = None
    """Smallest and largest number of a launch; None with fewer than two launches."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The names of a metric in the formats of other tools. A name never changes: their histories depend on it."""

    column: str
    """Column of the CSV table."""
    label: str | None = None
    """Name in github-action-benchmark; None: not exported there, since each case would repeat it."""
    measure: str | None = None
    """Measure in Bencher; None likewise."""


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric: what it is, how it is judged by default, and how it is written."""

    name: str
    """Name in verdicts and in the policy."""
    rule: Rule | None = None
    """How it is judged; None for a figure that is only shown."""
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
    of_passes: bool = False
    """True if it is of work passes: the reason why it is lacking can be theirs."""
    figure: Callable[[CaseResult], Figure | None] | None = None
    """Returns the number of a completed case; None where it has none."""
    exported: Exported | None = None
    """Names in the formats of other tools; None where it is not exported as a number."""
    trend: str = ""
    """Title of its trend over stored reports, with the unit; empty where it is not followed."""
    trend_unit: float = 1.0
    """Divisor of the figure in a trend: 2**30 where bytes are shown in GiB."""

    def of(self, result: CaseResult) -> Figure | None:
        """Return the number of a case; None where it has none, or did not complete."""
        return self.figure(result) if self.figure is not None and result.outcome == "completed" else None

    @property
    def grows(self) -> bool:
        """True if a verdict's row has the ratio of two amounts, so that a growth can be stated."""
        return bool(self.unit) and not self.points and not self.bigger_is_better


def spec_of(name: str) -> MetricSpec:
    """Return the row of a metric; KeyError for a name that the table lacks."""
    return BY_NAME[name]


def own(name: str, declared: Declared | None) -> MetricSpec:
    """Return the row of a figure of the user's own; one that is not declared is only shown."""
    words, unit = name.replace("_", " "), declared.unit if declared else ""
    return MetricSpec(
        name=name,
        rule=declared.rule if declared else None,
        threshold=declared.threshold if declared else None,
        bigger_is_better=declared is not None and declared.better == "larger",
        next_step="Read `figures` of the launches in both reports.",
        unit=unit,
        written=lambda value: f"{significant(value)} {unit}".rstrip(),
        figure=lambda result: _median(unit, recorded(result, name)),
        exported=Exported(column=name, label=words if declared else None, measure=name.replace("_", "-")),
        trend=f"{words} ({unit})" if unit else words,
    )


def recorded(result: CaseResult, name: str) -> list[float]:
    """Return a figure of the user's own for each launch that has it."""
    return [launch.figures[name] for launch in result.launches if name in launch.figures]


def own_metrics(results: Iterable[CaseResult]) -> list[MetricSpec]:
    """Return a row for each figure of their own that results have; of several declarations the last one counts."""
    all_of = [(name, one.declared.get(name)) for one in results for launch in one.launches for name in launch.figures]
    return [own(name, declared) for name, declared in dict(all_of).items() if is_own(name)]


def is_own(name: str) -> bool:
    """Return whether a figure of the user's own may have a name."""
    return re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) is not None and name not in BY_NAME


def place_of(name: str) -> int:
    """Return the place of a metric in the table; figures of the user's own come last."""
    return [*BY_NAME, name].index(name)


def _figure(unit: str, value: float | None, launches: Sequence[float] = ()) -> Figure | None:
    if value is None or not math.isfinite(value):
        return None
    several = len(launches) > 1 and all(map(math.isfinite, launches))
    low, high = (min(launches), max(launches)) if several else (None, None)
    return Figure(unit=unit, value=value, low=low, high=high)


def _median(unit: str, launches: Sequence[float]) -> Figure | None:
    return _figure(unit, statistics.median(launches), launches) if launches else None


def _rate(unit: str, value: float | None, result: CaseResult, counts: Sequence[int]) -> Figure | None:
    """Return a rate of the median time, with its range over launches of these counts."""
    seconds = map(inference_s, result.launches)
    return _figure(unit, value, [count / s for count, s in zip(counts, seconds, strict=True) if s])


def _accuracy(result: CaseResult) -> Figure | None:
    """Return the accuracy that a case was checked by; None for random weights, whose accuracy is chance."""
    metric = "acc" if result.accuracy_check is not None and result.accuracy_check.metric == "acc" else "acc_norm"
    return None if result.case.load_format == "dummy" else _figure(metric, getattr(result, metric))


def _medians(result: CaseResult, name: str) -> list[float]:
    """Return the median of a column of the generation for each launch that has it."""
    columns = [getattr(launch.generation, name) for launch in result.launches if launch.generation is not None]
    return [statistics.median(column) for column in columns if column]


def _token_traffic(result: CaseResult) -> Figure | None:
    """Return the bytes that all ranks send for each token of a decode step of the largest batch."""
    rows = max((count for launch in result.launches for count in launch.batches.sequences), default=0)
    if result.traffic is None or result.traffic.step is None or not rows:
        return None
    sent = sum(one.sent_bytes for rank in result.traffic.step for one in rank)
    return _figure("bytes/token", sent / rows)


def _per(count: Callable[[Launch], int], field: str, unit: str, result: CaseResult) -> Figure | None:
    """Return the sum of a field of the work of all ranks divided by a count, in the first launch that has both."""
    for launch in result.launches:
        amounts, number = [getattr(rank, field) for rank in launch.ranks], count(launch)
        if amounts and None not in amounts and number:
            return _figure(unit, sum(amounts) / number)
    return None


def _flops(result: CaseResult) -> Figure | None:
    """Return the FLOPs of a sequence over all ranks; of a text those of its prefill and of all its decode steps."""
    unit = "FLOP/sequence"
    found = _per(_sequences, "flops", unit, result)
    if found is None or not result.case.generates:
        return found
    prefill = _per(_sequences, "flops", unit, of_prefill(result))
    steps = (result.case.new_tokens or 1) - 1
    return None if prefill is None else _figure(unit, prefill.value + steps * found.value)


def _sequences(launch: Launch) -> int:
    """Return the number of sequences of the eager pass; 0 where its batches were not timed."""
    sequences, batches = launch.batches.sequences, _eager_batches(launch)
    return sum(sequences[number] for number in batches) if max(batches, default=0) < len(sequences) else 0


def _eager_batches(launch: Launch) -> list[int]:
    """Return the batches of the eager pass; none where there was no work pass."""
    return [] if launch.work is None else launch.work.eager_batches


def _seconds(value: float) -> str:
    return f"{significant(value)} s"


def _sent(value: float) -> str:
    unit, name = (1e9, "GB") if value >= 1e9 else (1e6, "MB")  # noqa: PLR2004 - the unit's own size
    return f"{value / unit:,.4g} {name}" if value else "0"


def _operations(value: float) -> str:
    units = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (-math.inf, "FLOP"))
    unit, name = next((unit, name) for unit, name in units if value >= unit)
    return f"{value / max(1.0, unit):,.5g} {name}"


_wall_time = functools.partial(MetricSpec, rule="time", threshold=0.04, unit="s", written=_seconds)
_counted = "{:,.0f}".format
_points = functools.partial(percent, digits=2)
_ITEMS = "Read the items in `lost` of the verdict's row in the report."

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        name="outcome",
        rule="outcome",
        next_step="Read `failure` of the case in the report: it has the message and the end of the log.",
    ),
    MetricSpec(
        name="execution",
        rule="execution",
        next_step="Read `execution_choice` of the launch in the report: it names what could not be recorded.",
    ),
    MetricSpec(
        name="program",
        rule="program",
        of_passes=True,
        threshold=0.002,
        unit="s",
        written=_seconds,
        next_step="Remove what is called more often; if it is meant, promote the report with --force REASON.",
    ),
    MetricSpec(
        name="device_time",
        rule="time",
        of_passes=True,
        threshold=0.005,
        unit="s",
        written=_seconds,
        next_step="Read which kernels became slower: `work.ranks` of both reports.",
        figure=lambda result: _median("s", [max(found) for of in result.launches if (found := device_times_s(of))]),
        exported=Exported(column="device_time_s", label="device time", measure="device-time"),
        trend="device time of a work pass (s)",
    ),
    _wall_time(
        name="time",
        next_step="Read what changed between the two commits, and whether one batch size is slower or all.",
        figure=lambda result: _figure(
            "s", result.inference_s, [inference_s(launch) for launch in result.launches if launch.batches.latency_s]
        ),
        exported=Exported(column="inference_s", label="time", measure="latency"),
        trend="time (s)",
    ),
    _wall_time(
        name="first_token",
        next_step="Compare the prefill: `first_token_s` of `generation` in both reports, and the time of scoring.",
        figure=lambda result: _figure("s", result.first_token_s, _medians(result, "first_token_s")),
        exported=Exported(column="first_token_s", label="time to first token", measure="first-token"),
        trend="time to first token (s)",
    ),
    _wall_time(
        name="token_time",
        next_step="Compare the decode steps: `step_s` of `generation` in both reports, and their traffic.",
        figure=lambda result: _figure("s", result.token_p50_s, _medians(result, "step_s")),
        exported=Exported(column="token_p50_s", label="time per token", measure="token-time"),
        trend="time per token (s)",
    ),
    MetricSpec(
        name="token_p95",
        figure=lambda result: _figure("s", result.token_p95_s),
        exported=Exported(column="token_p95_s"),
    ),
    MetricSpec(
        name="kv_cache",
        figure=lambda result: _figure("bytes", texts.kv_cache_bytes) if (texts := generated(result)) else None,
        exported=Exported(column="kv_cache_bytes"),
    ),
    MetricSpec(name="token_traffic", figure=_token_traffic, exported=Exported(column="wire_bytes_per_token")),
    MetricSpec(
        name="sequences",
        bigger_is_better=True,
        figure=lambda result: _rate(
            "sequences/s", result.sequences_per_s, result, [sum(one.batches.sequences) for one in result.launches]
        ),
        exported=Exported(column="sequences_per_s", label="sequences per second", measure="throughput"),
        trend="throughput (sequences/s)",
    ),
    MetricSpec(
        name="tokens",
        bigger_is_better=True,
        figure=lambda result: _rate(
            "tokens/s",
            result.tokens_per_s,
            result,
            [counted_tokens(one, result.case.new_tokens) for one in result.launches],
        ),
        exported=Exported(column="tokens_per_s", label="tokens per second", measure="tokens-per-second"),
    ),
    MetricSpec(
        name="accuracy",
        rule="answers",
        threshold=0.005,
        points=True,
        bigger_is_better=True,
        unit="acc",
        written=_points,
        next_step=_ITEMS,
        figure=_accuracy,
        exported=Exported(column="accuracy", label="accuracy", measure="accuracy"),
        trend="accuracy (%)",
        trend_unit=0.01,
    ),
    MetricSpec(
        name="predictions", rule="answers", gate=False, points=True, unit="acc", written=_points, next_step=_ITEMS
    ),
    MetricSpec(
        name="texts",
        rule="answers",
        next_step="Compare the config of the model and the kernels of both reports: constants, scales, positions.",
    ),
    MetricSpec(
        name="flops",
        unit="FLOP",
        written=_operations,
        figure=_flops,
        exported=Exported(column="flops_per_sequence", label="FLOPs per sequence", measure="flops-per-sequence"),
        trend="computed (TFLOP/sequence, all ranks)",
        trend_unit=1e12,
    ),
    MetricSpec(
        name="host_syncs",
        unit="calls",
        written=_counted,
        figure=lambda result: _per(lambda launch: len(_eager_batches(launch)), "host_syncs", "calls/forward", result),
        exported=Exported(column="host_syncs_per_forward"),
    ),
    MetricSpec(
        name="host_calls",
        rule="exact",
        gate=False,
        unit="calls",
        written=_counted,
        next_step="Read `host_calls` of `work` in the two reports: which source file calls more functions.",
        of_passes=True,
    ),
    MetricSpec(
        name="kernels",
        unit="calls",
        written=_counted,
        figure=lambda result: _per(
            lambda launch: len(launch.work.batches) if launch.work else 0, "kernels", "calls/forward", result
        ),
        exported=Exported(column="kernels_per_forward"),
        trend="kernel calls (per forward, all ranks)",
    ),
    MetricSpec(
        name="traffic",
        rule="traffic",
        threshold=0.001,
        unit="wire bytes",
        written=_sent,
        next_step="Exact counts do not vary by chance: find what sends more since the baseline.",
        figure=lambda result: _figure(
            "bytes/sequence", result.traffic.wire_bytes_per_sequence if result.traffic is not None else None
        ),
        exported=Exported(
            column="wire_bytes_per_sequence", label="sent per sequence", measure="wire-bytes-per-sequence"
        ),
        trend="sent (MB/sequence, all ranks)",
        trend_unit=1e6,
    ),
    MetricSpec(name="path", rule="path", next_step="Compare `topology` and the NCCL variables of the two reports."),
    MetricSpec(
        name="memory",
        rule="memory",
        threshold=0.005,
        unit="bytes",
        written=gib,
        next_step="Read memory by batch size: weights, workspace or live tensors.",
        figure=lambda result: _median("bytes", list(map(float, peaks_bytes(result)))),
        exported=Exported(column="peak_memory_bytes", label="peak memory", measure="peak-memory-bytes"),
        trend="peak of the fullest GPU (GiB)",
        trend_unit=2.0**30,
    ),
    MetricSpec(
        name="creep",
        rule="creep",
        next_step="Find the commits that added it with llmgpu trend, or accept it: llmgpu promote --force REASON.",
    ),
    MetricSpec(
        name="load_time",
        figure=lambda result: _median("s", [launch.load_s for launch in result.launches if launch.load_s]),
        exported=Exported(column="load_s"),
    ),
)
"""Every metric, in the order in which a reader meets them: outcome before numbers."""

BY_NAME = {spec.name: spec for spec in METRICS}
"""Each metric by its name."""

JUDGED: tuple[str, ...] = tuple(spec.name for spec in METRICS if spec.rule)
"""Names of the metrics that the gate has verdicts on."""

MetricName = str
"""Name of a metric or of a figure of the user's own; stored verdicts can have names that the gate judged before."""
