"""What a gate is told: margins, what to do where nothing can be said, and regressions that are known."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from pytest_llmgpu.report.metrics import JUDGED, MetricName, default_threshold, spec_of
from pytest_llmgpu.report.result import CaseResult

__all__ = [
    "AccuracyRule",
    "ExactRule",
    "Known",
    "MemoryRule",
    "Override",
    "Policy",
    "Rules",
    "TimeRule",
    "converted",
    "idle_overrides",
    "overridden",
    "switched",
]

_Record = TypeVar("_Record", bound=msgspec.Struct)

_ALLOWED = {
    "on_inconclusive": ("pass", "fail"),
    "accuracy.metric": ("acc", "acc_norm"),
    "].metric": JUDGED,
}
"""End of a key to the words it takes."""


_SWITCHES = ("on_inconclusive", "allow_missing", "allow_no_baseline", "require_armed")
"""Keys that a command line may set, too."""


class TimeRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bar for time."""

    gate: bool = True
    """False: reported, never a reason to fail."""
    margin: float = default_threshold("time")
    """Slowdown that is allowed, as a fraction."""
    absolute_s: float = 0.0
    """Seconds of the whole case that are allowed where the margin is less."""


class LoadTimeRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The threshold of the load time, which is compared once per series: a strategy loads its model once."""

    gate: bool = spec_of("load_time").gate
    """False: a verdict is shown and never fails the gate."""
    margin: float = default_threshold("load_time")
    """Growth that is allowed, as a fraction."""


class AccuracyRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bar for right answers. Losing more items than chance explains is a regression however small the loss."""

    gate: bool = True
    metric: Literal["acc", "acc_norm"] = "acc_norm"
    margin: float = default_threshold("accuracy")
    """Loss, as a fraction of the items, that has to be ruled out before the answers count as OK."""
    floor: float | None = None
    """Least accuracy, whatever the baseline says; None: only what the candidate's own check says."""
    difference: float | None = None
    """Largest typical difference of log-likelihoods from the baseline's, as a fraction, the answers being what they
    may; None: what rounding explains in the case's dtype, 0.001 in float32, 0.005 in float16, 0.04 in bfloat16."""


class MemoryRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bar for the peak of the fullest device."""

    gate: bool = True
    margin: float = default_threshold("memory")
    """Growth that is allowed, as a fraction."""
    absolute_bytes: int = 64 * 2**20
    """Bytes that are allowed where the margin is less."""
    used_margin: float = 0.1
    """Growth that is allowed of all that NVML sees in use, caches and buffers of NCCL among it; a GiB always is."""


class ExactRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether any change counts, for what one run settles."""

    gate: bool = True


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for one case."""

    time: TimeRule = TimeRule()
    accuracy: AccuracyRule = AccuracyRule()
    memory: MemoryRule = MemoryRule()
    traffic: ExactRule = ExactRule()
    path: ExactRule = ExactRule()
    predictions: ExactRule = ExactRule(gate=spec_of("predictions").gate)
    """Items answered otherwise. Other kernels may flip a few; `accuracy` says whether that did harm."""
    largest_batch: ExactRule = ExactRule()
    load_time: LoadTimeRule = LoadTimeRule()


class Override(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other bars for some cases; a later entry wins. Fields that an entry leaves out stay as they are."""

    strategy: str | None = None
    """Strategy it is for; None: any."""
    test: str | None = None
    """Pattern of the node ids it is for, `*` for anything; None: any."""
    marker: str | None = None
    """Name of a pytest marker that the test, its class or its module has; None: any."""
    time: dict[str, Any] = {}
    accuracy: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    traffic: dict[str, Any] = {}
    path: dict[str, Any] = {}
    predictions: dict[str, Any] = {}
    largest_batch: dict[str, Any] = {}
    load_time: dict[str, Any] = {}

    def is_for(self, result: CaseResult) -> bool:
        """Return whether it is for a case, by its strategy and its test."""
        return (
            self.strategy in {None, result.case.strategy}
            and (self.test is None or _matches(self.test, result.nodeid or ""))
            and (self.marker is None or self.marker in result.markers)
        )


