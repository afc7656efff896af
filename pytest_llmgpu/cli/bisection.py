"""git's own bisection in a temporary worktree, so that the user's tree and his own bisection are not touched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pytest_llmgpu.cli import worktrees
from pytest_llmgpu.gate.bisect import Mark

_FIRST_BAD = re.compile(r"^# first bad commit: \[([0-9a-f]+)\]", re.MULTILINE)
_ONLY_SKIPPED = re.compile(r"^# only skipped commits left to test", re.MULTILINE)


class CommitText(NamedTuple):
    """The text of a commit."""

    sha: str
    """The hash of the commit."""
    subject: str
    """The first line of its message."""
    author: str
    """The name of its author."""
    date: str
    """The author date, in the form of ISO 8601."""


class Bisection:
    """A bisection under way. git chooses each commit; its state is in the worktree."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def candidate(self) -> str | None:
        """Return the hash of the commit to measure next; None if no commit is left."""
        log = self._log()
        if _FIRST_BAD.search(log) or _ONLY_SKIPPED.search(log):
            return None
        return self._git("rev-parse", "--verify", "BISECT_HEAD").strip()

    def mark(self, sha: str, mark: Mark) -> None:
        """Mark a commit as good, bad or skipped.

        Raises:
            ValueError: one line: git cannot continue, for example because a merge base is bad.
        """
        try:
            self._git("bisect", mark, sha)
        except ValueError:
            if not _ONLY_SKIPPED.search(self._log()):
                raise

    def first_bad(self) -> str | None:
        """Return the hash of the first bad commit; None if it is not known."""
        found = _FIRST_BAD.search(self._log())
        return None if found is None else found[1]

    def remaining(self) -> list[str]:
        """Return the hashes of the commits of which one is the first bad commit, the newest first."""
        return self._git("rev-list", "refs/bisect/bad", "--not", "--glob=refs/bisect/good-*").split()

    def parents(self, sha: str) -> list[str]:
        """Return the hashes of the parents of a commit."""
        return self._git("rev-list", "--parents", "--max-count=1", sha).split()[1:]

    def text(self, sha: str) -> CommitText:
        """Return the text of a commit."""
        form = "--format=%H%x00%s%x00%an%x00%aI"
        return CommitText(*self._git("show", "--no-patch", "--no-show-signature", form, sha).rstrip("\n").split("\0"))

    def _log(self) -> str:
        return self._git("bisect", "log")

    def _git(self, *arguments: str) -> str:
        return worktrees.git_output(self._root, *arguments)


@contextmanager
def begun(good: str, bad: str, folder: Path = Path()) -> Iterator[Bisection]:
    """Begin a bisection in a worktree without files, and remove it at the end, also after an error.

    Raises:
        ValueError: one line: git cannot bisect between these commits.
    """
    if good == bad:
        raise ValueError(f"GOOD and BAD are the same commit, {good}: there is nothing to search")
    try:
        fork = worktrees.git_output(folder, "merge-base", good, bad).strip()
    except ValueError:
        raise ValueError(
            f"GOOD {good} and BAD {bad} have no common ancestor in this clone: fetch its history"
        ) from None
    if fork == bad:
        raise ValueError(f"GOOD {good} is a descendant of BAD {bad}: exchange them")
    if fork != good:
        raise ValueError(f"GOOD {good} is not an ancestor of BAD {bad}: give their merge base {fork} as GOOD")
    with worktrees.temporary(folder) as add:
        root = add("bisection", bad, "--no-checkout")
        worktrees.git_output(root, "bisect", "start", "--no-checkout", bad, good)
        yield Bisection(root)
