"""Figures derived from recorded ones. All of them can be derived again from a report."""

from __future__ import annotations

import base64
import binascii
import math
import operator
import statistics
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from pytest_llmgpu.report.result import (
    Accuracy,
    Batches,
    CaseResult,
    DeviceProfile,
    Generation,
    Launch,
    Metric,
    Profile,
)

LOGLIKELIHOOD_TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Largest rounding difference that padding and other kernels may cause, as a fraction of the log-likelihood."""

_Number = TypeVar("_Number", int, float)

_LEAST_FOREIGN = 1e-3
"""Typical differences of log-likelihoods up to this fraction are explained by rounding for every dtype."""

_LEAST_ENERGY_WINDOW_S = 1.0
"""NVML updates the energy counter of a GPU every 20 to 100 ms: shorter windows would miss a large part."""

_FEWEST_FOR_P99 = 100
"""With fewer decode steps or batches, the 99th percentile would be the largest one."""

_P95 = 0.95

_FIGURES = (
    *("inference_s", "sequences_per_s", "tokens_per_s", "acc", "acc_norm"),
    *("first_token_s", "token_p50_s", "token_p95_s", "token_p99_s"),
    *("energy_j_per_sequence", "energy_j_per_token"),
)
"""Fields of a result that are derived."""

_COLUMNS = {"acc": "predictions", "acc_norm": "predictions_norm"}


def inference_s(launch: Launch) -> float:
    """Return the sum of the batch latencies of a launch."""
    return math.fsum(launch.batches.latency_s)


def device_times_s(launch: Launch) -> list[float] | None:
    """Return the device time of each rank, the mean of the middle half of its passes; None if a rank has none.

    A quarter of the passes at either end, at least one, is left out: a single disturbed pass does not count, and the
    mean varies less than a median.
    """
    times = [_middle_mean(rank.device_time_s) for rank in launch.ranks if rank.device_time_s]
    return times if times and len(times) == len(launch.ranks) and min(times) > 0 else None


def of_prefill(result: CaseResult) -> CaseResult:
    """Return a result of a case that generates with the work of its prefills in place of that of its decode steps."""
    launches = [msgspec.structs.replace(launch, work=launch.prefill_work) for launch in result.launches]
    return msgspec.structs.replace(result, launches=launches)


def device_busy(launch: Launch) -> float | None:
    """Return the fraction of the timed forwards in which kernels ran, the mean over ranks; None without device time.

    Collectives do not count, since a rank that waits in one computes nothing. The time is that of the same forwards in
    the case, or of decode steps: under the profiler they take longer.
    """
    times_s, work, generation = device_times_s(launch), launch.work, launch.generation
    if times_s is None or work is None:
        return None
    if generation is None:
        latencies_s = launch.batches.latency_s
        timed_s = math.fsum(latencies_s[number] for number in work.batches if number < len(latencies_s))
    else:
        timed_s = len(work.batches) * statistics.median(generation.step_s or [0.0])
    return min(1.0, math.fsum(times_s) / len(times_s) / timed_s) if timed_s else None


def transfer_s(launch: Launch) -> float | None:
    """Return the time in which the collectives of a work pass transferred data; None without collectives."""
    collectives = [] if launch.work is None else launch.work.collectives or []
    return math.fsum(_middle_mean(one.transfer_s) for one in collectives if one.transfer_s) or None


def _middle_mean(values: Sequence[float]) -> float:
    left_out = max(1, len(values) // 4) if len(values) > 2 else 0  # noqa: PLR2004 - of two none is in the middle
    middle = sorted(values)[left_out : len(values) - left_out]
    return math.fsum(middle) / len(middle)


def peaks_bytes(result: CaseResult) -> list[int]:
    """Return the memory peak of the fullest device, tensors plus workspace, for each launch in which it is known."""
    launches = [[device.peak_bytes for device in launch.memory if device.peak_bytes] for launch in result.launches]
    return [max(sizes) for sizes in launches if sizes]


def derive(result: CaseResult) -> None:
    """Set the derived figures of a completed case: medians over its launches, and the rates of the median time.

    A case that did not complete has none, because a total over some of the batches is not comparable.
    """
    for name in _FIGURES:
        setattr(result, name, None)
    launches = [launch for launch in result.launches if launch.batches.latency_s]
    if result.outcome != "completed" or not launches:
        return
    result.inference_s = statistics.median(map(inference_s, launches))
    if result.inference_s > 0:  # a file may contain latencies of 0.0
        # From the median time: medians of their own would disagree with it where launches scatter.
        all_batches, new_tokens = [launch.batches for launch in launches], result.case.new_tokens
        sequences = statistics.median(sum(batches.sequences) for batches in all_batches)
        tokens = statistics.median(counted_tokens(batches, new_tokens) for batches in all_batches)
        result.sequences_per_s, result.tokens_per_s = sequences / result.inference_s, tokens / result.inference_s
    _derive_token_times(result, launches)
    _derive_energy(result, launches)
    accuracies = [launch.accuracy for launch in launches if launch.accuracy is not None]
    if accuracies:
        result.acc = statistics.median(accuracy.acc for accuracy in accuracies)
        result.acc_norm = statistics.median(accuracy.acc_norm for accuracy in accuracies)


def _derive_energy(result: CaseResult, launches: Sequence[Launch]) -> None:
    """Fill in the energy, or the reason why it is not known."""
    names = "energy_j_per_sequence", "energy_j_per_token"
    measured = [(launch.batches, energy_j) for launch in launches if (energy_j := launch_energy_j(launch)) is not None]
    if len(measured) < len(launches):
        reason = f"the energy of a window of at least {_LEAST_ENERGY_WINDOW_S:g} s is not known"
        result.why = {**result.why, **dict.fromkeys(names, reason)}
        return
    result.why = {name: reason for name, reason in result.why.items() if name not in names}
    result.energy_j_per_sequence = statistics.median(
        energy_j / max(1, sum(batches.sequences)) for batches, energy_j in measured
    )
    result.energy_j_per_token = statistics.median(
        energy_j / max(1, counted_tokens(batches, result.case.new_tokens)) for batches, energy_j in measured
    )


def counted_tokens(batches: Batches, new_tokens: int | None) -> int:
    """Return the tokens that throughput and energy count: input tokens, or those that were generated."""
    return sum(batches.tokens) if new_tokens is None else new_tokens * sum(batches.sequences)


def _derive_token_times(result: CaseResult, launches: Sequence[Launch]) -> None:
    """Fill in the time to first token and the time per output token."""
    texts = [launch.generation for launch in launches if launch.generation is not None]
    if not texts:
        return
    result.first_token_s = statistics.median(statistics.median(one.first_token_s) for one in texts)
    steps = [one.step_s for one in texts if one.step_s]
    if steps:
        result.token_p50_s, result.token_p95_s = (
            statistics.median(quantile(one, share) for one in steps) for share in (0.5, 0.95)
        )
    if steps and min(map(len, steps)) >= _FEWEST_FOR_P99:
        result.token_p99_s = statistics.median(quantile(one, 0.99) for one in steps)


def batch_latency_s(result: CaseResult, share: float) -> float | None:
    """Return a quantile of the batch latencies of all launches; None without batches, and too few for the 99th.

    Args:
        result: a case; one that did not complete has none, because its batches are not those of a completed one.
        share: 0.5, 0.95 or 0.99.
    """
    latencies = [latency for launch in result.launches for latency in launch.batches.latency_s]
    fewest = _FEWEST_FOR_P99 if share > _P95 else 1
    return quantile(latencies, share) if result.outcome == "completed" and len(latencies) >= fewest else None


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of numbers, interpolated between the two nearest ones."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def launch_energy_j(launch: Launch) -> float | None:
    """Return the energy of all GPUs during a launch; None if it is not known, or the window is too short."""
    profile = launch.profile
    if profile is None or not profile.devices or profile.duration_s < _LEAST_ENERGY_WINDOW_S:
        return None
    energies = [device.energy_j for device in profile.devices]
    return None if None in energies else math.fsum(energy for energy in energies if energy is not None)


def proportion_stderr(fraction: float, items: int) -> float | None:
    """Return the standard error of a fraction of items as lm-evaluation-harness computes it; None with one item."""
    return math.sqrt(fraction * (1 - fraction) / (items - 1)) if items > 1 else None


def upper_bound(fraction: float, items: int, z: float = 1.645) -> float:
    """Return the one-sided 95 % upper bound of a fraction of `items` items.

    It is that of Wilson's score interval, which stays in [0, 1] and is valid for small samples.
    """
    centre = fraction + z * z / (2 * items)
    spread = z * math.sqrt(fraction * (1 - fraction) / items + z * z / (4 * items * items))
    return min(1.0, (centre + spread) / (1 + z * z / items))


def measured(result: CaseResult) -> Accuracy | None:
    """Return the accuracy record of the first launch that has one."""
    return next(iter(result.accuracies), None)


def generated(result: CaseResult) -> Generation | None:
    """Return the texts of the first launch that has some."""
    return next((launch.generation for launch in result.launches if launch.generation is not None), None)


def decode(loglikelihoods: str) -> array[float]:
    """Return the numbers of `Accuracy.loglikelihoods`."""
    return _decode(array("f"), loglikelihoods)


def encode(values: Iterable[float]) -> str:
    """Return numbers as text for `Accuracy.loglikelihoods`: base64 of little-endian float32."""
    return _encode(array("f", values))


def decode_tokens(tokens: str) -> array[int]:
    """Return the numbers of `Generation.tokens`."""
    return _decode(array("i"), tokens)


def encode_tokens(tokens: Iterable[int]) -> str:
    """Return token ids as text for `Generation.tokens`: base64 of little-endian int32."""
    return _encode(array("i", tokens))


def _decode(numbers: array[_Number], text: str) -> array[_Number]:
    numbers.frombytes(binascii.a2b_base64(text))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _encode(numbers: array[_Number]) -> str:
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


def value_of(accuracy: Accuracy, metric: str) -> float:
    """Return `acc` or `acc_norm` by name; ValueError for another name."""
    _column_of(metric)
    return accuracy.acc if metric == "acc" else accuracy.acc_norm


def predictions_of(accuracy: Accuracy, metric: str) -> list[int]:
    """Return the predictions for `acc` or `acc_norm`; ValueError for another name."""
    predictions: list[int] = getattr(accuracy, _column_of(metric))
    return predictions


def _column_of(metric: str) -> str:
    if metric not in _COLUMNS:
        raise ValueError(f"accuracy metric {metric!r}: allowed are {', '.join(_COLUMNS)}")
    return _COLUMNS[metric]


def explained(dtype: str) -> float:
    """Return the largest typical difference of log-likelihoods that rounding explains, as a fraction.

    For an unknown dtype it is the largest of all dtypes.
    """
    tolerances = LOGLIKELIHOOD_TOLERANCES
    return max(tolerances[dtype] if dtype in tolerances else max(tolerances.values()), _LEAST_FOREIGN)


def typical_difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Return the sum of all absolute differences divided by the sum of the absolute expected numbers.

    Args:
        values: finite numbers.
        expected: as many finite numbers.

    Raises:
        ValueError: the numbers of values differ.
    """
    if len(values) != len(expected):
        raise ValueError(f"{len(values)} numbers cannot be compared with {len(expected)}")
    total = math.fsum(map(abs, expected))
    return math.fsum(map(abs, map(operator.sub, values, expected))) / (total or 1.0)


