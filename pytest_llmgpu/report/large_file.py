"""Reading a large report without the rows of its work passes: they are most of it, and few cases need them.

The rows of a rank are read when they are used, from the file, which stays open, or from the text of a report that was
compressed or came from git.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import msgspec

from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import with_present_names
from pytest_llmgpu.report.work import RankWork, WorkRow

SMALL_BYTES = 2**24
"""A smaller report is always read as a whole."""
PART_BYTES = 3 * 2**15
"""A file is read in parts of this size, which fit in the cache of a core. From 128 KiB on, each copy of a part would
get fresh pages from the system and give them back."""
_HEAD_BYTES = 2**22
"""The first case starts within the first bytes of the text."""

# A report is split where `file.encode` separates its cases. In JSON a line break is never part of a text.
_FIRST = b'\n  "cases": [\n    {\n      "id": '
_NEXT = b'\n    },\n    {\n      "id": '
_LAST = b"\n    }\n  ]"
_START, _END = b'[{"id": ', b"}]"

# The rows of a rank are between these.
_ROWS = b'\n                "rows": ['
_ROWS_END = b"\n                ]"


class Text:
    """The text of a report in memory."""

    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        """Name of the report in messages."""
        self.size_bytes = len(data)
        """Size of the text."""
        self._data = data
        self._before: RankWork | None = None
        """The rank before the one that is read."""

    @classmethod
    def unpacked(cls, data: bytes, name: str) -> Text:
        """Return the text in the bytes of a file, compressed or not.

        Raises:
            ValueError: one line with the name: the bytes cannot be decompressed.
        """
        try:
            return cls(file.unpack(data), name)
        except ValueError as error:
            raise ValueError(f"report {name}: {error}") from None

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of the text, fewer at its end."""
        return self._data[start : start + length]

    def parts(self, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes of the text from `start` on."""
        while part := self.read(start, PART_BYTES):
            start += len(part)
            yield part

    def report(self, *, rows: bool = True) -> Report:
        """Return the report.

        Args:
            rows: False to read the rows of a case only when they are used, where the file has the form in which reports
                are written. Such a report cannot be written again. An error in a row is raised when it is read.

        Raises:
            ValueError: one line with the file, the error and its place.
        """
        small = self.size_bytes <= SMALL_BYTES
        found = None if rows or small else self._without_rows()
        return file.parse(self.read(0, self.size_bytes), self.name) if found is None else found

    def _without_rows(self) -> Report | None:
        """Return the report without rows; None if the file has another form, or an error, which has no place then."""
        first = self.read(0, _HEAD_BYTES)
        at = first.find(_FIRST)
        if at < 0:
            return None
        decoder = msgspec.json.Decoder(list[CaseResult])
        cases: list[CaseResult] = []
        try:
            start, size = at + len(_FIRST), PART_BYTES
            while part := self.read(start, size):
                whole, separator, rest = part.rpartition(_NEXT)
                if separator:
                    cases += self._cases(whole, start, decoder)
                    start += len(whole) + len(separator)
                last, end, _ = rest.partition(_LAST)
                if end:
                    cases += self._cases(last, start, decoder)
                    start += len(last) + len(end)
                    break
                if len(part) < size:
                    return None
                # A case of any size is read in a time that is proportional to it.
                size = PART_BYTES if separator else 2 * size
            else:
                return None
            others = b'%b\n  "cases": []%b' % (first[:at], b"".join(self.parts(start)))
            report = msgspec.json.decode(with_present_names(others), type=Report)
            if report.cases:
                return None
            report.cases = cases
            file.check(report)
        except (ValueError, RecursionError):
            return None
        return report

    def _cases(self, text: bytes, start: int, decoder: msgspec.json.Decoder[list[CaseResult]]) -> list[CaseResult]:
        """Return the cases in a part of the report, with rows that are read when they are used.

        Args:
            text: the part, without the start of the first case and the end of the last one.
            start: the byte at which it starts.
            decoder: decodes cases.

        Raises:
            ValueError: the part is not valid, or has another form.
        """
        kept: list[bytes] = []
        stored: list[Sequence[WorkRow]] = []
        at = 0
        while (found := text.find(_ROWS, at)) >= 0:
            first = found + len(_ROWS)
            kept.append(text[at:first])
            # Without a kernel, as on a CPU, the list ends at once.
            at = first if text.startswith(b"]", first) else text.index(_ROWS_END, first)
            stored.append(StoredRows(self, start + first, at - first) if at > first else [])
        cases = decoder.decode(b"".join([_START, *kept, text[at:], _END]))
        launches = [launch for result in cases for launch in result.launches]
        works = [work for launch in launches for work in (launch.work, launch.prefill_work) if work is not None]
        ranks = [rank for work in works for rank in work.ranks]
        for rank, rows in zip([rank for rank in ranks if rank.rows == []], stored, strict=True):
            msgspec.structs.force_setattr(rank, "rows", rows)
        for rank in ranks:
            # Ranks mostly run the same ops, and mappings of them are most of the memory of 8 ranks.
            for name in ("ops", "runtime_calls"):
                if getattr(rank, name) == (shared := getattr(self._before, name, None)):
                    msgspec.structs.force_setattr(rank, name, shared)
            self._before = rank
        return cases


class LargeFile(Text):
    """The text of a large file, which is open for reading; it is not kept in memory."""

    def __init__(self, descriptor: int, name: str) -> None:
        weakref.finalize(self, os.close, descriptor)
        super().__init__(b"", name)
        self._descriptor = descriptor
        self._state = self._present()
        self.size_bytes, _ = self._state

    @classmethod
    def open(cls, path: Path) -> LargeFile | None:
        """Open a report; None where it is to be read into memory, because it is small, compressed or too large.

        Raises:
            OSError: the file cannot be opened.
        """
        if not path.is_file():
            return None
        found = cls(os.open(path, os.O_RDONLY), str(path))
        plain = found.read(0, 1) == b"{"
        return found if plain and SMALL_BYTES < found.size_bytes <= file.LIMIT_BYTES else None

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of the file, fewer at its end.

        Raises:
            ValueError: one line: the file changed after it was opened, or it cannot be read.
        """
        try:
            data = os.pread(self._descriptor, length, start)
            if self._present() == self._state:
                return data
        except OSError as error:
            raise ValueError(f"report {self.name}: cannot be read: {file.one_line(error)}") from None
        raise ValueError(f"report {self.name}: changed while it was read; run the command again")

    @property
    def sha256(self) -> str:
        """SHA-256 of the content."""
        digest = hashlib.sha256()
        for part in self.parts():
            digest.update(part)
        return digest.hexdigest()

    def _present(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns


class StoredRows(Sequence[WorkRow]):
    """The rows of one rank in the text of a report. They are read each time they are used."""

    __slots__ = ("_length", "_start", "_text")

    def __init__(self, text: Text, start: int, length: int) -> None:
        """Name the rows by their bytes."""
        self._text, self._start, self._length = text, start, length

    def _read(self) -> list[WorkRow]:
        rows = self._text.read(self._start, self._length)
        try:
            return msgspec.json.decode(b"[%b]" % rows, type=list[WorkRow])
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"report {self._text.name}: the rows at byte {self._start}: {file.one_line(error)}"
            ) from None

    @overload
    def __getitem__(self, index: int) -> WorkRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WorkRow]: ...
    def __getitem__(self, index: int | slice) -> WorkRow | Sequence[WorkRow]:
        return self._read()[index]

    def __iter__(self) -> Iterator[WorkRow]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())
