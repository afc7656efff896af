"""Reading and writing of a report: one JSON object per session.

A report is written completely or not at all. Errors in a report name the file and the place in it. Neither torch nor
pytest is needed, so that a report can be judged on any machine.
"""

from __future__ import annotations

import gc
import gzip
import io
import json
import math
import os
import re
import secrets
import stat
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from pytest_llmgpu.report import validation
from pytest_llmgpu.report.report import SCHEMA_VERSION, Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import valid
from pytest_llmgpu.report.verdicts import with_present_names

_Record = TypeVar("_Record")


_WORK_ROW = re.compile(r"[._]work\..*\.rows\[\d+\]$")
"""Place of a row of kernels: with a line for each field they would be most of a report."""

LIMIT_BYTES = 384 * 2**20
"""Default limit, after decompression. It is about twice 40 launches of all of HellaSwag in 21 cases."""

GZIP = b"\x1f\x8b"
"""The first bytes of a gzip stream."""
_CHUNK_BYTES = 2**24


class _Head(msgspec.Struct):
    """The fields that distinguish a report from the JSON of another tool."""

    schema_version: int
    cases: msgspec.Raw


def check_writable(path: Path, kind: str = "report", suffixes: Sequence[str] = (".json", ".json.gz")) -> None:
    """Check that a file of a kind can be written to `path`, without creating a file or a folder.

    It is called before the run, so that hours of measuring are not lost at the end.

    Raises:
        ValueError: the file cannot be written. The message names the path and the reason.
    """
    if not path.name.endswith(tuple(suffixes)):
        raise ValueError(f"{kind} {path}: the name must end in {' or '.join(suffixes)}")
    try:
        target = path.resolve()
        if (mode := _mode(target)) is not None:
            if not stat.S_ISREG(mode):
                raise ValueError(f"{kind} {path}: is {'a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")
            if not os.access(target, os.W_OK):
                raise ValueError(f"{kind} {path}: exists and is read-only")
        folder = next(parent for parent in target.parents if parent.exists())
        # Only creating a file shows quotas, read-only mounts and the rights of root. This one has no name.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links, before Python 3.13
        raise ValueError(f"{kind} {path}: cannot be written: {one_line(error)}") from None


def dump(report: Report, path: Path, texts: CaseTexts | None = None) -> None:
    """Write a report to `path`, `.json` or `.json.gz`. A reader finds the old file or the new one, never a part of it.

    Args:
        report: the report.
        path: its file.
        texts: texts of cases that were encoded before; None if the report is written once.

    Raises:
        ValueError: a figure is NaN or infinite, which JSON does not allow. The message names the field.
        OSError: the file cannot be written. The old file is unchanged.
    """
    write(path, _parts(report, compressed=path.name.endswith(".gz"), texts=texts))


def write(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file and its folder. A reader finds the old file or the new one, never a part of it.

    Raises:
        OSError: the file cannot be written. The old file is unchanged.
    """
    target = path.resolve()  # a symbolic link is followed, not replaced
    target.parent.mkdir(parents=True, exist_ok=True)
    # No file of tempfile: its mode 0600 would stay on the file, and other users could not read it.
    # No process id: containers that share a volume have equal ones.
    temporary = target.parent / f".llmgpu-{secrets.token_hex(16)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def save(path: Path, data: bytes, kind: str) -> None:
    """Write a file as `write` does; ValueError in one line with the kind of the file, the path and the reason."""
    try:
        write(path, [data])
    except OSError as error:
        raise ValueError(f"{kind} {path}: cannot be written: {one_line(error)}") from None


def encode(report: Report, *, compressed: bool) -> bytes:
    """Return the bytes of a report's file. Equal reports give equal bytes.

    A report that was read from an older version is written as one of this version, with all of its fields.

    Raises:
        ValueError: a figure is NaN or infinite, which JSON does not allow. The message names the field.
    """
    return b"".join(_parts(report, compressed=compressed))


def _parts(report: Report, *, compressed: bool, texts: CaseTexts | None = None) -> Iterator[bytes]:
    """Yield the bytes of a report's file in parts: as a whole they take as much memory as the cases themselves."""
    parts = _plain_parts(report, _case_text if texts is None else texts.of)
    if not compressed:
        yield from parts
        return
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS + 16)  # of gzip, without name and time
    yield from map(packer.compress, parts)
    yield packer.flush()


