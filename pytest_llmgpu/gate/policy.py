"""The policy of a gate: a table of thresholds for each metric, the regressions that are accepted, and their file.

It is TOML: the table `[tool.llmgpu.gate]` of a pyproject.toml, or a separate file with the same keys at the top level.
Gates and thresholds are those of `report.metrics`.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from pytest_llmgpu.report import file
from pytest_llmgpu.report.bounds import Amount, Count, Fraction, Number
from pytest_llmgpu.report.metrics import BY_NAME, JUDGED, METRICS, MetricName, is_own, spec_of
from pytest_llmgpu.report.result import CaseResult, Declared
from pytest_llmgpu.report.text import MIB, guess
from pytest_llmgpu.report.verdicts import Row, Verdicts
from pytest_llmgpu.store import git

_PYPROJECT = "pyproject.toml"
_LIMIT_BYTES = 2**20

_Part = Annotated[float, Meta(ge=0, lt=1)]
"""A relative threshold."""


class ExactRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule of an exact metric: every change for the worse is a regression."""

    gate: bool = True
    """True if a regression fails the gate. False: verdicts are reported only."""


class AmountRule(ExactRule, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The threshold of an amount."""

    threshold: _Part = 0.001
    """The relative threshold: the growth that is allowed, as a fraction. For device time more is allowed where the
    baseline is of other GPUs of the same kind."""


class TimeRule(ExactRule, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The threshold of wall time."""

    threshold: _Part | None = None
    """The relative threshold: the slowdown that is allowed, as a fraction. None: 0.04 against a stored baseline, 0.02
    where launches of both reports alternated or the host is at equal speed, 0.01 for CUDA graphs replayed in a row."""


class ProgramRule(AmountRule, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The thresholds of a changed program: `threshold` is the price that is allowed, as a fraction of device time."""

    threshold: _Part = 0.002
    flops: _Part = 0.001
    """The growth of FLOPs that is allowed where the time of the kernels is not known, as on a CPU, as a fraction."""


Accuracy = Literal["acc", "acc_norm"]
"""Accuracy by log-likelihood, and by log-likelihood per byte of the ending."""


class AccuracyRule(AmountRule, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The thresholds of accuracy: `threshold` is the loss, as a fraction of the items, that OK has to rule out.

    A statistically significant loss is a regression, however small it is.
    """

    threshold: _Part = 0.005
    metric: Accuracy = "acc_norm"
    """The accuracy that is compared."""
    floor: Fraction | None = None
    """The least accuracy that is allowed, independent of the baseline; None: the candidate's accuracy check decides."""
    difference: Amount | None = None
    """The largest typical relative difference of log-likelihoods from the baseline that is allowed. None: what rounding
    explains in the dtype of the case, 0.001 in float32, 0.005 in float16, 0.04 in bfloat16."""


class TextsRule(ExactRule, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The threshold of generated texts."""

    difference: Amount | None = None
    """The largest typical relative difference of the log-likelihoods of generated tokens from the baseline that is
    allowed. None: what rounding explains in the dtype of the case, as for accuracy."""


class MemoryRule(AmountRule, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The thresholds of the peak memory of each device."""

    threshold: _Part = 0.005
    absolute_bytes: Count = 64 * MIB
    """The absolute threshold in bytes. The larger of both thresholds is used."""
    used_threshold: _Part = 0.1
    """The growth that is allowed for memory that torch reserved and for all memory that NVML reports as used, as a
    fraction. This includes caches and buffers of NCCL. A growth of 1 GiB is always allowed."""


class FigureRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a policy adds to the declaration of a figure of the user's own: it can only tighten it."""

    threshold: _Part | None = None
    """The change for the worse that is allowed, at most the declared one; None: the declared one."""
    at_least: Number | None = None
    at_most: Number | None = None
    """The bounds that the figure must keep, with and without a baseline; None: no bound."""


class Allowed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A regression that is accepted: a row of a matching case passes, undecided or missing ones too."""

    case: str
    """The id of the case, such as `tp-bs8`; `*` stands for any text."""
    metric: MetricName
    reason: str
    up_to: Amount | None = None
    """The largest growth that is accepted, as a fraction of the baseline; None: any. Only for metrics that grow."""
    expires: datetime.date | None = None
    """The last day on which the regression is accepted; None: it is always accepted."""

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches a whole name."""
        # fnmatch would interpret the brackets of node ids.
        return re.fullmatch(".*".join(map(re.escape, self.case.split("*"))), name, re.DOTALL) is not None


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of a gate for all cases by metric, and the regressions that are accepted."""

    execution: ExactRule = ExactRule()
    program: ProgramRule = ProgramRule()
    device_time: AmountRule = AmountRule(threshold=0.005)
    time: TimeRule = TimeRule()
    first_token: TimeRule = TimeRule()
    token_time: TimeRule = TimeRule()
    accuracy: AccuracyRule = AccuracyRule()
    predictions: ExactRule = ExactRule(gate=False)
    texts: TextsRule = TextsRule()
    host_calls: ExactRule = ExactRule(gate=False)
    traffic: AmountRule = AmountRule()
    path: ExactRule = ExactRule()
    memory: MemoryRule = MemoryRule()
    creep: ExactRule = ExactRule()

    confidence: Annotated[float, Meta(ge=0.5, lt=1)] = 0.99
    """The confidence of a verdict that something changed. The probability of a false alarm in all gated rows of times
    together, and in all gated rows of another metric, is at most 1 minus this value."""
    strict: bool = False
    """True if a gated row that is undecided fails the gate."""
    allow_no_baseline: bool = False
    """True if a run passes that could not be compared because there is no baseline."""
    allow: list[Allowed] = []
    """The regressions that are accepted."""
    figures: dict[str, FigureRule] = {}
    """The rules of figures of the user's own; in TOML each is a table beside those of the metrics."""

    def __post_init__(self) -> None:
        """Refuse an `up_to` that can have no effect."""
        for number, entry in enumerate(self.allow):
            if entry.metric not in BY_NAME and not is_own(entry.metric):
                raise ValueError(f"allow[{number}].metric: {entry.metric!r} is no metric and no name of a figure")
            if entry.up_to is not None and not (entry.metric in BY_NAME and spec_of(entry.metric).grows):
                growing = ", ".join(spec.name for spec in METRICS if spec.rule and spec.grows)
                raise ValueError(f"allow[{number}].up_to: {entry.metric} does not grow; allowed for {growing}")


def in_force(given: Path | None, switches: object, folder: Path = Path()) -> tuple[Policy, str]:
    """Return the policy of a file, else that of `find_policy` in a folder, and a line that names it.

    Switches that are set among the attributes of `switches`, such as parsed arguments, override it. The line is
    published, so it contains no folder. ValueError as for `load_policy`.
    """
    path = find_policy(folder) if given is None else given
    switched = {name: True for name in ("strict", "allow_no_baseline") if getattr(switches, name, None)}
    policy = msgspec.structs.replace(load_policy(path, folder), **switched)
    if path is None or _table(path, folder) is None:
        return policy, "policy: built-in"
    return policy, f"policy: {path if git.is_reference(path) else path.name}"


def find_policy(folder: Path) -> Path | None:
    """Return the policy file that is used if none is given; None: the default policy.

    It is the first pyproject.toml with a policy from the folder up to the root of its repository. A command in a
    subfolder uses the same thresholds in this way.
    """
    start = folder.resolve()
    for parent in (start, *start.parents):
        path = parent / _PYPROJECT
        try:
            if path.is_file() and _table(path, parent) is not None:
                return path
        except ValueError:
            return path  # `load_policy` reports the error.
        if (parent / ".git").exists():  # In a worktree it is a file.
            break
    return None


def load_policy(path: Path | None, repository: Path = Path()) -> Policy:
    """Read a policy: a TOML file, or `git:REV:PATH`, which is read from that commit of the repository.

    The default policy is returned for None, for a pyproject.toml without a policy and for a commit without that file.
    ValueError in one line, with the file, the error and its place, if the file is not valid.
    """
    table = None if path is None else _table(path, repository)
    if table is None:
        return Policy()
    try:
        return _converted(table)
    except (AttributeError, ValueError) as error:  # AttributeError: the table is a value
        raise ValueError(f"policy {path}: {error}") from None


def _converted(table: Mapping[str, Any]) -> Policy:
    built_in = msgspec.to_builtins(Policy())
    del built_in["figures"]  # in a file they are beside the metrics
    merged, figures = dict(table), {}
    for key, given in table.items():
        if not isinstance(given, dict) or not isinstance(known := built_in.get(key, {}), dict):
            continue
        # A number that is not finite would compare with nothing.
        for name in (name for name, one in given.items() if isinstance(one, float) and not math.isfinite(one)):
            raise ValueError(f"{key}.{name} = {given[name]}: a finite number is needed")
        # A key that a table lacks has the default of its metric, not that of the record.
        merged[key] = {**known, **given}
        if key not in built_in and is_own(key):
            figures[key] = merged.pop(key)
            try:
                msgspec.convert(given, FigureRule)
            except msgspec.ValidationError as error:
                what = f"{key}: no metric{guess(key, built_in)}, and for a figure of your own"
                raise ValueError(f"{what}: {_refusal(error, given, FigureRule)}") from None
    try:
        return msgspec.convert({"figures": figures, **merged}, Policy)
    except msgspec.ValidationError as error:
        raise ValueError(_refusal(error, merged, Policy)) from None


def _refusal(error: msgspec.ValidationError, table: Any, kind: Any) -> str:
    """Return an error with its place, and the value there or the keys that are allowed there."""
    ((text, place),) = re.findall(r"(?s)^(.*?)(?: - at `\$([\w.[\]]*)`)?\Z", str(error))
    keys = re.findall(r"\w+", place)
    if not text.startswith("Object "):
        for key in keys:
            table = table[int(key) if isinstance(table, list) else key]
        written = json.dumps(table, default=str)
        if place == ".accuracy.metric" and "enum" in text:
            text = f"allowed are {', '.join(get_args(Accuracy))}"
        return f"{place[1:]} = {written:.80} is not allowed: {text[:1].lower()}{text[1:]}" if place else text
    kind = Allowed if keys[:1] == ["allow"] else type(getattr(Policy(), keys[0], Policy())) if keys else kind
    allowed = ", ".join(name for name in kind.__struct_fields__ if name != "figures")
    what = "is missing" if "missing" in text else "is not allowed"
    return f"{place}.{text.split('`')[1]} {what}: allowed are {allowed}".removeprefix(".")


def misspelt(name: str) -> str:
    """Return `guess` of a metric for a misspelt one, and nothing for a figure of the user's own such as decode_time."""
    return guess(name, [one for one in JUDGED if sorted(one) == sorted(name)]) or guess(name, JUDGED, 0.85)


def check_figures(policy: Policy, declared: Mapping[str, Declared]) -> list[str]:
    """Return a line for each undeclared figure; ValueError for a misspelt metric or a threshold above the declared."""
    for name, rule in policy.figures.items():
        if name in declared and (given := rule.threshold or 0.0) > (least := declared[name].threshold):
            needed = "a policy can only tighten it"
            raise ValueError(f"policy: {name}: threshold = {given:g} is above the declared {least:g}: {needed}")
    names = dict.fromkeys([*policy.figures, *(entry.metric for entry in policy.allow)])
    unknown = [name for name in names if name not in BY_NAME and name not in declared]
    text = "policy: {}: no metric, and no figure that pytest_llmgpu_metrics declares{}"
    if wrong := next(filter(misspelt, unknown), None):
        raise ValueError(text.format(wrong, misspelt(wrong)))
    return [text.format(name, "") for name in unknown]


def dump_policy(policy: Policy) -> str:
    """Return the policy as TOML with all keys; `load_policy` reads it."""
    fields: dict[str, Any] = msgspec.to_builtins(policy, builtin_types=(datetime.date,))
    allowed = fields.pop("allow")
    fields |= fields.pop("figures")
    tables = {key: fields.pop(key) for key in sorted(fields) if isinstance(fields[key], dict)}
    sections = [("", fields), *((f"\n[{key}]\n", table) for key, table in tables.items())]
    sections += [("\n[[allow]]\n", entry) for entry in allowed]
    text = ""
    for title, table in sections:
        text += title
        for key, value in sorted(table.items()):
            written = value if isinstance(value, datetime.date) else json.dumps(value, ensure_ascii=False)
            text += f"{key} = {written}\n" if value is not None else ""
    return text.replace("\x7f", "\\u007f")  # TOML has the strings, numbers and booleans of JSON, except for DEL


def policy_of(verdicts: Verdicts | None) -> Policy:
    """Return the policy of verdicts; the default policy if there are none or theirs cannot be read."""
    try:
        return Policy() if verdicts is None else parse_policy(verdicts)
    except ValueError:
        return Policy()


def parse_policy(verdicts: Verdicts) -> Policy:
    """Return the policy of verdicts; ValueError in one line if it cannot be read."""
    try:
        return _converted(msgspec.toml.decode(verdicts.policy))
    except ValueError as error:
        raise ValueError(f"the policy of these verdicts cannot be read: {file.one_line(error)}") from None


def _table(path: Path, repository: Path) -> Any:
    """Return the table of the policy in a file; None for a pyproject.toml without one."""
    is_project = path.name.rpartition(":")[2] == _PYPROJECT
    try:
        data = git.content(path, repository) if git.is_reference(path) else file.read(path, _LIMIT_BYTES)
    except (OSError, ValueError) as error:
        if is_project and isinstance(error, git.AbsentError):
            return None
        text = file.one_line(error).removeprefix(f"{path}: ")
        raise ValueError(f"policy {path}: {'cannot be read: ' * isinstance(error, OSError)}{text}") from None
    try:
        table = msgspec.toml.decode(data)  # in Python 3.10 by tomli, which pytest installs
    except (ValueError, RecursionError) as error:
        raise ValueError(f"policy {path}: is not valid TOML: {file.one_line(error)}") from None
    if not is_project and "tool" not in table:
        return table
    # A key beside the table would be ignored, and the default policy used.
    ours: Any = table
    for name in ("tool", "llmgpu"):
        ours = found if isinstance(found := ours.get(name), Mapping) else {}
    wrong = [f"tool.llmgpu.{name}" for name in ours if name != "gate"]
    wrong += [] if is_project else [name for name in table if name != "tool"]
    if wrong:
        raise ValueError(f"policy {path}: {wrong[0]} is not allowed: allowed is [tool.llmgpu.gate]")
    if not is_project and "gate" not in ours:
        raise ValueError(f"policy {path}: [tool.llmgpu.gate] is missing, or rules without [tool]")
    return ours.get("gate")


def unmatched(policy: Policy, cases: Sequence[CaseResult]) -> list[str]:
    """Return a line for each accepted regression that matches none of the cases: its name may be misspelt."""
    names = {result.id for result in cases}
    return [
        f"{_named(entry)}: no case of these reports has that name{guess(entry.case, names)}"
        for entry in policy.allow
        if not any(map(entry.matches, names))
    ]


def _named(entry: Allowed) -> str:
    return f"allowed {entry.case} {entry.metric} ({entry.reason})"


def with_allowed(rows: Sequence[Row], policy: Policy, today: datetime.date) -> tuple[list[Row], list[str]]:
    """Mark the rows that the policy accepts, and return a warning for each entry that expired.

    An undecided row can be the accepted regression, hidden by noise.
    """
    in_force = [entry for entry in policy.allow if entry.expires is None or entry.expires >= today]
    expired = [entry for entry in policy.allow if entry not in in_force]
    warnings = [f"{_named(entry)} expired on {entry.expires}: it counts again" for entry in expired]
    marked = []
    for row in rows:
        growth = 0.0 if row.ratio is None else row.ratio - 1
        alike = [entry for entry in in_force if entry.metric == row.metric and entry.matches(row.id)]
        found = next((entry.reason for entry in alike if entry.up_to is None or growth <= entry.up_to), None)
        is_open = row.worse or row.verdict in {"MISSING", "UNDECIDED"}
        marked.append(msgspec.structs.replace(row, allowed=found) if is_open else row)
    return marked, warnings
