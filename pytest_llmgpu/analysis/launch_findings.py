"""Differences between the launches of one case: they may differ a little in time, and in nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_llmgpu.analysis.finding_texts import finding, has_finding
from pytest_llmgpu.analysis.noise_regime import largest_spread, of_device_time, of_time
from pytest_llmgpu.analysis.traffic_path import FASTEST_FIRST, NAMES
from pytest_llmgpu.report.derived import device_times_s, inference_s, predictions_of
from pytest_llmgpu.report.result import Accuracy, CaseResult, Finding
from pytest_llmgpu.report.text import listed

_METRICS = ("acc_norm", "acc")

_TIMES_DIFFER = "launch-times-differ"
_NAMED = 3


def disagreements(launches: Sequence[CaseResult]) -> list[Finding]:
    """Return the findings on how the launches of one case differ.

    Args:
        launches: The results of one case, one per launch, in the order in which they ran. A launch that failed is
            counted, but not compared.
    """
    return [*_differences([result for result in launches if result.outcome == "completed"]), *_times(launches)]


def _differences(completed: Sequence[CaseResult]) -> Iterator[Finding]:
    accuracies = [accuracy for result in completed for accuracy in result.accuracies]
    differing = {metric: count for metric in _METRICS if (count := _count_differing(accuracies, metric))}
    for metric, answers in [*differing.items()][:1]:
        items = accuracies[0].items
        yield finding(
            "launches-answer-otherwise", launches=len(accuracies), answers=answers, items=items, metric=metric
        )
    plans = {launch.plan_sha256 for result in completed for launch in result.launches}
    if len(plans) > 1:
        yield finding("launches-run-other-batches", launches=len(completed), plans=len(plans))
    traffic = [result.traffic for result in completed if result.traffic is not None]
    if any(one.ranks != traffic[0].ranks for one in traffic):
        yield finding("launches-send-otherwise", launches=len(traffic))
    links = Counter(one.path.link for one in traffic if one.path is not None and one.path.link is not None)
    if len(links) > 1:
        counts = ", ".join(f"{links[link]} over {NAMES[link]}" for link in FASTEST_FIRST if link in links)
        yield finding("launches-take-other-paths", launches=sum(links.values()), links=counts)
    executions = dict.fromkeys(result.case.execution for result in completed)
    if len(executions) > 1:
        yield finding("launches-run-otherwise", executions=" and as ".join(executions))


def _count_differing(accuracies: Sequence[Accuracy], metric: str) -> int:
    """Return the number of items that not all launches answer alike."""
    columns = [predictions_of(accuracy, metric) for accuracy in accuracies]
    return sum(len(set(answers)) > 1 for answers in zip(*columns, strict=False))


def _times(launches: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield the fastest and the slowest launch if chance does not explain them and all launches did the same.

    Device time counts where it is far apart although wall time is not.
    """
    completed = [(number, result) for number, result in enumerate(launches, 1) if result.outcome == "completed"]
    numbered = [(number, launch) for number, result in completed for launch in result.launches]
    if len({(launch.plan_sha256, result.case.execution) for _, result in completed for launch in result.launches}) > 1:
        return
    wall = [(inference_s(launch), number) for number, launch in numbered if launch.batches.latency_s]
    device = [(max(times), number) for number, launch in numbered if (times := device_times_s(launch))]
    for metric, timed, regime_of in (("time", wall, of_time), ("device time", device, of_device_time)):
        spread = max((largest_spread(regime_of(result)) for _, result in completed), default=math.inf)
        (fastest_s, fastest), (slowest_s, slowest) = min(timed, default=(0.0, 0)), max(timed, default=(0.0, 0))
        if slowest_s >= spread * fastest_s > 0:
            yield finding(
                _TIMES_DIFFER,
                metric=metric,
                factor=slowest_s / fastest_s,
                launches=len(launches),
                slowest=slowest,
                slowest_s=slowest_s,
                fastest=fastest,
                fastest_s=fastest_s,
            )
            return


def far_apart(cases: Sequence[CaseResult]) -> str:
    """Return a line that names the cases whose launches differ in time by far; empty where there are none."""
    ids = [result.id for result in cases if has_finding(_TIMES_DIFFER, [result])]
    if not ids:
        return ""
    return f"note: the launches of {listed(ids, _NAMED)} differ so much in time that only large changes can be seen"
