"""Modules of the measured project that came from elsewhere: a report names a commit, and must have measured it.

The usual cause is an installation of another working tree, editable or not, which comes first wherever pytest starts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pytest_llmgpu.store import git

PROJECT_FILES = {"pyproject.toml", "setup.py", "setup.cfg"}
_NO_MODULES = {"setup", "conftest"}
_TIMEOUT_S = 60.0


class Source(NamedTuple):
    """The files of this machine from which a distribution was installed."""

    path: Path
    editable: bool


def source_of(distribution: metadata.Distribution) -> Source | None:
    """Return what a distribution was installed from (PEP 610); None where it came from elsewhere."""
    try:
        found = json.loads(distribution.read_text("direct_url.json") or "{}")
        url = urlsplit(found.get("url", ""))
        path = Path(unquote(url.path)).resolve()
        return Source(path, bool(found.get("dir_info", {}).get("editable"))) if url.scheme == "file" else None
    except (ValueError, AttributeError, TypeError):  # somebody else's file
        return None


class Project(NamedTuple):
    """The working tree of a commit, with the modules that an import should find there."""

    root: Path
    modules: Sequence[str]
    """Top-level names of packages and modules: beside a pyproject.toml or in its `src`, and in the root."""

    @classmethod
    def at(cls, folder: Path) -> Project | None:
        """Return the project of a folder; None where git knows no working tree."""
        try:
            root = Path(git.output(folder, "rev-parse", "--show-toplevel", timeout_s=_TIMEOUT_S).removesuffix("\n"))
            listed = git.output(root, "ls-files", "-z", timeout_s=_TIMEOUT_S).split("\0")
        except ValueError:
            return None
        files = [PurePosixPath(name) for name in listed]
        folders = {PurePosixPath(), *(path.parent for path in files if path.name in PROJECT_FILES)}
        folders |= {folder / "src" for folder in folders}
        packages = [path.parent for path in files if path.name == "__init__.py"]
        found = {path.name for path in packages if path.parent in folders and path.name}
        found |= {path.stem for path in files if path.suffix == ".py" and path.parent in folders}
        found -= sys.stdlib_module_names | _NO_MODULES
        return cls(root.resolve(), sorted(name for name in found if name.isidentifier()))

    def imported_from_elsewhere(self) -> dict[str, str]:
        """Return the modules that this process imported from outside of the tree, with their files.

        A copy that was installed from the tree is accepted.
        """
        found = {}
        for name in self.modules:
            path = getattr(sys.modules.get(name), "__file__", None)
            if path is None or Path(path).resolve().is_relative_to(self.root):
                continue
            distributions = metadata.packages_distributions().get(name, ())
            sources = [source_of(metadata.distribution(one)) for one in distributions]  # PEP 610
            if not any(source is not None and source.path.is_relative_to(self.root) for source in sources):
                found[name] = str(path)
        return found
