"""Check before loading that the devices divide the heads and columns that tensor parallelism splits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pytest_llmgpu.inference import model_facts
from pytest_llmgpu.inference.model_facts import SPLIT_COUNTS
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case

_MOST = 64
"""No node has more devices."""


class Indivisible(msgspec.Struct, frozen=True, kw_only=True):
    """A count of the model that the number of devices does not divide."""

    name: str
    """The config has the count under this name."""
    count: int
    """The model has this many."""
    allowed: tuple[int, ...]
    """These numbers of devices divide all counts."""


def architecture(source: ModelSource) -> dict[str, Any]:
    """Return the fields of the config that describe the decoder: those of `text_config` if there is one."""
    return dict(source.config.get("text_config") or source.config)


def find_indivisible(
    fields: Mapping[str, Any], devices: int, names: Iterable[str] = tuple(SPLIT_COUNTS), *, least: int = 2
) -> Indivisible | None:
    """Return the first count that a number of devices does not divide; None if it divides all of them.

    Args:
        fields: The counts of the decoder by their names in its config; one that is absent is not checked.
        devices: The number of devices.
        names: The fields whose counts are split.
        least: The strategy runs on this many devices or more.
    """
    counts = {name: fields[name] for name in names if isinstance(fields.get(name), int)}
    common = math.gcd(*counts.values())
    for name, count in counts.items():
        if count % devices:
            allowed = tuple(number for number in range(least, _MOST + 1) if common % number == 0)
            return Indivisible(name=name, count=count, allowed=allowed)
    return None


def check_divisible(
    case: Case, source: ModelSource, names: Iterable[str] = tuple(SPLIT_COUNTS), *, least: int = 2
) -> None:
    """Refuse a number of devices that does not divide the counts of the model; see `find_indivisible`.

    Raises:
        ValueError: The message has the count and the numbers of devices that divide it.
    """
    counts = architecture(source) | model_facts.ask(source).counts
    found = find_indivisible(counts, case.devices, names, least=least)
    if found is None:
        return
    allowed = ", ".join(map(str, found.allowed)) or f"no number from {least} to {_MOST}"
    raise ValueError(
        f"--llmgpu-devices={case.devices}: strategy {case.strategy} cannot split the {found.count} "
        f"{SPLIT_COUNTS[found.name]} of {source.name} evenly: allowed: {allowed}"
    )
