"""Runs git, finds the commit that was measured, and reads files of a commit by `git:REV:PATH`.

git never asks for a password, changes nothing in the repository, and its errors are one line. A baseline or a policy
that is read from a commit of the main branch cannot be edited by the change that it judges.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from pytest_llmgpu.report.privacy import anonymous
from pytest_llmgpu.report.report import Commit
from pytest_llmgpu.report.text import guess_file

_REFERENCE = "git:"
_FETCH_TIMEOUT_S = 120.0  # a partial clone fetches the file from its remote
_STATUS_TIMEOUT_S = 60.0  # git reads every file of a large tree on a network disk, and a report needs its commit

# Without locks and file system monitor, reading a tree does not change it and leaves no process.
_COMMAND = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")

_NOT_STORED = ":(exclude,top,glob)**/.llmgpu/**"

_VARIABLES = {
    "LLMGPU_COMMIT": ("LLMGPU_BRANCH",),
    "GITHUB_SHA": ("GITHUB_HEAD_REF", "GITHUB_REF_NAME"),
    "CI_COMMIT_SHA": ("CI_COMMIT_REF_NAME",),
}
"""Maps a variable with the commit to the variables with its branch; the one that a user sets comes first."""


class AbsentError(ValueError):
    """There is no such file or report; one that is broken is another error."""


class MisspeltError(AbsentError):
    """There is none, and another file or name, which may be meant."""


FIRST = "; for a new baseline, measure without one, then promote the report"
"""What to do where the other one is not meant."""


def is_reference(name: str | Path) -> bool:
    """Return whether a name is of the form `git:REV:PATH`: `git:origin/main:pyproject.toml`."""
    return str(name).startswith(_REFERENCE)


def commit(rootdir: Path, environ: Mapping[str, str] = os.environ, needed: Collection[str] = ()) -> Commit:
    """Return the commit of a working tree; without git and without variables of a CI system, the reason.

    A tree is changed if a tracked file is, or if git neither tracks nor ignores one of the `needed` files, relative to
    `rootdir`.
    """

    def first(names: Iterable[str]) -> str | None:
        return next((environ[name] for name in names if environ.get(name)), None)

    try:
        sha, branch = output(rootdir, "rev-parse", "HEAD", "--abbrev-ref", "HEAD", timeout_s=_STATUS_TIMEOUT_S).split()
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
        changed = output(rootdir, *status, timeout_s=_STATUS_TIMEOUT_S)
        if inside := [f":(literal){name}" for name in needed if not name.startswith("..")]:
            untracked = ("ls-files", "--others", "--exclude-standard", "--", *inside)  # a build makes ignored files
            changed += output(rootdir, *untracked, timeout_s=_STATUS_TIMEOUT_S)
    except ValueError as error:
        return Commit(sha=sha, branch=named, source="git", why={"dirty": anonymous(str(error))})
    return Commit(sha=sha, branch=named, dirty=bool(changed), source="git")


def subjects(repository: Path, base: str, head: str) -> list[str]:
    """Return a line for each commit after one and up to another, the latest first; none where git cannot name them."""
    if not all(re.fullmatch(r"[0-9a-f]{7,64}", name) for name in (base, head)):
        return []  # a report can have any text
    try:
        found = output(repository, "log", "--format=%h %s", f"{base}..{head}", "--", timeout_s=_STATUS_TIMEOUT_S)
    except ValueError:  # a shallow clone lacks commits
        return []
    return found.splitlines()


def content(reference: str | Path, repository: Path) -> bytes:
    """Return the bytes of `git:REV:PATH`.

    The path is from the root of the repository; `repository` is a folder in the working tree. AbsentError if the commit
    has no such file, ValueError if it cannot be read: in one line that starts with the reference.
    """
    name = str(reference)
    revision, colon, path = name[len(_REFERENCE) :].partition(":")
    if not (revision and colon and path) or revision.startswith("-") or re.search(r"[\0\n]", name):
        raise ValueError(f"{name!r}: the form git:REV:PATH is needed, such as git:origin/main:baselines/report.json")
    begun = _run(repository, "rev-parse", "--git-dir", timeout_s=_FETCH_TIMEOUT_S)
    if begun.returncode:
        raise ValueError(f"{name}: git: {_error_line(begun)}")
    known = _run(repository, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", timeout_s=_FETCH_TIMEOUT_S)
    if known.returncode:
        raise ValueError(f"{name}: there is no commit {revision!r} in this repository; fetch it first")
    blob = b"%s:%s\n" % (known.stdout.strip(), path.encode())
    found = _run(repository, "cat-file", "--batch", text=blob, timeout_s=_FETCH_TIMEOUT_S).stdout
    head, _, data = found.partition(b"\n")
    kind = re.fullmatch(rb"[0-9a-f]+ (\w+) (\d+)", head)
    if kind is None:
        tree, (folder, _, last) = known.stdout.decode().strip(), path.rpartition("/")
        while (beside := _run(repository, "ls-tree", "-z", "--name-only", f"{tree}:{folder}")).returncode and folder:
            folder, _, last = folder.rpartition("/")
        similar = guess_file(last, beside.stdout.decode(errors="replace").split("\0"))
        every = _run(repository, "ls-tree", "-r", "-z", "--name-only", tree).stdout.decode(errors="replace").split("\0")
        similar = similar or next((f" (did you mean {one}?)" for one in every if one.endswith(f"/{path}")), "")
        text = f"{name}: {revision!r} has no file {path!r}{similar}; give the path from the root of the repository"
        raise (MisspeltError if similar else AbsentError)(text)
    if kind[1] != b"blob":
        raise ValueError(f"{name}: is not a file")
    return data[: int(kind[2])]


def _run(
    folder: Path,
    *arguments: str,
    text: bytes = b"",
    timeout_s: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[bytes]:
    """Return the finished process of git, to which `text` was given; ValueError if git is missing or did not finish."""
    try:
        return subprocess.run(
            [*_COMMAND, "-C", str(folder), *arguments],
            input=text,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={**environ, "GIT_TERMINAL_PROMPT": "0"},  # a password cannot be typed
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"git did not finish within {timeout_s:g} s") from None
    except OSError as error:
        raise ValueError(f"git cannot be run: {error.strerror}") from None


def output(folder: Path, *args: str, timeout_s: float | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the output of git; ValueError in one line if it is missing, did not finish in time, or failed."""
    done = _run(folder, *args, timeout_s=timeout_s, environ=environ)
    if done.returncode:
        raise ValueError(f"git: {_error_line(done)}")
    return done.stdout.decode(errors="replace")


def _error_line(failed: subprocess.CompletedProcess[bytes]) -> str:
    """Return the line of git's error output that has the reason."""
    lines = failed.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {failed.returncode}"]
    return next((line for line in lines if line.startswith("fatal")), lines[0])
