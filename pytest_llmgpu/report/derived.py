"""Figures derived from recorded ones. All of them can be derived again from a report."""

from __future__ import annotations

import base64
import binascii
import math
import operator
import statistics
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from pytest_llmgpu.report.result import Accuracy, CaseResult, DeviceProfile, Generation, Launch, Metric, Profile
from pytest_llmgpu.report.text import plural
from pytest_llmgpu.report.work import RankWork

LOGLIKELIHOOD_TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
"""Largest rounding difference that padding and other kernels may cause, as a fraction of the log-likelihood."""

_LEAST_FOREIGN = 1e-3
"""Typical differences of log-likelihoods up to this fraction are explained by rounding for every dtype."""

_LEAST_ENERGY_WINDOW_S = 1.0
"""NVML updates the energy counter of a GPU every 20 to 100 ms: shorter windows would miss a large part."""

_FEWEST_FOR_P99 = 100
"""With fewer decode steps, the 99th percentile would be the largest one."""

_SLOW, _MANY_SLOW = 2.0, 3
"""A batch is an outlier from this multiple of its time in the other launches on, and a launch has many from this number
on: fewer of them are left out where not every launch of a report has one."""

_ENERGIES = "energy_j_per_sequence", "energy_j_per_token"
_FIGURES = (
    *("inference_s", "sequences_per_s", "tokens_per_s", "acc", "acc_norm"),
    *("first_token_s", "token_p50_s", "token_p95_s", "token_p99_s", *_ENERGIES),
)
"""Fields of a result that are derived."""


def inference_s(launch: Launch) -> float:
    """Return the sum of the batch latencies of a launch."""
    return math.fsum(launch.batches.latency_s)


def device_passes_s(rank: RankWork) -> list[float]:
    """Return the device time of each pass of a rank: kernels that are no collective, and copies; empty without any."""
    copies_s = rank.copy_s or [0.0] * len(rank.device_time_s or ())
    return [kernels_s + copy_s for kernels_s, copy_s in zip(rank.device_time_s or (), copies_s, strict=False)]


