"""Reports of complete runs, for the tests of the store and of the commands that judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pytest_llmgpu.report.report import Commit, Gpu, Report, Session
from pytest_llmgpu.report.result import CaseResult
from support.report_factory import make_failed, make_report, make_result, make_traffic
from support.verdict_factory import BATCHES, with_launches

H200 = "4x-NVIDIA-H200-140GiB"
"""The folder of the default report of `measured`."""


def gpus(*names: str, memory_bytes: int | None = 150754820096) -> list[Gpu]:
    """Return GPUs of these names."""
    return [
        Gpu(index=index, uuid=f"GPU-{index}", name=name, memory_bytes=memory_bytes) for index, name in enumerate(names)
    ]


def timed(*levels: float, calls: int = 64, **fields: Any) -> CaseResult:
    """Return a result with traffic and one launch per level, which multiplies its time."""
    result = with_launches(levels or (1.0,), **fields)
    for launch in result.launches:
        for name in ("sequences", "tokens", "padded_tokens"):
            setattr(launch.batches, name, [1] * BATCHES)
    result.traffic = make_traffic(calls)
    return result


def on_h200(cases: Sequence[CaseResult] = (), sha: str | None = "a" * 40, **fields: Any) -> Report:
    """Return a report of a complete run on four H200, with one case by default."""
    report = make_report(cases or [timed()])
    report.session = Session(complete=True, exit_status=0)
    report.environment.gpus = gpus(*["NVIDIA H200"] * 4)
    report.commit = Commit(sha=sha, branch="main", dirty=False)
    return msgspec.structs.replace(report, **fields)


def measured(
    sha: str | None = "3b1f09ac" * 5, seen: Sequence[Gpu] | None = None, cpu: str | None = None, **case: Any
) -> Report:
    """Return a complete report with a completed and a failed case, on four H200 by default."""
    report = on_h200([make_result(**case), make_failed("oom", strategy="tp", **case)], sha)
    report.cases[0].launches[0].load_s = 10.0  # equal in every call
    report.environment.gpus = report.environment.gpus if seen is None else list(seen)
    report.environment.cpu = cpu
    return report
