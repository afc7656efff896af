from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from pytest_llmgpu.render.terminal.live import LiveLine


class _Terminal(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def _uncaptured() -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def test_the_line_is_drawn_over_itself_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each drawing starts where the first one started, and nothing is left at the end."""
    screen = _Terminal(is_terminal=True)
    monkeypatch.setattr(sys, "stdout", screen)
    line = LiveLine(_uncaptured, lambda: 40)
    line.show("1/9 batches")
    line.show("2/9 batches")
    line.clear()
    assert screen.getvalue() == "\x1b7\x1b[K1/9 batches\x1b8\x1b[K2/9 batches\x1b8\x1b[K"


def test_the_line_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is cut to the room there is: a wrapped line could not be drawn over."""
    screen = _Terminal(is_terminal=True)
    monkeypatch.setattr(sys, "stdout", screen)
    LiveLine(_uncaptured, lambda: 21).show("x" * 100)
    assert screen.getvalue().count("x") == 20


def test_without_room_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few columns would say nothing."""
    screen = _Terminal(is_terminal=True)
    monkeypatch.setattr(sys, "stdout", screen)
    line = LiveLine(_uncaptured, lambda: 5)
    line.show("1/9 batches")
    line.clear()
    assert not screen.getvalue()


def test_the_room_is_asked_of_the_real_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under pytest's capture standard output has no width."""
    screen = _Terminal(is_terminal=True)
    monkeypatch.setattr(sys, "stdout", _Terminal(is_terminal=False))

    @contextlib.contextmanager
    def uncaptured() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen)
            yield

    LiveLine(uncaptured, lambda: 31 if sys.stdout is screen else 21).show("x" * 100)
    assert screen.getvalue().count("x") == 30


def test_a_pipe_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log file gets no control sequences."""
    pipe = _Terminal(is_terminal=False)
    monkeypatch.setattr(sys, "stdout", pipe)
    line = LiveLine(_uncaptured, lambda: 80)
    line.show("1/9 batches")
    line.clear()
    assert not pipe.getvalue()
