"""Assess one run by itself, without a baseline: the one entry point of this package for a run.

`assess` calls the parts in the order in which they need each other. Three other questions have entry points of their
own: `merging` joins reports that were measured apart, `capacity` chooses the batch sizes to measure next, and
`environments` compares two machines.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_llmgpu.analysis import bound, comparison, findings, reference, traffic_path
from pytest_llmgpu.analysis.accuracy import (
    check_accuracy,
    check_random_weights,
    findings_on_accuracy,
    findings_on_random_weights,
)
from pytest_llmgpu.analysis.merging import merge_results
from pytest_llmgpu.report import derived
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Environment
from pytest_llmgpu.report.result import AccuracyCheck, CaseResult, Finding


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
    located = []
    for launch in launches:
        traffic, profile = launch.traffic, launch.launches[-1].profile if launch.launches else None
        if traffic is not None and profile is not None:
            path = traffic_path.of_case(traffic, profile, environment)
            traffic = msgspec.structs.replace(traffic, path=path)
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
    result.comparison = None if mp is None else comparison.compare(result, mp, options.accuracy_metric)
    result.why = {name: reason for name, reason in result.why.items() if name not in ("bound", "comparison")}
    if isinstance(shortest, str):
        result.why["bound"] = shortest
    if mp is None:
        result.why["comparison"] = reference.missing(result, earlier)
    result.accuracy_check, wrong = _check_answers(result, mp, earlier, options)
    others = findings.findings(result, earlier, located, searching=options.find_max_batch)
    result.findings = [*wrong, *others]
    return result


def _check_answers(
    result: CaseResult, mp: CaseResult | None, earlier: Sequence[CaseResult], options: Options
) -> tuple[AccuracyCheck | None, list[Finding]]:
    """Check the answers of a result, compare them with those of mp, and find what is wrong with them.

    If the result has several launches, the worst one counts.

    Returns:
        The check as the report holds it, None for a result that did not complete or has no answers; and the findings.
    """
    if result.case.generates:
        checked = comparison.check_texts(result, mp)
        if checked is None:
            return None, []
        wrong = [] if checked.fault is None else [findings.wrong_answers(checked.check.text, result, checked.fault)]
        return checked.check, wrong
    if result.outcome != "completed" or not result.accuracies:
        return None, []
    series = [other for other in reference.same_series(result, earlier) if other.outcome == "completed"]
    smaller = [one for one in series if one.case.batch_size <= result.case.batch_size and derived.measured(one)]
    smallest = min(smaller, key=lambda other: other.case.batch_size, default=None)
    if result.case.load_format == "dummy":
        checked = check_random_weights(result, mp, smallest)
        return checked.check, findings_on_random_weights(result, checked, mp, earlier)
    checked = check_accuracy(result, mp, smallest, options)
    return checked.check, findings_on_accuracy(result, checked, mp, smallest)
