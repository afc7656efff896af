"""Checks of a report's figures that no type expresses, and error messages that name the value and its place."""

from __future__ import annotations

import base64
import binascii
import json
import operator
import re
import reprlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import Accuracy, CaseResult, Generation, Launch
from pytest_llmgpu.report.work import Work

_NUMBER_BYTES = 4
_ROUNDING = 1e-6
_EXPLAINED_BYTES = 2**24
"""A larger report is not decoded a second time for its error message."""
_TRIED_BYTES = 2**28
"""The search for the key of a map decodes the report once per key, up to this many bytes in all."""
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<number>\d+)\]|\[\.\.\.\]")


def explain(data: bytes, error: msgspec.ValidationError) -> str:
    """Return the message of an error in a report's JSON, with the value that breaks a bound.

    msgspec names a bound and a place, but no value; and it writes `[...]` for the key of a map:
    ``Expected `float` >= 0.0 - at `$.counters[...]` `` becomes
    ``Expected `float` >= 0.0, got -1.0 - at `$.counters.xids` ``.
    """
    message, at, place = str(error).rpartition(" - at ")
    if not at or len(data) > _EXPLAINED_BYTES:
        return str(error)
    try:
        document = msgspec.json.decode(data)
        value, path = document, "$"
        for step in _STEP.finditer(place):
            if step["number"]:
                value, path = value[int(step["number"])], path + step[0]
            else:
                if not step["name"] and len(data) * len(value) > _TRIED_BYTES:
                    return str(error)
                key = step["name"] or _broken_key(document, value, str(error))
                value, path = value[key], f"{path}.{key}"
    except (ValueError, LookupError, TypeError, RecursionError):  # a number beyond all bounds, one name twice
        return str(error)
    if re.match("Expected `(int|float)` [<>]", message):
        message += f", got {reprlib.repr(value)}"
    return f"{message}{at}`{path}`"


def check(cases: Sequence[CaseResult]) -> None:
    """Check what several fields of a report must have in common: unique ids, columns of equal length, log-likelihoods.

    Raises:
        ValueError: the first violation, with its place: `$.cases[3].launches[0].batches.tokens`.
    """
    seen: dict[str, int] = {}
    for number, result in enumerate(cases):
        place = f"$.cases[{number}]"
        if not result.id:
            _refuse(f"{place}.id", "an id, got an empty text")
        if result.outcome == "completed" and result.failure is not None:
            _refuse(f"{place}.failure", "null, because the case completed")
        if (first := seen.setdefault(result.id, number)) != number:
            _refuse(f"{place}.id", f"a unique id, got {result.id!r}, which $.cases[{first}] has too")
        for launch_number, launch in enumerate(result.launches):
            _check_launch(launch, f"{place}.launches[{launch_number}]")


def _check_launch(launch: Launch, place: str) -> None:
    batches = launch.batches
    _check_lengths(batches, ("sequences", "tokens", "padded_tokens"), len(batches.latency_s), f"{place}.batches")
    if launch.accuracy is not None:
        _check_accuracy(launch.accuracy, f"{place}.accuracy")
    if launch.generation is not None:
        _check_generation(launch.generation, len(batches.latency_s), f"{place}.generation")
    if launch.profile is not None and launch.profile.series is not None:
        series = launch.profile.series
        _check_length(series.devices, len(launch.profile.devices), f"{place}.profile.series.devices")
        for number, columns in enumerate(series.devices):
            for name, column in columns.items():
                _check_length(column, len(series.t_s), f"{place}.profile.series.devices[{number}].{name}")
    for name, work in (("work", launch.work), ("prefill_work", launch.prefill_work)):
        if work is not None:
            _check_work(work, f"{place}.{name}")


def _check_work(work: Work, place: str) -> None:
    for number, collective in enumerate(work.collectives or ()):
        _check_lengths(collective, ("transfer_s", "wait_s"), work.passes, f"{place}.collectives[{number}]")
    for number, rank in enumerate(work.ranks):
        _check_lengths(rank, ("device_time_s", "copy_s", "idle_s"), work.passes, f"{place}.ranks[{number}]")


def _check_generation(generation: Generation, batches: int, place: str) -> None:
    _check_length(generation.prompt_tokens, len(generation.new_tokens), f"{place}.prompt_tokens")
    _check_length(generation.first_token_s, batches, f"{place}.first_token_s")
    for name in ("tokens", "loglikelihoods", "prefill_loglikelihoods", "reference_loglikelihoods"):
        if (text := getattr(generation, name)) is not None:
            numbers = _numbers(text, f"{place}.{name}")
            if numbers != sum(generation.new_tokens):
                _refuse(f"{place}.{name}", f"{sum(generation.new_tokens)} numbers, got {numbers}")


def _numbers(text: str, place: str) -> int:
    """Return how many numbers of 4 bytes a text of base64 holds."""
    try:
        size_bytes = len(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:  # ValueError: letters beyond ASCII
        _refuse(place, f"base64, got another text ({error})")
    if size_bytes % _NUMBER_BYTES:
        _refuse(place, f"numbers of {_NUMBER_BYTES} bytes, got {size_bytes} bytes")
    return size_bytes // _NUMBER_BYTES


def _check_accuracy(accuracy: Accuracy, place: str) -> None:
    _check_lengths(accuracy, ("predictions", "predictions_norm", "labels"), accuracy.items, place)
    _numbers(accuracy.loglikelihoods, f"{place}.loglikelihoods")
    for metric, choices in (("acc", accuracy.predictions), ("acc_norm", accuracy.predictions_norm)):
        if accuracy.labels is None or choices is None or not accuracy.items:
            continue
        right = sum(map(operator.eq, choices, accuracy.labels)) / accuracy.items
        if abs(getattr(accuracy, metric) - right) > _ROUNDING:
            _refuse(f"{place}.{metric}", f"{right:g}, which the predictions give, got {getattr(accuracy, metric):g}")


def check_names(data: bytes) -> None:
    """Check that no object of a JSON text has one name twice: every reader would see another value.

    A text of more than 16 MiB is not checked.

    Raises:
        ValueError: the message has the name.
    """
    if len(data) <= _EXPLAINED_BYTES:
        json.loads(data, object_pairs_hook=_refuse_second)


def _refuse_second(pairs: list[tuple[str, Any]]) -> None:
    name, times = Counter(name for name, _ in pairs).most_common(1)[0] if pairs else ("", 0)
    if times > 1:
        raise ValueError(f"the name {name!r} occurs {times} times in one object")


def _check_lengths(record: msgspec.Struct, columns: Sequence[str], length: int, place: str) -> None:
    for name in columns:
        column = getattr(record, name)
        if column is not None and len(column) != length:
            _check_length(column, length, f"{place}.{name}")


def _check_length(column: Sequence[object], length: int, place: str) -> None:
    if len(column) != length:
        _refuse(place, f"{length} values, got {len(column)}")


def _refuse(place: str, expected: str) -> NoReturn:
    raise ValueError(f"Expected {expected} - at `{place}`")  # in the form of msgspec's own messages


def _broken_key(document: Any, entries: dict[str, Any], reason: str) -> str:
    """Return the key of a map whose value breaks the report, by trying each entry alone. It keeps only that key."""
    for key, item in list(entries.items()):
        entries.clear()
        entries[key] = item
        try:
            msgspec.convert(document, Report)
        except msgspec.ValidationError as error:
            if str(error) == reason:
                return key
    raise LookupError(reason)
