"""Figures of the user's own: the declarations of the hook, and the values that a test records."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pytest_llmgpu.gate.policy import Policy
from pytest_llmgpu.render.exports.tables import CSV_COLUMNS
from pytest_llmgpu.render.table import COLUMNS
from pytest_llmgpu.report.bounds import LARGEST
from pytest_llmgpu.report.metrics import is_own, spec_of
from pytest_llmgpu.report.result import Declared

_TAKEN = {*CSV_COLUMNS, *COLUMNS, *Policy.__struct_fields__}
"""Names with a meaning of their own in tables, CSV and the policy."""

_HOOK = "pytest_llmgpu_metrics"


def merge(found: Iterable[Any]) -> dict[str, Declared]:
    """Return the declarations of all implementations of the hook, by name.

    ValueError if a declaration is not allowed, or two of one name differ.
    """
    merged: dict[str, Declared] = {}
    for declarations in found:
        if not isinstance(declarations, Mapping) or not all(isinstance(one, Mapping) for one in declarations.values()):
            raise ValueError(f"{_HOOK}: {declarations!r}: a dictionary of names to dictionaries is needed")
        for name, fields in declarations.items():
            _check_name(f"{_HOOK}: {name!r}", name)
            usual = {"threshold": spec_of("time").threshold} if fields.get("rule") == "time" else {}
            try:
                if unknown := fields.keys() - {*Declared.__struct_fields__}:
                    raise ValueError(f"unknown key {min(unknown, key=str)!r}")  # noqa: TRY301 - worded as those of msgspec
                one = msgspec.convert({**usual, **fields}, Declared)
            except ValueError as error:
                keys = "better = larger or smaller, rule = exact or time, unit (16 characters), threshold (0 to 1)"
                raise ValueError(f"{_HOOK}: {name!r}: {error}; allowed are {keys}") from None
            if merged.setdefault(name, one) != one:
                raise ValueError(f"{_HOOK}: {name!r} is declared twice: {merged[name]} and {one}")
    return merged


def checked(figures: Any, declared: Mapping[str, Declared]) -> dict[str, float]:
    """Return figures that a test records; ValueError in one line for a name or a value that is not allowed."""
    __tracebackhide__ = True
    if not isinstance(figures, Mapping):
        raise ValueError(f"figures: {figures!r} is not allowed: a dictionary of names to numbers is needed")  # noqa: TRY004 - as for the others
    for name, value in figures.items():
        _check_name(f"figure {name!r}", name)
        is_time = name in declared and declared[name].rule == "time"
        is_number = isinstance(value, (int, float, numbers.Real)) and not isinstance(value, bool)
        if not is_number or not (0 if is_time else -LARGEST) < value < LARGEST:
            what = "number above 0 (rule time)" if is_time else "finite number"
            raise ValueError(f"figure {name!r}: {value!r} is not allowed: a {what} is needed")
    return {name: float(value) for name, value in figures.items()}


def _check_name(where: str, name: object) -> None:
    __tracebackhide__ = True
    if not isinstance(name, str) or not is_own(name) or name in _TAKEN:
        allowed = "a name of up to 40 of a-z, 0-9 and _ is needed that this package has for nothing else"
        raise ValueError(f"{where} is not allowed: {allowed}")
