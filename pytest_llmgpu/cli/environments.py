"""The environment of a worktree whose project is installed: a venv with the packages of this environment, and it.

An installation of the user's own tree, editable or not, would be imported in every worktree. The venv has one `.pth`
file with the folders and the `.pth` files of this environment, without those of the project. The project is then
installed from the worktree as it is installed here: editable, or as a copy.
"""

from __future__ import annotations

import importlib.util
import re
import site
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_llmgpu.store import imports

_OURS = "zzz-llmgpu.pth"
"""The last file of its folder that Python reads: the project comes before what is installed here."""
_DEFAULT_BACKEND = "setuptools.build_meta"


class Installed(NamedTuple):
    """A project of the user's repository that is installed in this environment."""

    folder: Path
    """Its folder in the worktree."""
    editable: bool
    paths: Sequence[Path]
    """The `.pth` files of the installation."""


def installed(root: Path, repository: Path) -> list[Installed]:
    """Return the projects of a worktree that are installed in this environment from the repository (PEP 610)."""
    found = []
    for one in metadata.distributions():
        source = imports.source_of(one)
        if source is not None and source.path.is_relative_to(repository):
            folder = root / source.path.relative_to(repository)
            paths = [Path(str(path.locate())).resolve() for path in one.files or () if path.suffix == ".pth"]
            # Else it is of another repository, such as a submodule, which a worktree lacks, or ignored by git.
            if any((folder / name).is_file() for name in imports.PROJECT_FILES):
                found.append(Installed(folder, source.editable, paths))
    return found


def create(root: Path, repository: Path, projects: Sequence[Installed]) -> list[str]:
    """Create `.venv` in the root of a worktree, and return the command that installs the projects there."""
    folder = root / ".venv"
    venv.create(folder, symlinks=True)
    scripts = folder / "bin"
    variables = {"base": str(folder), "platbase": str(folder)}
    lines = _packages(root, repository, {path for project in projects for path in project.paths})
    (Path(sysconfig.get_path("purelib", vars=variables)) / _OURS).write_text("\n".join([*lines, ""]), encoding="utf-8")
    # `pytest` is a file whose first lines name the interpreter.
    here = f"{Path(sys.executable).parent}/python".encode()
    for path in Path(sysconfig.get_path("scripts")).iterdir():
        if path.is_file() and not (scripts / path.name).exists():
            with path.open("rb") as file:
                head = file.readline() + file.readline() if file.read(2) == b"#!" else b""
            if here in head:
                (scripts / path.name).write_bytes(path.read_bytes().replace(here, f"{scripts}/python".encode(), 1))
                (scripts / path.name).chmod(0o755)
    command = [str(scripts / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    if not any(metadata.distributions(name="pip")):  # an environment that uv made
        command = ["uv", "pip", "install", "--python", command[0], "--no-deps"]
    if all(_has_backend(project.folder) for project in projects):
        command.append("--no-build-isolation")
    for project in projects:
        command += [*["-e"] * project.editable, str(project.folder)]
    return command


def _packages(root: Path, repository: Path, own: set[Path]) -> Iterator[str]:
    """Yield the lines of the `.pth` file: the folders of this environment, and its `.pth` files but for `own`.

    Paths in the user's own tree become those of the worktree, as in PYTHONPATH, where git tracks them.
    """
    names = [name for name in (*site.getsitepackages(), site.getusersitepackages()) if name in sys.path]
    folders = dict.fromkeys(Path(name).resolve() for name in names)
    yield from map(str, folders)
    for path in (path for folder in folders for path in sorted(folder.glob("*.pth")) if path.resolve() not in own):
        for line in path.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            if line.startswith(("import ", "import\t")):
                yield line
            elif line.strip() and not line.startswith("#"):
                named = (path.parent / line.rstrip()).resolve()
                is_own = named.is_relative_to(repository) and not any(map(named.is_relative_to, folders))
                here = root / named.relative_to(repository) if is_own else named
                yield str(here if here.exists() else named)


def _has_backend(project: Path) -> bool:
    """Return whether this environment has what builds a project; else pip downloads that."""
    try:
        text = (project / "pyproject.toml").read_bytes() if (project / "pyproject.toml").exists() else b""
        system = msgspec.toml.decode(text, type=dict).get("build-system", {})
        backend = str(system.get("build-backend", _DEFAULT_BACKEND))
        needed = [re.split(r"[^\w.-]", str(one).strip())[0] for one in system.get("requires", ())]
        known = all(next(iter(metadata.distributions(name=name)), None) is not None for name in needed)
        return known and importlib.util.find_spec(backend.partition(".")[0].partition(":")[0]) is not None
    except (OSError, ValueError, ImportError):  # ImportError: Python 3.10 without tomli
        return True
