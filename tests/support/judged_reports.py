"""Reports on disk for the tests of the commands that judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_llmgpu.report.report import Commit, Environment, Report, Session
from pytest_llmgpu.report.result import CaseResult
from support.stored_reports import gpus
from support.verdict_factory import BATCHES, make_traffic, with_launches


def timed(*levels: float, calls: int = 64, **fields: Any) -> CaseResult:
    """Return a result with traffic and one launch per level, which multiplies its time."""
    result = with_launches(levels or (1.0,), **fields)
    for launch in result.launches:
        for name in ("sequences", "tokens", "padded_tokens"):
            setattr(launch.batches, name, [1] * BATCHES)
    result.traffic = make_traffic(calls)
    return result


def on_h200(cases: Sequence[CaseResult] = (), sha: str = "a" * 40, **fields: Any) -> Report:
    """Return a report of a complete run on four H200, with one case by default."""
    defaults: dict[str, Any] = {
        "created": "2026-01-02T03:04:05Z",
        "plugin_version": None,
        "session": Session(complete=True, exit_status=0),
        "environment": Environment(python="3.12", platform="Linux", gpus=gpus(*["NVIDIA H200"] * 4)),
        "commit": Commit(sha=sha, dirty=False),
        "cases": list(cases) or [timed()],
    }
    return Report(**{**defaults, **fields})
