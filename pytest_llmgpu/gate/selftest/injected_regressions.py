"""Losses that a gate should see, planted into copies of results: what is measured after a change for the worse.

The original stays as it is; a copy shares whatever the loss does not touch.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pytest_llmgpu.gate.policy import Rules
from pytest_llmgpu.report.derived import decode, derive, encode, predictions_of
from pytest_llmgpu.report.metrics import MetricName
from pytest_llmgpu.report.result import Accuracy, Batches, CaseResult, Collective, DeviceMemory, Failure, Launch

__all__ = ["SLOWDOWN", "Plant", "plants"]

SLOWDOWN = 0.05
"""More time, as a fraction, where nobody says otherwise."""

_GROWTH_BYTES = 2**30
_FLIPPED = 20
_OFF = 1.1
"""By which log-likelihoods are multiplied: DeepSpeed's residual, added twice, moves them about as far."""

_NEW_CALL_BYTES = 4
"""Of a collective where a rank had none to copy: one float32."""


class Plant(NamedTuple):
    """A loss to plant."""

    name: str
    text: str
    """What is planted, in a few words."""
    metric: MetricName
    """Whose row should say so."""
    sow: Callable[[CaseResult, Rules], CaseResult | str]
    """Returns a copy of a completed result with the loss, or in a sentence why it cannot hold one."""
    largest_only: bool = False
    """Whether it is for the largest batch size of each series only."""
    slowdown: float | None = None
    """How much slower it is, as a fraction; None for what one launch settles."""


def plants(slowdown: float = SLOWDOWN) -> tuple[Plant, ...]:
    """Return every loss; the first is a slowdown, as a fraction."""
    return (
        Plant(
            "time",
            f"{100 * slowdown:.3g} % more time in every batch",
            "time",
            functools.partial(_slower, slowdown),
            slowdown=slowdown,
        ),
        Plant("collective", "one more collective per batch on every rank", "traffic", _one_more_collective),
        Plant("memory", "1 GiB more on the fullest device", "memory", _more_memory),
        Plant("batch-size", "out of memory at the largest batch size", "outcome", _out_of_memory, largest_only=True),
        Plant(
            "answers",
            f"{_FLIPPED} items answered wrong that were right (random weights: other log-likelihoods of as many)",
            "accuracy",
            _wrong_answers,
        ),
    )


def _slower(slowdown: float, result: CaseResult, _: Rules) -> CaseResult | str:
    def slower(launch: Launch) -> Launch:
        latencies = [latency * (1 + slowdown) for latency in launch.batches.latency_s]
        return msgspec.structs.replace(launch, batches=msgspec.structs.replace(launch.batches, latency_s=latencies))

    if not any(launch.batches.latency_s for launch in result.launches):
        return "no batch was timed."
    return _derived(result, [slower(launch) for launch in result.launches])


def _one_more_collective(result: CaseResult, _: Rules) -> CaseResult | str:
    if result.traffic is None:
        return f"its traffic is not known: {result.why.get('traffic', 'the report does not say why')}."
    batches = next((launch.batches for launch in result.launches if launch.batches.latency_s), Batches())
    calls = len(batches.latency_s) or 1
    ranks = [_with_more_calls(rank, calls) for rank in result.traffic.ranks]
    traffic = msgspec.structs.replace(result.traffic, ranks=ranks)
    added = traffic.sent_bytes - result.traffic.sent_bytes
    per_sequence = traffic.wire_bytes_per_sequence + added / (sum(batches.sequences) or 1)
    traffic = msgspec.structs.replace(traffic, wire_bytes_per_sequence=per_sequence)
    return msgspec.structs.replace(result, traffic=traffic)


def _with_more_calls(rank: Sequence[Collective], calls: int) -> list[Collective]:
    """Return a rank's traffic with more calls of the first kind, each as large as its others are."""
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
        fullest = max(launch.memory, key=_peak, default=None)
        memory = [_grown(device) if device is fullest else device for device in launch.memory]
        return msgspec.structs.replace(launch, memory=memory)

    if not any(_peak(device) for launch in result.launches for device in launch.memory):
        return "its peak of memory is not known."
    return _derived(result, [fuller(launch) for launch in result.launches])


def _peak(device: DeviceMemory) -> int:
    return device.peak_allocated_bytes + (device.workspace_bytes or 0) if device.peak_allocated_bytes else 0


def _grown(device: DeviceMemory) -> DeviceMemory:
    more = {
        name: value + _GROWTH_BYTES
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "nvml_used_max_bytes")
        if (value := getattr(device, name))
    }
    return msgspec.structs.replace(device, **more)


def _out_of_memory(result: CaseResult, _: Rules) -> CaseResult:
    failure = Failure(phase="forward", message="planted: out of memory")
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

    if all(launch.accuracy is None for launch in result.launches):
        return "no items were scored."
    return _derived(result, [wrong(launch) for launch in result.launches])


def _flipped(accuracy: Accuracy, metric: str) -> Accuracy:
    """Return answers in which items that were right are wrong: as many as are planted, or all there are.

    Without labels nobody knows which are right: the first items change.
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
    """Return log-likelihoods of which those of a few items are off by as much as a wrong kernel puts them.

    Random weights answer by chance: flipped items would say nothing.
    """
    numbers = decode(accuracy.loglikelihoods)
    few = _FLIPPED * len(numbers) // max(1, accuracy.items)
    planted = [_OFF * value if place < few else value for place, value in enumerate(numbers)]
    return msgspec.structs.replace(accuracy, loglikelihoods=encode(planted))


def _derived(result: CaseResult, launches: list[Launch]) -> CaseResult:
    copy = msgspec.structs.replace(result, launches=launches)
    derive(copy)
    return copy
