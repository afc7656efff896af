"""Which report is meant: by a path, a number, `latest`, a name, a commit, or a file of another commit of git."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pytest_llmgpu.report import decompression, file
from pytest_llmgpu.report.option_values import LATEST
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.verdicts import Baseline
from pytest_llmgpu.store import git
from pytest_llmgpu.store.store import Stored, stored

__all__ = ["BASELINE", "AbsentError", "Source", "public", "resolve"]

BASELINE = "baseline"
"""Name of the store's baseline: what `llmgpu promote` keeps is a copy of a report."""

_SUFFIXES = (".json", ".json.gz")
_LAST_RUN = "last.json"
"""What a run writes beside the store by default, without a number."""
_SHOWN = 5

_NUMBER = re.compile(r"[0-9]{1,9}")
_SHA = re.compile(r"(?=.*[a-z])[0-9a-z]{4,40}|[0-9]{7,40}")
"""How much of a commit is needed: fewer than 7 digits and no letter are the number of a report."""


class AbsentError(ValueError):
    """There is nothing where a report could be; a broken one is no absent one."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of a report, read once: what is hashed is what is judged."""

    name: str
    """What people call it: a path, or `git:main:reports/base.json`."""
    data: bytes
    """As they are in the file, compressed or not."""
    stored: Stored | None = None
    """Where it comes from the store."""

    @property
    def sha256(self) -> str:
        """Hash of the file."""
        return hashlib.sha256(self.data).hexdigest()

    def report(self) -> Report:
        """Return the report; ValueError in one line where it is none."""
        return file.parse(self.data, self.name)

    def baseline(self, reference: str, of: Report) -> Baseline:
        """Return what verdicts say that they were held against: this report, by the name that it was asked for."""
        return Baseline(name=public(reference), sha256=self.sha256, commit=of.commit.sha)


def public(reference: str) -> str:
    """Return a reference as verdicts may hold it: they get published, so that no path says whose machine it was."""
    path = Path(reference)
    return path.name if path.is_absolute() else reference


def resolve(reference: str, storage: Path, *, machine: str | None = None, repository: Path = Path()) -> Source:
    """Read the report that a person means.

    Args:
        reference: a path; `git:REV:PATH`, the file as that commit has it; or one of the store: its number, `latest`,
            its name, or the beginning of its commit, with `MACHINE/` before it where several machines have one.
            `latest` is the one that was measured last, not the one that was promoted last.
        storage: folder of the store.
        machine: what `storage.hardware` says of the machine at hand, whose reports are meant first.
        repository: folder inside the working tree of git.

    Raises:
        AbsentError: there is no such report.
        ValueError: there is more than one, with the candidates, or it cannot be read.
    """
    if git.is_reference(reference):
        return _of_git(reference, repository)
    path = Path(reference)
    found = _find(reference, stored(storage), machine)
    is_there = _is_there(path)
    if len(found) + is_there > 1:
        candidates = [f"./{reference}"] * is_there + _shown(found)
        raise ValueError(f"{reference!r} can mean {', '.join(candidates)}")
    if found:
        return msgspec.structs.replace(_of_path(found[0].path), stored=found[0])
    if is_there or reference.endswith(_SUFFIXES):
        return _of_path(path)
    kept = len(stored(storage))
    holds = f"which holds {kept:,}: see llmgpu list" if kept else "which is empty"
    if reference == LATEST and _is_there(last := storage / _LAST_RUN):
        holds += f"; the last run wrote {last}, and --llmgpu-save keeps it"
    raise AbsentError(f"{reference!r} is neither a file nor a report of the store {storage}, {holds}")


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for a file, say
        return False


def _find(reference: str, kept: Sequence[Stored], machine: str | None) -> list[Stored]:
    """Return the reports of the store that a reference can mean, on the machine at hand if there are any there."""
    folder, slash, rest = reference.rpartition("/")
    if slash:
        return _find(rest, [one for one in kept if one.machine == folder], None)
    if reference == LATEST:
        newest = {one.machine: one for one in sorted(kept, key=_recency)}
        found = list(newest.values())
    else:
        number = int(reference) if _NUMBER.fullmatch(reference) else None
        commit = reference.lower() if _SHA.fullmatch(reference.lower()) else None
        found = [
            one
            for one in kept
            if (number is not None and number == one.number)
            or reference == one.name
            or (commit is not None and one.commit is not None and _begins(one.commit, commit))
        ]
    return [one for one in found if one.machine == machine] or found


def _recency(one: Stored) -> tuple[str, bool, int]:
    # Not the number alone: a copy made by promotion has the highest one, and the time of its original.
    return (one.created, one.name != BASELINE, one.number)


def _begins(kept: str, given: str) -> bool:
    """Return whether one commit is the beginning of the other: the file's name holds a few letters of it."""
    return kept.startswith(given) or given.startswith(kept)


def _shown(found: Sequence[Stored]) -> list[str]:
    """Return how each of several reports can be named without doubt, and what else its file's name says."""
    lines = [
        f"{one.reference} ({', '.join(filter(None, [one.commit, one.created, one.name]))})" for one in found[:_SHOWN]
    ]
    more = len(found) - _SHOWN
    return [*lines, f"and {more:,} more"] if more > 0 else lines


def _of_path(path: Path) -> Source:
    try:
        return Source(name=str(path), data=decompression.read(path))
    except FileNotFoundError as error:
        raise AbsentError(f"report {path}: cannot be read: {error.strerror}") from None
    except OSError as error:
        raise ValueError(f"report {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"report {path}: {error}") from None


def _of_git(reference: str, repository: Path) -> Source:
    try:
        return Source(name=reference, data=git.content(reference, repository))
    except git.AbsentError as error:
        raise AbsentError(str(error)) from None
