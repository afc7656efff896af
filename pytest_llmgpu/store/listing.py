"""The list of the store: one line per report. Only the fields that the line shows are decoded."""

from __future__ import annotations

import collections
import concurrent.futures
import os
from collections.abc import Iterable, Sequence

import msgspec
from tabulate import tabulate

from pytest_llmgpu.report import decompression, file
from pytest_llmgpu.report.machine import Commit
from pytest_llmgpu.report.result import Outcome
from pytest_llmgpu.store.store import Stored

_SHA_LETTERS = 8


class _Case(msgspec.Struct, frozen=True):
    strategy: str


class _Result(msgspec.Struct, frozen=True):
    case: _Case
    outcome: Outcome


class _Session(msgspec.Struct, frozen=True):
    complete: bool = False


class Summary(msgspec.Struct, frozen=True):
    """The fields of a report that its line shows, named as in the report."""

    schema_version: int
    created: str
    cases: list[_Result]
    commit: Commit = Commit()
    session: _Session = _Session()


def summarise(kept: Sequence[Stored]) -> list[Summary | str]:
    """Return the summary of each report; for a file that cannot be read, the reason in one line."""
    # Threads help: reading and decompressing take most of the time and release the interpreter lock.
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(_summary, kept))


def table(lines: Iterable[tuple[Stored, Summary]]) -> str:
    """Return a table with one line per report."""
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


def commit(of: Commit) -> str:
    """Return a commit as text: `3b1f09ac main (changed)`."""
    sha = (of.sha or "unknown")[:_SHA_LETTERS]
    text = f"{sha} {of.branch}" if of.branch else sha
    return f"{text} (changed)" if of.dirty else text


def _summary(one: Stored) -> Summary | str:
    try:
        data = decompression.unpack(decompression.read(one.path))
        file.readable_version(data)
        return msgspec.json.decode(data, type=Summary)
    except OSError as error:
        return f"report {one.path}: cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"report {one.path}: {file.one_line(error)}"


def _outcomes(summary: Summary) -> str:
    counted = collections.Counter(result.outcome for result in summary.cases)
    parts = [f"{count} {outcome}" for outcome, count in counted.items()]
    return ", ".join(parts if summary.session.complete else [*parts, "run not complete"])
