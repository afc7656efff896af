"""Modules of a project that came from another working tree."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.report_factory import known
from support.repository import first_commit

from pytest_llmgpu.store.imports import Project


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path, str], None]]:
    """Return a function that imports modules from a folder; they are forgotten at the end."""
    names: list[str] = []

    def load(folder: Path, *modules: str) -> None:
        monkeypatch.syspath_prepend(folder)
        for name in modules:
            names.append(name)
            importlib.import_module(name)

    yield load
    for name in names:
        sys.modules.pop(name, None)


def _tree(root: Path) -> Path:
    """Make a repository with a package in `src`, a module, and a member of a monorepo."""
    for name in (
        "pyproject.toml", "src/own_engine/__init__.py", "src/own_engine/logging/__init__.py", "own_script.py",
        "members/one/setup.py", "members/one/own_member/__init__.py", "vendored/torch/__init__.py", "types.py",
    ):  # fmt: skip
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    first_commit(root)
    return root


def test_modules_of_the_tree_are_its_top_level_names(tmp_path: Path) -> None:
    """Neither parts of packages, nor copies of other projects, nor names of the standard library are among them."""
    project = known(Project.at(_tree(tmp_path) / "members"))
    assert project.root == tmp_path.resolve()
    assert project.modules == ["own_engine", "own_member", "own_script"]
    assert Project.at(tmp_path.parent) is None or Project.at(tmp_path.parent) != project


def test_a_module_of_another_tree_is_named_with_its_file(tmp_path: Path, imported: Callable[..., None]) -> None:
    """A module of the tree is not, and neither is one that was not imported."""
    here, there = (_tree(tmp_path / name) for name in ("here", "there"))
    project = known(Project.at(here))
    imported(there / "src", "own_engine")
    imported(here, "own_script")
    assert project.imported_from_elsewhere() == {"own_engine": str(there / "src/own_engine/__init__.py")}


@pytest.mark.parametrize(
    ("of", "is_named"), [("here", False), ("here/dist/a.whl", False), ("there", True), (None, True)]
)
def test_a_copy_that_was_installed_from_the_tree_is_of_the_tree(
    tmp_path: Path, imported: Callable[..., None], of: str | None, is_named: bool
) -> None:
    """The installer keeps where a distribution came from; one of an index has no such file."""
    here, site = _tree(tmp_path / "here"), tmp_path / "site"
    (site / "own_engine").mkdir(parents=True)
    (site / "own_engine/__init__.py").write_text("")
    information = site / "own_engine-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: own-engine\nVersion: 1.0\n")
    (information / "top_level.txt").write_text("own_engine\n")
    if of is not None:
        url = (tmp_path / of).as_uri()
        (information / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {}}))
    imported(site, "own_engine")
    assert bool(known(Project.at(here)).imported_from_elsewhere()) is is_named
