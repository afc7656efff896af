from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pytest_llmgpu.render.terminal.live import LiveLine
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.session.session import BenchmarkSession


def test_an_interrupt_as_late_as_the_end_keeps_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C while processes end, they are still ended, and the report is marked as interrupted."""
    session = BenchmarkSession(
        rootdir=tmp_path,
        report_path=tmp_path / "report.json",
        storage_path=tmp_path / "store",
        policy_path=None,
        calibration_path=None,
        page_path=None,
        options=Options(),
        arguments=[],
        live=LiveLine(nullcontext, lambda: 80),
        known={},
    )
    closed: list[bool] = []

    def close() -> None:
        closed.append(True)
        if len(closed) == 1:
            raise KeyboardInterrupt

    concluded: dict[str, Any] = {}
    monkeypatch.setattr(session.runner, "close", close)
    monkeypatch.setattr(session.recorder, "conclude", lambda _status, _judge, **state: concluded.update(state))
    try:
        session.finish(0, interrupted=False, deselected=[])
    finally:
        session.close()
    assert concluded["interrupted"] is True
    assert len(closed) == 3, "after the interrupt again, and once by close"