def _plain_parts(report: Report, text_of: Callable[[int, CaseResult], bytes]) -> Iterator[bytes]:
    fields = {**msgspec.to_builtins(msgspec.structs.replace(report, cases=[])), "schema_version": SCHEMA_VERSION}
    before = b"{\n"
    for name, value in fields.items():
        yield before + f"  {_json(name)}: ".encode()
        if name == "cases":
            for place, case in enumerate(report.cases):
                yield b",\n    " if place else b"[\n    "
                yield text_of(place, case)
            yield b"\n  ]" if report.cases else b"[]"
        else:
            yield _text(value, f"$.{name}", "  ").encode()
        before = b",\n"
    yield b"\n}\n"


class CaseTexts:
    """The texts of the cases of a report that is written many times: a case that stays is encoded once.

    They are in a file without a name. In memory they would take as much again as the cases.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[CaseResult, int, int]] = {}
        """The place of each case in its report to the case, the start of its text in the file, and its bytes."""
        self._end = self._replaced_bytes = 0
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - it is closed with this object
        weakref.finalize(self, self._file.close)

    def of(self, place: int, case: CaseResult) -> bytes:
        """Return the text of a case; a case that changed is another object."""
        kept, start, size_bytes = self._kept.get(place, (None, 0, 0))
        if kept is case:
            return os.pread(self._file.fileno(), size_bytes, start)
        text = _case_text(place, case)
        self._replaced_bytes += size_bytes
        if 2 * self._replaced_bytes > self._end:
            # Each launch changes its case. The file would grow with the square of their number.
            os.ftruncate(self._file.fileno(), 0)
            self._kept.clear()
            self._end = self._replaced_bytes = 0
        with suppress(OSError):  # the disk is full: the case is encoded again next time
            if os.pwrite(self._file.fileno(), text, self._end) == len(text):
                self._kept[place] = case, self._end, len(text)
                self._end += len(text)
        return text


def _case_text(place: int, case: CaseResult) -> bytes:
    return _text(msgspec.to_builtins(case), f"$.cases[{place}]", "    ").encode()


def encodable(record: _Record) -> _Record:
    """Return a record in which every text is valid UTF-8 (see `text.valid`); the same record if it is already."""
    try:
        msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.convert(_with_valid_texts(msgspec.to_builtins(record)), type(record))
    return record


def _with_valid_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {valid(key): _with_valid_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_valid_texts(item) for item in value]
    return valid(value) if isinstance(value, str) else value


def read(path: Path, limit_bytes: int | None = None) -> bytes:
    """Return the bytes of a file, without decompression.

    Args:
        path: a file or a pipe.
        limit_bytes: None for `LIMIT_BYTES`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger than the limit.
    """
    limit_bytes = LIMIT_BYTES if limit_bytes is None else limit_bytes
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        regular = stat.S_ISREG(found.st_mode)
        if not (regular and found.st_size > limit_bytes):
            data = file.read() if regular else bytes(_read(file, limit_bytes + 1))
            if len(data) <= limit_bytes:
                return data
    raise ValueError(f"is larger than {limit_bytes:,} bytes, the limit")


def unpack(data: bytes, limit_bytes: int | None = None) -> bytes:
    """Return gzip data decompressed, and other data unchanged.

    Args:
        data: one gzip stream, several gzip streams, or anything else.
        limit_bytes: None for `LIMIT_BYTES`.

    Raises:
        ValueError: the stream is broken or ends early, or it decompresses to more than the limit.
    """
    if not data.startswith(GZIP):
        return data
    limit_bytes = LIMIT_BYTES if limit_bytes is None else limit_bytes
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            unpacked = _read(file, limit_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot be decompressed: {error}") from None
    if len(unpacked) > limit_bytes:
        raise ValueError(f"decompresses to more than {limit_bytes:,} bytes, the limit")
    return bytes(unpacked)


def parse_json(data: bytes) -> Any:
    """Return a JSON value, for files whose form no type describes.

    Raises:
        ValueError: the data is not JSON, or it is nested too deeply. The message is one line.
    """
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8: save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"not JSON ({error.msg}, {line}column {error.colno})") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _read(file: IO[bytes] | gzip.GzipFile, most_bytes: int) -> bytearray:
    """Return the bytes of a file, at most so many, without allocating memory for more than the file holds."""
    data = bytearray()
    while part := file.read(min(_CHUNK_BYTES, most_bytes - len(data))):
        data += part
    return data


def load(path: Path) -> Report:
    """Read a report. Its content decides if it is decompressed, not its name.

    Raises:
        ValueError: one line with the file, the error and its place.
    """
    try:
        data = read(path)
    except OSError as error:
        raise ValueError(f"report {path}: cannot be read: {one_line(error)}") from None
    except ValueError as error:
        raise ValueError(f"report {path}: {error}") from None
    return parse(data, str(path))


def parse(data: bytes, name: str) -> Report:
    """Return the report in the bytes of a file, compressed or not.

    Raises:
        ValueError: one line with the name, the error and its place.
    """
    try:
        return _decode(with_present_names(unpack(data)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"report {name}: {one_line(error)}") from None


def _decode(data: bytes) -> Report:
    try:
        report = msgspec.json.decode(data, type=Report)
        validation.check(report.cases)
        validation.check_names(data)
    except (ValueError, RecursionError) as error:
        version = readable_version(data)
        reason = validation.explain(data, error) if isinstance(error, msgspec.ValidationError) else one_line(error)
        raise ValueError(f"breaks schema_version {version}: {reason}") from None
    _check_version(report.schema_version)
    _compute_keys(report)
    return report


def check(report: Report) -> None:
    """Check a report that was decoded in parts, and compute the keys of its cases; see `parse`.

    Raises:
        ValueError: the first violation.
    """
    validation.check(report.cases)
    _check_version(report.schema_version)
    _compute_keys(report)


def _compute_keys(report: Report) -> None:
    """Compute the keys of all cases again: those of another version, or of an edited file, can be of other fields."""
    present = {}
    for result in report.cases:
        present[result.key] = result.key = result.case.key
    if report.verdicts is not None:
        rows = [
            row if present.get(row.key, row.key) == row.key else msgspec.structs.replace(row, key=present[row.key])
            for row in report.verdicts.rows
        ]
        report.verdicts = msgspec.structs.replace(report.verdicts, rows=rows)


def readable_version(data: bytes) -> int:
    """Return the schema version of a report's text.

    Raises:
        ValueError: the text is not JSON, it is not a report, or this pytest-llmgpu does not read its version.
    """
    try:
        version = msgspec.json.decode(data, type=_Head).schema_version
    except msgspec.ValidationError as error:
        raise ValueError(f"is not a report of pytest-llmgpu: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {one_line(error)}") from None
    _check_version(version)
    return version


def _check_version(version: int) -> None:
    if version > SCHEMA_VERSION:
        raise ValueError(f"schema_version {version} is newer than {SCHEMA_VERSION}; upgrade pytest-llmgpu")
    if version < 1:
        raise ValueError(f"schema_version {version} does not exist; allowed are 1 to {SCHEMA_VERSION}")


def _text(value: Any, place: str, indent: str) -> str:
    """Return indented JSON with each list of scalars on one line, and each row of work passes.

    Args:
        value: The value, of plain types.
        place: Its place in the report, for errors.
        indent: The indent of its line.
    """
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = (f"{_json(key)}: {_text(item, f'{place}.{key}', inner)}" for key, item in value.items())
        if _WORK_ROW.search(place):
            return "{" + ", ".join(lines) + "}"
        return "{\n" + ",\n".join(inner + line for line in lines) + "\n" + indent + "}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        lines = (_text(item, f"{place}[{number}]", inner) for number, item in enumerate(value))
        return "[\n" + ",\n".join(inner + line for line in lines) + "\n" + indent + "]"
    for number, item in enumerate(value if isinstance(value, list) else [value]):
        if isinstance(item, float) and not math.isfinite(item):
            where = f"{place}[{number}]" if isinstance(value, list) else place
            raise ValueError(f"{where} is {item}, which JSON does not allow; this is a bug in pytest-llmgpu")
    return _json(value)


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_with_valid_texts(value)).decode()


def _mode(path: Path) -> int | None:
    """Return the mode of a path, None if it does not exist. `Path.exists` hides other errors since Python 3.14."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def one_line(error: Exception) -> str:
    """Return the text of an exception in one line; without the path of an OSError, which the caller names."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def paused() -> Iterator[None]:
    """Switch off the collection of reference cycles in this block; it makes reading large reports faster."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