class Span(NamedTuple):
    """A reading that covers the period before it."""

    value: float
    start_s: float
    end_s: float


def of_window(profile: Profile, device: DeviceProfile, name: str) -> Metric | str:
    """Return the figures of a metric if they are of the window, else the reason why there are none.

    A profile without a reading in the window has the nearest reading, which is not a figure of the case.
    """
    metric = device.metrics.get(name)
    if metric is None or metric.mean is None:
        return device.why.get(name) or profile.why.get("profile", "no sample")
    if metric.coverage == 0 or (metric.coverage is None and not profile.samples):
        return profile.why.get("samples") or f"{metric.method}: no reading covers this window"
    return metric


def moments(
    readings: Sequence[tuple[float, float]], window_s: float | None, method: str, start_s: float, end_s: float
) -> Metric:
    """Return the figures of readings that cover [t, t + window_s] each, or a moment.

    Args:
        readings: time and value of each reading.
        window_s: length of the period that each reading covers; None for a moment or if it is not known.
        method: NVML call that returned the values.
        start_s: start of the window.
        end_s: end of the window.
    """
    values = [value for _, value in readings]
    coverage = None
    if window_s is not None and values:
        coverage = _fraction([(time_s, time_s + window_s) for time_s, _ in readings], start_s, end_s)
    mean = math.fsum(values) / len(values) if values else None
    return Metric(mean=mean, max=max(values, default=None), method=method, coverage=coverage)


