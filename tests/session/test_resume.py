from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.report_factory import make_ceilings, make_failed, make_report, make_result, make_traffic

from pytest_llmgpu.report.report import Commit, Report, Session
from pytest_llmgpu.report.result import CaseResult, Failure, Launch
from pytest_llmgpu.report.work import TRAFFIC_STOPPED, WORK_STOPPED
from pytest_llmgpu.session.recorder import continued


def _report(*cases: CaseResult) -> Report:
    report = make_report(cases, gpus=2)
    report.commit = Commit(sha="a" * 40, dirty=False, source="git")
    report.environment.cpu, report.environment.cores = "EPYC", 16
    report.environment.versions = {"torch": "2.13.0"}
    report.options = {"--llmgpu-limit": 8, "--llmgpu-json": "a.json"}
    return report


def _continued(broken: Report) -> Report:
    now = _report()
    now.created = "2026-01-03T00:00:00Z"
    return continued(broken, now, name="a.json", sha256="f" * 64)


def _replaced(part: str, **fields: Any) -> Callable[[Report], None]:
    def change(report: Report) -> None:
        setattr(report, part, msgspec.structs.replace(getattr(report, part), **fields))

    return change


def _other_gpus(report: Report) -> None:
    first, second = report.environment.gpus
    report.environment.gpus = [first, msgspec.structs.replace(second, uuid="GPU-7")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_replaced("commit", sha="b" * 40), "it was measured in another way: commit b+ -> a+"),
        (_replaced("commit", dirty=True), "files differ from commit a+: only a committed state"),
        (_replaced("commit", sha=None, why={"sha": "no git"}), "the commit is not known: no git"),
        (_replaced("environment", cpu="Xeon"), "another way: CPU Xeon -> EPYC"),
        (_replaced("environment", cores=8), "another way: cores 8 -> 16"),
        (_replaced("environment", gpus=[]), "another way: GPUs 0 -> 2"),
        (_other_gpus, "another way: other GPUs of the same kind"),
        (_replaced("environment", driver="1"), "another way: driver 1 -> none"),
        (_replaced("environment", variables={"NCCL_P2P_DISABLE": "1"}), "another way: NCCL_P2P_DISABLE 1 -> unset"),
        (lambda report: setattr(report, "plugin_version", "0.0.9"), "another way: pytest-llmgpu 0.0.9 -> 0.1.0"),
        (lambda report: report.options.update({"--llmgpu-launches": 5}), "another way: --llmgpu-launches 5 -> none"),
    ],
)
def test_another_commit_machine_or_option_is_refused(change: Callable[[Report], None], reason: str) -> None:
    """In one line with both values."""
    broken = _report(make_result())
    assert _continued(broken).resumed
    change(broken)
    with pytest.raises(ValueError, match=reason) as caught:
        _continued(broken)
    assert "\n" not in str(caught.value)


def test_results_stay_and_the_state_of_the_session_does_not() -> None:
    """Every outcome is a result, its environment has the rates, and options of the output may be others."""
    cases = [make_result(), make_failed("oom", batch_size=2), make_failed("crashed", batch_size=4)]
    broken = _report(*cases)
    broken.session = Session(interrupted=True, exit_status=2, duration_s=7.0)
    broken.options = {**broken.options, "--llmgpu-json": "other.json", "--llmgpu-html": "page.html"}
    broken.environment.ceilings = make_ceilings()
    found = _continued(broken)
    assert found.cases == cases
    assert (found.created, found.session, found.environment) == (
        broken.created,
        Session(duration_s=7.0),
        broken.environment,
    )
    (resumption,) = found.resumed
    assert (resumption.created, resumption.source, resumption.kept) == ("2026-01-03T00:00:00Z", "a.json", 3)


def test_a_launch_that_was_stopped_is_measured_again() -> None:
    """The launches before it stay. Without its later passes a launch would lack its kernels or its traffic for ever."""
    failure = Failure(phase="forward", message="interrupted by KeyboardInterrupt")
    result = msgspec.structs.replace(make_result(10.0), outcome="interrupted", failure=failure)
    broken = Launch(load_s=1.0)
    first, later = (msgspec.structs.replace(result, launches=[*whole, broken]) for whole in ([], result.launches * 2))
    (kept,) = _continued(_report(later)).cases
    assert (kept.outcome, kept.failure, len(kept.launches)) == ("completed", None, 2)
    assert kept.inference_s == pytest.approx(10.0)
    without_work, without_traffic = make_result(10.0, traffic=make_traffic()), make_result(10.0)
    without_work.launches[-1].why["work"] = WORK_STOPPED
    without_traffic.why["traffic"] = TRAFFIC_STOPPED
    for result in (first, without_work, without_traffic):
        assert _continued(_report(result)).cases == []
