from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.stored_reports import H200, measured

from pytest_llmgpu.report.file import load
from pytest_llmgpu.report.report import Commit, Session
from pytest_llmgpu.store.store import Summary, save, stored, summarise, table

pytestmark = pytest.mark.usefixtures("empty_folder")

_STORE = Path(".llmgpu")


def test_the_list_describes_each_report() -> None:
    """A line has number, name, time, commit, machine, strategies and outcomes."""
    save(measured(), _STORE, "base")
    changed = measured(sha=None)
    changed.commit = Commit(sha="c" * 40, dirty=True)
    changed.session = Session(complete=False)
    save(changed, _STORE)
    kept = stored(_STORE)
    lines = [(one, summary) for one, summary in zip(kept, summarise(kept), strict=True) if isinstance(summary, Summary)]
    assert [" ".join(line.split()) for line in table(lines).splitlines()[2:]] == [
        f"0001 base 2026-01-02T03:04:05Z 3b1f09ac main {H200} mp, tp 2 1 completed, 1 oom",
        f"0002 2026-01-02T03:04:05Z cccccccc (changed) {H200} mp, tp 2 1 completed, 1 oom, run not complete",
    ]


def test_a_broken_file_does_not_hide_the_others() -> None:
    """Its line has the error; the other reports are listed."""
    paths = [save(measured(), _STORE) for _ in range(4)]
    paths[0].write_bytes(b"{")
    paths[1].write_bytes(gzip.compress(b"{}")[:-3])
    paths[2].write_bytes(b"[" * 100_000)
    one, two, three, four = summarise(stored(_STORE))
    assert one == f"report {paths[0]}: is not valid JSON: Input data was truncated"
    assert isinstance(two, str)
    assert two.startswith(f"report {paths[1]}: cannot be decompressed")
    assert isinstance(three, str)
    assert three.startswith(f"report {paths[2]}: is not")
    assert isinstance(four, Summary)


def _kept(text: str) -> Path:
    path = save(measured(), _STORE)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"created": "x", "cases": []}', "is not a report of pytest-llmgpu"),
        ('{"benchmarks": [], "version": "5.3.1"}', "is not a report of pytest-llmgpu"),
        (
            '{"schema_version": 9, "created": "x", "cases": []}',
            "schema_version 9 is newer than 2; upgrade pytest-llmgpu",
        ),
        ('{"schema_version": 9, "cases": {}}', "schema_version 9 is newer than 2; upgrade pytest-llmgpu"),
        ('{"schema_version": 0, "created": "x", "cases": []}', "schema_version 0 is older than 2 and not read"),
        ('{"schema_version": 2, "created": "x", "cases": {}}', "Expected `array`, got `object` - at `$.cases`"),
    ],
)
def test_a_file_that_is_not_a_report_of_this_schema_is_listed_with_the_reason(text: str, reason: str) -> None:
    """The reason replaces its line, and the other reports are listed."""
    path = _kept(text)
    save(measured(), _STORE)
    one, two = summarise(stored(_STORE))
    assert isinstance(one, str)
    assert one.startswith(f"report {path}: {reason}")
    assert isinstance(two, Summary)


def test_a_summary_has_the_fields_of_the_report() -> None:
    """The names and values of the summary are those of the whole report."""
    path = save(measured(), _STORE)
    (summary,) = summarise(stored(_STORE))
    assert isinstance(summary, Summary)
    whole = msgspec.to_builtins(load(path))

    def part_of(part: Any, of: Any) -> bool:
        if isinstance(part, dict):
            return all(key in of and part_of(value, of[key]) for key, value in part.items())
        if isinstance(part, list):
            return all(part_of(*pair) for pair in zip(part, of, strict=True))
        return bool(part == of)

    assert part_of(msgspec.to_builtins(summary), whole)
