"""Regressions that a gate should detect, injected into copies of results.

The original is not changed. A copy shares the parts that the regression does not change.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pytest_llmgpu.analysis import generation_check
from pytest_llmgpu.gate.policy import Rules
from pytest_llmgpu.report.derived import decode, derive, encode, generated, predictions_of
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.result import (
    Accuracy,
    Batches,
    CaseResult,
    Collective,
    DeviceMemory,
    Failure,
    Generation,
    Launch,
)
from pytest_llmgpu.report.text import GIB
from pytest_llmgpu.report.work import RankWork

SLOWDOWN = 0.05
"""The default slowdown, as a fraction."""

_GROWTH_BYTES = GIB
_FLIPPED = 20
_OFF = 1.1
"""The factor for log-likelihoods. A residual that DeepSpeed added twice changed them by about as much."""

_MORE_FLOPS = 0.01

_NEW_CALL_BYTES = 4
"""Size of an added collective on a rank without collectives: one float32."""


class Regression(NamedTuple):
    """A regression to inject."""

    name: str
    """The name of the regression on the command line."""
    text: str
    """Description of the regression in a few words."""
    metric: MetricName
    """The metric that the regression changes."""
    inject: Callable[[CaseResult, Rules], CaseResult | str]
    """The function that returns a copy of a completed result with the regression, or a sentence why it cannot."""
    largest_only: bool = False
    """True if the regression is injected only into the largest batch size of each series."""
    slowdown: float | None = None
    """The slowdown as a fraction; None for other regressions."""
    suits: Callable[[CaseResult], bool] | None = None
    """The function that returns False for a case that is left out: its machine or strategy cannot have the figure.
    None: no case is left out."""


def regressions(slowdown: float = SLOWDOWN) -> tuple[Regression, ...]:
    """Return all regressions. The first five are slowdowns by a fraction."""
    more = f"{100 * slowdown:.3g} % more time"
    slower = functools.partial(_slower_kernels, slowdown)
    of_kernels = functools.partial(_of_work, metric="device_time", changed=slower, figure="device_time_s")
    return (
        Regression("time", f"{more} in every batch", "time", functools.partial(_slower, slowdown), slowdown=slowdown),
        _of_tokens("first-token", f"{more} to the first token", "first_token", "first_token_s", slowdown),
        _of_tokens("token-time", f"{more} in every decode step", "token_time", "step_s", slowdown),
        of_kernels("device-time", f"{more} in the kernels of every rank")._replace(slowdown=slowdown),
        of_kernels("prefill", f"{more} in the kernels of every prefill", part="prefill_work")._replace(
            slowdown=slowdown
        ),
        _of_work("flops", f"{100 * _MORE_FLOPS:g} % more FLOPs on every rank", "flops", _more_flops),
        _of_work("host-sync", "one more host synchronization on every rank", "host_syncs", _one_more_sync),
        _of_work("kernel", "one more kernel call on every rank", "kernels", _one_more_kernel),
        Regression("collective", "one more collective per forward on every rank", "traffic", _one_more_collective),
        Regression("memory", "1 GiB more on the fullest device", "memory", _more_memory, suits=_on_a_gpu),
        Regression(
            "batch-size", "out of memory at the largest batch size", "outcome", _out_of_memory, largest_only=True
        ),
        Regression(
            "answers",
            f"up to {_FLIPPED} right answers become wrong (random weights: other log-likelihoods of {_FLIPPED} items)",
            "accuracy",
            _wrong_answers,
        ),
    )


def _on_a_gpu(result: CaseResult) -> bool:
    """Return whether the memory of a case is measured: on a CPU it is not."""
    return result.case.device != "cpu"


def _slower(slowdown: float, result: CaseResult, _: Rules) -> CaseResult | str:
    def slower(launch: Launch) -> Launch:
        latencies = [latency * (1 + slowdown) for latency in launch.batches.latency_s]
        return msgspec.structs.replace(launch, batches=msgspec.structs.replace(launch.batches, latency_s=latencies))

    if not any(launch.batches.latency_s for launch in result.launches):
        return "No batch was timed."
    return _derived(result, [slower(launch) for launch in result.launches])


def _of_tokens(name: str, text: str, metric: MetricName, column: str, slowdown: float) -> Regression:
    """Return a slowdown of the times in one column of the generation."""

    def slower(texts: Generation) -> Generation:
        return msgspec.structs.replace(
            texts, **{column: [(1 + slowdown) * time_s for time_s in getattr(texts, column)]}
        )

    def suits(result: CaseResult) -> bool:
        texts = generated(result)
        return texts is not None and bool(getattr(texts, column))

    return Regression(name, text, metric, lambda result, _: _with_texts(result, slower), slowdown=slowdown, suits=suits)


def _with_texts(result: CaseResult, changed: Callable[[Generation], Generation]) -> CaseResult:
    """Return a copy whose generated texts are changed."""
    launches = [
        launch if launch.generation is None else msgspec.structs.replace(launch, generation=changed(launch.generation))
        for launch in result.launches
    ]
    return _derived(result, launches)


def _of_work(
    name: str,
    text: str,
    metric: MetricName,
    changed: Callable[[RankWork], RankWork],
    *,
    figure: str | None = None,
    part: str = "work",
) -> Regression:
    """Return a regression of the work of every rank.

    Args:
        name: The name of the regression.
        text: Its description.
        metric: The metric that it changes.
        changed: Returns the changed work of a rank.
        figure: The attribute that it changes, if not `metric`.
        part: The field of a launch: `work`, or `prefill_work`.
    """

    def suits(result: CaseResult) -> bool:
        works = [getattr(launch, part) for launch in result.launches]
        ranks = [rank for work in works if work is not None for rank in work.ranks]
        return bool(ranks) and all(getattr(rank, figure or metric) is not None for rank in ranks)

    def inject(result: CaseResult, _: Rules) -> CaseResult:
        launches = [
            launch
            if (work := getattr(launch, part)) is None
            else msgspec.structs.replace(
                launch, **{part: msgspec.structs.replace(work, ranks=list(map(changed, work.ranks)))}
            )
            for launch in result.launches
        ]
        return msgspec.structs.replace(result, launches=launches)

    return Regression(name, text, metric, inject, suits=suits)


def _more_flops(rank: RankWork) -> RankWork:
    return msgspec.structs.replace(rank, flops=math.ceil((rank.flops or 0) * (1 + _MORE_FLOPS)))


def _one_more_sync(rank: RankWork) -> RankWork:
    calls = Counter(rank.runtime_calls or {}) + Counter(["cudaStreamSynchronize"])
    return msgspec.structs.replace(rank, host_syncs=(rank.host_syncs or 0) + 1, runtime_calls=dict(calls))


def _one_more_kernel(rank: RankWork) -> RankWork:
    return msgspec.structs.replace(rank, kernels=(rank.kernels or 0) + 1)


def _slower_kernels(slowdown: float, rank: RankWork) -> RankWork:
    return msgspec.structs.replace(rank, device_time_s=[(1 + slowdown) * one for one in rank.device_time_s or []])


def _one_more_collective(result: CaseResult, _: Rules) -> CaseResult | str:
    if result.traffic is None:
        return f"The traffic is not known: {result.why.get('traffic', 'the report has no reason')}."
    batches = next((launch.batches for launch in result.launches if launch.batches.latency_s), Batches())
    calls = (len(batches.latency_s) or 1) * (result.case.new_tokens or 1)
    ranks = [_with_more_calls(rank, calls) for rank in result.traffic.ranks]
    traffic = msgspec.structs.replace(result.traffic, ranks=ranks)
    added = traffic.sent_bytes - result.traffic.sent_bytes
    per_sequence = traffic.wire_bytes_per_sequence + added / (sum(batches.sequences) or 1)
    traffic = msgspec.structs.replace(traffic, wire_bytes_per_sequence=per_sequence)
    return msgspec.structs.replace(result, traffic=traffic)


def _with_more_calls(rank: Sequence[Collective], calls: int) -> list[Collective]:
    """Return the traffic of a rank with more calls of its first kind, each of the mean size of that kind."""
    if not rank or not rank[0].calls:
        size = calls * _NEW_CALL_BYTES
        return [Collective(collective="all_reduce", calls=calls, payload_bytes=size, wire_bytes=size), *rank]
    first = rank[0]
    more = msgspec.structs.replace(
        first,
        calls=first.calls + calls,
        payload_bytes=first.payload_bytes + calls * first.payload_bytes // first.calls,
        wire_bytes=first.wire_bytes + calls * first.wire_bytes // first.calls,
    )
    return [more, *rank[1:]]


def _more_memory(result: CaseResult, _: Rules) -> CaseResult | str:
    def fuller(launch: Launch) -> Launch:
        fullest = max(launch.memory, key=lambda device: device.peak_bytes or 0, default=None)
        memory = [_grown(device) if device is fullest else device for device in launch.memory]
        return msgspec.structs.replace(launch, memory=memory)

    if not any(device.peak_bytes for launch in result.launches for device in launch.memory):
        return "The peak memory is not known."
    return _derived(result, [fuller(launch) for launch in result.launches])


def _grown(device: DeviceMemory) -> DeviceMemory:
    more = {
        name: value + _GROWTH_BYTES
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "nvml_used_max_bytes")
        if (value := getattr(device, name))
    }
    return msgspec.structs.replace(device, **more)


def _out_of_memory(result: CaseResult, _: Rules) -> CaseResult:
    failure = Failure(phase="forward", message="injected: out of memory")
    nothing = dict.fromkeys(("inference_s", "sequences_per_s", "tokens_per_s", "acc", "acc_norm", "accuracy_check"))
    return msgspec.structs.replace(
        result, outcome="oom", failure=failure, launches=[], traffic=None, comparison=None, **nothing
    )


def _wrong_answers(result: CaseResult, rules: Rules) -> CaseResult | str:
    def wrong(launch: Launch) -> Launch:
        if launch.accuracy is None:
            return launch
        if result.case.load_format == "dummy":
            return msgspec.structs.replace(launch, accuracy=_other_numbers(launch.accuracy))
        return msgspec.structs.replace(launch, accuracy=_flipped(launch.accuracy, rules.accuracy.metric))

    if result.case.generates:
        return _wrong_texts(result)
    if all(launch.accuracy is None for launch in result.launches):
        return "No items were scored."
    return _derived(result, [wrong(launch) for launch in result.launches])


def _wrong_texts(result: CaseResult) -> CaseResult:
    """Return a copy whose decode steps have other log-likelihoods than the model, with the check of its texts."""
    copy = _with_texts(
        result,
        lambda texts: msgspec.structs.replace(
            texts, loglikelihoods=encode(_OFF * value for value in decode(texts.loglikelihoods))
        ),
    )
    copy.accuracy_check = generation_check.check(copy, ())
    return copy


def _flipped(accuracy: Accuracy, metric: str) -> Accuracy:
    """Return an accuracy in which `_FLIPPED` right answers, or all of them, are wrong.

    Without labels it is not known which answers are right, and the answers of the first items change.
    """
    before = predictions_of(accuracy, metric)
    labels = before if accuracy.labels is None else accuracy.labels
    right = [number for number, (choice, label) in enumerate(zip(before, labels, strict=True)) if choice == label]
    chosen = frozenset(right[:_FLIPPED])

    def answers(predictions: Sequence[int]) -> list[int]:
        return [int(not labels[number]) if number in chosen else value for number, value in enumerate(predictions)]

    after = {name: answers(getattr(accuracy, name)) for name in ("predictions", "predictions_norm")}
    if accuracy.labels is not None and accuracy.items:
        for name, predictions in (("acc", after["predictions"]), ("acc_norm", after["predictions_norm"])):
            hits = (choice == label for choice, label in zip(predictions, labels, strict=True))
            accuracy = msgspec.structs.replace(accuracy, **{name: statistics.fmean(hits)})
    return msgspec.structs.replace(accuracy, **after)


def _other_numbers(accuracy: Accuracy) -> Accuracy:
    """Return an accuracy in which the log-likelihoods of a few items differ as with a wrong kernel.

    The answers of random weights are random, so that changed answers would not be a regression.
    """
    numbers = decode(accuracy.loglikelihoods)
    few = _FLIPPED * len(numbers) // max(1, accuracy.items)
    changed = [_OFF * value if place < few else value for place, value in enumerate(numbers)]
    return msgspec.structs.replace(accuracy, loglikelihoods=encode(changed))


def _derived(result: CaseResult, launches: list[Launch]) -> CaseResult:
    copy = msgspec.structs.replace(result, launches=launches)
    derive(copy)
    return copy
