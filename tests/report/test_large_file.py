from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.report_factory import make_full_report, make_report, make_result, make_work

from pytest_llmgpu.report import file, large_file
from pytest_llmgpu.report.file import dump, load
from pytest_llmgpu.report.large_file import LargeFile, StoredRows, Text
from pytest_llmgpu.report.report import Report

_PATH = Path("report.json")


@pytest.fixture(autouse=True)
def _no_file_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(large_file, "SMALL_BYTES", 0)


def _report(cases: int = 5) -> Report:
    """Return a report with work passes, and with all other fields of a report after its cases."""
    results = [make_result(batch_size=2**number) for number in range(cases)]
    for number, result in enumerate(results):
        result.launches[0].work = make_work(1 + number % 3)
        result.launches[0].prefill_work = make_work(2) if number % 2 else None
    report = make_full_report()
    report.cases = results
    report.capacity = report.capacity * 2  # two records, which are separated as cases are
    return report


def _opened() -> LargeFile:
    found = LargeFile.open(_PATH)
    assert found is not None
    return found


def _with_rows(report: Report) -> Report:
    """Read the rows of a report, so that it can be compared."""
    for result in report.cases:
        for launch in result.launches:
            for work in filter(None, (launch.work, launch.prefill_work)):
                for rank in work.ranks:
                    assert isinstance(rank.rows, StoredRows)
                    msgspec.structs.force_setattr(rank, "rows", list(rank.rows))
    return report


