"""Commits checked out in temporary git worktrees; the user's own working tree is not touched."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pytest_llmgpu.cli.subprocesses import handled
from pytest_llmgpu.store import git

_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
"""Variables that a git hook sets for its own repository; git would use that repository in every folder."""


class Worktree(NamedTuple):
    """A commit that is checked out in a folder of its own."""

    reference: str
    """The commit as the user named it."""
    sha: str
    root: Path
    folder: Path
    """The user's working directory within the worktree; commands run there."""
    repository: Path
    """The root of the user's own working tree."""


@contextmanager
def checked_out(references: Sequence[str], folder: Path = Path()) -> Iterator[list[Worktree]]:
    """Check out each commit in a worktree of its own, and remove the worktrees at the end, also after an error.

    They are in the folder for temporary files, which TMPDIR sets: each is as large as the working tree with its
    environment. Hooks of the repository do not run. ValueError in one line: there is no repository or no such commit,
    or the commit does not have that folder.
    """
    inside, repository = place(folder)
    commits = [sha_of(reference, folder) for reference in references]
    with temporary(folder) as add:
        trees = []
        for number, (reference, sha) in enumerate(zip(references, commits, strict=True)):
            root = add(f"{number}-{sha[:8]}", sha)
            if not (root / inside).is_dir():
                raise ValueError(f"commit {reference} has no folder {inside!r}, in which the command would run")
            trees.append(Worktree(reference, sha, root, root / inside, repository))
        yield trees


def place(folder: Path) -> tuple[str, Path]:
    """Return the path of a folder within its working tree, and the root of that."""
    answers = [git_output(folder, "rev-parse", f"--show-{what}").removesuffix("\n") for what in ("prefix", "toplevel")]
    return answers[0], Path(answers[1])


@contextmanager
def temporary(folder: Path) -> Iterator[Callable[[str, str], Path]]:
    """Yield a function that adds a worktree, and remove the worktrees at the end, also after an error.

    The arguments of the function are the name of the worktree and the hash of its commit. It returns its root.
    """
    parent = Path(tempfile.mkdtemp(prefix="llmgpu-")).resolve()
    made: list[Path] = []

    def add(name: str, sha: str) -> Path:
        root = parent / name
        made.append(root)
        git_output(folder, "worktree", "add", "--quiet", "--detach", str(root), sha)
        return root

    try:
        yield add
    finally:
        with handled(signal.SIG_IGN):  # git inherits that
            for root in made:
                # First, because git stops at a file that it cannot remove.
                shutil.rmtree(root, ignore_errors=True)
                with suppress(ValueError):  # git has no record of a worktree that it could not add
                    git_output(folder, "worktree", "remove", "--force", "--force", str(root))
            shutil.rmtree(parent, ignore_errors=True)


def sha_of(reference: str, folder: Path = Path()) -> str:
    """Return the hash of a commit that the user named; ValueError in one line if there is none."""
    if reference.startswith("-") or not reference.strip():
        raise ValueError(f"{reference!r} is not a commit: give a branch, a tag or the first digits of a commit")
    try:
        return git_output(folder, "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}").strip()
    except ValueError:
        raise ValueError(f"there is no commit {reference!r} in this repository; fetch it first") from None


def changed(folder: Path) -> bool:
    """Return whether the user's working tree has uncommitted changes; the worktrees do not have them."""
    return bool(git_output(folder, "status", "--porcelain", "--untracked-files=no"))


def environment(tree: Worktree, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of commands that run in a worktree.

    Its `.venv`, if there is one, comes first in PATH. Entries of PYTHONPATH in the user's own tree become those of the
    worktree. LLMGPU_BRANCH is the commit as the user named it, because a CI system's variables name only one branch.
    """
    found = {name: value for name, value in environ.items() if name not in _GIT_VARIABLES}
    found["LLMGPU_BRANCH"] = tree.reference
    if "PYTHONPATH" in found:
        entries = found["PYTHONPATH"].split(os.pathsep)
        for number, path in enumerate(map(Path, entries)):
            if path.is_relative_to(tree.repository):
                entries[number] = str(tree.root / path.relative_to(tree.repository))
        found["PYTHONPATH"] = os.pathsep.join(entries)
    for folder in (tree.folder, tree.root):
        scripts = folder / ".venv" / "bin"
        if scripts.is_dir():
            found["PATH"] = os.pathsep.join(filter(None, [str(scripts), found.get("PATH")]))
            found["VIRTUAL_ENV"] = str(scripts.parent)
            found.pop("PYTHONHOME", None)
            break
    return found


def git_output(folder: Path, *arguments: str) -> str:
    """Return the output of git in a folder, without hooks of the repository; ValueError in one line."""
    environ = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    # A checkout must not run code of the repository.
    return git.output(folder, "-c", f"core.hooksPath={os.devnull}", *arguments, environ=environ)
