"""What a gate is told: margins, what to do where nothing can be said, and regressions that are known.

Written as TOML: `[tool.llmgpu.gate]` of a pyproject.toml, or a file of its own with the same keys at its top.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from pytest_llmgpu import git
from pytest_llmgpu.result import CaseResult
from pytest_llmgpu.verdicts import MetricName

__all__ = [
    "AccuracyRule",
    "ExactRule",
    "Known",
    "MemoryRule",
    "Override",
    "Policy",
    "Rules",
    "TimeRule",
    "dump",
    "find",
    "idle_overrides",
    "in_words",
    "load",
    "sha256",
    "switched",
]

_Record = TypeVar("_Record", bound=msgspec.Struct)
_PYPROJECT = "pyproject.toml"

_ALLOWED = {
    "on_inconclusive": ("pass", "fail"),
    "accuracy.metric": ("acc", "acc_norm"),
    "].metric": get_args(MetricName),
}
"""End of a key to the words it takes."""


_SWITCHES = ("on_inconclusive", "allow_missing", "allow_no_baseline", "require_armed")
"""Keys that a command line may set, too."""

_GROWING = ("time", "traffic", "memory")
"""Metrics of which a ratio to the baseline's is known."""


class TimeRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bar for time."""

    gate: bool = True
    """False: reported, never a reason to fail."""
    margin: float = 0.02
    """Slowdown that is allowed, as a fraction."""
    absolute_s: float = 0.0
    """Seconds of the whole case that are allowed where the margin is less."""


class AccuracyRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bar for right answers. Losing more items than chance explains is a regression however small the loss."""

    gate: bool = True
    metric: Literal["acc", "acc_norm"] = "acc_norm"
    margin: float = 0.005
    """Loss, as a fraction of the items, that has to be ruled out before the answers count as OK."""
    floor: float | None = None
    """Least accuracy, whatever the baseline says; None: only what the candidate's own check says."""
    difference: float | None = None
    """Largest typical difference of log-likelihoods from the baseline's, as a fraction, the answers being what they
    may; None: what rounding explains in the case's dtype, 0.001 in float32, 0.005 in float16, 0.04 in bfloat16."""


class MemoryRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bar for the peak of the fullest device."""

    gate: bool = True
    margin: float = 0.005
    """Growth that is allowed, as a fraction."""
    absolute_bytes: int = 64 * 2**20
    """Bytes that are allowed where the margin is less."""


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
    predictions: ExactRule = ExactRule(gate=False)
    """Items answered otherwise. Other kernels may flip a few; `accuracy` says whether that did harm."""
    largest_batch: ExactRule = ExactRule()


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
                rules = _overridden(rules, entry)
        return rules


def find(folder: Path) -> Path | None:
    """Return what to `load` where nobody names a policy; None for the built-in one.

    The first pyproject.toml with a policy from the folder up to the root of its repository: a command that is run in
    a folder below must not pass by other margins.
    """
    start = folder.resolve()
    for parent in (start, *start.parents):
        path = parent / _PYPROJECT
        if path.is_file() and _has_policy(path):
            return path
        if (parent / ".git").exists():  # a file in a worktree
            break
    return None


def load(path: Path | None, repository: Path = Path()) -> Policy:
    """Read a policy; None, and a pyproject.toml without one, give the defaults.

    Args:
        path: TOML, or `git:REV:PATH`, which is read from that commit.
        repository: folder inside the working tree of git.

    Raises:
        ValueError: one line that names the file, the key, and what is allowed.
    """
    table = None if path is None else _table(path, repository)
    try:
        return Policy() if table is None else _policy(table)
    except ValueError as error:
        raise ValueError(f"policy {path}: {error}") from None


def in_words(path: Path | None, repository: Path = Path()) -> str:
    """Return which policy `load` reads, in a line for people; no folder is named: the line gets published."""
    if path is None or _table(path, repository) is None:
        return "policy: built-in"
    return f"policy: {path if git.is_reference(path) else path.name}"


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


def _has_policy(path: Path) -> bool:
    try:
        return _table(path, path.parent) is not None
    except ValueError:
        return True  # `load` says what is wrong with it


def _table(path: Path, repository: Path) -> Any:
    """Return the policy's table of a file; None for a pyproject.toml without one."""
    try:
        data = git.content(path, repository) if git.is_reference(path) else path.read_bytes()
        # msgspec's and not tomllib, which Python 3.10 lacks: there it finds tomli, which pytest brings along.
        table = msgspec.toml.decode(data)
    except OSError as error:
        raise ValueError(f"policy {path}: cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"policy {path}: is no TOML: {' '.join(str(error).split())}") from None
    except ImportError:
        raise ValueError(f"policy {path}: Python 3.10 needs the package tomli to read TOML") from None
    except ValueError as error:  # git's, which begins with the name
        raise ValueError(f"policy {error}") from None
    if path.name.rpartition(":")[2] != _PYPROJECT and "tool" not in table:
        return table
    _check_tables(path, table)
    for name in ("tool", "llmgpu", "gate"):
        table = table.get(name) if isinstance(table, dict) else table
    return table


def _check_tables(path: Path, table: dict[str, Any]) -> None:
    """Refuse a table that somebody meant for the policy: under another name it would be silently the default."""
    tools = table.get("tool", {})
    tools = tools if isinstance(tools, dict) else {}
    ours = tools.get("llmgpu", {})
    wrong = [f"tool.{name}" for name in tools if name.startswith(("llmgpu-", "llmgpu_", "pytest-llmgpu"))]
    wrong += [f"tool.llmgpu.{name}" for name in ours if name != "gate"] if isinstance(ours, dict) else []
    if wrong:
        raise ValueError(f"policy {path}: [{wrong[0]}] is not allowed: allowed is [tool.llmgpu.gate]")


def dump(policy: Policy) -> str:
    """Return the policy as TOML, every key with the value in force; `load` reads it back."""
    fields: dict[str, Any] = msgspec.to_builtins(policy, builtin_types=(datetime.date,))
    plain = {key: value for key, value in fields.items() if not isinstance(value, (dict, list))}
    lines = _pairs(plain)
    for key in sorted(fields.keys() - plain.keys()):
        if isinstance(fields[key], dict):
            lines += ["", f"[{key}]", *_pairs(fields[key])]
    for key in ("override", "known"):
        for entry in fields[key]:
            lines += ["", f"[[{key}]]", *_pairs(entry)]
    return "\n".join(lines) + "\n"


def sha256(policy: Policy) -> str:
    """Return the digest of the policy's text, as `dump` gives it."""
    return hashlib.sha256(dump(policy).encode()).hexdigest()


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern, `*` for anything, is for the whole name. Not fnmatch: ids of tests have brackets."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def _policy(table: Any) -> Policy:
    policy = _converted(table, Policy, "")
    bounds = [("confidence", policy.confidence, 0.5, 1.0), *_bounded("", policy)]
    for number, known in enumerate(policy.known):
        if known.up_to is None:
            continue
        if known.metric not in _GROWING:
            raise ValueError(f"known[{number}].up_to is for {', '.join(_GROWING)}: {known.metric} does not grow")
        bounds.append((f"known[{number}].up_to", known.up_to, 0.0, math.inf))
    for number, entry in enumerate(policy.override):
        if (entry.strategy, entry.test, entry.marker) == (None, None, None):
            raise ValueError(f"override[{number}] is for no strategy, test or marker: name one of them")
        bounds += _bounded(f"override[{number}].", _overridden(policy, entry, number))
    for place, value, low, high in bounds:
        if not low <= value < high:  # NaN is neither
            raise ValueError(f"{place} = {value}: allowed is {low:g} up to but not {high:g}")
    return policy


def _bounded(place: str, rules: Rules) -> list[tuple[str, float, float, float]]:
    """Return where a number stands, the number, its least value, and the first that is too large."""
    floor, difference = rules.accuracy.floor, rules.accuracy.difference
    return [
        (f"{place}time.margin", rules.time.margin, 0.0, 10.0),
        (f"{place}time.absolute_s", rules.time.absolute_s, 0.0, math.inf),
        (f"{place}accuracy.margin", rules.accuracy.margin, 0.0, 1.0),
        (f"{place}accuracy.floor", 0.0 if floor is None else floor, 0.0, 1.0 + 1e-9),
        (f"{place}accuracy.difference", 0.0 if difference is None else difference, 0.0, math.inf),
        (f"{place}memory.margin", rules.memory.margin, 0.0, 10.0),
        (f"{place}memory.absolute_bytes", rules.memory.absolute_bytes, 0.0, math.inf),
    ]


def _overridden(rules: Rules, entry: Override, number: int = 0) -> Rules:
    changed: dict[str, Any] = {}
    for name in Rules.__struct_fields__:
        if table := getattr(entry, name):
            before = getattr(rules, name)
            merged = {**msgspec.to_builtins(before), **table}
            changed[name] = _converted(merged, type(before), f"override[{number}].{name}.")
    # A Policy is more than its rules: what holds for one case has no overrides of its own.
    return Rules(**{name: changed.get(name, getattr(rules, name)) for name in Rules.__struct_fields__})


def _converted(table: Any, record: type[_Record], place: str) -> _Record:
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


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_toml(table[key])}" for key in sorted(table) if table[key] not in (None, {})]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's basic strings take JSON's escapes; DEL alone may not stand for itself.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_pairs(value)) + " }"
    return repr(value)
