"""The policy of a gate: thresholds, the handling of rows with not enough data, and known regressions."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from pytest_llmgpu.report.bounds import Amount, Count, Fraction, Positive, Seconds
from pytest_llmgpu.report.metrics import JUDGED, MetricName, default_threshold, spec_of
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import MIB, guess

_Record = TypeVar("_Record", bound=msgspec.Struct)

_Part = Annotated[float, Meta(ge=0, lt=1)]
"""A relative threshold."""

_ALLOWED = {
    "on_inconclusive": ("pass", "fail"),
    "accuracy.metric": ("acc", "acc_norm"),
    "].metric": JUDGED,
}
"""The allowed words of a key, by the end of its name."""

_SWITCHES = ("on_inconclusive", "largest_unseen_slowdown", "allow_missing", "allow_no_baseline", "require_armed")
"""Keys that options of the command line override."""


class DeviceTimeRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The threshold of device time: the time of the kernels that are no collective."""

    gate: bool = True
    """True if a regression fails the gate. False: verdicts are reported only."""
    margin: _Part = default_threshold("device_time")
    """The relative threshold: the slowdown that is allowed, as a fraction. 0.005 is added between different days, and
    more where the baseline is of other GPUs of the same kind."""


class TimeRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The threshold of wall time."""

    gate: bool = True
    """True if a regression fails the gate. False: verdicts are reported only."""
    margin: _Part | None = None
    """The relative threshold: the slowdown that is allowed, as a fraction. None: 0.04 against a stored baseline, 0.02
    where launches of both reports alternated."""
    absolute_s: Seconds = 0.0
    """The absolute threshold in seconds, for `time` of the whole case. The larger of both thresholds is used."""


class AccuracyRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The thresholds of accuracy. A statistically significant loss is a regression, however small it is."""

    gate: bool = True
    """True if a regression fails the gate. False: verdicts are reported only."""
    metric: Literal["acc", "acc_norm"] = "acc_norm"
    """The accuracy that is compared: by log-likelihood (acc), or by log-likelihood per byte of the ending
    (acc_norm)."""
    margin: _Part = default_threshold("accuracy")
    """The loss as a fraction of the items that the interval must exclude for the verdict OK."""
    floor: Fraction | None = None
    """The least accuracy that is allowed, independent of the baseline; None: the candidate's accuracy check decides."""
    difference: Amount | None = None
    """The largest typical relative difference of log-likelihoods from the baseline that is allowed. None: what rounding
    explains in the dtype of the case, 0.001 in float32, 0.005 in float16, 0.04 in bfloat16."""


class MemoryRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The thresholds of the peak memory of each device."""

    gate: bool = True
    """True if a regression fails the gate. False: verdicts are reported only."""
    margin: _Part = default_threshold("memory")
    """The relative threshold: the growth of tensors that is allowed, as a fraction."""
    absolute_bytes: Count = 64 * MIB
    """The absolute threshold in bytes. The larger of both thresholds is used."""
    used_margin: _Part = 0.1
    """The growth that is allowed for memory that torch reserved and for all memory that NVML reports as used, as a
    fraction. This includes caches and buffers of NCCL. A growth of 1 GiB is always allowed."""


class ExactRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule of an exact metric: every change for the worse is a regression."""

    gate: bool = True
    """True if a regression fails the gate. False: verdicts are reported only."""


class AmountRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The threshold of an exact amount, which is equal in every launch of an equal program."""

    gate: bool = True
    """True if a regression fails the gate. False: verdicts are reported only."""
    margin: _Part = 0.001
    """The relative threshold: the growth that is allowed, as a fraction."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of all metrics for one case."""

    device_time: DeviceTimeRule = DeviceTimeRule()
    """The rule of the device time of a case."""
    time: TimeRule = TimeRule()
    """The rule of the time of a case."""
    first_token: TimeRule = TimeRule()
    """The rule of the time to first token of a case that generates."""
    token_time: TimeRule = TimeRule()
    """The rule of the time per output token of a case that generates."""
    accuracy: AccuracyRule = AccuracyRule()
    """The rule of accuracy."""
    memory: MemoryRule = MemoryRule()
    """The rule of the peak memory."""
    execution: ExactRule = ExactRule()
    """The rule of the execution: CUDA graphs in the baseline and eager forwards in the candidate are a regression."""
    flops: AmountRule = AmountRule(margin=default_threshold("flops"))
    """The rule of the floating-point operations of each rank."""
    host_syncs: ExactRule = ExactRule()
    """The rule of the calls that make the host wait for the GPU."""
    kernels: ExactRule = ExactRule(gate=spec_of("kernels").gate)
    """The rule of the number of kernel calls."""
    ops: ExactRule = ExactRule(gate=spec_of("ops").gate)
    """The rule of the number of calls of torch's ops."""
    runtime_calls: ExactRule = ExactRule(gate=spec_of("runtime_calls").gate)
    """The rule of the number of calls of the CUDA runtime and driver."""
    traffic: AmountRule = AmountRule(margin=default_threshold("traffic"))
    """The rule of the bytes and calls that the ranks send."""
    path: ExactRule = ExactRule()
    """The rule of the links that carry the traffic."""
    predictions: ExactRule = ExactRule(gate=spec_of("predictions").gate)
    """The rule of changed predictions. Other kernels can change a few without a loss of accuracy."""
    largest_batch: ExactRule = ExactRule()
    """The rule of the largest batch size of a series that completed."""


