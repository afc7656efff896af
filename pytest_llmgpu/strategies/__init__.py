"""How a model is spread over devices and run; one file per strategy, see `protocol`."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_llmgpu.strategies.protocol import Strategy

__all__ = ["BUILT_IN", "find", "make", "merge"]

BUILT_IN = {
    "mp": "pytest_llmgpu.strategies.mp:LayerParallel",
    "tp": "pytest_llmgpu.strategies.tp:TensorParallel",
    "iok": "pytest_llmgpu.strategies.iok:KernelInjection",
}
"""Name to `module:attribute`, so that a strategy costs nothing until it is chosen."""


def merge(registrations: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return one mapping of name to place from those that the implementations of `pytest_llmgpu_strategies` return.

    Raises:
        ValueError: One is no mapping, a place is no `module:attribute`, a name is none, or has two places.
    """
    merged: dict[str, str] = {}
    for registration in registrations:
        if not isinstance(registration, Mapping):
            raise ValueError(f"pytest_llmgpu_strategies: {registration!r} is not allowed: a mapping is needed")  # noqa: TRY004 - one kind of error for all input
        for name, place in registration.items():
            if not _is_place(place):
                raise ValueError(
                    f"pytest_llmgpu_strategies: {place!r}, the place of strategy {name!r}, is not allowed: "
                    "package.module:attribute is needed"
                )
            if not _is_name(name):
                raise ValueError(
                    f"pytest_llmgpu_strategies: {name!r}, the name of the strategy at {place}, is not allowed: {_NAMED}"
                )
            if merged.setdefault(name, place) != place:
                raise ValueError(
                    f"pytest_llmgpu_strategies: strategy {name!r} is at two places, {merged[name]} and {place}"
                )
    return merged


def find(name: str, known: Mapping[str, str] = BUILT_IN) -> str:
    """Return where a strategy is: `module:attribute`.

    Args:
        name: A registered name, or itself `module:attribute`.
        known: Registered names to places, as `pytest_llmgpu_strategies` gives them.

    Raises:
        ValueError: There is no such strategy.
    """
    if name in known:
        return known[name]
    if not _is_place(name):
        guess = f" (did you mean {':'.join(name.rpartition('.')[::2])}?)" if "." in name and ":" not in name else ""
        raise ValueError(
            f"{name!r} is no strategy{guess}: allowed are {', '.join(sorted(known))}, or package.module:attribute"
        )
    return name


def make(place: str) -> Strategy:
    """Return a new object of the strategy at a place that `find` gave.

    Raises:
        ValueError: It does not import, or is no strategy.
    """
    module, _, attribute = place.partition(":")
    try:
        found: object = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
        strategy = found() if callable(found) else found
    # It is somebody's module, and anything may go wrong in it: a library it lacks, its syntax, its constructor.
    except Exception as error:
        reason = f"{error}".partition("\n")[0]
        raise ValueError(
            f"strategy {place} cannot be imported: {type(error).__name__}: {reason}{_at(error)}"
        ) from error
    lacking = [name for name in _MEMBERS if not hasattr(strategy, name)]
    if lacking:
        raise ValueError(f"strategy {place} lacks {', '.join(lacking)} (see pytest_llmgpu.strategies.protocol)")
    name = getattr(strategy, "name")  # noqa: B009 - its type is not known
    if not _is_name(name):
        raise ValueError(f"strategy {place} is named {name!r}: {_NAMED}")
    return strategy  # type: ignore[return-value]  # its members were checked


def _at(error: Exception) -> str:
    """Return the last line of somebody's own code that an error came from; empty where there is none."""
    if isinstance(error, SyntaxError):
        return ""  # it says so itself
    ours = {__file__, importlib.__file__}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in ours]
    own = [frame for frame in frames if not frame.filename.startswith("<frozen ")]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _is_name(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(r"[\w.-]+", text) is not None


def _is_place(text: object) -> bool:
    module, _, attribute = text.partition(":") if isinstance(text, str) else ("", "", "")
    return all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")])


_NAMED = "letters, digits, _, . and - are needed"
_MEMBERS = ("name", "backend", "check", "ranks", "build", "load", "prepare")
