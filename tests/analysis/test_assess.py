from __future__ import annotations

from support.assessed import CPU, as_one
from support.report_factory import (
    known,
    make_accuracy,
    make_failed,
    make_profile,
    make_report,
    make_result,
    make_traffic,
)

from pytest_llmgpu.report.file import encode


def test_one_call_states_all_that_a_run_states_about_a_case() -> None:
    """Derived figures, check, comparison, path of the traffic and findings; or the reasons of a failed case."""
    mp = as_one([make_result(1.0, make_accuracy(), **CPU)])
    launch = make_result(2.0, make_accuracy(0.5), make_profile(), traffic=make_traffic(), strategy="tp", **CPU)
    result = as_one([launch], [mp])
    check, comparison = known(result.accuracy_check), known(result.comparison)
    assert known(result.traffic).path is not None
    assert (result.sequences_per_s, check.ok, comparison.reference) == (32.0, False, "mp-bs1")
    assert [finding.code for finding in result.findings] == ["wrong-answers"]
    result = as_one([make_failed("crashed")])
    assert (result.accuracy_check, result.comparison, result.traffic) == (None, None, None)
    assert {"comparison", "bound"} <= result.why.keys()
    assert [finding.code for finding in result.findings] == ["failed"]


def test_launches_of_a_case_are_assessed_as_one_with_the_options_of_its_test() -> None:
    """Their times are compared with each other, and the arguments are not changed."""
    launches = [make_result(seconds, make_accuracy(0.5), **CPU) for seconds in (1.0, 4.0)]
    before = encode(make_report(launches), compressed=False)
    found = as_one(launches, accuracy_baseline=0.51, accuracy_metric="acc")
    assert (len(found.launches), found.inference_s) == (2, 2.5)
    assert [finding.code for finding in found.findings] == ["times-far-apart"]
    check = known(found.accuracy_check)
    assert (check.metric, check.baseline, check.tolerance, check.ok) == ("acc", 0.51, 0.01, True)
    assert encode(make_report(launches), compressed=False) == before
