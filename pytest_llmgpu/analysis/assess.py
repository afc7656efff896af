"""Assess one run by itself, without a baseline: the one entry point of this package for a run.

`assess` calls the parts in the order in which they need each other; nothing outside this package calls these parts.
Three other questions have entry points of their own: `launch_merging` joins reports that were measured apart,
`capacity.search` chooses the batch sizes to measure next, and `environment_differences` compares two machines.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_llmgpu.analysis import (
    accuracy_check,
    bound,
    findings,
    generation_check,
    launch_findings,
    reference,
    traffic_path,
    work_findings,
)
from pytest_llmgpu.analysis.launch_merging import merge_results
from pytest_llmgpu.report import derived
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Environment
from pytest_llmgpu.report.result import CaseResult


def assess(
    launches: Sequence[CaseResult],
    *,
    earlier: Sequence[CaseResult],
    environment: Environment,
    options: Options,
) -> CaseResult:
    """Return one case with all its launches, its derived figures, its checks and its findings.

    The arguments are not changed.

    Args:
        launches: The results of the case, one per launch, in the order in which they ran; at least one.
        earlier: The assessed cases that stand before it in the report. It is compared with these.
        environment: The machine of the run.
        options: The options in force for the test that measured the case.
    """
    located = [_with_path(launch, environment) for launch in launches]
    result = merge_results(located) if len(located) > 1 else located[0]
    derived.derive(result)
    result = _with_bound(result, environment)
    result = _with_comparison(result, earlier, options.accuracy_metric)
    if result.case.generates:
        result.accuracy_check = generation_check.check(result, earlier)
    else:
        result.accuracy_check = accuracy_check.check(
            result,
            earlier,
            given=options.accuracy_baseline,
            metric=options.accuracy_metric,
            tolerance=options.accuracy_tolerance,
        )
    result.findings = [
        *findings.findings(result, earlier, searching=options.find_max_batch),
        *(work_findings.of_work(result, earlier) if result.outcome == "completed" else ()),
        *generation_check.findings(result, earlier),
        *launch_findings.disagreements(located),
    ]
    return result


def _with_path(launch: CaseResult, environment: Environment) -> CaseResult:
    """Return a copy of a result of one launch in which its traffic has the links that carried it."""
    traffic, profile = launch.traffic, launch.launches[-1].profile if launch.launches else None
    if traffic is not None and profile is not None:
        traffic = msgspec.structs.replace(traffic, path=traffic_path.of_case(traffic, profile, environment))
    return msgspec.structs.replace(launch, traffic=traffic)


def _with_bound(result: CaseResult, environment: Environment) -> CaseResult:
    """Return a result with the shortest time that the machine allows, or with the reason why it is unknown."""
    why = {name: reason for name, reason in result.why.items() if name != "bound"}
    work = result.launches[-1].work if result.launches else None
    found = bound.bound(result, work, environment.ceilings)
    if isinstance(found, str):
        return msgspec.structs.replace(result, bound=None, why={**why, "bound": found})
    return msgspec.structs.replace(result, bound=found, why=why)


def _with_comparison(result: CaseResult, earlier: Sequence[CaseResult], metric: str) -> CaseResult:
    """Return a result with its comparison with the reference strategy, or with the reason why there is none."""
    mp = reference.reference(result, earlier)
    why = {name: reason for name, reason in result.why.items() if name != "comparison"}
    if mp is None:
        why["comparison"] = reference.missing(result, earlier)
    comparison = None
    if mp is not None:
        generates = result.case.generates
        comparison = generation_check.compare(result, mp) if generates else reference.compare(result, mp, metric)
    return msgspec.structs.replace(result, comparison=comparison, why=why)
