"""The policy file, which is found, read, checked and written here.

It is TOML: the table `[tool.llmgpu.gate]` of a pyproject.toml, or a separate file with the same keys at the top level.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmgpu.gate.policy import Policy, converted, overridden
from pytest_llmgpu.report import file
from pytest_llmgpu.report.metrics import METRICS
from pytest_llmgpu.report.verdicts import Verdicts
from pytest_llmgpu.store import git

_PYPROJECT = "pyproject.toml"
_LIMIT_BYTES = 2**20
_MOST_PARTS = 32
_DEEP_KEY = re.compile(rb"""(?:(?:[\w-]{1,100}|"[^"\n]{0,100}"|'[^'\n]{0,100}')[ \t]*\.[ \t]*){%d}""" % _MOST_PARTS)
"""The time and the memory that tomllib needs for a dotted key grow with the square of its parts."""

_GROWING = tuple(spec.name for spec in METRICS if spec.grows)


def find(folder: Path) -> Path | None:
    """Return the policy file that is used if none is given; None: the default policy.

    It is the first pyproject.toml with a policy from the folder up to the root of its repository. A command in a
    subfolder uses the same thresholds in this way.
    """
    start = folder.resolve()
    for parent in (start, *start.parents):
        path = parent / _PYPROJECT
        if path.is_file() and _has_policy(path):
            return path
        if (parent / ".git").exists():  # In a worktree it is a file.
            break
    return None


def load(path: Path | None, repository: Path = Path()) -> Policy:
    """Read a policy. The default policy is returned for None and for a pyproject.toml without a policy.

    A commit without a pyproject.toml has the default policy, too.

    Args:
        path: A TOML file, or `git:REV:PATH`, which is read from that commit.
        repository: A folder inside the working tree of git.

    Raises:
        ValueError: The file is not valid; one line with the file, the key and what is allowed.
    """
    table = None if path is None else _table(path, repository)
    try:
        return Policy() if table is None else _policy(table)
    except ValueError as error:
        raise ValueError(f"policy {path}: {error}") from None


def in_words(path: Path | None, repository: Path = Path()) -> str:
    """Describe the policy that `load` reads. The line is published, so it contains no folder."""
    if path is None or _table(path, repository) is None:
        return "policy: built-in"
    return f"policy: {path if git.is_reference(path) else path.name}"


def dump(policy: Policy) -> str:
    """Return the policy as TOML with all keys; `load` reads it."""
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
    """Return the SHA-256 of the policy as TOML."""
    return hashlib.sha256(dump(policy).encode()).hexdigest()


def _has_policy(path: Path) -> bool:
    try:
        return _table(path, path.parent) is not None
    except ValueError:
        return True  # `load` reports the error.


def _content(path: Path, repository: Path) -> bytes:
    """Return the bytes of a policy, unless reading it as TOML would take minutes."""
    try:
        data = git.content(path, repository) if git.is_reference(path) else file.read(path, _LIMIT_BYTES)
    except git.AbsentError:
        raise
    except ValueError as error:
        raise ValueError(str(error) if git.is_reference(path) else f"{path}: {error}") from None
    if found := _DEEP_KEY.search(data):
        line = data.count(b"\n", 0, found.start()) + 1
        raise ValueError(f"{path}: line {line}: a key has more than {_MOST_PARTS - 1} dots, the limit")
    return data


def _table(path: Path, repository: Path) -> Any:
    """Return the table of the policy in a file; None for a pyproject.toml without one."""
    try:
        data = _content(path, repository)
    except git.AbsentError as error:
        if path.name.rpartition(":")[2] == _PYPROJECT:
            return None
        raise ValueError(f"policy {error}") from None
    except OSError as error:
        raise ValueError(f"policy {path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # A message of git begins with the name.
        raise ValueError(f"policy {error}") from None
    try:
        # tomllib needs Python 3.11. msgspec uses tomli in Python 3.10, which pytest installs.
        table = msgspec.toml.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"policy {path}: is not valid TOML: {' '.join(str(error).split())}") from None
    except ImportError:
        raise ValueError(f"policy {path}: Python 3.10 needs the package tomli to read TOML") from None
    if path.name.rpartition(":")[2] != _PYPROJECT and "tool" not in table:
        return table
    _check_tables(path, table)
    if path.name.rpartition(":")[2] != _PYPROJECT and (outside := sorted(set(table) - {"tool"})):
        raise ValueError(
            f"policy {path}: {outside[0]} is outside [tool.llmgpu.gate] and would be ignored: move it there"
        )
    for name in ("tool", "llmgpu", "gate"):
        table = table.get(name) if isinstance(table, dict) else table
    return table


def _check_tables(path: Path, table: dict[str, Any]) -> None:
    """Refuse a table with a similar name, because it would be ignored and the default policy used."""
    tools = table.get("tool", {})
    tools = tools if isinstance(tools, dict) else {}
    ours = tools.get("llmgpu", {})
    wrong = [f"tool.{name}" for name in tools if name.startswith(("llmgpu-", "llmgpu_", "pytest-llmgpu"))]
    wrong += [f"tool.llmgpu.{name}" for name in ours if name != "gate"] if isinstance(ours, dict) else []
    if wrong:
        raise ValueError(f"policy {path}: [{wrong[0]}] is not allowed: allowed is [tool.llmgpu.gate]")


def _policy(table: Any) -> Policy:
    policy = converted(table, Policy, "")
    for number, known in enumerate(policy.known):
        if known.up_to is not None and known.metric not in _GROWING:
            raise ValueError(f"known[{number}].up_to: {known.metric} does not grow; allowed for {', '.join(_GROWING)}")
    for number, entry in enumerate(policy.override):
        if (entry.strategy, entry.test, entry.marker) == (None, None, None):
            raise ValueError(f"override[{number}] has no strategy, test or marker: add one of them")
        overridden(policy, entry, number)
    return policy


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_toml(table[key])}" for key in sorted(table) if table[key] not in (None, {})]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A TOML string has the escapes of JSON, except that DEL must be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_pairs(value)) + " }"
    return repr(value)


def policy_of(verdicts: Verdicts | None) -> Policy:
    """Return the policy of verdicts; the default policy if there are none or theirs cannot be read."""
    if verdicts is None:
        return Policy()
    try:
        return msgspec.toml.decode(verdicts.policy, type=Policy)
    except (msgspec.DecodeError, ImportError):  # ImportError: Python 3.10 without tomli
        return Policy()
