"""How a policy's file is found, read, checked and written.

It is TOML: `[tool.llmgpu.gate]` of a pyproject.toml, or a file of its own with the same keys at its top.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmgpu.gate.policy import Policy, Rules, converted, overridden
from pytest_llmgpu.report.metrics import METRICS
from pytest_llmgpu.report.verdicts import Verdicts
from pytest_llmgpu.store import git

__all__ = ["dump", "find", "in_words", "load", "policy_of", "sha256"]

_PYPROJECT = "pyproject.toml"

_GROWING = tuple(spec.name for spec in METRICS if spec.grows)


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
    if path.name.rpartition(":")[2] != _PYPROJECT and (beside := sorted(set(table) - {"tool"})):
        raise ValueError(f"policy {path}: {beside[0]} is outside [tool.llmgpu.gate], where it counts for nothing")
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


def _policy(table: Any) -> Policy:
    policy = converted(table, Policy, "")
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
        bounds += _bounded(f"override[{number}].", overridden(policy, entry, number))
    for place, value, low, high in bounds:
        if not low <= value < high:  # NaN is neither
            raise ValueError(f"{place} = {value}: allowed is {low:g} up to but not {high:g}")
    return policy


def _bounded(place: str, rules: Rules) -> list[tuple[str, float, float, float]]:
    """Return where a number stands, the number, its least value, and the first that is too large."""
    floor, difference = rules.accuracy.floor, rules.accuracy.difference
    return [
        (f"{place}time.margin", rules.time.margin, 0.0, 1.0),
        (f"{place}time.absolute_s", rules.time.absolute_s, 0.0, math.inf),
        (f"{place}accuracy.margin", rules.accuracy.margin, 0.0, 1.0),
        (f"{place}accuracy.floor", 0.0 if floor is None else floor, 0.0, 1.0 + 1e-9),
        (f"{place}accuracy.difference", 0.0 if difference is None else difference, 0.0, math.inf),
        (f"{place}memory.margin", rules.memory.margin, 0.0, 1.0),
        (f"{place}memory.absolute_bytes", rules.memory.absolute_bytes, 0.0, math.inf),
        (f"{place}memory.used_margin", rules.memory.used_margin, 0.0, 1.0),
    ]


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


def policy_of(verdicts: Verdicts | None) -> Policy:
    """Return the policy by which verdicts were made; the default one where there is none or it cannot be read."""
    if verdicts is None:
        return Policy()
    try:
        return msgspec.toml.decode(verdicts.policy, type=Policy)
    except (msgspec.DecodeError, ImportError):  # ImportError: Python 3.10 without tomli
        return Policy()
