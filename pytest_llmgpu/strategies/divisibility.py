"""Whether a model's heads and columns can be shared out evenly, asked of its config before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case

__all__ = ["architecture", "check_divisible"]


def architecture(source: ModelSource) -> dict[str, Any]:
    """Return the fields of the config that describe the decoder: those of `text_config` where there is one."""
    return dict(source.config.get("text_config") or source.config)


_CUT = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "intermediate_size": "columns of its feed-forward layers",
}


def check_divisible(case: Case, source: ModelSource, names: Iterable[str] = tuple(_CUT), *, least: int = 2) -> None:
    """Refuse a number of devices that does not divide what tensor parallelism cuts up.

    Args:
        case: How many devices.
        source: Whose config names the counts.
        names: Of the counts that are cut.
        least: Fewest devices that the strategy runs on.

    Raises:
        ValueError: With the number that it should divide.
    """
    fields = architecture(source)
    counts = {name: fields[name] for name in names if isinstance(fields.get(name), int)}
    for name, count in counts.items():
        what = _CUT[name]
        if count % case.devices:
            common = math.gcd(*counts.values())
            allowed = ", ".join(str(n) for n in range(least, _MOST + 1) if common % n == 0)
            raise ValueError(
                f"--llmgpu-devices={case.devices}: strategy {case.strategy} cannot share out the {count} {what} of "
                f"{source.name}: {f'allowed are {allowed}' if allowed else f'no number from {least} to {_MOST} can'}"
            )


_MOST = 64
"""More devices than a node has are not worth naming."""
