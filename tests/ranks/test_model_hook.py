"""A rank finds the functions of `pytest_llmgpu_model` by their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_llmgpu.ranks.registered import ModelHook


@torch.no_grad()
def change(loaded: Any) -> None:
    """Change the model."""
    loaded.append("changed")


def give_back(case: Any) -> Any:
    """Return the argument."""
    return case


def test_a_function_gets_the_arguments_that_it_takes() -> None:
    """The module that is imported here is the one that the rank uses; a decorator of another module is none."""
    model: list[str] = []
    ModelHook.of(change, ("loaded",))(model, "case")  # type: ignore[arg-type]  # plain values suffice
    assert model == ["changed"]


def test_a_file_is_used_where_its_name_leads_elsewhere(tmp_path: Path) -> None:
    """Many conftest.py have one name; each is imported once."""
    path = tmp_path / "conftest.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\ncalls = []\n@dataclass\nclass A:\n"
        "    b: int\ndef change(loaded, case):\n    calls.append(loaded)\n    loaded.append(len(calls))\n"
    )
    hook = ModelHook("conftest", str(path), "change", ("loaded", "case"))
    numbers: list[int] = []
    for _ in range(2):
        hook(numbers, None)  # type: ignore[arg-type]  # as above
    assert numbers == [1, 2]


def test_a_function_that_returns_something_is_an_error() -> None:
    """It would be lost."""
    with pytest.raises(ValueError, match=r"test_model_hook.py: give_back returned str: change loaded.model in place"):
        ModelHook.of(give_back, ("case",))("model", "case")  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize("function", [lambda: None, [].append, print], ids=["lambda", "method", "builtin"])
def test_a_function_that_no_rank_finds_is_refused(function: Callable[..., object]) -> None:
    """The message has its name."""
    with pytest.raises(ValueError, match=r"^pytest_llmgpu_model: .* is not allowed: a function at the top level of a"):
        ModelHook.of(function, ("loaded",))
