"""The live line of a running case: one line that is redrawn in place, after the text that pytest wrote."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from pytest_llmgpu.report.text import printable, printable_lines

_SAVE, _RESTORE, _CLEAR_TO_END = "\x1b7", "\x1b8", "\x1b[K"
_SMALLEST_WIDTH = 12
_LOG_S = 60.0


class LiveLine:
    """Draws on the terminal; if standard output is not one, it gets a line a minute."""

    def __init__(self, uncaptured: Callable[[], AbstractContextManager[None]], width: Callable[[], int]) -> None:
        """Prepare to draw within `uncaptured`, where standard output is the real one.

        There `width` returns the number of free columns in the line that pytest writes.
        """
        self._uncaptured = uncaptured
        self._width = width
        self._drawn = False
        self._due_s = time.monotonic() + _LOG_S

    def show(self, text: str, *, at_once: bool = False) -> None:
        """Draw `text`, cut to the free width, in place of the text before it; a log gets it once a minute, or now."""
        with self._uncaptured():
            if not sys.stdout.isatty():
                if at_once or time.monotonic() >= self._due_s:
                    _write(f"\n{printable_lines(text)}\n")
                    self._due_s = time.monotonic() + _LOG_S
                return
            width = self._width() - 1
            if width >= _SMALLEST_WIDTH:
                _write((_RESTORE if self._drawn else _SAVE) + _CLEAR_TO_END + printable(text)[:width])
                self._drawn = True

    def clear(self) -> None:
        """Remove the line, and put the cursor where pytest left it."""
        if self._drawn:
            with self._uncaptured():
                _write(_RESTORE + _CLEAR_TO_END)
        self._drawn = False


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
