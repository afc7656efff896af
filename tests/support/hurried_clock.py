"""Time limits of ranks that are over at once: a test neither waits for them nor depends on the speed of the machine."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_llmgpu.ranks import group


def hurry(monkeypatch: pytest.MonkeyPatch, *, while_exists: Path) -> None:
    """Let the clock of time limits be a thousand times as fast while a file exists, which a rank that hangs makes."""
    monotonic = time.monotonic

    def hurried() -> float:
        return monotonic() * (1000 if while_exists.exists() else 1)

    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=hurried))
