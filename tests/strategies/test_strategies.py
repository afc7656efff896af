from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_llmgpu import strategies
from pytest_llmgpu.strategies.mp import LayerParallel


class Own(LayerParallel):
    """A strategy of somebody's own."""

    name = "own"


class Needy(Own):
    """One that cannot be made without an argument."""

    def __init__(self, needed: str) -> None:
        self.needed = needed


made = Own()


class Lacking:
    """No strategy, but for its name."""

    name = "lacking"


@pytest.mark.parametrize("name", list(strategies.BUILT_IN))
def test_a_built_in_strategy_has_the_name_it_is_found_by(name: str) -> None:
    """Each of them can be had, in a process without torch."""
    code = (
        f"import sys; from pytest_llmgpu import strategies; print(strategies.make(strategies.find({name!r})).name);"
        "print([name for name in ('torch', 'transformers', 'accelerate', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [name, "[]"]


def test_a_strategy_is_found_by_a_registered_name_or_by_its_place() -> None:
    """A registered name comes first; a place needs no registration."""
    known = {"own": f"{__name__}:Own"}
    assert strategies.find("own", known) == f"{__name__}:Own"
    assert strategies.find("somebody.else_:Place.inner", known) == "somebody.else_:Place.inner"


@pytest.mark.parametrize("name", ["pp", "pp:", ":Own", "test-strategies:Own", "a.b", "a:b:c", "a/b.py:Own"])
def test_what_is_neither_is_refused(name: str) -> None:
    """The registered names are what is allowed, in order, beside a place."""
    guess = r" \(did you mean a:b\?\)" if name == "a.b" else ""
    with pytest.raises(
        ValueError, match=f"^'{name}' is no strategy{guess}: allowed are mp, own, or package.module:attr"
    ):
        strategies.find(name, {"own": f"{__name__}:Own", "mp": "a:b"})


@pytest.mark.parametrize("place", [f"{__name__}:Own", f"{__name__}:made"])
def test_a_class_is_made_and_an_object_taken_as_it_is(place: str) -> None:
    """Both are strategies."""
    assert strategies.make(place).name == "own"


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("nowhere:Own", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'$"),
        (f"{__name__}:Missing", "cannot be imported: AttributeError: .*'Missing'"),
        (f"{__name__}:Needy", "cannot be imported: TypeError: .*'needed'"),
        ("broken:Own", r"cannot be imported: SyntaxError: .*broken\.py, line 1\)$"),
        ("unlucky:Own", r"cannot be imported: OSError: first line \(unlucky\.py, line 1\)$"),
        (
            f"{__name__}:Lacking",
            r"lacks backend, check, ranks, .* \(see pytest_llmgpu.strategies.protocol\)$",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(
    place: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong in somebody's module, the place is named with the reason."""
    (tmp_path / "broken.py").write_text("def")
    (tmp_path / "unlucky.py").write_text("raise OSError('first line\\nsecond line')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"^strategy {place} {complaint}") as caught:
        strategies.make(place)
    assert "\n" not in str(caught.value)


def test_registrations_add_up() -> None:
    """One place may be registered twice: a package and the conftest of its own repository."""
    merged = strategies.merge([{"mp": "a:Mp"}, {}, {"own": "b.c:Own", "mp": "a:Mp"}])
    assert merged == {"mp": "a:Mp", "own": "b.c:Own"}


@pytest.mark.parametrize(
    ("registrations", "complaint"),
    [
        ([{"own": "a:Own"}, {"own": "b:Own"}], "strategy 'own' is at two places, a:Own and b:Own$"),
        ([{"own": "a.Own"}], "'a.Own', the place of strategy 'own', is not allowed: package.module:attribute is"),
        ([{"own": Own}], f"<class '{__name__}.Own'>, the place of strategy 'own', is not allowed: "),
        ([["a:Own"]], r"\['a:Own'\] is not allowed: a mapping is needed$"),
        ([{5: "chat:Chatty"}], "5, the name of the strategy at chat:Chatty, is not allowed: letters, digits, _, . and"),
        ([{"own": "b:Own"}, {"a,b": "a:Own"}], "'a,b', the name of the strategy at a:Own, is not allowed: letters,"),
        ([{"": "a:Own"}], "'', the name of the strategy at a:Own, is not allowed: letters,"),
    ],
)
def test_a_registration_that_cannot_be_meant_is_refused(registrations: list[dict[str, str]], complaint: str) -> None:
    """The hook is named, for whoever chose no strategy at all, with what is wrong."""
    with pytest.raises(ValueError, match=f"^pytest_llmgpu_strategies: {complaint}"):
        strategies.merge(registrations)


@pytest.mark.parametrize("name", ["", "two words", "a/b"])
def test_a_strategy_has_a_name_that_people_can_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in tables, ids and file names."""
    monkeypatch.setattr(Own, "name", name)
    with pytest.raises(ValueError, match=f"strategy {__name__}:Own is named {name!r}: letters, digits"):
        strategies.make(f"{__name__}:Own")
