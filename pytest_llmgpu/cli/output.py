"""What commands print."""

from __future__ import annotations

import os
import sys

__all__ = ["color", "show"]


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


def color() -> bool:
    """Return whether what is printed may hold colours: on a terminal, unless NO_COLOR is set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _discard_the_rest() -> None:
    # Else Python tries again at its exit, and complains.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
