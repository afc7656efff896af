"""Reading files of unknown origin: of limited size, after decompression too, and of limited depth."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import zlib
from pathlib import Path
from typing import IO, Any

LIMIT_BYTES = 384 * 2**20
"""Default limit, after decompression. It is about twice 40 launches of all of HellaSwag in 21 cases."""

GZIP = b"\x1f\x8b"
"""The first bytes of a gzip stream."""
_CHUNK_BYTES = 2**24


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
