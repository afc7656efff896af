"""Reports of a store, for the tests of its readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_llmgpu.report.report import Commit, Gpu, Report, Session
from support.report_factory import make_failed, make_report, make_result

H200 = "4x-NVIDIA-H200-140GiB"
"""The folder of the default report of `measured`."""


def gpus(*names: str, memory_bytes: int | None = 150754820096) -> list[Gpu]:
    """Return GPUs of these names."""
    return [
        Gpu(index=index, uuid=f"GPU-{index}", name=name, memory_bytes=memory_bytes) for index, name in enumerate(names)
    ]


def measured(
    sha: str | None = "3b1f09ac" * 5, seen: Sequence[Gpu] | None = None, cpu: str | None = None, **case: Any
) -> Report:
    """Return a complete report with a completed and a failed case, on four H200 by default."""
    report = make_report([make_result(**case), make_failed("oom", strategy="tp", **case)])
    report.cases[0].launches[0].load_s = 10.0  # equal in every call
    report.commit = Commit(sha=sha, branch="main", dirty=False)
    report.session = Session(complete=True)
    report.environment.gpus = gpus(*["NVIDIA H200"] * 4) if seen is None else list(seen)
    report.environment.cpu = cpu
    return report