@pytest.mark.parametrize("part_bytes", [16, 5000, 5001, 7919, 2**22])
def test_rows_that_are_read_later_are_those_of_the_file(part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other fields are equal too, wherever the file is cut into parts."""
    dump(_report(), _PATH)
    monkeypatch.setattr(large_file, "PART_BYTES", part_bytes)
    found = _opened().report(rows=False)
    assert _with_rows(found) == load(_PATH)
    assert any(len(rank.rows or ()) for rank in found.cases[2].launches[0].work.ranks)  # type: ignore[union-attr]


def test_ranks_without_kernels_are_read_as_quickly() -> None:
    """On a CPU the rows are an empty list: those of other ranks are left in the file all the same."""
    report = _report()
    for result in report.cases[::2]:
        for rank in result.launches[0].work.ranks:  # type: ignore[union-attr]
            msgspec.structs.force_setattr(rank, "rows", [])
    dump(report, _PATH)
    found = _opened().report(rows=False)
    ranks = [rank for result in found.cases for rank in result.launches[0].work.ranks]  # type: ignore[union-attr]
    assert {type(rank.rows) for rank in ranks} == {list, StoredRows}
    assert [list(rank.rows or []) for rank in ranks] == [
        rank.rows
        for result in load(_PATH).cases
        for rank in result.launches[0].work.ranks  # type: ignore[union-attr]
    ]


def test_a_case_of_many_parts_is_read_in_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is proportional to its size: a case of many ranks and launches can have hundreds of megabytes."""
    dump(_report(1), _PATH)
    monkeypatch.setattr(large_file, "PART_BYTES", 16)
    opened, starts = _opened(), list[int]()
    read = opened.read

    def noted(start: int, length: int) -> bytes:
        starts.append(start)
        return read(start, length)

    monkeypatch.setattr(opened, "read", noted)
    assert len(opened.report(rows=False).cases) == 1
    end = _PATH.read_bytes().index(b"\n    }\n  ]")
    assert end > 100 * large_file.PART_BYTES
    assert sum(start < end for start in starts) < 20


def test_the_rows_of_a_compressed_report_are_decoded_when_they_are_used() -> None:
    """So are those of a report from git: only their text is kept."""
    compressed = Path("report.json.gz")
    dump(_report(), compressed)
    found = Text.unpacked(compressed.read_bytes(), "report.json.gz").report(rows=False)
    assert _with_rows(found) == load(compressed)


def test_a_small_compressed_report_is_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows need little memory."""
    monkeypatch.setattr(large_file, "SMALL_BYTES", 2**24)
    dump(_report(), Path("report.json.gz"))
    found = Text.unpacked(Path("report.json.gz").read_bytes(), "report.json.gz").report(rows=False)
    assert found == load(Path("report.json.gz"))


def test_a_report_with_all_rows_is_the_one_of_the_file() -> None:
    """Rows are left out only where the caller agrees."""
    dump(_report(), _PATH)
    assert _opened().report() == load(_PATH)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: json.dumps(json.loads(text)),
        lambda text: json.dumps(json.loads(text), indent=2),
        lambda text: json.dumps(json.loads(text), indent=4),
        lambda text: json.dumps(json.loads(text), sort_keys=True, indent=2),
        lambda text: text.replace("\n", "\r\n"),
    ],
    ids=["one line", "indented", "indented by 4", "sorted", "CRLF"],
)
def test_a_file_that_another_program_formatted_is_read_alike(change: Callable[[str], str]) -> None:
    """A report that has not the form of ours is read as a whole."""
    dump(_report(), _PATH)
    expected = load(_PATH)
    _PATH.write_bytes(change(_PATH.read_text()).encode())
    found = _opened().report(rows=False)
    stored = isinstance(found.cases[0].launches[0].work.ranks[0].rows, StoredRows)  # type: ignore[union-attr]
    assert (_with_rows(found) if stored else found) == expected


def test_a_report_without_cases_is_read_as_a_whole() -> None:
    """There is nothing to leave out."""
    dump(make_report(), _PATH)
    assert _opened().report(rows=False) == load(_PATH)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"schema_version": 2', '"schema_version": 99'),
        ('"batch_size": 4', '"batch_size": -4'),
        ("\n    },\n    {", "\n    }\n    {"),
        ("\n    }\n  ]", "\n    }\n  "),
        ('"mp-bs2"', '"mp-bs1"'),
    ],
)
def test_an_error_is_that_of_the_whole_report(old: str, new: str) -> None:
    """The message names the place in the file, as without parts."""
    dump(_report(), _PATH)
    text = _PATH.read_text()
    assert old in text
    _PATH.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=r"report\.json") as whole:
        load(_PATH)
    with pytest.raises(ValueError, match=r"report\.json") as parts:
        _opened().report(rows=False)
    assert str(parts.value) == str(whole.value)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [(b'"time_s": ', b'"time_s": -', r".*\[0\]\.time_s`$"), (b'"module": "', b'"module": "\xff', "'utf-8' codec .*")],
    ids=["bound", "encoding"],
)
def test_an_error_in_a_row_is_raised_where_the_row_is_used(old: bytes, new: bytes, error: str) -> None:
    """It is one line with the file and the place in the rows."""
    dump(_report(), _PATH)
    _PATH.write_bytes(_PATH.read_bytes().replace(old, new))
    rank = _opened().report(rows=False).cases[0].launches[0].work.ranks[0]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=rf"^report report\.json: the rows at byte \d+: {error}"):
        list(rank.rows or ())


def test_a_file_that_changes_before_its_rows_are_read_is_refused() -> None:
    """Verdicts and causes are of the same bytes; a report that replaces the file leaves the open one as it was."""
    dump(_report(), _PATH)
    rank = _opened().report(rows=False).cases[0].launches[0].work.ranks[0]  # type: ignore[union-attr]
    rows = list(rank.rows or ())
    dump(make_report(), _PATH)
    assert list(rank.rows or ()) == rows

    dump(_report(), _PATH)
    rank = _opened().report(rows=False).cases[0].launches[0].work.ranks[0]  # type: ignore[union-attr]
    with _PATH.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(ValueError, match=r"report\.json: changed while it was read"):
        list(rank.rows or ())


@pytest.mark.parametrize("limit_bytes", [10, 2**22])
def test_small_compressed_and_too_large_files_are_not_opened(limit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read as before, with the limits of their size."""
    compressed = Path("report.json.gz")
    dump(_report(), _PATH)
    dump(_report(), compressed)
    monkeypatch.setattr(file, "LIMIT_BYTES", limit_bytes)
    assert (LargeFile.open(_PATH) is None) == (limit_bytes == 10)
    monkeypatch.setattr(large_file, "SMALL_BYTES", 2**24)
    assert LargeFile.open(_PATH) is None
    assert LargeFile.open(compressed) is None
    assert LargeFile.open(Path()) is None
