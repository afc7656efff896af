"""Reading and writing of a report: one JSON object per session.

A report is written completely or not at all. Errors in a report name the file and the place in it. Neither torch nor
pytest is needed, so that a report can be judged on any machine. A file can be of unknown origin: its size is limited,
after decompression too.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import operator
import os
import secrets
import stat
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import msgspec

from pytest_llmgpu.report.report import SCHEMA_VERSION, Report
from pytest_llmgpu.report.result import CaseResult, Launch
from pytest_llmgpu.report.text import valid, with_texts

_Record = TypeVar("_Record")

LIMIT_BYTES = 2**29
"""Default limit, after decompression: about 40 launches of all of HellaSwag in 21 cases."""

_MOST_RATIO, _FREE_BYTES = 100, 2**24
"""A report of more bytes than the second figure is decompressed to at most so many times its size: real ones to 10."""
_MOST_FIELDS = 4_000_000
"""Each takes 100 bytes in memory. A report of the largest size has a quarter of them."""

GZIP = b"\x1f\x8b"
"""The first bytes of a gzip stream."""
_MOST_VALUES = 5_000_000
"""Each takes up to 80 bytes in memory. The largest tokenizers have two million."""
_CHUNK_BYTES = 2**24
_LEVEL = 6  # of gzip: level 9 takes four times as long for 2 % less
_NUMBER_BYTES = 4
_ROUNDING = 1e-6


class _Head(msgspec.Struct):
    """The fields that distinguish a report from the JSON of another tool."""

    schema_version: int
    cases: msgspec.Raw


def check_writable(path: Path, kind: str = "report", suffixes: Sequence[str] = (".json", ".json.gz")) -> None:
    """Check before a run that `path` can be written, and leave no trace; ValueError with kind, path and reason."""
    if not path.name.endswith(tuple(suffixes)):
        raise ValueError(f"{kind} {path}: the name must end in {' or '.join(suffixes)}")
    try:
        target = path.parent.resolve() / path.name
        with suppress(FileNotFoundError, NotADirectoryError):
            mode = target.lstat().st_mode  # Path.exists hides other errors since Python 3.14
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                raise ValueError(f"{kind} {path}: is {'a directory' if stat.S_ISDIR(mode) else 'not a regular file'}")
            if stat.S_ISREG(mode) and not os.access(target, os.W_OK):
                raise ValueError(f"{kind} {path}: exists and is read-only")
        folder = next(parent for parent in target.parents if parent.exists())
        # Only creating a file shows quotas, read-only mounts and the rights of root. This one has no name.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links, before Python 3.13
        raise ValueError(f"{kind} {path}: cannot be written: {one_line(error)}") from None


def dump(report: Report, path: Path) -> None:
    """Write a report to `path`, `.json` or `.json.gz`; the errors are those of `encode` and `write`."""
    write(path, encode(report, compressed=path.name.endswith(".gz")))


def write(path: Path, data: bytes) -> None:
    """Write a file and its folder. A reader finds the old file or the new one, never a part of it.

    A link with the name of the file is replaced: a repository could have one that names a file elsewhere.
    """
    target = path.parent.resolve() / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    # No file of tempfile: its mode 0600 would stay on the file, and other users could not read it.
    # No process id: containers that share a volume have equal ones.
    temporary = target.parent / f".llmgpu-{secrets.token_hex(16)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def save(path: Path, data: bytes, kind: str) -> None:
    """Write a file as `write` does; ValueError in one line with the kind of the file, the path and the reason."""
    try:
        write(path, data)
    except OSError as error:
        raise ValueError(f"{kind} {path}: cannot be written: {one_line(error)}") from None


def encode(report: Report, *, compressed: bool) -> bytes:
    """Return the bytes of a report's file, indented or compressed, equal bytes for equal reports.

    ValueError if a figure is NaN or infinite.
    """
    plain = msgspec.to_builtins(encodable(report))
    data = msgspec.json.encode(plain)
    if msgspec.json.decode(data) != plain:  # msgspec writes null in its place
        raise ValueError("a figure is NaN or infinite, which JSON does not allow; this is a bug in pytest-llmgpu")
    if compressed:
        return gzip.compress(data, _LEVEL, mtime=0)
    return msgspec.json.format(data, indent=1) + b"\n"


def encodable(record: _Record) -> _Record:
    """Return a record in which every text is valid UTF-8 (see `text.valid`); the same record if it is already."""
    try:
        msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.convert(with_texts(msgspec.to_builtins(record), valid), type(record))
    return record


def load(path: Path) -> Report:
    """Read a report. Its content decides if it is decompressed, not its name. The errors are those of `parse`."""
    try:
        data = read(path)
    except OSError as error:
        raise ValueError(f"report {path}: cannot be read: {one_line(error)}") from None
    except ValueError as error:
        raise ValueError(f"report {path}: {error}") from None
    return parse(data, str(path))


def parse(data: bytes, name: str) -> Report:
    """Return the report in the bytes of a file; ValueError in one line with the name, the error and its place."""
    try:
        text = unpack(data)
        if (fields := text.count(b'":')) > _MOST_FIELDS:
            raise ValueError(f"has {fields:,} fields: at most {_MOST_FIELDS:,} are read")  # noqa: TRY301 - as below
        try:
            version = msgspec.json.decode(text, type=_Head).schema_version
        except msgspec.ValidationError as error:
            needed = "pytest --llmgpu-json=FILE writes one, llmgpu gate --json verdicts alone"
            raise ValueError(f"is not a report of pytest-llmgpu: {needed} ({error})") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not valid JSON: {error}" if text.strip() else "is empty") from None
        if version != SCHEMA_VERSION:
            newer = version > SCHEMA_VERSION
            advice = "; upgrade pytest-llmgpu" if newer else " and not read; measure it again"
            found = f"schema_version {version} is {'newer' if newer else 'older'} than {SCHEMA_VERSION}{advice}"
            raise ValueError(found)  # noqa: TRY301 - the name of the report is added below
        try:
            report = msgspec.json.decode(text, type=Report)
            _check(report.cases)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"breaks schema_version {SCHEMA_VERSION}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"report {name}: {one_line(error)}") from None
    present = {result.key: result.case.key for result in report.cases}  # other fields in another version
    for result in report.cases:
        result.key = result.case.key
    if report.verdicts is not None:
        rows = [msgspec.structs.replace(row, key=present.get(row.key, row.key)) for row in report.verdicts.rows]
        report.verdicts = msgspec.structs.replace(report.verdicts, rows=rows)
    return report


def read(path: Path, limit_bytes: int | None = None) -> bytes:
    """Return the bytes of a file or a pipe; ValueError if they are more than the limit, None for `LIMIT_BYTES`."""
    with path.open("rb") as file:
        return _limited(file, LIMIT_BYTES if limit_bytes is None else limit_bytes, "is larger")


def unpack(data: bytes) -> bytes:
    """Return gzip data decompressed and other data unchanged; ValueError if it is broken, or larger than the limit."""
    if not data.startswith(GZIP):
        return data
    limit_bytes = min(LIMIT_BYTES, max(_FREE_BYTES, _MOST_RATIO * len(data)))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return _limited(file, limit_bytes, "decompresses to more")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot be decompressed: {error}") from None


def _limited(file: IO[bytes] | gzip.GzipFile, limit_bytes: int, excess: str) -> bytes:
    data = bytearray()
    while part := file.read(min(_CHUNK_BYTES, limit_bytes + 1 - len(data))):
        data += part
    if len(data) > limit_bytes:
        raise ValueError(f"{excess} than {limit_bytes:,} bytes, the limit")
    return bytes(data)


def parse_json(data: bytes) -> Any:
    """Return a JSON value, for files whose form no type describes; ValueError in one line if the data is none."""
    if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise ValueError(f"the JSON has more than {_MOST_VALUES:,} values")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8: save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"not JSON ({error.msg}, {line}column {error.colno})") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _check(cases: Sequence[CaseResult]) -> None:
    """Check what no type expresses: unique ids, columns of equal length, answers; ValueError with the place."""
    places: dict[str, int] = {}
    for number, result in enumerate(cases):
        place = f"$.cases[{number}]"
        if not result.id:
            _refuse(f"{place}.id", "an id, got an empty text")
        if (first := places.setdefault(result.id, number)) != number:
            _refuse(f"{place}.id", f"a unique id, got {result.id!r}, which $.cases[{first}] has too")
        if result.outcome == "completed" and result.failure is not None:
            _refuse(f"{place}.failure", "null, because the case completed")
        for launch_number, launch in enumerate(result.launches):
            inside = f"{place}.launches[{launch_number}]"
            for name, column, length in _columns(launch):
                if column is not None and len(column) != length:
                    _refuse(f"{inside}.{name}", f"{length} values, got {len(column)}")
            _check_answers(launch, inside)


def _columns(launch: Launch) -> Iterator[tuple[str, Sequence[object] | None, int]]:
    """Yield the name of each column of a launch, the column, and the length that it must have."""

    def of(record: msgspec.Struct, place: str, length: int, *names: str) -> Iterator[tuple[str, Any, int]]:
        return ((f"{place}.{name}", getattr(record, name), length) for name in names)

    batches = len(launch.batches.latency_s)
    yield from of(launch.batches, "batches", batches, "sequences", "tokens", "padded_tokens")
    # Of eager forwards alone.
    timed = batches if launch.batches.launch_s or launch.batches.reference_s else 0
    yield from of(launch.batches, "batches", timed, "launch_s", "reference_s")
    if (accuracy := launch.accuracy) is not None:
        yield from of(accuracy, "accuracy", accuracy.items, "predictions", "predictions_norm", "labels")
    if (generation := launch.generation) is not None:
        yield from of(generation, "generation", len(generation.new_tokens), "prompt_tokens")
        # Not every engine reports it.
        yield from of(generation, "generation", batches if generation.first_token_s else 0, "first_token_s")
    if (profile := launch.profile) is not None and (series := profile.series) is not None:
        yield "profile.series.devices", series.devices, len(profile.devices)
        for number, columns in enumerate(series.devices):
            for name, column in columns.items():
                yield f"profile.series.devices[{number}].{name}", column, len(series.t_s)
    works = {"work": launch.work, "prefill_work": launch.prefill_work}
    for place, work in ((place, work) for place, work in works.items() if work is not None):
        for number, collective in enumerate(work.collectives or ()):
            yield from of(collective, f"{place}.collectives[{number}]", work.passes, "transfer_s", "wait_s")
        for number, rank in enumerate(work.ranks):
            yield from of(rank, f"{place}.ranks[{number}]", work.passes, "device_time_s", "copy_s", "idle_s")


def _check_answers(launch: Launch, place: str) -> None:
    if (accuracy := launch.accuracy) is not None:
        _numbers(accuracy.loglikelihoods, f"{place}.accuracy.loglikelihoods")
        for metric, choices in (("acc", accuracy.predictions), ("acc_norm", accuracy.predictions_norm)):
            found = right = getattr(accuracy, metric)
            if accuracy.labels is not None and accuracy.items:
                right = sum(map(operator.eq, choices, accuracy.labels)) / accuracy.items
            if abs(found - right) > _ROUNDING:
                _refuse(f"{place}.accuracy.{metric}", f"{right:g}, which the predictions give, got {found:g}")
    if (generation := launch.generation) is not None:
        tokens = sum(generation.new_tokens)
        for name in ("tokens", "loglikelihoods", "prefill_loglikelihoods", "reference_loglikelihoods"):
            text = getattr(generation, name)
            if text is not None and (numbers := _numbers(text, f"{place}.generation.{name}")) != tokens:
                _refuse(f"{place}.generation.{name}", f"{tokens} numbers, got {numbers}")


def _numbers(text: str, place: str) -> int:
    """Return how many numbers of 4 bytes a text of base64 holds."""
    try:
        size_bytes = len(base64.b64decode(text, validate=True))
    except ValueError as error:
        _refuse(place, f"base64, got another text ({error})")
    if size_bytes % _NUMBER_BYTES:
        _refuse(place, f"numbers of {_NUMBER_BYTES} bytes, got {size_bytes} bytes")
    return size_bytes // _NUMBER_BYTES


def _refuse(place: str, expected: str) -> NoReturn:
    raise ValueError(f"Expected {expected} - at `{place}`")  # in the form of msgspec's own messages


def one_line(error: Exception) -> str:
    """Return the text of an exception in one line; without the path of an OSError, which the caller names."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
