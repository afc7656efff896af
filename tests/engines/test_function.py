"""Engines of a test: what may be given, and how a place is made."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from support import report_factory, tiny_model

from pytest_llmgpu.engines.function import OPTION, Function
from pytest_llmgpu.engines.protocol import Texts

_CASE = msgspec.structs.replace(report_factory.make_case(), strategy="Own", workload="generate")
_SOURCE = tiny_model.source({})


class Own:
    """Repeats the last token."""

    times = (0.5, [0.25])
    stopped = False

    def generate(self, token_ids: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Return its texts."""
        return [[ids[-1]] * new_tokens for ids in token_ids]

    def stop(self) -> None:
        """Note the call."""
        self.stopped = True


def repeat(token_ids: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Repeat the last token."""
    return [[ids[-1]] * new_tokens for ids in token_ids]


def factory() -> Own:
    """Return an engine."""
    return Own()


@pytest.mark.parametrize("name", ["Own", "factory", "repeat"])
def test_a_place_is_a_class_a_factory_or_a_function(name: str) -> None:
    """It is made in the rank, where the case has its place."""
    place = f"{__name__}:{name}"
    assert Function(place).name == name
    made = Function()
    made.start(msgspec.structs.replace(_CASE, strategy_options={OPTION: place}), _SOURCE)
    found = made.generate([[1, 2]], 2)
    made.stop()
    assert (found.tokens if isinstance(found, Texts) else found) == [[2, 2]]


def test_an_object_keeps_its_name_and_its_times() -> None:
    """It is not stopped; what it cannot do is said when it starts."""
    own = Own()
    engine = Function(own)
    assert (engine.name, engine.place) == ("Own", f"{__name__}:Own")
    engine.start(_CASE, _SOURCE)
    assert engine.generate([[3]], 2) == Texts(tokens=[[3, 3]], first_token_s=0.5, step_s=[0.25])
    engine.stop()
    assert not own.stopped, "it belongs to the test, and further launches use it"
    with pytest.raises(ValueError, match=r"engine Own has no score\(token_ids, from_position\): add it, or use"):
        engine.start(msgspec.structs.replace(_CASE, workload="score"), _SOURCE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (object(), "measure: object is not allowed: the fixture llm is needed, or an engine"),
        (
            Own,
            f"or an object, Own(), or the place of the class, '{__name__}:Own'",
        ),
        ("no place", "measure: 'no place' is not allowed: the place of an engine is needed"),
        ("no_such_module:Engine", "there is no module no_such_module"),
        (type("Named", (Own,), {"name": "a b"})(), "the name 'a b' of an engine is not allowed"),
    ],
)
def test_what_is_no_engine_is_refused(given: Any, message: str) -> None:
    """One line names the value and what is allowed."""
    with pytest.raises(ValueError, match=re.escape(message)):
        Function(given)
