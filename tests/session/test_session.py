from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.report_factory import make_result

from pytest_llmgpu.render.terminal.report import LiveLine
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.session.session import BenchmarkSession


@pytest.fixture
def session(tmp_path: Path) -> Iterator[BenchmarkSession]:
    """A session without a case."""
    made = BenchmarkSession(
        rootdir=tmp_path,
        paths={"json": tmp_path / "report.json", "storage": tmp_path / "store"},
        options=Options(),
        live=LiveLine(nullcontext, lambda: 80),
        known={},
    )
    yield made
    made.close()


def test_an_interrupt_at_the_end_keeps_the_report(session: BenchmarkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C while processes end, they are still ended, and report and exit status are those of an interrupt."""
    closed: list[bool] = []

    def close() -> None:
        closed.append(True)
        if len(closed) == 1:
            raise KeyboardInterrupt

    concluded: dict[str, Any] = {}
    monkeypatch.setattr(session.runner, "close", close)
    monkeypatch.setattr(session.recorder, "conclude", lambda _, **state: concluded.update(state))
    assert session.end(0, interrupted=False, deselected=[]) == 2
    assert concluded["interrupted"] is True
    assert len(closed) == 2, "after the interrupt again"


def test_an_interrupted_write_loses_nothing(session: BenchmarkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is deferred until everything is written, and changes the exit status."""
    written: list[str] = []

    def finish(_: None) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        written.append("store and page")

    monkeypatch.setattr(session.recorder, "finish", finish)
    before = signal.getsignal(signal.SIGINT)
    assert session.end(0, interrupted=False, deselected=[]) == 2
    assert written == ["store and page"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_forked_process_ends_nothing(session: BenchmarkSession) -> None:
    """A test may fork, and its child may end as pytest does."""
    assert not session.forked
    if not (child := os.fork()):
        status = session.forked
        session.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert session._folder.is_dir()
    session.close()
    assert not session._folder.exists()


def test_several_interrupts_in_haste_lose_no_case(session: BenchmarkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C pressed five times is one request, while a case is written and outside of that."""
    written: list[str] = []

    def press() -> None:
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGINT)

    def add(*_: object, **__: object) -> None:
        press()
        written.append("the case")

    monkeypatch.setattr(session.recorder, "add", add)
    monkeypatch.setattr(session.planner, "machine", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        session.record(make_result(), Options(), "test_it.py::test_it")
    assert written == ["the case"]
    with pytest.raises(KeyboardInterrupt):
        press()
    press()