def device_times_s(launch: Launch) -> list[float] | None:
    """Return the device time of each rank, the mean of the middle half of its passes; None if a rank has none.

    A quarter of the passes at either end, at least one, is left out: a single disturbed pass does not count, and the
    mean varies less than a median.
    """
    times_s = []
    for rank in launch.ranks:
        ordered = sorted(device_passes_s(rank))
        left_out = max(1, len(ordered) // 4) if len(ordered) > 2 else 0  # noqa: PLR2004 - of two none is in the middle
        middle = ordered[left_out : len(ordered) - left_out]
        times_s.append(math.fsum(middle) / max(1, len(middle)))
    return times_s if times_s and min(times_s) > 0 else None


def sums_s(sides: Sequence[Sequence[Sequence[float]]]) -> tuple[list[list[float]], str]:
    """Return the sum of the times [reports][launches][batches] of each launch, and a sentence on what is left out.

    A batch that took twice its time in the other launches counts where every launch of its report has one, or one has
    at least three or more than half of its batches: else it was a disturbance.
    """
    expected = list(map(statistics.median_low, zip(*(one for side in sides for one in side), strict=True)))
    many = min(_MANY_SLOW, len(expected) // 2 + 1)
    sums, ignored = [], 0
    for side in sides:
        usual_s = [[usual if s > _SLOW * usual else s for s, usual in zip(one, expected, strict=True)] for one in side]
        counts = [sum(map(operator.ne, *both)) for both in zip(side, usual_s, strict=True)]
        keep = max(counts) >= many or (len(counts) > 1 and min(counts) > 0)
        ignored += 0 if keep else sum(counts)
        sums.append(list(map(math.fsum, side if keep else usual_s)))
    return sums, f" {plural(ignored, 'time')} of more than twice the usual one left out." if ignored else ""


def latencies(launch: Launch, metric: str) -> tuple[Sequence[float], list[list[float]] | None]:
    """Return the times of a launch whose sum is a wall time, and the SM clocks [GPUs][batches] meanwhile."""
    if metric == "time":
        return launch.batches.latency_s, launch.batches.clock_ghz
    if metric in launch.figures:
        return [launch.figures[metric]], None
    if (texts := launch.generation) is None:
        return [], None
    if metric == "first_token":
        return texts.first_token_s, texts.prefill_clock_ghz
    return (texts.step_s, texts.step_clock_ghz) if metric == "token_time" else ([], None)


def of_prefill(result: CaseResult) -> CaseResult:
    """Return a result of a case that generates with the work of its prefills in place of that of its decode steps."""
    launches = [msgspec.structs.replace(launch, work=launch.prefill_work) for launch in result.launches]
    return msgspec.structs.replace(result, launches=launches)


def device_busy(result: CaseResult) -> float | None:
    """Return the fraction of the timed forwards in which kernels ran, the mean over ranks and launches that have it.

    Collectives do not count, since a rank that waits in one computes nothing. The time is that of the same forwards in
    the case, or of decode steps: under the profiler they take longer.
    """
    found = []
    for launch in result.launches:
        times_s, work, latencies_s = device_times_s(launch), launch.work, launch.batches.latency_s
        if times_s is None or work is None:
            continue
        timed_s = math.fsum(latencies_s[number] for number in work.batches if number < len(latencies_s))
        if launch.generation is not None:
            timed_s = len(work.batches) * statistics.median(launch.generation.step_s or [0.0])
        if timed_s:
            found.append(min(1.0, statistics.fmean(times_s) / timed_s))
    return statistics.fmean(found) if found else None


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
    figures = [figures_of_launch(launch, result.case.new_tokens) for launch in launches]
    medians = {}
    result.why = {name: reason for name, reason in result.why.items() if name not in _ENERGIES}
    for name in figures[0]:
        known = [value for one in figures if (value := one[name]) is not None]
        medians[name] = statistics.median(known) if known else None
        if name in _ENERGIES and len(known) < len(figures):
            medians[name] = None
            result.why[name] = f"the energy of a window of at least {_LEAST_ENERGY_WINDOW_S:g} s is not known"
    if time_s := medians["inference_s"]:  # a file may contain latencies of 0.0
        # From the median time: medians of their own would disagree with it where launches scatter.
        medians["sequences_per_s"] = (medians["sequences"] or 0) / time_s
        medians["tokens_per_s"] = (medians["tokens"] or 0) / time_s
    for name in _FIGURES:
        setattr(result, name, medians.get(name))


def figures_of_launch(launch: Launch, new_tokens: int | None) -> dict[str, float | None]:
    """Return the figures of one launch by name, and what the rates count; None where one is not known."""
    batches, accuracy, texts = launch.batches, launch.accuracy, launch.generation
    steps_s = [] if texts is None else texts.step_s
    sequences, tokens = sum(batches.sequences), counted_tokens(launch, new_tokens)
    window_s, devices = (0.0, []) if launch.profile is None else (launch.profile.duration_s, launch.profile.devices)
    energies_j = [device.energy_j for device in devices if device.energy_j is not None]
    is_known = window_s >= _LEAST_ENERGY_WINDOW_S and 0 < len(energies_j) == len(devices)
    energy_j = math.fsum(energies_j) if is_known else None
    return {
        "inference_s": inference_s(launch),
        "sequences": sequences,
        "tokens": tokens,
        "acc": None if accuracy is None else accuracy.acc,
        "acc_norm": None if accuracy is None else accuracy.acc_norm,
        "first_token_s": statistics.median(texts.first_token_s) if texts is not None and texts.first_token_s else None,
        "token_p50_s": quantile(steps_s, 0.5) if steps_s else None,
        "token_p95_s": quantile(steps_s, 0.95) if steps_s else None,
        "token_p99_s": quantile(steps_s, 0.99) if len(steps_s) >= _FEWEST_FOR_P99 else None,
        "energy_j_per_sequence": None if energy_j is None else energy_j / max(1, sequences),
        "energy_j_per_token": None if energy_j is None else energy_j / max(1, tokens),
    }


def counted_tokens(launch: Launch, new_tokens: int | None) -> int:
    """Return the tokens that throughput and energy count: input tokens, or those that were generated."""
    return sum(launch.batches.tokens) if new_tokens is None else new_tokens * sum(launch.batches.sequences)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of numbers, interpolated between the two nearest ones."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def proportion_stderr(fraction: float, items: int) -> float | None:
    """Return the standard error of a fraction of items as lm-evaluation-harness computes it; None with one item."""
    return math.sqrt(fraction * (1 - fraction) / (items - 1)) if items > 1 else None


def upper_bound(fraction: float, items: int, z: float = 1.645) -> float:
    """Return the one-sided 95 % upper bound of a fraction of items by Wilson's score interval."""
    centre = fraction + z * z / (2 * items)
    spread = z * math.sqrt(fraction * (1 - fraction) / items + z * z / (4 * items * items))
    return min(1.0, (centre + spread) / (1 + z * z / items))


def measured(result: CaseResult) -> Accuracy | None:
    """Return the accuracy record of the first launch that has one."""
    return next(iter(result.accuracies), None)


def generated(result: CaseResult) -> Generation | None:
    """Return the texts of the first launch that has some."""
    return next((launch.generation for launch in result.launches if launch.generation is not None), None)


def decode(text: str | None, kind: Literal["f", "i"] = "f") -> array[Any]:
    """Return the numbers of a text that `encode` wrote; none without a text."""
    return array(kind, binascii.a2b_base64(text or ""))


def encode(numbers: Iterable[float], kind: Literal["f", "i"] = "f") -> str:
    """Return numbers as text: base64 of float32, or with `i` (token ids) of int32; little-endian as GPU hosts are."""
    return base64.b64encode(array(kind, numbers)).decode()


def value_of(accuracy: Accuracy, metric: str) -> float:
    """Return `acc` or `acc_norm` by name."""
    return accuracy.acc if metric == "acc" else accuracy.acc_norm


def predictions_of(accuracy: Accuracy, metric: str) -> list[int]:
    """Return the predictions for `acc` or `acc_norm`."""
    return accuracy.predictions if metric == "acc" else accuracy.predictions_norm


def explained(dtype: str) -> float:
    """Return the largest typical difference that rounding explains, as a fraction; the largest for an unknown dtype."""
    tolerances = LOGLIKELIHOOD_TOLERANCES
    return max(tolerances[dtype] if dtype in tolerances else max(tolerances.values()), _LEAST_FOREIGN)


def typical_difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Return the sum of all absolute differences of finite numbers, divided by that of the expected numbers.

    ValueError if the numbers of values differ.
    """
    if len(values) != len(expected):
        raise ValueError(f"{len(values)} numbers cannot be compared with {len(expected)}")
    total = math.fsum(map(abs, expected))
    return math.fsum(map(abs, map(operator.sub, values, expected))) / (total or 1.0)


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
