"""Finds the commit that was measured: from git, or else from the variables of a CI system."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_llmgpu.report.privacy import anonymous
from pytest_llmgpu.report.report import Commit
from pytest_llmgpu.store import git

_TIMEOUT_S = 60.0
"""git reads every file of a large tree on a network disk, and a report needs its commit."""

_NOT_STORED = ":(exclude,top,glob)**/.llmgpu/**"

_VARIABLES = {
    "LLMGPU_COMMIT": ("LLMGPU_BRANCH",),
    "GITHUB_SHA": ("GITHUB_HEAD_REF", "GITHUB_REF_NAME"),
    "CI_COMMIT_SHA": ("CI_COMMIT_REF_NAME",),
}
"""Maps a variable with the commit to the variables with its branch; the one that a user sets comes first."""


def commit(rootdir: Path, environ: Mapping[str, str] = os.environ) -> Commit:
    """Return the commit of a working tree; without git and without variables of a CI system, the reason."""

    def first(names: Iterable[str]) -> str | None:
        return next((environ[name] for name in names if environ.get(name)), None)

    try:
        sha, branch = git.output(rootdir, "rev-parse", "HEAD", "--abbrev-ref", "HEAD", timeout_s=_TIMEOUT_S).split()
    except ValueError as error:
        for name, branches in _VARIABLES.items():
            if value := environ.get(name, "").strip():
                return Commit(sha=value, branch=first(branches), source=name, why={"dirty": anonymous(str(error))})
        return Commit(why={"sha": f"{anonymous(str(error))}; none of {', '.join(_VARIABLES)} is set"})
    # A detached HEAD: CI checks out a commit, not a branch.
    named = branch if branch != "HEAD" else first(name for branches in _VARIABLES.values() for name in branches)
    try:
        # The store does not count: every run writes to it, and it may be kept in git.
        status = ("status", "--porcelain", "--untracked-files=no", "--", ":/", _NOT_STORED)
        changed = git.output(rootdir, *status, timeout_s=_TIMEOUT_S)
    except ValueError as error:
        return Commit(sha=sha, branch=named, source="git", why={"dirty": anonymous(str(error))})
    return Commit(sha=sha, branch=named, dirty=bool(changed), source="git")
