"""An engine of the user: an object with `generate(token_ids, new_tokens)`, or `score(token_ids, from_position)`.

A function is taken for the first. Given as `module:name`, a class, a factory or a function, it runs in a rank of its
own; given as an object, in the process of pytest.
"""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
from types import FunctionType, SimpleNamespace
from typing import Any

from pytest_llmgpu.engines.protocol import Engine, Texts
from pytest_llmgpu.inference.models import ModelSource
from pytest_llmgpu.report.case import Case

PLACE = f"{__name__}:Function"
"""The place of this engine."""
OPTION = "function"
"""The option of the case that has the place of the user's engine."""
_METHODS = {"generate": "generate(token_ids, new_tokens)", "score": "score(token_ids, from_position)"}


class Function(Engine):
    """Calls the engine of the user."""

    backend = "torch"

    def __init__(self, given: object = None) -> None:
        """Wrap an object or a function, or a place `module:name`; None is for the place of the case that is started.

        ValueError if it is neither an engine nor the place of one.
        """
        self.given = None if isinstance(given, str) else given
        """The object; None for a place."""
        self.place = given if isinstance(given, str) else ""
        self.name = "engine"
        self._engine: Any = None
        if isinstance(given, str):
            self.name = _name_of_place(given)
        elif given is not None:
            kind = given if isinstance(given, (type, FunctionType)) else type(given)
            self.place = f"{kind.__module__}:{kind.__qualname__}"
            self.name = str(getattr(given, "name", kind.__name__))
            if isinstance(given, type) or not (_methods(given) or callable(given)):
                needed = f"an engine, which has {' or '.join(_METHODS.values())}, or its place as 'package.module:name'"
                if isinstance(given, type):
                    needed = f"an object, {self.name}(), or the place of the class, {self.place!r}"
                raise ValueError(f"measure: {self.name} is not allowed: the fixture llm is needed, or {needed}")
        if not re.fullmatch(r"[\w.-]+", self.name):
            allowed = "letters, digits, _, . and - are needed, as in the name of a def"
            raise ValueError(f"measure: the name {self.name!r} of an engine is not allowed: {allowed}")

    def describe(self) -> str:
        """Return what the case has as its model."""
        return self.name if self.name == "engine" else f"engine {self.name}"

    def start(self, case: Case, source: ModelSource) -> None:  # noqa: ARG002 - it loads its own model
        """Make the engine in this rank; ValueError if it lacks what the case needs."""
        self._engine = self.given
        if self.given is None:
            self.name, place = case.strategy, str(case.strategy_options[OPTION])
            try:
                made = pkgutil.resolve_name(place)
            except AttributeError as error:
                raise ValueError(f"measure: {place!r} is not allowed: {error}") from None
            # A class or a factory is called without arguments; an engine, or a function that generates, is used itself.
            self._engine = made() if isinstance(made, type) or (_is_factory(made) and not _methods(made)) else made
        if not _methods(self._engine) and callable(self._engine):
            self._engine = SimpleNamespace(generate=self._engine)
        if case.workload not in _methods(self._engine):
            other = "hellaswag, whose items are scored" if case.generates else "prompts, which are continued"
            raise ValueError(f"engine {self.name} has no {_METHODS[case.workload]}: add it, or use the fixture {other}")

    def generate(self, token_ids: list[list[int]], new_tokens: int) -> Texts | list[list[int]]:
        """Return its texts; `times`, if it has them, are the seconds of the first token and a list of the others."""
        found = _returned(self._engine.generate(token_ids, new_tokens), "generate")
        times = getattr(self._engine, "times", None)
        if times is None or isinstance(found, Texts):
            return found  # type: ignore[no-any-return]
        try:
            first_token_s, step_s = times
        except (TypeError, ValueError):
            needed = "the seconds of the first token and a list of those of the others are needed"
            raise ValueError(f"times is {times!r}: {needed}") from None
        return Texts(tokens=found, first_token_s=first_token_s, step_s=step_s)

    def score(self, token_ids: list[list[int]], from_position: list[int]) -> list[list[float]] | None:
        """Return its log-likelihoods; NotImplementedError if it has no `score`."""
        if not callable(getattr(self._engine, "score", None)):
            raise NotImplementedError
        return _returned(self._engine.score(token_ids, from_position), "score")  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Call `stop` of an engine that `start` made, if it has one; an object belongs to the test."""
        if self.given is None and callable(stop := getattr(self._engine, "stop", None)):
            stop()


def _returned(found: Any, method: str) -> Any:
    """Return what a method returned; refuse a forgotten `return`, which would pass as an engine without answers."""
    if found is None:
        raise ValueError(f"{method} returned None: {_METHODS[method]} returns a list for each sequence")
    return found


def _methods(given: object) -> list[str]:
    return [name for name in _METHODS if callable(getattr(given, name, None))]


def _is_factory(made: object) -> bool:
    """Return whether something is called without arguments."""
    if not callable(made):
        return False
    parameters = inspect.signature(made).parameters.values()
    return all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)


def _name_of_place(place: str) -> str:
    """Return the last name of a place, whose module must exist; it is imported in the rank alone."""
    module, _, name = place.partition(":")
    wanted = "the place of an engine is needed, as 'package.module:name'"
    if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise ValueError(f"measure: {place!r} is not allowed: {wanted}")
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        remedy = "install its package, or add its folder to `pythonpath` in the configuration of pytest"
        raise ValueError(f"measure: {place!r} is not allowed: there is no module {module}: {remedy}")
    return name.rpartition(".")[2]
