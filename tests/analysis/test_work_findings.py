from __future__ import annotations

import msgspec
import pytest
from support.prose import Prose
from support.report_factory import make_result, make_work

from pytest_llmgpu.analysis.work_findings import of_work
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.work import NO_WORK, WORK_OFF, RankWork


def _without(reason: str | None) -> CaseResult:
    result = make_result()
    result.launches[0].why = {} if reason is None else {"work": reason}
    return result


@pytest.mark.parametrize("reason", [None, WORK_OFF, NO_WORK])
def test_work_passes_that_were_not_wanted_are_no_finding(reason: str | None) -> None:
    """Old reports have neither work nor a reason."""
    assert list(of_work(_without(reason), [])) == []


def test_failed_work_passes_are_a_finding(prose: Prose) -> None:
    """The case is complete, and its reader learns what is missing."""
    (found,) = of_work(_without("the work passes failed: OutOfMemoryError: CUDA out of memory."), [])
    assert (found.code, found.severity) == ("work-passes-failed", "warning")
    assert prose == f"{found.text} {found.next_step}"


def test_kernels_that_were_not_recorded_are_a_finding_once_a_session(prose: Prose) -> None:
    """The cause is the machine, not the case; a CPU has no kernels to record."""
    reason = {"device_time_s": "torch.profiler did not start: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"}
    result, cpu = make_result(), make_result()
    result.launches[0].work = msgspec.structs.replace(make_work(), ranks=[RankWork(uuids=["GPU-0"], why=reason)])
    cpu.launches[0].work = msgspec.structs.replace(make_work(), ranks=[RankWork(uuids=[], why=reason)])
    (found,) = of_work(result, [])
    assert (found.code, found.severity) == ("kernels-not-recorded", "warning")
    assert prose == f"{found.text} {found.next_step}"
    assert list(of_work(result, [msgspec.structs.replace(result, findings=[found])])) == []
    assert list(of_work(cpu, [])) == []


def test_recorded_work_is_no_finding() -> None:
    """Nothing is wrong."""
    result = make_result()
    result.launches[0].work = make_work()
    assert list(of_work(result, [])) == []
