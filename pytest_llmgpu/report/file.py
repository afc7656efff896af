"""The report: one JSON object per session, written whole or not at all, and read back with errors that name the place.

It needs neither torch nor pytest, so that a report can be judged on a laptop.
"""

from __future__ import annotations

import gzip
import math
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmgpu.analysis.capacity import Capacity
from pytest_llmgpu.profiling.nvml import Gpu
from pytest_llmgpu.report import collector, decompression, validation
from pytest_llmgpu.report.case import Case
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Verdicts

__all__ = [
    "SCHEMA_VERSION",
    "Commit",
    "Environment",
    "OptionValue",
    "Report",
    "Session",
    "check_writable",
    "dump",
    "encode",
    "load",
    "next_id",
    "parse",
]

SCHEMA_VERSION = 1
"""Version of the report's object. It grows by optional fields; a reader ignores the fields it does not know."""

OptionValue = str | int | float | bool | None | list[str | int | float]
"""What an option can hold in JSON."""

_SUFFIXES = (".json", ".json.gz")


class Session(msgspec.Struct, kw_only=True):
    """What pytest was asked to run and how far it got, so that a missing case differs from a deselected one."""

    complete: bool = False
    """True once every collected case has its result."""
    interrupted: bool = False
    """Ended by Ctrl-C, `-x` or a signal."""
    exit_status: int | None = None
    """Pytest's exit status, None in a report written before the session ended."""
    collected: int = 0
    """Tests left after deselection."""
    deselected: list[str] = []
    """Node ids that `-k` or `-m` took out, and what else narrowed the run: `--lf`, tests named on the command line."""


class Environment(msgspec.Struct, kw_only=True):
    """The machine and its libraries, without names of hosts or users."""

    cpu: str | None = None
    cores: int | None = None
    """Cores this process may use."""
    python: str
    platform: str
    """Kernel and C library: `Linux-6.1.0-x86_64-with-glibc2.36`."""
    gpus: list[Gpu] = []
    """Every GPU of the node, visible to CUDA or not."""
    topology: list[list[str]] | None = None
    """[gpus][gpus] how each pair is linked, in the words of `nvidia-smi topo -m`."""
    driver: str | None = None
    cuda: str | None = None
    """CUDA version torch was built for."""
    nccl: str | None = None
    versions: dict[str, str | None] = {}
    """Distribution to its version, None where it is not installed."""
    variables: dict[str, str] = {}
    """Environment variables that change what is measured."""
    why: dict[str, str] = {}


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The source that was measured."""

    sha: str | None = None
    branch: str | None = None
    """None where HEAD is detached and nothing else names the branch."""
    dirty: bool | None = None
    """Whether a tracked file differs from the commit; None where git did not answer."""
    source: str | None = None
    """`git`, or the environment variable that named the commit."""
    why: dict[str, str] = {}


class Report(msgspec.Struct, kw_only=True):
    """One session: the whole object of the JSON file."""

    schema_version: int = SCHEMA_VERSION
    created: str
    """RFC 3339, UTC."""
    plugin_version: str | None
    argv: list[str] = []
    """Arguments of pytest, with paths relative to the rootdir, else their basenames."""
    options: dict[str, OptionValue] = {}
    """Flag to the value in force."""
    session: Session = msgspec.field(default_factory=Session)
    environment: Environment
    commit: Commit = Commit()
    cases: list[CaseResult] = []
    """In the order they ran."""
    capacity: list[Capacity] = []
    """The largest batch size of each series of cases, as measured and as predicted."""
    verdicts: Verdicts | None = None
    """What a gate said; None as long as nothing was compared."""


class _Head(msgspec.Struct):
    """The fields that tell a report from another tool's JSON."""

    schema_version: int
    cases: msgspec.Raw


def next_id(report: Report, case: Case) -> str:
    """Return the id of the report's next result for `case`: `mp-bs8`, then `mp-bs8#2`."""
    used = {result.id for result in report.cases}
    name, number = case.id, 1
    while name in used:
        number += 1
        name = f"{case.id}#{number}"
    return name


def check_writable(path: Path) -> None:
    """Raise ValueError unless a report can be written to `path`. Nothing is left behind, no folder either.

    Called before the run, which may take hours that a failing write at its end would lose.
    """
    if not path.name.endswith(_SUFFIXES):
        raise ValueError(f"report {path}: the name must end in {' or '.join(_SUFFIXES)}")
    try:
        target = path.resolve()
        if (mode := _mode(target)) is not None:
            if not stat.S_ISREG(mode):
                raise ValueError(f"report {path}: is {'a directory' if stat.S_ISDIR(mode) else 'no regular file'}")
            if not os.access(target, os.W_OK):
                raise ValueError(f"report {path}: is there already and is read-only")
        folder = next(parent for parent in target.parents if parent.exists())
        # A file without a name: only creating one shows quotas, read-only mounts and what root may do.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links before Python 3.13
        raise ValueError(f"report {path}: cannot be written: {_reason(error)}") from None


