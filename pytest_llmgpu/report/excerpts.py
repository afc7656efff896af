"""The parts of long texts that a report keeps: a library may write gigabytes, or raise a message of megabytes."""

from __future__ import annotations

from pathlib import Path

MESSAGE_LETTERS = 2_000
"""Most letters of a message that are kept."""

_LOG_LINES = 40
_LINE_LETTERS = 1_000
_LOG_BYTES = 2**18
"""A log is read from this many bytes before its end: 40 lines of several thousand letters."""


def beginning(text: str, most_letters: int = MESSAGE_LETTERS) -> str:
    """Return the beginning of a text, with the number of bytes that are left out."""
    if len(text) <= most_letters:
        return text
    left_out_bytes = len(text[most_letters:].encode("utf-8", "surrogatepass"))
    return f"{text[:most_letters]}... ({left_out_bytes:,} bytes left out)"


def log_tail(path: Path, begin_bytes: int = 0, *, most_lines: int = _LOG_LINES, most_bytes: int = _LOG_BYTES) -> str:
    """Return the last lines of a log, each cut; empty if the log cannot be read.

    If the log is longer than the part that is read, the first line has the number of bytes before that part.

    Args:
        path: The log.
        begin_bytes: What comes before this place does not count.
        most_lines: Most lines that are returned.
        most_bytes: Most bytes that are read.
    """
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, 2)
            skipped_bytes = file.seek(max(begin_bytes, size_bytes - most_bytes)) - begin_bytes
            text = file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""
    lines = [beginning(line, _LINE_LETTERS) for line in text.splitlines()[-most_lines:]]
    return "\n".join([f"({skipped_bytes:,} bytes of the log left out)"] * (skipped_bytes > 0) + lines)
