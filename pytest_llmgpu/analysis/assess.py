"""Assess one run by itself, without a baseline: the one entry point of this package for a run.

`assess` calls the parts in the order in which they need each other. Three other questions have entry points of their
own: `merging` joins reports that were measured apart, `capacity` chooses the batch sizes to measure next, and
`environments` compares two machines.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_llmgpu.analysis import answers, bound, findings, reference, traffic_path
from pytest_llmgpu.analysis.merging import merge_results
from pytest_llmgpu.report import derived
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Environment
from pytest_llmgpu.report.result import CaseResult


def assess(
    launches: Sequence[CaseResult], *, earlier: Sequence[CaseResult], environment: Environment, options: Options
) -> CaseResult:
    """Return one case with all its launches, its derived figures, its checks and its findings.

    The arguments are not changed.

    Args:
        launches: The results of the case, one per launch, in the order in which they ran; at least one.
        earlier: The assessed cases that stand before it in the report. It is compared with these.
        environment: The machine of the run.
        options: The options in force for the test that measured the case.
    """
    located = []
    for launch in launches:
        traffic, profile = launch.traffic, launch.launches[-1].profile if launch.launches else None
        if traffic is not None and profile is not None:
            traffic = msgspec.structs.replace(traffic, path=traffic_path.of_case(traffic, profile, environment))
        located.append(msgspec.structs.replace(launch, traffic=traffic, why=dict(launch.why)))
    if len(located) > 1:
        result = merge_results(located)
    else:
        result = located[0]
        derived.derive(result)
    work = result.launches[-1].work if result.launches else None
    shortest = bound.bound(result, work, environment.ceilings)
    mp = reference.reference(result, earlier)
    result.bound = None if isinstance(shortest, str) else shortest
    result.comparison = None if mp is None else answers.compare(result, mp, options.accuracy_metric)
    result.why = {name: reason for name, reason in result.why.items() if name not in ("bound", "comparison")}
    if isinstance(shortest, str):
        result.why["bound"] = shortest
    if mp is None:
        result.why["comparison"] = reference.missing(result, earlier)
    result.accuracy_check, wrong = answers.check(result, mp, earlier, options)
    result.findings = [*wrong, *findings.findings(result, earlier, located, searching=options.find_max_batch)]
    return result