class Override(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other rules for some cases. Later entries take precedence, and keys that an entry lacks do not change."""

    strategy: str | None = None
    """The strategy of the cases; None: any."""
    test: str | None = None
    """The pattern of the node ids of the cases, in which `*` stands for any text; None: any."""
    marker: str | None = None
    """The name of a pytest marker that the test, its class or its module has; None: any."""
    device_time: dict[str, Any] = {}
    """The changed keys of the rule of device time."""
    time: dict[str, Any] = {}
    """The changed keys of the rule of time."""
    first_token: dict[str, Any] = {}
    """The changed keys of the rule of the time to first token."""
    token_time: dict[str, Any] = {}
    """The changed keys of the rule of the time per output token."""
    accuracy: dict[str, Any] = {}
    """The changed keys of the rule of accuracy."""
    memory: dict[str, Any] = {}
    """The changed keys of the rule of memory."""
    execution: dict[str, Any] = {}
    """The changed keys of the rule of the execution."""
    flops: dict[str, Any] = {}
    """The changed keys of the rule of the floating-point operations."""
    host_syncs: dict[str, Any] = {}
    """The changed keys of the rule of host synchronizations."""
    kernels: dict[str, Any] = {}
    """The changed keys of the rule of kernel calls."""
    ops: dict[str, Any] = {}
    """The changed keys of the rule of calls of torch's ops."""
    runtime_calls: dict[str, Any] = {}
    """The changed keys of the rule of calls of the CUDA runtime."""
    traffic: dict[str, Any] = {}
    """The changed keys of the rule of traffic."""
    path: dict[str, Any] = {}
    """The changed keys of the rule of the path."""
    predictions: dict[str, Any] = {}
    """The changed keys of the rule of predictions."""
    largest_batch: dict[str, Any] = {}
    """The changed keys of the rule of the largest batch size."""

    def is_for(self, result: CaseResult) -> bool:
        """Return whether the entry applies to a case."""
        return (
            self.strategy in {None, result.case.strategy}
            and (self.test is None or _matches(self.test, result.nodeid or ""))
            and (self.marker is None or self.marker in result.markers)
        )


class Known(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A regression that is accepted until a day."""

    case: str
    """The id of the case, such as `tp-bs8`, or the strategy of a series."""
    metric: MetricName
    """The metric that regressed."""
    reason: str
    """The reason why the regression is accepted."""
    expires: datetime.date
    """The last day on which the regression is accepted."""
    up_to: Amount | None = None
    """The largest growth that is accepted, as a fraction of the baseline; None: any. Only for metrics that grow."""


class Policy(Rules, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of a gate for all cases, with overrides and known regressions."""

    confidence: Annotated[float, Meta(ge=0.5, lt=1)] = 0.99
    """The confidence of a verdict that something changed. The probability of a false alarm in all gated rows of times
    together, and in all gated rows of another metric, is at most 1 minus this value."""
    on_inconclusive: Literal["pass", "fail"] = "pass"
    """Effect of a UNDECIDED row on the gate: `pass` or `fail`."""
    largest_unseen_slowdown: Annotated[float, Meta(gt=0, lt=2.0**63)] = 0.5
    """The largest slowdown of a case that may stay unseen, as a fraction. The gate does not pass if the launches of a
    gated case would not have shown this slowdown, whatever `on_inconclusive` is. Device time counts if both reports
    have it, else wall time."""
    min_launches: Positive = 1
    """The least number of undisturbed launches of each completed case in a baseline: `llmgpu promote` refuses
    fewer."""
    allow_missing: bool = False
    """True if cases and figures pass that only the baseline has."""
    allow_no_baseline: bool = False
    """True if a run passes that could not be compared because there is no baseline."""
    require_armed: bool = False
    """True if a gated row that could not be compared fails the gate."""
    override: list[Override] = []
    """The rules that differ for some cases."""
    known: list[Known] = []
    """The regressions that are accepted."""

    def rules(self, result: CaseResult) -> Rules:
        """Return the rules for a case."""
        rules: Rules = self
        for entry in self.override:
            if entry.is_for(result):
                rules = overridden(rules, entry)
        return rules


def switched(policy: Policy, given: object) -> Policy:
    """Return the policy with the values of the attributes of `given`, except None, for the keys in `_SWITCHES`."""
    changed = {name: value for name in _SWITCHES if (value := getattr(given, name, None)) is not None}
    return msgspec.structs.replace(policy, **changed)


def idle_overrides(policy: Policy, cases: Iterable[CaseResult]) -> list[str]:
    """Return a line for each override that applies to none of the cases, because its name may be misspelt."""
    results = list(cases)
    return [
        f"override[{number}] of the policy matches no case: check its strategy, test and marker"
        for number, entry in enumerate(policy.override)
        if not any(map(entry.is_for, results))
    ]


def overridden(rules: Rules, entry: Override, number: int = 0) -> Rules:
    """Return the rules with the keys of an entry; ValueError names the number of the entry and the key."""
    changed: dict[str, Any] = {}
    for name in Rules.__struct_fields__:
        if table := getattr(entry, name):
            before = getattr(rules, name)
            merged = {**msgspec.to_builtins(before), **table}
            changed[name] = converted(merged, type(before), f"override[{number}].{name}.")
    # `rules` can be a Policy; only its rules are copied.
    return Rules(**{name: changed.get(name, getattr(rules, name)) for name in Rules.__struct_fields__})


def converted(table: Any, record: type[_Record], place: str) -> _Record:
    """Return a TOML table as a record; ValueError names an invalid key, its value and what is allowed."""
    _refuse_unknown(table, record, place)
    try:
        return msgspec.convert(table, record)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        key = f"{place}{where.rstrip('`')}" or "the table"
        if bound := re.fullmatch(r"Expected `(?:int|float)` ([<>]=?) (.*)", text):
            for step in re.findall(r"\w+", where):
                table = table[int(step) if step.isdigit() else step]
            raise ValueError(f"{key} = {table}: allowed are numbers {bound[1]} {float(bound[2]):g}") from None
        allowed = next((names for end, names in _ALLOWED.items() if key.endswith(end)), None)
        also = f": allowed are {', '.join(allowed)}" if allowed and "enum" in text else ""
        raise ValueError(f"{key}: {text[:1].lower()}{text[1:]}{also}") from None


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern with `*` matches the whole name. fnmatch would interpret the brackets of node ids."""
    first, *others = pattern.split("*")
    if not others or not name.startswith(first):
        return name == pattern
    *middle, last = others
    # Each part at its first place. A regular expression would try every combination of places.
    at = len(first)
    for part in middle:
        if (found := name.find(part, at)) < 0:
            return False
        at = found + len(part)
    return len(name) - at >= len(last) and name.endswith(last)


def _refuse_unknown(table: Any, record: type[msgspec.Struct], place: str) -> None:
    if not isinstance(table, Mapping):
        return  # The conversion reports it.
    for key, value in table.items():
        if key not in record.__struct_fields__:
            allowed = sorted(record.__struct_fields__)
            raise ValueError(f"{place}{key} is not a key{guess(key, allowed)}: allowed are {', '.join(allowed)}")
        if record is Policy:
            rule = next((f.type for f in msgspec.structs.fields(Policy) if f.name == key), None)
            if isinstance(rule, type) and issubclass(rule, msgspec.Struct):
                _refuse_unknown(value, rule, f"{key}.")
            if key in {"override", "known"} and isinstance(value, list):
                for number, entry in enumerate(value):
                    _refuse_unknown(entry, Override if key == "override" else Known, f"{key}[{number}].")
