"""Finding a report by path, number, `latest`, name, commit, or `git:REV:PATH`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pytest_llmgpu.report import file
from pytest_llmgpu.report.options import LATEST
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.text import listed, plural
from pytest_llmgpu.report.verdicts import Baseline
from pytest_llmgpu.store import git
from pytest_llmgpu.store.store import LAST, Stored, compact_time, stored

BASELINE = "baseline"
"""Name of the baseline in the store, which `llmgpu promote` saves as a copy of a report."""

_SUFFIXES = (".json", ".json.gz")
_SHOWN = 5  # candidates in a message

_NUMBER = re.compile(r"[0-9]{1,9}")
_SHA = re.compile(r"(?=.*[a-z])[0-9a-z]{4,40}|[0-9]{7,40}")
"""Start of a commit. Fewer than 7 digits without a letter are the number of a report instead."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of a report, read once, so that hash and verdicts are of the same bytes."""

    name: str
    """Name of the report: a path, or `git:main:reports/base.json`."""
    data: bytes
    """Content of the file, compressed or not."""
    stored: Stored | None = None
    """Place in the store; None if it is not from the store."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(self.data).hexdigest()

    def report(self) -> Report:
        """Return the report; ValueError in one line if the content is none."""
        return file.parse(self.data, self.name)

    def baseline(self, reference: str, report: Report) -> Baseline:
        """Return the record of this source as a baseline, by the name that the user gave."""
        return Baseline(name=public(reference), sha256=self.sha256, commit=report.commit.sha)


def public(reference: str) -> str:
    """Return a reference for publication: only the file name of an absolute path, which may contain a user name."""
    path = Path(reference)
    return path.name if path.is_absolute() else reference


def resolve(reference: str, storage: Path, *, machine: str | None = None, repository: Path = Path()) -> Source:
    """Read the report that a reference names.

    Args:
        reference: a path, `git:REV:PATH` for a file of a commit, or a report of the store: its number, `latest`, its
            name, or the start of its commit. `MACHINE/` in front selects one of several machines. `latest` is the
            report that was measured last, kept or not, and not the one that was promoted last.
        storage: folder of the store.
        machine: `hardware` of the current machine, whose reports are preferred.
        repository: a folder in the working tree of git.

    Raises:
        git.AbsentError: there is no such report.
        ValueError: several reports match, which the message lists, or the report cannot be read.
    """
    if git.is_reference(reference):
        return Source(name=reference, data=git.content(reference, repository))
    path = Path(reference)
    found = _find(reference, stored(storage), machine)
    if reference == LATEST and _exists(last := storage / LAST):
        source = _of_path(last)
        created = compact_time(source.report())
        if all(one.created < created for one in found):
            return source
    exists = _exists(path)
    if len(found) + exists > 1:
        candidates = [f"./{reference}"] * exists
        candidates += [
            f"{one.reference} ({', '.join(filter(None, [one.commit, one.created, one.name]))})" for one in found
        ]
        raise ValueError(f"{reference!r} is ambiguous: it can be {listed(candidates, _SHOWN)}")
    if found:
        return msgspec.structs.replace(_of_path(found[0].path), stored=found[0])
    if exists or reference.endswith(_SUFFIXES):
        return _of_path(path)
    kept = len(stored(storage))
    advice = f"which has {plural(kept, 'report')}: see llmgpu list" if kept else "which is empty"
    raise git.AbsentError(f"{reference!r} is neither a file nor a report of the store {storage}, {advice}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # for example, the name is too long
        return False


def _find(reference: str, kept: Sequence[Stored], machine: str | None) -> list[Stored]:
    """Return the reports that a reference matches; only those of the current machine if it has any."""
    folder, slash, rest = reference.rpartition("/")
    if slash:
        return _find(rest, [one for one in kept if one.machine == folder], None)
    if reference == LATEST:
        # The number alone is not enough: a promoted copy has the highest number and the time of its original.
        by_time = sorted(kept, key=lambda one: (one.created, one.name != BASELINE, one.number))
        found = list({one.machine: one for one in by_time}.values())
    else:
        number = int(reference) if _NUMBER.fullmatch(reference) else None
        commit = reference.lower() if _SHA.fullmatch(reference.lower()) else None
        found = [
            one
            for one in kept
            if (number is not None and number == one.number)
            or reference == one.name
            # The name of a file has the first letters of the commit only.
            or (commit and one.commit and (one.commit.startswith(commit) or commit.startswith(one.commit)))
        ]
    return [one for one in found if one.machine == machine] or found


def _of_path(path: Path) -> Source:
    try:
        return Source(name=str(path), data=file.read(path))
    except FileNotFoundError as error:
        raise git.AbsentError(f"report {path}: cannot be read: {error.strerror}") from None
    except OSError as error:
        raise ValueError(f"report {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"report {path}: {error}") from None
