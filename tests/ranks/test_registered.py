from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_llmgpu.ranks import registered
from pytest_llmgpu.strategies.mp import LayerParallel


class Own(LayerParallel):
    """A strategy of a user."""

    name = "own"


class Needy(Own):
    """A strategy whose constructor needs an argument."""

    def __init__(self, needed: str) -> None:
        self.needed = needed


made = Own()


class Spaced(Own):
    """A strategy whose name cannot be part of tables, ids and file names."""

    name = "two words"


class Lacking:
    """A class that has only the name of a strategy."""

    name = "lacking"


@pytest.mark.parametrize("name", list(registered.BUILT_IN))
def test_a_built_in_strategy_has_its_registered_name(name: str) -> None:
    """Each one is made in a process without torch."""
    code = (
        "import sys; from pytest_llmgpu.ranks.registered import find, make;"
        f"print(make(find({name!r})).name);"
        "print([name for name in ('torch', 'transformers', 'accelerate', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [name, "[]"]


def test_a_strategy_is_found_by_a_registered_name_or_by_its_place() -> None:
    """A registered name is looked up; a place needs no registration, and may have a class or an object."""
    known = {"own": f"{__name__}:Own"}
    assert registered.find("own", known) == f"{__name__}:Own"
    assert registered.find("somebody.else_:Place.inner", known) == "somebody.else_:Place.inner"
    assert registered.make(f"{__name__}:Own").name == registered.make(f"{__name__}:made").name == "own"


@pytest.mark.parametrize("name", ["pp", "pp:", ":Own", "test-strategies:Own", "a.b", "a:b:c", "a/b.py:Own"])
def test_an_unknown_name_is_refused(name: str) -> None:
    """The message has the registered names in order, and a guess at the place."""
    guess = r" \(did you mean a:b\?\)" if name == "a.b" else ""
    message = f"^'{name}' is no strategy{guess}: allowed are mp, own, or package.module:attr"
    with pytest.raises(ValueError, match=message):
        registered.find(name, {"own": f"{__name__}:Own", "mp": "a:b"})


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("nowhere:Own", "cannot be imported: ModuleNotFoundError: No module named 'nowhere': install .* `pythonpath`"),
        (f"{__name__}:Missing", "cannot be imported: AttributeError: .*'Missing'"),
        (f"{__name__}:Neddy", r"cannot be imported: AttributeError: .* \(did you mean Needy\?\)"),
        (f"{__name__}:Needy", "cannot be imported: TypeError: .*'needed'"),
        ("broken:Own", r"cannot be imported: SyntaxError: .*broken\.py, line 1\)$"),
        ("unlucky:Own", r"cannot be imported: OSError: first line \(unlucky\.py, line 1\)$"),
        (f"{__name__}:Spaced", "is named 'two words': "),
        (f"{__name__}:Lacking", r"lacks backend, check, ranks \(see pytest_llmgpu.strategies.protocol"),
    ],
)
def test_a_bad_strategy_is_refused(place: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the place and the reason, for any error in the module of the user."""
    (tmp_path / "broken.py").write_text("def")
    (tmp_path / "unlucky.py").write_text("raise OSError('first line\\nsecond line')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"^strategy {place} {complaint}") as caught:
        registered.make(place)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("registrations", "complaint"),
    [
        ([{"own": "a:Own"}, {"own": "b:Own"}], "strategy 'own' is at two places, a:Own and b:Own$"),
        ([{"own": "a.Own"}], "'a.Own', the place of strategy 'own', is not allowed: "),
        ([{"own": Own}], f"<class '{__name__}.Own'>, the place of strategy 'own', is not allowed: "),
        ([["a:Own"]], r"\['a:Own'\] is not allowed: a mapping is needed$"),
        ([{5: "chat:Chatty"}], "5, the name of the strategy at chat:Chatty, is not allowed: "),
        ([{"own": "b:Own"}, {"a,b": "a:Own"}], "'a,b', the name of the strategy at a:Own, is not allowed: "),
        ([{"a/b": "a:Own"}], "'a/b', the name of the strategy at a:Own, is not allowed: "),
        ([{"": "a:Own"}], "'', the name of the strategy at a:Own, is not allowed: "),
    ],
)
def test_a_wrong_registration_is_refused(registrations: list[dict[str, str]], complaint: str) -> None:
    """The message has the name of the hook, since the user may have chosen no strategy."""
    with pytest.raises(ValueError, match=f"^pytest_llmgpu_strategies: {complaint}"):
        registered.merge(registrations)
