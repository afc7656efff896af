from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

import pytest

from pytest_llmgpu.render.terminal.live import LiveLine


class _Terminal(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_the_line_is_redrawn_in_place_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text starts at the saved position, and the last call leaves nothing on the screen."""
    screen = _Terminal(is_terminal=True)
    monkeypatch.setattr(sys, "stdout", screen)
    line = LiveLine(contextlib.nullcontext, lambda: 40)
    line.show("1/9 batches")
    line.show("2/9 batches")
    line.clear()
    assert screen.getvalue() == "\x1b7\x1b[K1/9 batches\x1b8\x1b[K2/9 batches\x1b8\x1b[K"


def test_the_width_is_read_from_the_real_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured standard output has no width."""
    screen = _Terminal(is_terminal=True)
    monkeypatch.setattr(sys, "stdout", _Terminal(is_terminal=False))

    @contextlib.contextmanager
    def uncaptured() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            yield

    LiveLine(uncaptured, lambda: 31 if sys.stdout is screen else 21).show("x" * 100)
    assert screen.getvalue().count("x") == 30


def test_nothing_is_drawn_on_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log file gets no control sequences."""
    pipe = _Terminal(is_terminal=False)
    monkeypatch.setattr(sys, "stdout", pipe)
    line = LiveLine(contextlib.nullcontext, lambda: 80)
    line.show("1/9 batches")
    line.clear()
    assert not pipe.getvalue()
