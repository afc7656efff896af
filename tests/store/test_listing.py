from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.stored_reports import H200, measured

from pytest_llmgpu.report.file import load
from pytest_llmgpu.report.machine import Commit
from pytest_llmgpu.report.report import Session
from pytest_llmgpu.store.listing import Summary, summarise, table
from pytest_llmgpu.store.store import save, stored

_STORE = Path(".llmgpu")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_list_says_what_each_report_is() -> None:
    """Number, name, time, commit, machine, strategies and how the cases ended."""
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
    """It is named with what is wrong; the rest is listed."""
    paths = [save(measured(), _STORE) for _ in range(4)]
    paths[0].write_bytes(b"{")
    paths[1].write_bytes(gzip.compress(b"{}")[:-3])
    paths[2].write_bytes(b"[" * 100_000)
    one, two, three, four = summarise(stored(_STORE))
    assert one == f"report {paths[0]}: cannot be listed: Input data was truncated"
    assert isinstance(two, str)
    assert two.startswith(f"report {paths[1]}: cannot be listed: cannot be decompressed")
    assert isinstance(three, str)
    assert isinstance(four, Summary)


def _kept(text: str) -> Path:
    path = save(measured(), _STORE)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"created": "x", "cases": []}', "Object missing required field `schema_version`"),
        ('{"benchmarks": [], "version": "5.3.1"}', "Object missing required field `schema_version`"),
        (
            '{"schema_version": 9, "created": "x", "cases": []}',
            "schema_version 9 is newer than 1; upgrade pytest-llmgpu",
        ),
        ('{"schema_version": 9, "cases": {}}', "schema_version 9 is newer than 1; upgrade pytest-llmgpu"),
        ('{"schema_version": 0, "created": "x", "cases": []}', "schema_version 0 does not exist; allowed are 1 to 1"),
        ('{"schema_version": 1, "created": "x", "cases": {}}', "Expected `array`, got `object` - at `$.cases`"),
    ],
)
def test_what_is_no_report_of_this_schema_is_not_listed_as_one(text: str, said: str) -> None:
    """Its line would be a guess; what is wrong is said instead, and the others are listed."""
    path = _kept(text)
    save(measured(), _STORE)
    one, two = summarise(stored(_STORE))
    assert one == f"report {path}: cannot be listed: {said}"
    assert isinstance(two, Summary)


def test_the_summary_reads_the_reports_own_fields() -> None:
    """A field that is renamed in the report cannot be forgotten here."""
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
