"""What commands print."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["as_json", "color", "save", "show"]


def show(text: str) -> None:
    """Print to stdout at once.

    A reader that has seen enough, `head` say, changes nothing: the command goes on to its exit status.

    Raises:
        ValueError: the output cannot be written: a full disk must not pass as an answer.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _discard_the_rest()
    except OSError as error:
        _discard_the_rest()
        raise ValueError(f"the output cannot be written: {error.strerror}") from None


def as_json(record: object) -> str:
    """Return a record as indented JSON, for people and `--json`."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode()


def save(text: str, path: Path) -> None:
    """Write text to a file, with its folder if need be.

    Raises:
        ValueError: it cannot be written; one line that names it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror or error}") from None


def color() -> bool:
    """Return whether what is printed may hold colours: on a terminal, unless NO_COLOR is set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _discard_the_rest() -> None:
    # Else Python tries again at its exit, and complains.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
