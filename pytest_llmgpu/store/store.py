"""The numbered store: reports kept side by side, by machine, `.llmgpu/<machine>/0001_<sha>_<time>.json`.

A stored report is never overwritten, and several runs may save at once.
"""

from __future__ import annotations

import collections
import datetime
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pytest_llmgpu.report import file as report
from pytest_llmgpu.report.option_values import LONGEST_NAME, check_name
from pytest_llmgpu.report.report import Report

__all__ = ["DEFAULT", "Stored", "hardware", "save", "stored"]

DEFAULT = Path(".llmgpu")
"""Folder of the store, from where the run started."""


_GIB = 2**30
_SHA_LETTERS = 8
_NO_COMMIT = "nocommit"

_FILE = re.compile(r"(\d{4,})_([0-9a-z]+)_(\d{8}T\d{6}Z)(?:_(.+?))?\.json(?:\.gz)?")
_MARKS = re.compile(r"\((?:R|TM|C)\)|\bCPU\b|@.*", re.IGNORECASE)


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """One report of the store, by what its file's name says."""

    machine: str
    """What `hardware` said: the name of its folder."""
    number: int
    """Counted from 1 in each folder."""
    commit: str | None
    """First letters of the measured commit, None where it was not known."""
    created: str
    """When it was measured, UTC, to the second: `20260102T030405Z`."""
    name: str | None
    """Given when it was saved."""
    path: Path

    @property
    def reference(self) -> str:
        """How people can name it without doubt: `4x-NVIDIA-H200-140GiB/0001`."""
        return f"{self.machine}/{self.number:04}"


def hardware(of: Report) -> str:
    """Return the machine that a report was measured on, as the name of a folder: `4x-NVIDIA-H200-140GiB`.

    All GPUs of the node where a case ran on any; `CPU-` and the processor's model where none did. Host and driver have
    no part in it: machines that are built alike share a folder.
    """
    environment = of.environment
    if environment.gpus and any(result.case.device == "cuda" for result in of.cases):
        kinds = collections.Counter((gpu.name, gpu.memory_bytes) for gpu in environment.gpus)
        return _safe("+".join(f"{count}x-{name}{_memory(size)}" for (name, size), count in kinds.items()))
    return _safe(f"CPU-{_MARKS.sub(' ', environment.cpu or 'unknown')}")


def stored(storage: Path) -> list[Stored]:
    """Return every report of the store by machine and number; none where there is no store. No report is opened.

    Raises:
        ValueError: a folder cannot be read.
    """
    try:
        folders = sorted(entry.path for entry in os.scandir(storage) if entry.is_dir())
        found = [one for folder in folders for one in _stored_in(Path(folder))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"storage {storage}: cannot be read: {error.strerror}") from None
    return sorted(found, key=lambda one: (one.machine, one.number, one.path.name))


def save(of: Report, storage: Path, name: str | None = None, *, compressed: bool = False) -> Path:
    """Keep a report in the store under the next number of its machine; return its file.

    Args:
        of: what to keep.
        storage: folder of the store, made where it is missing.
        name: by which people can find it, as `check_name` allows.
        compressed: whether to write `.json.gz`.

    Raises:
        ValueError: the name is not allowed, or the report cannot be held by JSON.
        OSError: the file cannot be written.
    """
    if name is not None:
        check_name(name)
    data = report.encode(of, compressed=compressed)
    folder = storage / hardware(of)
    tail = f"_{_commit(of)}_{_time(of)}{'' if name is None else f'_{name}'}.json{'.gz' if compressed else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    number, claim = _claim(folder)
    try:
        with claim.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        claim.unlink()
        raise
    # From here on the claim's name may be another's: it is not touched again.
    target = folder / f"{number:04}{tail}"
    claim.replace(target)
    return target


def _claim(folder: Path) -> tuple[int, Path]:
    """Return the next free number and the unfinished file that holds it for this process alone.

    The name of the unfinished file is the number only, and becomes the report's in one step: as long as it is there,
    nobody else can take the number, and once it is gone, the report is there. So a number that was claimed and is of
    no report now is free, whoever else writes. One that a killed process left behind costs its number.
    """
    number = max((found.number for found in _stored_in(folder)), default=0) + 1
    while True:
        claim = folder / f".{number:04}.unfinished"
        try:
            claim.open("xb").close()
        except FileExistsError:
            number += 1
            continue
        last = max((found.number for found in _stored_in(folder)), default=0)
        if last < number:
            return number, claim
        claim.unlink()
        number = last + 1


def _stored_in(folder: Path) -> Iterator[Stored]:
    for entry in os.scandir(folder):
        if match := _FILE.fullmatch(entry.name):
            number, commit, created, name = match.groups()
            yield Stored(
                machine=folder.name,
                number=int(number),
                commit=None if commit == _NO_COMMIT else commit,
                created=created,
                name=name,
                path=folder / entry.name,
            )


def _commit(of: Report) -> str:
    # A variable of a CI system may hold anything.
    return re.sub(r"[^0-9a-z]", "", (of.commit.sha or "").lower())[:_SHA_LETTERS] or _NO_COMMIT


def _time(of: Report) -> str:
    try:
        # Python before 3.11 does not know the Z.
        created = datetime.datetime.fromisoformat(of.created.replace("Z", "+00:00"))
    except ValueError:
        raise ValueError(f"created {of.created!r}: a time such as 2026-01-02T03:04:05Z is needed") from None
    return created.astimezone(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")


def _memory(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"-{size_bytes / _GIB:.0f}GiB"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text).strip("-.")[:LONGEST_NAME].rstrip("-.")
