"""Repositories of git that a test makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
_SETTINGS = ("user.name=a", "user.email=a@b.c", "commit.gpgsign=false", "core.hooksPath=/dev/null")


def git(folder: Path, *arguments: str) -> str:
    """Return the output of git in a folder, without the hooks, the signatures and the repository of the caller."""
    environ = {name: value for name, value in os.environ.items() if name not in _REPOSITORY}
    command = ["git", "-C", str(folder), *(word for setting in _SETTINGS for word in ("-c", setting)), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout.strip()


def first_commit(folder: Path, *names: str, branch: str = "main") -> None:
    """Make a folder a repository whose only commit has all of its files, or those with these names."""
    git(folder, "init", "--quiet", f"--initial-branch={branch}")
    git(folder, "add", *(names or ["."]))
    git(folder, "commit", "--quiet", "-m", "first")
