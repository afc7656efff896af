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

        Raises:
            ValueError: It is neither an engine nor the place of one.
        """
        self.given = None if isinstance(given, str) else given
        self.place = given if isinstance(given, str) else ""
        self.name = "engine"
        if isinstance(given, str):
            self.name = _name_of_place(given)
        elif given is not None:
            kind = given if isinstance(given, (type, FunctionType)) else type(given)
            self.place = f"{kind.__module__}:{kind.__qualname__}"
            self.name = str(getattr(given, "name", kind.__name__))
            if isinstance(given, type) or not (_methods(given) or callable(given)):
                raise ValueError(
                    f"measure: {self.name} is not allowed: the fixture llm is needed, or an engine, which has "
                    f"{' or '.join(_METHODS.values())}, or its place as 'package.module:name'"
                )
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(
                f"measure: the name {self.name!r} of an engine is not allowed: letters, digits, _, . and -"
            )

    def describe(self) -> str:
        """Return what the case has as its model."""
        return self.name if self.name == "engine" else f"engine {self.name}"

    def start(self, case: Case, source: ModelSource) -> None:  # noqa: ARG002 - it loads its own model
        """Make the engine in this rank.

        Raises:
            ValueError: It lacks what the case needs.
        """
        if self.given is None:
            self.name, made = case.strategy, pkgutil.resolve_name(str(case.strategy_options[OPTION]))
            # A class or a factory is called without arguments; an engine, or a function that generates, is used itself.
            self.given = made() if isinstance(made, type) or (_is_factory(made) and not _methods(made)) else made
        if not _methods(self.given) and callable(self.given):
            self.given = SimpleNamespace(generate=self.given)
        if case.workload not in _methods(self.given):
            other = "score" if case.generates else "generate"
            raise ValueError(f"engine {self.name} has no {_METHODS[case.workload]}: pass --llmgpu-workload={other}")

    def generate(self, token_ids: list[list[int]], new_tokens: int) -> Texts | list[list[int]]:
        """Return its texts; `times`, if it has them, are the seconds of the first token and a list of the others."""
        given: Any = self.given
        found = given.generate(token_ids, new_tokens)
        times = getattr(given, "times", None)
        if times is None or isinstance(found, Texts):
            return found  # type: ignore[no-any-return]
        first_token_s, step_s = times
        return Texts(tokens=found, first_token_s=first_token_s, step_s=step_s)

    def score(self, token_ids: list[list[int]], from_position: list[int]) -> list[list[float]] | None:
        """Return its log-likelihoods.

        Raises:
            NotImplementedError: It has no `score`.
        """
        given: Any = self.given
        if not callable(getattr(given, "score", None)):
            raise NotImplementedError
        return given.score(token_ids, from_position)  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Call its `stop`, if it has one."""
        if callable(stop := getattr(self.given, "stop", None)):
            stop()


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
        raise ValueError(
            f"measure: {place!r} is not allowed: there is no module {module}: install its package, or add its folder "
            "to `pythonpath` in the configuration of pytest"
        )
    return name.rpartition(".")[2]
