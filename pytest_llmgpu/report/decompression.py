"""The bytes of a file that somebody else may have made: read and decompressed, but never more than a limit."""

from __future__ import annotations

import zlib
from pathlib import Path

__all__ = ["LIMIT_BYTES", "read", "unpack"]

LIMIT_BYTES = 2**30
"""Largest report that is read, decompressed: about five times 40 launches of the whole HellaSwag in 21 cases."""

_GZIP = b"\x1f\x8b"
_CHUNK_BYTES = 2**24
_WITH_GZIP_HEADER = 16 + zlib.MAX_WBITS  # zlib's sign for a gzip stream


def read(path: Path, limit_bytes: int | None = None) -> bytes:
    """Return the bytes of a file, as they are.

    Args:
        path: a file, or a pipe.
        limit_bytes: None for `LIMIT_BYTES`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than the limit.
    """
    limit = LIMIT_BYTES if limit_bytes is None else limit_bytes
    # Not the size that the file system names: a pipe and a device have none.
    parts, size = [], 0
    with path.open("rb") as file:
        while part := file.read(min(_CHUNK_BYTES, limit + 1 - size)):
            parts.append(part)
            size += len(part)
            if size > limit:
                raise ValueError(f"is larger than {_written(limit)}, the most that is read")
    return b"".join(parts)


def unpack(data: bytes, limit_bytes: int | None = None) -> bytes:
    """Return `data` decompressed where it is gzip, else as it is.

    Args:
        data: one gzip stream or several, or anything else.
        limit_bytes: None for `LIMIT_BYTES`.

    Raises:
        ValueError: the stream is broken or ends early, or it holds more than the limit, as a small file made to fill
            the memory does.
    """
    if not data.startswith(_GZIP):
        return data
    limit = LIMIT_BYTES if limit_bytes is None else limit_bytes
    parts, size = [], 0
    while data:
        stream = zlib.decompressobj(wbits=_WITH_GZIP_HEADER)
        while not stream.eof:
            try:
                part = stream.decompress(data, min(_CHUNK_BYTES, limit + 1 - size))
            except zlib.error as error:
                raise ValueError(f"cannot be decompressed: {error}") from None
            parts.append(part)
            size += len(part)
            if size > limit:
                raise ValueError(f"holds more than {_written(limit)} decompressed, the most that is read")
            data = stream.unconsumed_tail
            if not data and not part and not stream.eof:
                raise ValueError("cannot be decompressed: the file ends before its gzip stream does")
        data = stream.unused_data.lstrip(b"\0")  # tapes and block devices pad with zeros, as `gzip` allows
    return b"".join(parts)


def _written(size_bytes: int) -> str:
    return f"{size_bytes:,} bytes"
