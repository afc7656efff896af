"""What SECURITY.md promises about the source of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest_llmgpu

_PACKAGE = Path(pytest_llmgpu.__file__).parent
_PIPES = {"ranks/local.py", "ranks/serving.py"}
"""These modules unpickle what comes from a process of this package, through pipes or an authenticated connection."""
_UNPICKLES = {("pickle", "load"), ("pickle", "loads"), ("pickle", "Unpickler"), ("torch", "load"), ("marshal", "loads")}


def _calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(_PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield path.relative_to(_PACKAGE).as_posix(), node


def test_pickles_come_through_pipes_only() -> None:
    """A file never decides which code runs: `pickle`, `torch.load` and their kind are not used on files."""
    found = set()
    for name, call in _calls():
        function = call.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            if (function.value.id, function.attr) in _UNPICKLES:
                found.add(name)
        elif isinstance(function, ast.Name) and function.id in {"eval", "exec", "__import__"}:
            found.add(name)
    assert found == _PIPES


def test_code_of_models_is_not_trusted() -> None:
    """`from_pretrained` and `from_config` of transformers run code of a model only if a keyword allows it."""
    values = [keyword.value for _, call in _calls() for keyword in call.keywords if keyword.arg == "trust_remote_code"]
    assert len(values) >= 4
    assert all(isinstance(value, ast.Constant) and value.value is False for value in values)
