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


@pytest.mark.parametrize(
    ("is_terminal", "drawn"),
    [(True, "\x1b7\x1b[K1/9 batches\x1b8\x1b[K2/9 batches\x1b8\x1b[K"), (False, "")],
)
def test_the_line_is_redrawn_and_removed(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, drawn: str) -> None:
    """The last call leaves nothing on the screen, and a log file gets no control sequences."""
    screen = _Terminal(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stdout", screen)
    line = LiveLine(contextlib.nullcontext, lambda: 40)
    line.show("1/9 batches")
    line.show("2/9 batches")
    line.clear()
    assert screen.getvalue() == drawn


def test_a_log_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that takes minutes is no silence; a note counts, and quick cases write nothing."""
    log, now_s = _Terminal(is_terminal=False), [0.0]
    monkeypatch.setattr(sys, "stdout", log)
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    line = LiveLine(contextlib.nullcontext, lambda: 40)
    for second in range(0, 300, 10):
        now_s[0] = float(second)
        line.show(f"llmgpu: mp-bs8  warm-up  {second}")
        if second == 130:
            line.show("llmgpu: launch 2 of 2", at_once=True)
    line.clear()
    assert log.getvalue().split("\n")[1::2] == [
        *("llmgpu: mp-bs8  warm-up  60", "llmgpu: mp-bs8  warm-up  120", "llmgpu: launch 2 of 2"),
        *("llmgpu: mp-bs8  warm-up  190", "llmgpu: mp-bs8  warm-up  250"),
    ]


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
