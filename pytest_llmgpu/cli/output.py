"""The output of commands."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from pytest_llmgpu.report.text import printable_lines


def show(text: str) -> None:
    """Print lines for people to stdout (see `printable_lines` and `write_data`)."""
    write_data(printable_lines(text, styled=color()))


def complain(text: str, program: str = "llmgpu") -> None:
    """Print one line to stderr, where it can be written."""
    if sys.stderr is None:  # closed
        return
    try:
        print(f"{program}: {printable_lines(' '.join(text.split()))}", file=sys.stderr, flush=True)
    except OSError:
        # Python flushes it again at exit, and a failure there would replace the exit status by 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def write_data(text: str) -> None:
    """Print text in the format of another program to stdout, without buffering.

    If the reader of a pipe, such as `head`, has ended, the command continues to its exit status. ValueError in one
    line: the output cannot be written, for example because the disk is full.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        # Python flushes stdout again at exit; without this it would report the error a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            raise ValueError(f"the output cannot be written: {error.strerror}") from None


def write_json(record: object, target: str | None) -> bool:
    """Write a record as indented JSON to the file of `--json`, or to stdout for `-`; return whether to stdout."""
    if target is None:
        return False
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
    if target == "-":
        write_data(text)
    else:
        save(f"{text}\n", Path(target))
    return target == "-"


def save(text: str, path: Path) -> None:
    """Write text to a file, whose folder is created; ValueError in one line if it cannot be written."""
    from pytest_llmgpu.report import file

    try:
        if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
            path.write_text(text, encoding="utf-8")
        else:
            file.write(path, text.encode())
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror or error}") from None


def color() -> bool:
    """Return whether the output may have colours: stdout is a terminal and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
