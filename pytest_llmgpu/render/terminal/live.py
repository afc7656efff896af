"""What a person sees while a case runs: one line that is drawn over itself, after what pytest has written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

__all__ = ["LiveLine"]

_SAVE, _RESTORE, _CLEAR_TO_END = "\x1b7", "\x1b8", "\x1b[K"
_LEAST_ROOM = 12


class LiveLine:
    """Draws on a terminal; where standard output is none, it draws nothing."""

    def __init__(self, uncaptured: Callable[[], AbstractContextManager[None]], room: Callable[[], int]) -> None:
        """Prepare to draw.

        Args:
            uncaptured: Gives a context in which standard output is the real one.
            room: Returns how many columns are left of the line that pytest is writing; asked in that context, since the
                width of a terminal is asked of standard output.
        """
        self._uncaptured = uncaptured
        self._room = room
        self._drawn = False

    def show(self, text: str) -> None:
        """Draw `text`, cut to the room there is, in place of what was drawn before."""
        with self._uncaptured():
            if not sys.stdout.isatty():
                return
            room = self._room() - 1
            if room >= _LEAST_ROOM:
                _write((_RESTORE if self._drawn else _SAVE) + _CLEAR_TO_END + text[:room])
                self._drawn = True

    def note(self, text: str) -> None:
        """Show what takes time before a case runs; a line of its own where standard output is no terminal."""
        with self._uncaptured():
            if sys.stdout.isatty():
                self.show(text)
            else:
                _write(f"\n{text}\n")

    def clear(self) -> None:
        """Take away what is drawn, so that pytest goes on where it stopped."""
        if self._drawn:
            with self._uncaptured():
                _write(_RESTORE + _CLEAR_TO_END)
        self._drawn = False


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
