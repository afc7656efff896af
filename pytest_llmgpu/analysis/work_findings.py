"""Findings about work passes: kernels that were not recorded, each with what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_llmgpu.report.result import CaseResult, Finding
from pytest_llmgpu.report.work import NO_WORK, WORK_OFF

_FAILED, _UNRECORDED = "work-passes-failed", "kernels-not-recorded"


def of_work(result: CaseResult, earlier: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield why the work passes of a completed case have no figures.

    Args:
        result: The case.
        earlier: The cases of the session before it, with their findings. The reason why no kernel was recorded is the
            same for all cases, and is stated once.
    """
    launch = result.launches[-1] if result.launches else None
    if launch is None:
        return
    reason = launch.why.get("work")
    if launch.work is None:
        if reason is not None and reason not in (NO_WORK, WORK_OFF):
            yield Finding(
                code=_FAILED,
                severity="warning",
                text=f"Kernels and FLOPs of this case are unknown: {reason.rstrip('.')}.",
                next_step="Read the log of the rank, or leave the work passes out with --llmgpu-work=off.",
            )
        return
    rank = next((rank for rank in launch.work.ranks if rank.uuids and "device_time_s" in rank.why), None)
    if rank is not None and not any(finding.code == _UNRECORDED for other in earlier for finding in other.findings):
        yield Finding(
            code=_UNRECORDED,
            severity="warning",
            text=f"Kernels were not recorded: {rank.why['device_time_s'].rstrip('.')}.",
            next_step="End other profilers on these GPUs, or allow the user to read GPU performance counters.",
        )
