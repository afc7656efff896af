"""What must hold of a report's figures beyond their types, for a file that another tool or a person has changed."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, NoReturn

from pytest_llmgpu.report.result import Accuracy, Batches, CaseResult, DeviceProfile, Launch, Profile, Series

__all__ = ["check"]

_COLUMNS = ("latency_s", "sequences", "tokens", "padded_tokens")
_SIZES = ("batch_size", "devices")
_SECONDS = ("inference_s",)
_RATES = ("sequences_per_s", "tokens_per_s")
_LAUNCH_TIMES = ("load_s", "warmup_s", "wall_s")
_MEMORY = (
    *("weights_bytes", "loading_peak_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "workspace_bytes"),
    *("held_bytes", "nvml_used_max_bytes", "nvml_used_mean_bytes"),
)
_WINDOW = ("samples", "missed")
_WINDOW_TIMES = ("period_s", "duration_s", "lateness_p99_s", "sampler_cpu_s")
_COUNTED = ("calls", "payload_bytes", "wire_bytes")
_SENT = ("wire_bytes_per_sequence",)
_FLOAT32_BYTES = 4

_MOST = float(2**63)
"""No count and no size has as much; far below where a sum of them is no float any more."""

_MOST_S = 1e12
"""30,000 years."""


def check(cases: Sequence[CaseResult]) -> None:
    """Raise ValueError for the first figure that cannot be, with its place: `$.cases[3].launches[0].wall_s`.

    Two cases of one id, times, bytes, counts and readings that are negative or beyond all measure, fractions outside 0
    to 1, columns of unequal length, and log-likelihoods that do not decode.
    """
    seen: dict[str, int] = {}
    for number, result in enumerate(cases):
        place = f"$.cases[{number}]"
        if (first := seen.setdefault(result.id, number)) != number:
            _refuse(f"{place}.id", f"an id of its own, got {result.id!r}, which $.cases[{first}] has")
        _within(result.case, _SIZES, f"{place}.case", 1)
        _within(result, _SECONDS, place, most=_MOST_S)
        _within(result, _RATES, place)
        for launch_number, launch in enumerate(result.launches):
            _check_launch(launch, f"{place}.launches[{launch_number}]")
        if result.traffic is not None:
            _within(result.traffic, _SENT, f"{place}.traffic")
            for rank, collectives in enumerate(result.traffic.ranks):
                for kind, collective in enumerate(collectives):
                    _within(collective, _COUNTED, f"{place}.traffic.ranks[{rank}][{kind}]")


def _check_launch(launch: Launch, place: str) -> None:
    _within(launch, _LAUNCH_TIMES, place, most=_MOST_S)
    _check_batches(launch.batches, f"{place}.batches")
    if launch.accuracy is not None:
        _check_accuracy(launch.accuracy, f"{place}.accuracy")
    for number, memory in enumerate(launch.memory):
        _within(memory, _MEMORY, f"{place}.memory[{number}]")
    if launch.profile is not None:
        _check_profile(launch.profile, f"{place}.profile")


def _check_profile(profile: Profile, place: str) -> None:
    _within(profile, _WINDOW, place)
    _within(profile, _WINDOW_TIMES, place, most=_MOST_S)
    for number, device in enumerate(profile.devices):
        _check_device(device, f"{place}.devices[{number}]")
    if profile.series is not None:
        _length(profile.series.devices, len(profile.devices), f"{place}.series.devices")
        _check_series(profile.series, f"{place}.series")


def _check_device(device: DeviceProfile, place: str) -> None:
    _within(device, ("energy_j",), place)
    # It may be more than the window: what is throttled for power and for heat at once counts twice.
    _within(device, ("throttled_s",), place, most=_MOST_S)
    for name, metric in device.metrics.items():
        for part, value in (("mean", metric.mean), ("max", metric.max)):
            if value is not None and not 0 <= value < _MOST:
                _refuse_figure(f"{place}.metrics.{name}.{part}", 0, _MOST, value)
        if metric.coverage is not None and not 0 <= metric.coverage <= 1:
            _refuse(f"{place}.metrics.{name}.coverage", f"a fraction from 0 to 1, got {metric.coverage}")
    for name, count in device.counters.items():
        if not 0 <= count < _MOST:
            _refuse_figure(f"{place}.counters.{name}", 0, _MOST, count)


def _check_series(series: Series, place: str) -> None:
    # The nearest reading of a window without one may be from before its start.
    _column(series.t_s, f"{place}.t_s", -_MOST_S, _MOST_S)
    # Their values are drawn, and no gate judges by them: to look at each would take half as long again as to read all.
    for number, columns in enumerate(series.devices):
        for name, column in columns.items():
            _length(column, len(series.t_s), f"{place}.devices[{number}].{name}")


def _check_batches(batches: Batches, place: str) -> None:
    length = len(batches.latency_s)
    for name in _COLUMNS:
        column = getattr(batches, name)
        _length(column, length, f"{place}.{name}")
        _column(column, f"{place}.{name}", most=_MOST_S if name == "latency_s" else _MOST)


def _check_accuracy(accuracy: Accuracy, place: str) -> None:
    for name in ("acc", "acc_norm"):
        value = getattr(accuracy, name)
        if not 0 <= value <= 1:
            _refuse(f"{place}.{name}", f"a fraction from 0 to 1, got {value}")
    for name in ("predictions", "predictions_norm"):
        column = getattr(accuracy, name)
        _length(column, accuracy.items, f"{place}.{name}")
        _choices(column, f"{place}.{name}")
    if accuracy.labels is not None:
        _length(accuracy.labels, accuracy.items, f"{place}.labels")
    try:
        size = len(base64.b64decode(accuracy.loglikelihoods, validate=True))
    except (binascii.Error, ValueError) as error:  # ValueError: letters beyond ASCII
        _refuse(f"{place}.loglikelihoods", f"base64, got another text ({error})")
    else:
        if size % _FLOAT32_BYTES:
            _refuse(f"{place}.loglikelihoods", f"numbers of {_FLOAT32_BYTES} bytes, got {size} bytes")


def _within(record: Any, names: tuple[str, ...], place: str, least: int = 0, most: float = _MOST) -> None:
    for name in names:
        value = getattr(record, name)
        if value is not None and not least <= value < most:
            _refuse_figure(f"{place}.{name}", least, most, value)


def _column(column: Sequence[float], place: str, least: float = 0, most: float = _MOST) -> None:
    if min(column, default=least) < least or max(column, default=least) >= most:
        number = next(number for number, value in enumerate(column) if not least <= value < most)
        _refuse_figure(f"{place}[{number}]", least, most, column[number])


def _choices(column: Sequence[int], place: str) -> None:
    try:
        bytes(column)  # all of 0 to 255, a fifth of the time that min and max take
    except ValueError:
        _column(column, place)


def _length(column: Sequence[object], length: int, place: str) -> None:
    if len(column) != length:
        _refuse(place, f"{length} values, got {len(column)}")


def _refuse_figure(place: str, least: float, most: float, value: float) -> NoReturn:
    bound = f"at least {least:g}" if value < least else f"less than {most:g}"
    _refuse(place, f"a figure of {bound}, got {_written(value)}")


def _written(value: float) -> str:
    # Python refuses to write out integers of thousands of digits.
    huge = isinstance(value, int) and abs(value) >= _MOST
    return f"one of {int(value).bit_length()} bits" if huge else str(value)


def _refuse(place: str, expected: str) -> NoReturn:
    # As msgspec says it of a wrong type.
    raise ValueError(f"Expected {expected} - at `{place}`")