class Known(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A regression that is accepted until a day."""

    case: str
    """Id of the case: `tp-bs8`; of a series its strategy."""
    metric: MetricName
    reason: str
    expires: datetime.date
    """Last day on which it is accepted."""
    up_to: float | None = None
    """Largest growth that is accepted, as a fraction of the baseline's; None: any. For time, traffic and memory."""


class Policy(Rules, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a gate is told."""

    confidence: float = 0.95
    """With which each end of an interval holds, and 1 less the chance of a false alarm in a metric's family of rows."""
    on_inconclusive: Literal["pass", "fail"] = "pass"
    allow_missing: bool = False
    """Let cases and figures pass that the baseline has and the candidate lacks."""
    allow_no_baseline: bool = False
    """Let a run pass in which nothing could be compared for want of a baseline."""
    require_armed: bool = False
    """Fail where anything that is gated could not be compared."""
    override: list[Override] = []
    known: list[Known] = []

    def rules(self, result: CaseResult) -> Rules:
        """Return what holds for a case."""
        rules: Rules = self
        for entry in self.override:
            if entry.is_for(result):
                rules = overridden(rules, entry)
        return rules


def switched(policy: Policy, given: object) -> Policy:
    """Return the policy with what `given` says otherwise in attributes of the keys' names; None there says nothing."""
    said = {name: value for name in _SWITCHES if (value := getattr(given, name, None)) is not None}
    return msgspec.structs.replace(policy, **said)


def idle_overrides(policy: Policy, cases: Iterable[CaseResult]) -> list[str]:
    """Return a line for each override that is for none of the cases: a name that is misspelt changes nothing."""
    results = list(cases)
    return [
        f"override[{number}] of the policy matched no case"
        for number, entry in enumerate(policy.override)
        if not any(map(entry.is_for, results))
    ]


def overridden(rules: Rules, entry: Override, number: int = 0) -> Rules:
    """Return rules with what an entry says otherwise; ValueError names the entry by its number, and the key."""
    changed: dict[str, Any] = {}
    for name in Rules.__struct_fields__:
        if table := getattr(entry, name):
            before = getattr(rules, name)
            merged = {**msgspec.to_builtins(before), **table}
            changed[name] = converted(merged, type(before), f"override[{number}].{name}.")
    # A Policy is more than its rules: what holds for one case has no overrides of its own.
    return Rules(**{name: changed.get(name, getattr(rules, name)) for name in Rules.__struct_fields__})


def converted(table: Any, record: type[_Record], place: str) -> _Record:
    """Return TOML's values as a record; ValueError names an unknown key and those that are allowed."""
    _refuse_unknown(table, record, place)
    try:
        return msgspec.convert(table, record)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        key = f"{place}{where.rstrip('`')}" or "the table"
        allowed = next((names for end, names in _ALLOWED.items() if key.endswith(end)), None)
        also = f": allowed are {', '.join(allowed)}" if allowed and "enum" in text else ""
        raise ValueError(f"{key}: {text[:1].lower()}{text[1:]}{also}") from None


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern, `*` for anything, is for the whole name. Not fnmatch: ids of tests have brackets."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def _refuse_unknown(table: Any, record: type[msgspec.Struct], place: str) -> None:
    if not isinstance(table, Mapping):
        return  # the conversion says so
    for key, value in table.items():
        if key not in record.__struct_fields__:
            raise ValueError(f"{place}{key} is no key: allowed are {', '.join(sorted(record.__struct_fields__))}")
        if record is Policy:
            rule = next((f.type for f in msgspec.structs.fields(Policy) if f.name == key), None)
            if isinstance(rule, type) and issubclass(rule, msgspec.Struct):
                _refuse_unknown(value, rule, f"{key}.")
            if key in {"override", "known"} and isinstance(value, list):
                for number, entry in enumerate(value):
                    _refuse_unknown(entry, Override if key == "override" else Known, f"{key}[{number}].")
