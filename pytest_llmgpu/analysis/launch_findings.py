"""Differences between the launches of one case: they may differ a little in time, and in nothing else.

`decide` returns the differences, `describe` words them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from pytest_llmgpu.analysis.noise_regime import largest_spread, of_device_time, of_time
from pytest_llmgpu.analysis.traffic_path import FASTEST_FIRST, NAMES
from pytest_llmgpu.report.derived import device_times_s, inference_s, predictions_of
from pytest_llmgpu.report.result import Accuracy, CaseResult, Finding, Link
from pytest_llmgpu.report.text import listed

_METRICS = ("acc_norm", "acc")

_TIMES_DIFFER = "launch-times-differ"
_NAMED = 3


class TimeSpread(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest and the slowest launch of a case."""

    of_device: bool
    """True if the device time of the launches is far apart; False: the seconds that they spent in batches."""
    fastest: int
    """Number of the fastest launch, from 1."""
    fastest_s: float
    """Seconds of that launch."""
    slowest: int
    """Number of the slowest launch, from 1."""
    slowest_s: float
    """Seconds of that launch."""


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """In what the launches of one case differ although they should be equal."""

    launches: int
    """Number of launches, those that failed included."""
    answers: int = 0
    """Number of items that not all launches answer alike."""
    items: int = 0
    """Number of items."""
    scored: int = 0
    """Number of launches that answered them."""
    metric: str = ""
    """The metric by which the answers differ: `acc_norm` or `acc`."""
    completed: int = 0
    """Number of launches that completed."""
    plans: int = 0
    """Number of different lists of batches."""
    unequal_traffic: int = 0
    """Number of launches whose traffic is known, where it differs; else 0."""
    links: dict[Link, int] = {}
    """Maps each link that carried traffic to the number of launches that used it, fastest link first."""
    executions: list[str] = []
    """The ways in which the forwards ran: `eager`, `cuda_graphs`."""
    times: TimeSpread | None = None
    """The fastest and the slowest launch, where their times are far apart; else None."""


def disagreements(launches: Sequence[CaseResult]) -> list[Finding]:
    """Return the findings on how the launches of one case differ.

    Args:
        launches: The results of one case, one per launch, in the order in which they ran.
    """
    return describe(decide(launches))


def decide(launches: Sequence[CaseResult]) -> Differences:
    """Compare the launches of one case; a launch that failed is counted, but not compared."""
    completed = [result for result in launches if result.outcome == "completed"]
    accuracies = [accuracy for result in completed for accuracy in result.accuracies]
    differing = {metric: count for metric in _METRICS if (count := _count_differing(accuracies, metric))}
    metric, answers = next(iter(differing.items()), ("", 0))
    traffic = [result.traffic for result in completed if result.traffic is not None]
    links = Counter(one.path.link for one in traffic if one.path is not None and one.path.link is not None)
    return Differences(
        launches=len(launches),
        answers=answers,
        items=accuracies[0].items if accuracies else 0,
        scored=len(accuracies),
        metric=metric,
        completed=len(completed),
        plans=len({launch.plan_sha256 for result in completed for launch in result.launches}),
        unequal_traffic=len(traffic) if any(one.ranks != traffic[0].ranks for one in traffic) else 0,
        links={link: links[link] for link in FASTEST_FIRST if link in links},
        executions=list(dict.fromkeys(result.case.execution for result in completed)),
        times=_decide_times(launches),
    )


def _count_differing(accuracies: Sequence[Accuracy], metric: str) -> int:
    """Return the number of items that not all launches answer alike."""
    columns = [predictions_of(accuracy, metric) for accuracy in accuracies]
    return sum(len(set(answers)) > 1 for answers in zip(*columns, strict=False))


