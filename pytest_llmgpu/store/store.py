"""The numbered store of reports: `.llmgpu/<machine>/0001_<sha>_<time>.json`, and how a report is found.

A stored report is overwritten only by the continuation of its own session, and several runs can save at the same time.
A report is named by its path, number, `latest`, name, commit, or `git:REV:PATH`.
"""

from __future__ import annotations

import collections
import datetime
import glob
import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from tabulate import tabulate

from pytest_llmgpu.report import file
from pytest_llmgpu.report.options import LATEST, LONGEST_NAME, check_name
from pytest_llmgpu.report.report import Commit, Report
from pytest_llmgpu.report.text import GIB, guess, guess_file, listed, plural
from pytest_llmgpu.report.verdicts import Baseline
from pytest_llmgpu.store import git

DEFAULT = Path(".llmgpu")
"""Default folder of the store, relative to the working directory."""

LAST = "last.json"
"""Default file of the last run in the folder of the store: it has no number, whether the run was kept or not."""

BASELINE = "baseline"
"""Name of the baseline in the store, which `llmgpu promote` saves as a copy of a report."""

_IGNORED = """\
# Written by pytest-llmgpu: reports and logs stay out of git, baselines can be committed.
*
!*/
!*_baseline.json
!*_baseline.json.gz
"""

_LEFT = (".llmgpu-*.tmp", "*/.llmgpu-*.tmp", "*/.*.unfinished")
_ABANDONED_S = 3600.0  # no report takes as long to write
_SHA_LETTERS = 8
_NO_COMMIT = "nocommit"
_FILE = re.compile(r"(\d{4,})_([0-9a-z]+)_(\d{8}T\d{6}Z)(?:_(.+?))?\.json(?:\.gz)?")
_PATH = re.compile(r"\.(?:js\w*(?:\.\w+)?|gz)$")
"""End of a path, misspelt or not: `.json`, `.json.gz`, `.jso`."""
_SHOWN = 5  # candidates in a message
_NUMBER = re.compile(r"[0-9]{1,9}")
_SHA = re.compile(r"(?=.*[a-z])[0-9a-z]{4,40}|[0-9]{7,40}")
"""Start of a commit. Fewer than 7 digits without a letter are the number of a report instead."""
_MARKS = re.compile(r"\((?:R|TM|C)\)|\bCPU\b|@.*", re.IGNORECASE)


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """One report of the store, from the name of its file."""

    machine: str
    """Name of its folder, from `hardware`."""
    number: int
    """Number in its folder, from 1."""
    commit: str | None
    """First letters of the measured commit; None if it was not known."""
    created: str
    """Time of the measurement in UTC: `20260102T030405Z`."""
    name: str | None
    """Name under which the report was saved; None if it has none."""
    path: Path
    """Path of the file."""

    @property
    def reference(self) -> str:
        """Unique name of the report in the store: `4x-NVIDIA-H200-140GiB/0001`."""
        return f"{self.machine}/{self.number:04}"


def hardware(report: Report, *, on_gpu: bool = False) -> str:
    """Return the hardware that a report was measured on, as the name of a folder: `4x-NVIDIA-H200-140GiB`.

    It names all GPUs of the node if any case ran on a GPU, or will run, else the model of the CPU. It has neither host
    nor driver: machines with equal hardware share a folder.
    """
    environment = report.environment
    if environment.gpus and (on_gpu or any(result.case.device == "cuda" for result in report.cases)):
        kinds = collections.Counter((gpu.name, gpu.memory_bytes) for gpu in environment.gpus)
        sizes = {size: "" if size is None else f"-{size / GIB:.0f}GiB" for _, size in kinds}
        text = "+".join(f"{count}x-{name}{sizes[size]}" for (name, size), count in kinds.items())
    else:
        text = f"CPU-{_MARKS.sub(' ', environment.cpu or 'unknown')}"
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text).strip("-.")[:LONGEST_NAME].rstrip("-.")


