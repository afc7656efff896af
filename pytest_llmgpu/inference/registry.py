"""Implementations that are registered by name, each as `module:attribute`, and imported when one is chosen.

Strategies and tasks use it: the built-in ones are a table, a pytest hook adds the ones of users.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from pytest_llmgpu.report.text import guess

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Registry(Generic[_T]):
    """The rules for one kind of implementation."""

    kind: str
    """The word for one implementation in messages, such as `strategy`."""
    built_in: Mapping[str, str]
    """Name to `module:attribute` of the implementations that need no registration."""
    hook: str
    """The pytest hook that registers implementations."""
    protocol: str
    """The module that describes an implementation."""
    members: tuple[str, ...]
    """The attributes that an implementation must have; `name` is one of them."""
    is_name: Callable[[str], bool]
    """Returns whether a text may be the name of an implementation."""
    allowed_names: str
    """The names that `is_name` allows, in words."""

    def merge(self, registrations: Iterable[Mapping[str, str]]) -> dict[str, str]:
        """Return one mapping of name to place from those that the implementations of the hook return.

        ValueError if one is no mapping, a place is no `module:attribute`, or a name is not allowed or has two places.
        """
        merged: dict[str, str] = {}
        for registration in registrations:
            if not isinstance(registration, Mapping):
                raise ValueError(f"{self.hook}: {registration!r} is not allowed: a mapping is needed")  # noqa: TRY004 - one kind of error for all input
            for name, place in registration.items():
                if not _is_place(place):
                    refused = f"{place!r}, the place of {self.kind} {name!r}, is not allowed"
                    raise ValueError(f"{self.hook}: {refused}: package.module:attribute is needed")
                if not (isinstance(name, str) and self.is_name(name)):
                    refused = f"{name!r}, the name of the {self.kind} at {place}, is not allowed: {self.allowed_names}"
                    raise ValueError(f"{self.hook}: {refused}")
                if merged.setdefault(name, place) != place:
                    raise ValueError(f"{self.hook}: {self.kind} {name!r} is at two places, {merged[name]} and {place}")
        return merged

    def find(self, name: str, known: Mapping[str, str] | None = None) -> str:
        """Return the place of an implementation, `module:attribute`, by a registered name or by the place itself.

        The registered names are those that `merge` returned; None for the built-in ones. ValueError for another name.
        """
        known = self.built_in if known is None else known
        if name in known:
            return known[name]
        if not _is_place(name):
            dotted = "." in name and ":" not in name
            hint = f" (did you mean {':'.join(name.rpartition('.')[::2])}?)" if dotted else guess(name, known)
            allowed = f"allowed are {', '.join(sorted(known))}, or package.module:attribute"
            raise ValueError(f"{name!r} is no {self.kind}{hint}: {allowed}")
        return name

    def make(self, place: str) -> _T:
        """Return a new object of the implementation at a place that `find` returned.

        ValueError if it cannot be imported or made, lacks a member, or has a name that is not allowed.
        """
        try:
            found = pkgutil.resolve_name(place)
            made: Any = found() if callable(found) else found
        # The module belongs to a user and can raise anything: a missing library, bad syntax, a failing constructor.
        except Exception as error:
            reason, hint = f"{error}".partition("\n")[0], ""
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing and f"{place.replace(':', '.')}.".startswith(f"{missing}."):
                added = "add its folder to `pythonpath` in the configuration of pytest"
                hint = f": install the package of {missing}, or {added}"
            elif isinstance(error, AttributeError) and error.obj is not None and error.name:
                hint = guess(error.name, dir(error.obj))
            # The last line of the user's code; the message of a SyntaxError has it.
            frames = [] if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)
            others = {__file__, importlib.__file__, pkgutil.__file__}
            own = [frame for frame in frames if frame.filename not in others and "<frozen" not in frame.filename]
            line = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
            found = f"{type(error).__name__}: {reason}{line}{hint}"
            raise ValueError(f"{self.kind} {place} cannot be imported: {found}") from error
        lacking = [name for name in self.members if not hasattr(made, name)]
        if lacking:
            raise ValueError(f"{self.kind} {place} lacks {', '.join(lacking)} (see {self.protocol})")
        if not (isinstance(made.name, str) and self.is_name(made.name)):
            raise ValueError(f"{self.kind} {place} is named {made.name!r}: {self.allowed_names}")
        return made  # type: ignore[no-any-return]


def _is_place(text: object) -> bool:
    module, _, attribute = text.partition(":") if isinstance(text, str) else ("", "", "")
    return all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")])
