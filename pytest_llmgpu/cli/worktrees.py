"""Two commits side by side: git worktrees outside the user's own tree, which stays as it is, and removed at the end."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pytest_llmgpu.store import git

__all__ = ["Worktree", "changed", "checked_out", "environment"]

_HERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
"""Variables with which a git hook says which tree it runs for; they would send git to that one from anywhere."""


class Worktree(NamedTuple):
    """A commit that is checked out in a folder of its own."""

    reference: str
    """As it was asked for."""
    sha: str
    root: Path
    """Of the worktree."""
    folder: Path
    """Where the user stands, in this worktree: commands run there."""
    repository: Path
    """Root of the user's own tree."""


@contextmanager
def checked_out(references: Sequence[str], folder: Path = Path()) -> Iterator[list[Worktree]]:
    """Check commits out, each in a worktree of its own; remove them at the end, whatever ended it.

    They are made in the folder for temporary files, which TMPDIR names: each is as large as the tree and its
    environment. Hooks of the repository do not run.

    Args:
        references: what git calls the commits; two may be the same.
        folder: where the user stands.

    Raises:
        ValueError: no repository, no such commit, or a commit without that folder; one line.
    """
    repository = Path(_git(folder, "rev-parse", "--show-toplevel").removesuffix("\n"))
    inside = _git(folder, "rev-parse", "--show-prefix").removesuffix("\n")
    commits = [_commit(reference, folder) for reference in references]
    parent = Path(tempfile.mkdtemp(prefix="llmgpu-ab-")).resolve()
    made: list[Path] = []
    try:
        trees = []
        for number, (reference, sha) in enumerate(zip(references, commits, strict=True)):
            root = parent / f"{number}-{sha[:8]}"
            made.append(root)
            _git(folder, "worktree", "add", "--quiet", "--detach", str(root), sha)
            if not (root / inside).is_dir():
                raise ValueError(f"{reference} has no folder {inside!r}, where the command should run")
            trees.append(Worktree(reference, sha, root, root / inside, repository))
        yield trees
    finally:
        with _undisturbed():
            for root in made:
                _remove(folder, root)
            shutil.rmtree(parent, ignore_errors=True)


def changed(folder: Path) -> bool:
    """Return whether the user's tree has changes that no commit has: they are in no worktree."""
    return bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))


def environment(tree: Worktree, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of commands that run in a worktree.

    Its `.venv` comes first in PATH if there is one. What PYTHONPATH has of the user's own tree is that of the worktree.
    LLMGPU_BRANCH is the commit as it was asked for: a CI system's variables name the branch of one side only.
    """
    found = {name: value for name, value in environ.items() if name not in _HERE}
    found["LLMGPU_BRANCH"] = tree.reference
    if "PYTHONPATH" in found:
        found["PYTHONPATH"] = os.pathsep.join(_moved(entry, tree) for entry in found["PYTHONPATH"].split(os.pathsep))
    for folder in (tree.folder, tree.root):
        scripts = folder / ".venv" / "bin"
        if scripts.is_dir():
            found["PATH"] = os.pathsep.join(filter(None, [str(scripts), found.get("PATH")]))
            found["VIRTUAL_ENV"] = str(scripts.parent)
            found.pop("PYTHONHOME", None)
            break
    return found


def _moved(entry: str, tree: Worktree) -> str:
    path = Path(entry)
    if entry and path.is_absolute() and path.is_relative_to(tree.repository):
        return str(tree.root / path.relative_to(tree.repository))
    return entry


def _commit(reference: str, folder: Path) -> str:
    if reference.startswith("-") or not reference.strip():
        raise ValueError(f"{reference!r} is no commit: a branch, a tag or the beginning of a commit is needed")
    try:
        return _git(folder, "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}").strip()
    except ValueError:
        raise ValueError(f"git knows no commit {reference!r} here; it may have to be fetched first") from None


def _remove(folder: Path, root: Path) -> None:
    """Remove a worktree and what git knows of it, also where it was made in part or is gone already."""
    shutil.rmtree(root, ignore_errors=True)  # first, since git stops at a file that it cannot remove
    try:
        _git(folder, "worktree", "remove", "--force", "--force", str(root))
    except ValueError:
        return  # it was never made


def _git(folder: Path, *arguments: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in _HERE}
    # Without hooks: checking a commit out must run nothing of the user's.
    return git.output(folder, "-c", f"core.hooksPath={os.devnull}", *arguments, environ=environ)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let nobody end what is under way, neither with Ctrl-C nor with SIGTERM; git inherits that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