def find() -> Path:
    """Return the nearest store from the working directory up to the root of its repository; without one, the default.

    A command in a subfolder uses the same store in this way.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        if folder.joinpath(DEFAULT).is_dir():
            return Path(os.path.relpath(folder / DEFAULT, here))
        if (folder / ".git").exists():  # in a worktree it is a file
            break
    return DEFAULT


def prepare(storage: Path) -> None:
    """Make the folder of the store, and remove what killed processes left in it.

    A new one gets a .gitignore; in a folder of the user it could hide other files.
    """
    storage.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        storage.mkdir()
        (storage / ".gitignore").write_text(_IGNORED, encoding="utf-8")
    for path in (path for pattern in _LEFT for path in storage.glob(pattern)):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                path.unlink()


def stored(storage: Path) -> list[Stored]:
    """Return the reports of the store by machine and number, without opening them; none if there is no store."""
    try:
        folders = sorted(entry.path for entry in os.scandir(storage) if entry.is_dir())
        found = [one for folder in folders for one in _stored_in(Path(folder))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"storage {storage}: cannot be read: {error.strerror}") from None
    return sorted(found, key=lambda one: (one.machine, one.number, one.path.name))


def save(report: Report, storage: Path, name: str | None = None) -> Path:
    """Write a report to the store under the next number of its machine, and return its path.

    A run that did not complete takes no name: the name stays that of a whole report. A session that was continued
    replaces its earlier report without a name, or with this one. The store is created if it is missing. ValueError if
    the name is not allowed, or a figure is not finite; OSError if the file cannot be written.
    """
    if name is not None:
        check_name(name)
    data = file.encode(report, compressed=False)
    prepare(storage)
    folder = storage / hardware(report)
    # The commit may come from a variable of a CI system and contain any letter.
    sha = re.sub(r"[^0-9a-z]", "", (report.commit.sha or "").lower())[:_SHA_LETTERS] or _NO_COMMIT
    folder.mkdir(parents=True, exist_ok=True)
    created, chosen = compact_time(report), name if report.session.complete or report.promotion else None
    tail = f"_{'_'.join(filter(None, [sha, created, chosen]))}.json"
    for one in list(_stored_in(folder)) if report.resumed else ():
        if (one.commit or _NO_COMMIT, one.created) == (sha, created) and one.name in (None, chosen):
            file.write(one.path, data)
            return one.path.rename(folder / f"{one.number:04}{tail}")
    number, claim = _claim(folder)
    target = folder / f"{number:04}{tail}"
    try:
        file.write(target, data)
    finally:
        claim.unlink()
    return target


def _claim(folder: Path) -> tuple[int, Path]:
    """Return the next free number and an empty file that reserves it for this process.

    The name of that file is the number only, and it is removed once the report exists. A number without a report and
    without such a file is therefore free. The file of a killed process stays, and its number is skipped.
    """
    number = 0
    while True:
        number = max([number, *(found.number for found in _stored_in(folder))]) + 1
        claim = folder / f".{number:04}.unfinished"
        with suppress(FileExistsError):
            claim.open("xb").close()
            if number > max((found.number for found in _stored_in(folder)), default=0):
                return number, claim
            claim.unlink()


def _stored_in(folder: Path) -> Iterator[Stored]:
    for entry in os.scandir(folder):
        # Reading a pipe would wait for somebody who writes to it.
        if (match := _FILE.fullmatch(entry.name)) and entry.is_file():
            number, commit, created, name = match.groups()
            yield Stored(
                machine=folder.name,
                number=int(number),
                commit=None if commit == _NO_COMMIT else commit,
                created=created,
                name=name,
                path=folder / entry.name,
            )


def compact_time(report: Report) -> str:
    """Return the time of a report in UTC: `20260102T030405Z`."""
    try:
        # Python before 3.11 does not read the Z.
        created = datetime.datetime.fromisoformat(report.created.replace("Z", "+00:00"))
    except ValueError:
        raise ValueError(f"created {report.created!r}: a time such as 2026-01-02T03:04:05Z is needed") from None
    return created.astimezone(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")


def table(kept: Iterable[Stored]) -> tuple[str, list[str]]:
    """Return a table with one line per report, and the reason in one line for each file that cannot be read."""
    rows, broken = [], []
    for one in kept:
        try:
            report = file.load(one.path)
        except ValueError as error:
            broken.append(str(error))
            continue
        counted = collections.Counter(result.outcome for result in report.cases)
        outcomes = [f"{count} {outcome}" for outcome, count in counted.items()]
        rows.append(
            (
                *(f"{one.number:04}", one.name or "", report.created, commit(report.commit), one.machine),
                ", ".join(dict.fromkeys(result.case.strategy for result in report.cases)),
                len(report.cases),
                ", ".join(outcomes if report.session.complete else [*outcomes, "run not complete"]),
            )
        )
    headers = ("number", "name", "when", "commit", "machine", "strategies", "cases", "outcomes")
    alignment = ("right", *["left"] * 5, "right")
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=alignment) if rows else "", broken


def commit(of: Commit) -> str:
    """Return a commit as text: `3b1f09ac main (changed)`."""
    sha = (of.sha or "unknown")[:_SHA_LETTERS]
    text = f"{sha} {of.branch}" if of.branch else sha
    return f"{text} (changed)" if of.dirty else text


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
            name, or the start of its commit. `MACHINE/` in front selects one of several machines. A name that several
            reports have is that of the newest. `latest` is the report that was measured last, kept or not, and not the
            one that was promoted last.
        storage: folder of the store.
        machine: `hardware` of the current machine, whose reports are preferred.
        repository: a folder in the working tree of git.

    Raises:
        git.AbsentError: there is no such report.
        ValueError: several reports match, which the message lists, or the report cannot be read.
    """
    if git.is_reference(reference):
        return Source(name=reference, data=git.content(reference, repository))
    if not reference:
        raise ValueError("report '': an empty name: give a path, a number, a name or a commit")
    path = Path(reference)
    found = _find(reference, stored(storage), machine)
    if reference == LATEST and (last := storage / LAST).exists():
        source = _of_path(last)
        created = compact_time(source.report())
        if all(one.created < created for one in found):
            return source
    exists = os.path.exists(path)  # noqa: PTH110 - false for a name that is too long, which Path.exists refuses
    if len(found) + exists > 1:
        named = [f"{one.reference} ({', '.join(filter(None, [one.commit, one.created, one.name]))})" for one in found]
        candidates = [*[f"./{reference}"] * exists, *named]
        raise ValueError(f"{reference!r} is ambiguous: give the number of {listed(candidates, _SHOWN)}")
    if found:
        return msgspec.structs.replace(_of_path(found[0].path), stored=found[0])
    folder = os.path.dirname(reference)  # noqa: PTH120 - as above
    if exists or _PATH.search(reference) or os.path.isdir(folder):  # noqa: PTH112
        return _of_path(path)
    kept = stored(storage)
    advice = f"which has {plural(len(kept), 'report')}: see llmgpu list" if kept else "which is empty"
    latest = [LATEST] * (bool(kept) or (storage / LAST).exists())
    similar = guess(reference, [*latest, *(one.name for one in kept if one.name)])
    text = f"{reference!r} is neither a file nor a report of the store {storage}, {advice}{similar}"
    raise (git.MisspeltError if similar else git.AbsentError)(text)


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
        newest = {one.machine: one for one in kept if one.name == reference}  # by number
        found = [
            one
            for one in kept
            if (number is not None and number == one.number)
            or one == newest.get(one.machine)
            # The name of a file has the first letters of the commit only.
            or (commit and one.commit and (one.commit.startswith(commit) or commit.startswith(one.commit)))
        ]
    return [one for one in found if one.machine == machine] or found


def _of_path(path: Path) -> Source:
    try:
        return Source(name=str(path), data=file.read(path))
    except FileNotFoundError as error:
        absent = next(one for one in (path, *path.parents) if one.parent.is_dir())  # it, or a folder above it
        similar = guess_file(absent.name, [one.name for one in absent.parent.iterdir()])
        # A folder above it may be left out.
        for deeper in absent.parent.glob(f"*/{glob.escape(str(path.relative_to(absent.parent)))}"):
            similar = similar or f" (did you mean {deeper}?)"
        text = f"report {path}: cannot be read: {error.strerror}{similar}"
        raise (git.MisspeltError if similar else git.AbsentError)(text) from None
    except OSError as error:
        raise ValueError(f"report {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"report {path}: {error}") from None
