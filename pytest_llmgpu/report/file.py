"""The report: one JSON object per session, written whole or not at all, and read back with errors that name the place.

It needs neither torch nor pytest, so that a report can be judged on a laptop.
"""

from __future__ import annotations

import gc
import gzip
import math
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmgpu.report import decompression, validation
from pytest_llmgpu.report.report import SCHEMA_VERSION, Report

__all__ = ["check_writable", "dump", "encode", "load", "parse", "paused"]


_SUFFIXES = (".json", ".json.gz")


class _Head(msgspec.Struct):
    """The fields that tell a report from another tool's JSON."""

    schema_version: int
    cases: msgspec.Raw


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
    with paused():
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


@contextmanager
def paused() -> Iterator[None]:
    """Collect no cycles in this block; afterwards as before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
