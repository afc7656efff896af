"""An exception of a rank as plain data, and an exception of the same class in pytest's process."""

from __future__ import annotations

import contextlib
import functools
import sys
from itertools import product
from types import NoneType
from typing import Any, NamedTuple

from pytest_llmgpu.report.text import beginning

_PLAIN = (NoneType, bool, int, float, str, bytes)
_MOST_LETTERS = 2**16


class Raised(NamedTuple):
    """What pytest's process needs to raise an exception of a rank again. It arrives also if the exception cannot."""

    classes: tuple[tuple[str, str], ...]
    """Module and name of the class, then of each class that it derives from, in the order of their resolution."""
    args: tuple[Any, ...]
    """The arguments of the exception if all are plain values; else its text alone."""
    text: str
    """The text of the exception."""


def describe(error: BaseException) -> Raised:
    """Return an exception as plain data."""
    text = str(error)
    args = error.args if len(text) <= _MOST_LETTERS and _is_plain(error.args) else ()
    text = beginning(text, _MOST_LETTERS)
    classes = tuple((cls.__module__, cls.__qualname__) for cls in type(error).__mro__)
    return Raised(classes=classes, args=args or (text,) * bool(text), text=text)


def rebuild(raised: Raised) -> Exception | None:
    """Return an exception of the first class that is imported here and can be made with the same text.

    Nothing is imported: a test that names a class, such as `pytest.raises(torch.OutOfMemoryError)`, has imported it.

    Returns:
        The exception; None for one that is no `Exception`, such as SystemExit.
    """
    for module, name in raised.classes:
        cls = _imported(module, name)
        if not (isinstance(cls, type) and issubclass(cls, Exception)):
            continue
        # Then without the constructor, which may take other arguments than it passes on.
        for args, make in product((raised.args, (raised.text,)), (cls, functools.partial(cls.__new__, cls))):
            with contextlib.suppress(Exception):  # the class of a user may raise anything
                made = make(*args)
                if isinstance(made, cls) and str(made) == raised.text:
                    return made
    return None


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) in (tuple, list) and all(map(_is_plain, value)))


def _imported(module: str, name: str) -> object:
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
