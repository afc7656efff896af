"""What the store holds, one line a report: only the few fields that the line shows are decoded."""

from __future__ import annotations

import collections
import concurrent.futures
import os
from collections.abc import Iterable, Sequence

import msgspec
from tabulate import tabulate

from pytest_llmgpu.report import decompression
from pytest_llmgpu.report.machine import Commit
from pytest_llmgpu.report.report import SCHEMA_VERSION
from pytest_llmgpu.report.result import Outcome
from pytest_llmgpu.store.store import Stored

__all__ = ["Summary", "commit", "summarise", "table"]

_SHA_LETTERS = 8


class _Case(msgspec.Struct, frozen=True):
    strategy: str


class _Result(msgspec.Struct, frozen=True):
    case: _Case
    outcome: Outcome


class _Commit(msgspec.Struct, frozen=True):
    sha: str | None = None
    branch: str | None = None
    dirty: bool | None = None


class _Session(msgspec.Struct, frozen=True):
    complete: bool = False


class Summary(msgspec.Struct, frozen=True):
    """The fields of a report that its line shows, by the report's own names."""

    schema_version: int
    created: str
    cases: list[_Result]
    commit: _Commit = _Commit()
    session: _Session = _Session()


class _Head(msgspec.Struct, frozen=True):
    schema_version: int


_DECODER = msgspec.json.Decoder(Summary)


def summarise(kept: Sequence[Stored]) -> list[Summary | str]:
    """Return the summary of each report, or in one line what is wrong with its file."""
    # Threads, since reading and decompressing take most of the time and let others run meanwhile.
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(_summary, kept))


def table(lines: Iterable[tuple[Stored, Summary]]) -> str:
    """Return a table with a line for each report."""
    rows = [
        (
            f"{one.number:04}",
            one.name or "",
            summary.created,
            commit(summary.commit),
            one.machine,
            ", ".join(dict.fromkeys(result.case.strategy for result in summary.cases)),
            len(summary.cases),
            _outcomes(summary),
        )
        for one, summary in lines
    ]
    headers = ("number", "name", "when", "commit", "machine", "strategies", "cases", "outcomes")
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=("right", *["left"] * 5, "right"))


def commit(of: _Commit | Commit) -> str:
    """Return what was measured, as people read it: `3b1f09ac main (changed)`."""
    sha = (of.sha or "unknown")[:_SHA_LETTERS]
    text = f"{sha} {of.branch}" if of.branch else sha
    return f"{text} (changed)" if of.dirty else text


def _summary(one: Stored) -> Summary | str:
    try:
        return _decoded(decompression.unpack(decompression.read(one.path)))
    except OSError as error:
        return f"report {one.path}: cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"report {one.path}: cannot be listed: {' '.join(str(error).split())}"


def _decoded(data: bytes) -> Summary:
    """Return the summary in a report's text; ValueError for one of another schema, and for what is no report."""
    try:
        summary = _DECODER.decode(data)
    except msgspec.ValidationError:
        # Of another schema it may lack what the line shows: its version is what to complain of then.
        _check(msgspec.json.decode(data, type=_Head).schema_version)
        raise
    _check(summary.schema_version)
    return summary


def _check(version: int) -> None:
    if version > SCHEMA_VERSION:
        raise ValueError(f"schema_version {version} is newer than {SCHEMA_VERSION}; upgrade pytest-llmgpu")
    if version < 1:
        raise ValueError(f"schema_version {version} does not exist; allowed are 1 to {SCHEMA_VERSION}")


def _outcomes(summary: Summary) -> str:
    counted = collections.Counter(result.outcome for result in summary.cases)
    parts = [f"{count} {outcome}" for outcome, count in counted.items()]
    return ", ".join(parts if summary.session.complete else [*parts, "run not complete"])