def _decide_times(launches: Sequence[CaseResult]) -> TimeSpread | None:
    """Return the fastest and the slowest launch if chance does not explain them and all launches did the same.

    Device time counts where it is far apart although wall time is not.
    """
    completed = [(number, result) for number, result in enumerate(launches, 1) if result.outcome == "completed"]
    numbered = [(number, launch) for number, result in completed for launch in result.launches]
    did = {(launch.plan_sha256, result.case.execution) for _, result in completed for launch in result.launches}
    if len(did) > 1:
        return None
    wall = [(inference_s(launch), number) for number, launch in numbered if launch.batches.latency_s]
    device = [(max(times), number) for number, launch in numbered if (times := device_times_s(launch))]
    for timed, regime_of in ((wall, of_time), (device, of_device_time)):
        spread = max((largest_spread(regime_of(result)) for _, result in completed), default=math.inf)
        (fastest_s, fastest), (slowest_s, slowest) = min(timed, default=(0.0, 0)), max(timed, default=(0.0, 0))
        if slowest_s >= spread * fastest_s > 0:
            return TimeSpread(
                of_device=timed is device, fastest=fastest, fastest_s=fastest_s, slowest=slowest, slowest_s=slowest_s
            )
    return None


def describe(found: Differences) -> list[Finding]:
    """Return a finding for each difference between launches."""
    return list(_describe(found))


def _describe(found: Differences) -> Iterator[Finding]:
    if found.answers:
        yield _warning(
            "launches-answer-otherwise",
            f"{found.scored} launches of this case answer {found.answers:,} of {found.items:,} items differently "
            f"({found.metric}).",
            "The forward is not deterministic: look for atomic sums, autotuned kernels, or memory that is read before "
            "it is written.",
        )
    if found.plans > 1:
        yield _warning(
            "launches-run-other-batches",
            f"{found.completed} launches of this case ran {found.plans} different lists of batches.",
            "Their times are not comparable: let the test choose the same items in the same order each time.",
        )
    if found.unequal_traffic:
        yield _warning(
            "launches-send-otherwise",
            f"{found.unequal_traffic} launches of this case do not send the same bytes, so its traffic is unknown.",
            "Look for a choice that the program makes in each process.",
        )
    if len(found.links) > 1:
        counts = ", ".join(f"{count} over {NAMES[link]}" for link, count in found.links.items())
        yield _warning(
            "launches-take-other-paths",
            f"{sum(found.links.values())} launches of this case do not send over the same links: {counts}.",
            "The slowest path counts: look for NCCL variables, GPUs or containers that change from launch to launch "
            "(NCCL_DEBUG=INFO shows what NCCL chose).",
        )
    if len(found.executions) > 1:
        yield _warning(
            "launches-run-otherwise",
            f"Launches of this case ran as {' and as '.join(found.executions)}: their times are not comparable.",
            "Read `execution_choice` of each launch, or pass --llmgpu-cuda-graphs=off, so that all launches run in the "
            "same way.",
        )
    if (times := found.times) is not None:
        metric = "device time" if times.of_device else "time"
        yield _warning(
            _TIMES_DIFFER,
            f"Launches differ in {metric} by a factor of {times.slowest_s / times.fastest_s:.1f}: launch "
            f"{times.slowest} of {found.launches} was the slowest with {times.slowest_s:.3g} s, launch {times.fastest} "
            f"the fastest with {times.fastest_s:.3g} s.",
            "Look for another user of the machine (`profile.invalid`, nvidia-smi, top). If there is none, run more "
            "launches (--llmgpu-launches) to see which time is typical.",
        )


def _warning(code: str, text: str, next_step: str) -> Finding:
    return Finding(code=code, severity="warning", text=text, next_step=next_step)


def far_apart(cases: Sequence[CaseResult]) -> str:
    """Return a line that names the cases whose launches differ in time by far; empty where there are none."""
    ids = [result.id for result in cases if any(found.code == _TIMES_DIFFER for found in result.findings)]
    if not ids:
        return ""
    return f"note: the launches of {listed(ids, _NAMED)} differ so much in time that only large changes can be seen"