def spans(readings: Sequence[Span], nearest: float | None, method: str, start_s: float, end_s: float) -> Metric:
    """Return the figures of readings that cover spans, weighted by the part of each span in the window.

    Args:
        readings: readings that may overlap with the window.
        nearest: value to return if none does.
        method: NVML call that returned the values.
        start_s: start of the window.
        end_s: end of the window.
    """
    parts = [(span, min(span.end_s, end_s) - max(span.start_s, start_s)) for span in readings]
    parts = [(span, part_s) for span, part_s in parts if part_s > 0]
    if not parts:
        return Metric(mean=nearest, max=nearest, method=method, coverage=None if nearest is None else 0.0)
    return Metric(
        mean=math.fsum(span.value * part_s for span, part_s in parts) / math.fsum(part_s for _, part_s in parts),
        max=max(span.value for span, _ in parts),
        method=method,
        coverage=_fraction([(span.start_s, span.end_s) for span, _ in parts], start_s, end_s),
    )


def _fraction(periods: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Return the fraction of [start, end] that the periods cover, which do not overlap."""
    if end_s <= start_s:
        return 0.0
    covered = math.fsum(max(0.0, min(last_s, end_s) - max(first_s, start_s)) for first_s, last_s in periods)
    return min(1.0, covered / (end_s - start_s))
