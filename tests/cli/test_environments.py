from __future__ import annotations

import site
import subprocess
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.measured_project import STEADY, Project

from pytest_llmgpu.cli import environments

_BUILD = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
_PYPROJECT = f'{_BUILD}[project]\nname = "engine"\nversion = "1"\n[tool.setuptools.packages.find]\nwhere = ["WHERE"]\n'


def _environment(folder: Path) -> Path:
    """Make an environment with the packages of this one, in which a project can be installed; return its Python."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text("\n".join(["relative", *site.getsitepackages()]))
    (packages / "relative").mkdir()
    (packages / "relative" / "dependency.py").write_text("CALLS = 64")
    return folder / "bin" / "python"


def _output(*words: str | Path, status: int = 0) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_an_environment_without_pip_is_of_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of the new environment is named."""
    monkeypatch.setattr("pytest_llmgpu.cli.environments.metadata.distributions", lambda **_: iter(()))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    *command, python, _ = environments.create(tmp_path, tmp_path, [])[:6]
    assert command == ["uv", "pip", "install", "--python"]
    assert Path(python).exists()


def test_what_a_worktree_lacks_stays_that_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone that git ignores is imported from the user's tree, and the folder of a submodule is no project."""
    root, repository, packages = tmp_path / "root", tmp_path / "repository", tmp_path / "packages"
    for folder in (root / "src", root / "submodule", repository / "src", repository / "ignored", packages):
        folder.mkdir(parents=True)
    (packages / "own.pth").write_text(f"{repository / 'src'}\n{repository / 'ignored'}\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr("site.getsitepackages", lambda: [str(packages)])
    source = SimpleNamespace(path=repository / "submodule", editable=True)
    monkeypatch.setattr("pytest_llmgpu.store.imports.source_of", lambda _: source)
    assert environments.installed(root, repository) == []
    environments.create(root, repository, [])
    (written,) = root.glob(".venv/lib/python*/site-packages/zzz-llmgpu.pth")
    assert written.read_text().splitlines()[-2:] == [str(root / "src"), str(repository / "ignored")]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "how"), [("src", ["-e"]), (".", ["-e"]), ("src", [])])
def test_an_installed_project_is_measured_at_each_commit(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, how: list[str]
) -> None:
    """`ab` finds the change, and the commit that cannot be installed is refused with the line that mends it."""
    package = project.root / where / "engine"
    package.mkdir(parents=True)
    (project.root / ".gitignore").write_text(".llmgpu\n.venv\n*.egg-info\nbuild\n")
    for name, calls in (("base", "CALLS"), ("head", "CALLS + 1")):
        (package / "__init__.py").write_text(f"import dependency\nCALLS = dependency.{calls}\n")
        project.commit(name, _PYPROJECT.replace("WHERE", where), seconds=STEADY, installed=True)
    project.commit("broken", "[build-system]\n", seconds=STEADY, installed=True)
    project.git("checkout", "--quiet", "head")
    python = _environment(project.root / ".venv")
    _output(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", *how, project.root)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    command = (python, "-m", "pytest_llmgpu.cli", "ab", "base")
    measuring = ("--launches", "1", "--", "python", "measure.py")
    out = _output(*command, "head", *measuring, status=1)
    assert "REGRESSED" in out
    assert "current environment" not in out
    assert [len(report.cases) for report in project.reports()] == [2, 2]
    error = _output(*command, "broken", *measuring, status=2).splitlines()[-1]
    assert error.startswith("llmgpu: head: ")
    assert "--setup 'python -m venv" in error
    assert "pip install of this commit ended with status 1" in error
