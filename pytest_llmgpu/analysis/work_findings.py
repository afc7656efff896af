"""Findings about work passes: kernels that were not recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_llmgpu.analysis.finding_texts import finding, has_finding
from pytest_llmgpu.report.result import CaseResult, Finding
from pytest_llmgpu.report.work import NO_WORK, WORK_OFF

_UNRECORDED = "kernels-not-recorded"


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
    if launch.work is None:
        reason = launch.why.get("work")
        if reason is not None and reason not in (NO_WORK, WORK_OFF):
            yield finding("work-passes-failed", reason=reason)
        return
    rank = next((rank for rank in launch.work.ranks if rank.uuids and "device_time_s" in rank.why), None)
    if rank is not None and not has_finding(_UNRECORDED, earlier):
        yield finding(_UNRECORDED, reason=rank.why["device_time_s"])
