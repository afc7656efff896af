"""Asking NVML for what it may refuse: the answer is None, and the reason is kept; which refusals last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Ask", "lasting"]

_LASTING = (
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_NO_PERMISSION",
    "NVML_ERROR_FUNCTION_NOT_FOUND",
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
)


def lasting(nvml: Any, error: Any) -> bool:
    """Return whether an NVMLError says that there is no such call; after any other the next one may be answered."""
    return error.value in [getattr(nvml, name) for name in _LASTING]


class Ask:
    """Calls NVML; where it refuses, keeps the reason under the field's name."""

    def __init__(self, nvml: Any, why: dict[str, str]) -> None:
        self._nvml = nvml
        self._why = why

    def __call__(self, field: str, call: Callable[..., Any], /, *arguments: Any) -> Any:
        """Return `call(*arguments)`; None, with the reason in `why[field]`, where NVML refuses."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            self._why[field] = f"{call.__name__}: {error}"
            return None