def dump(report: Report, path: Path) -> None:
    """Write the report to `path`, `.json` or `.json.gz`: a reader finds the old report or the new one, never a part.

    Raises:
        ValueError: a figure is NaN or infinite, which JSON cannot hold. The message names the field.
        OSError: the file cannot be written; what was there before is still there.
    """
    data = encode(report, compressed=path.name.endswith(".gz"))
    target = path.resolve()  # a symbolic link stays one
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile's: its mode 0600 would stay on the report and shut other users out.
    temporary = target.parent / f".llmgpu-{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def encode(report: Report, *, compressed: bool) -> bytes:
    """Return the bytes of a report's file: equal reports are equal bytes.

    Raises:
        ValueError: a figure is NaN or infinite, which JSON cannot hold. The message names the field.
    """
    data = (_text(msgspec.to_builtins(report), "$", "") + "\n").encode()
    return gzip.compress(data, mtime=0) if compressed else data  # no time stamp


def load(path: Path) -> Report:
    """Read a report, compressed or not, whatever its name ends in.

    Raises:
        ValueError: one line that names the file, what is wrong with it and where.
    """
    try:
        data = decompression.read(path)
    except OSError as error:
        raise ValueError(f"report {path}: cannot be read: {_reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"report {path}: {error}") from None
    return parse(data, str(path))


def parse(data: bytes, name: str) -> Report:
    """Return the report in the bytes of a file, compressed or not.

    Args:
        data: what the file holds.
        name: what people call it, for messages.

    Raises:
        ValueError: one line that names the report, what is wrong with it and where.
    """
    try:
        data = decompression.unpack(data)
    except ValueError as error:
        raise ValueError(f"report {name}: {error}") from None
    with collector.paused():
        return _decode(data, name)


def _decode(data: bytes, name: str) -> Report:
    try:
        report = msgspec.json.decode(data, type=Report)
    except (ValueError, RecursionError) as error:
        version = _version(data, name)  # what it is comes before what is wrong with it
        _check_version(version, name)
        raise ValueError(f"report {name}: breaks schema_version {version}: {_reason(error)}") from None
    _check_version(report.schema_version, name)
    try:
        validation.check(report.cases)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"report {name}: breaks schema_version {report.schema_version}: {_reason(error)}") from None
    return report


def _version(data: bytes, name: str) -> int:
    try:
        return msgspec.json.decode(data, type=_Head).schema_version
    except msgspec.ValidationError as error:
        raise ValueError(f"report {name}: is no report of pytest-llmgpu: {_reason(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"report {name}: is no JSON: {_reason(error)}") from None


def _check_version(version: int, name: str) -> None:
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"report {name}: schema_version {version} is newer than {SCHEMA_VERSION}, "
            "the newest this version reads; upgrade pytest-llmgpu"
        )
    if version < 1:
        raise ValueError(f"report {name}: schema_version {version} does not exist; allowed are 1 to {SCHEMA_VERSION}")


def _text(value: Any, place: str, indent: str) -> str:
    """Return indented JSON in which a list of scalars stays on one line; `place` names the value in errors."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = (
            f"{msgspec.json.encode(key).decode()}: {_text(item, f'{place}.{key}', inner)}"
            for key, item in value.items()
        )
        return "{\n" + ",\n".join(inner + line for line in lines) + "\n" + indent + "}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        lines = (_text(item, f"{place}[{number}]", inner) for number, item in enumerate(value))
        return "[\n" + ",\n".join(inner + line for line in lines) + "\n" + indent + "]"
    for number, item in enumerate(value if isinstance(value, list) else [value]):
        if isinstance(item, float) and not math.isfinite(item):
            where = f"{place}[{number}]" if isinstance(value, list) else place
            raise ValueError(f"{where} is {item}, which a report cannot hold: this is a bug of pytest-llmgpu")
    return msgspec.json.encode(value).decode()


def _mode(path: Path) -> int | None:
    """Return the mode of what is at `path`, None for nothing. `Path.exists` hides other errors from Python 3.14 on."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _reason(error: Exception) -> str:
    """Return an exception's text as one line; an OSError's without the path, which the caller names."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
