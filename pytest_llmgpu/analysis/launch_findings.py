"""What launches of one case must agree in: replicates differ in time, not by much, and in nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_llmgpu.analysis.traffic_path import FASTEST_FIRST, NAMES
from pytest_llmgpu.report.derived import inference_s, predictions_of
from pytest_llmgpu.report.result import Accuracy, CaseResult, Finding

__all__ = ["disagreements", "far_apart"]

_METRICS = ("acc_norm", "acc")

_TIMES_DIFFER = "launch-times-differ"
_NAMED = 3

_APART = 3.0
"""The slowest launch's time by the fastest's, from which on somebody should look. Forwards that wait for a shared CPU
differ by 20 % (`statistics.UNCALIBRATED_SD`): in one run of ten launches in a hundred that is a factor of 2.8."""


def disagreements(launches: Sequence[CaseResult]) -> list[Finding]:
    """Return in what the launches of one case differ though it should be equal, and times that are far apart.

    Args:
        launches: the results of one case, each of one launch, in the order in which they ran.
    """
    completed = [result for result in launches if result.outcome == "completed"]
    return [
        *_of_answers(completed),
        *_of_batches(completed),
        *_of_traffic(completed),
        *_of_paths(completed),
        *_of_execution(completed),
        *_of_times(launches),
    ]


def far_apart(cases: Sequence[CaseResult]) -> str:
    """Return in a line which cases took so different times that little can be told against them; empty for none."""
    ids = [result.id for result in cases if any(found.code == _TIMES_DIFFER for found in result.findings)]
    more = f" and {len(ids) - _NAMED:,} more" if len(ids) > _NAMED else ""
    told = f"{', '.join(ids[:_NAMED])}{more}"
    return f"note: launches of {told} differ so much in time that little can be told against them" if ids else ""


def _of_answers(launches: Sequence[CaseResult]) -> Iterator[Finding]:
    accuracies = [launch.accuracy for result in launches for launch in result.launches if launch.accuracy is not None]
    for metric in _METRICS:
        if differing := _differing(accuracies, metric):
            items = accuracies[0].items
            yield Finding(
                code="launches-answer-otherwise",
                severity="warning",
                text=f"{len(accuracies)} launches of the same case answer {len(differing):,} of {items:,} items "
                f"differently ({metric}).",
                next_step="Something in the forward is not deterministic: look for atomic sums, autotuned kernels or "
                "memory that is read before it is written.",
            )
            return


def _differing(accuracies: Sequence[Accuracy], metric: str) -> list[int]:
    """Return the numbers of the items that not all launches answer alike."""
    columns = [predictions_of(accuracy, metric) for accuracy in accuracies]
    return [number for number, answers in enumerate(zip(*columns, strict=False)) if len(set(answers)) > 1]


def _of_batches(launches: Sequence[CaseResult]) -> Iterator[Finding]:
    plans = {launch.plan_sha256 for result in launches for launch in result.launches}
    if len(plans) > 1:
        yield Finding(
            code="launches-run-other-batches",
            severity="warning",
            text=f"{len(launches)} launches of the same case ran {len(plans)} different lists of batches.",
            next_step="Their times are not comparable: let the test choose the same items in the same order each time.",
        )


def _of_traffic(launches: Sequence[CaseResult]) -> Iterator[Finding]:
    sent = [result.traffic.ranks for result in launches if result.traffic is not None]
    if any(ranks != sent[0] for ranks in sent[1:]):
        yield Finding(
            code="launches-send-otherwise",
            severity="warning",
            text=f"{len(sent)} launches of the same case do not send the same bytes.",
            next_step="Exact figures of it are left out: look for what the program decides anew in each process.",
        )


def _of_paths(launches: Sequence[CaseResult]) -> Iterator[Finding]:
    paths = [result.traffic.path for result in launches if result.traffic is not None]
    links = Counter(path.link for path in paths if path is not None and path.link is not None)
    if len(links) > 1:
        counts = ", ".join(f"{links[link]} over {NAMES[link]}" for link in FASTEST_FIRST if link in links)
        yield Finding(
            code="launches-take-other-paths",
            severity="warning",
            text=f"{links.total()} launches of the same case do not send over the same links: {counts}.",
            next_step="The slowest path is the case's: look for NCCL's variables, GPUs or containers that change from "
            "launch to launch (NCCL_DEBUG=INFO tells what NCCL chose).",
        )


def _of_execution(launches: Sequence[CaseResult]) -> Iterator[Finding]:
    ways = list(dict.fromkeys(result.case.execution for result in launches))
    if len(ways) > 1:
        yield Finding(
            code="launches-run-otherwise",
            severity="warning",
            text=f"Launches of the same case ran by {' and by '.join(ways)}: their times are of different things.",
            next_step="Say --llmgpu-cuda-graphs=on or off, so that no launch chooses for itself.",
        )


def _of_times(launches: Sequence[CaseResult]) -> Iterator[Finding]:
    """Yield that one launch took far longer than another, where all of them did the same."""
    completed = [(number, result) for number, result in enumerate(launches, 1) if result.outcome == "completed"]
    timed = [
        (inference_s(launch), number)
        for number, result in completed
        for launch in result.launches
        if launch.batches.latency_s
    ]
    did = {(launch.plan_sha256, result.case.execution) for _, result in completed for launch in result.launches}
    if not timed or len(did) > 1:
        return  # times of different things: that is said already
    (fast_s, fastest), (slow_s, slowest) = min(timed), max(timed)
    if slow_s >= _APART * fast_s > 0:
        yield Finding(
            code=_TIMES_DIFFER,
            severity="warning",
            text=f"Launches differ in time by a factor of {slow_s / fast_s:.1f}: launch {slowest} of {len(launches)} "
            f"took {slow_s:.3g} s, the slowest, and launch {fastest} {fast_s:.3g} s, the fastest.",
            next_step="Look for another tenant of the machine (`profile.invalid`, nvidia-smi, top). Where there is "
            "none, more launches (--llmgpu-launches) show what is typical.",
        )
