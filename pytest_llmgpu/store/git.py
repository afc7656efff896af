"""How git is run: it asks nobody for a password, leaves nothing behind, and its failures are one line.

Also `git:REV:PATH`, a file as a commit has it: by which a change cannot edit what it is judged by.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["AbsentError", "answer", "content", "is_reference", "output", "reason"]

_REFERENCE = "git:"
_FETCH_TIMEOUT_S = 120.0  # a partial clone fetches the file now

# No locks and no file system monitor: looking at a tree must not change it or leave a process behind.
_COMMAND = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


class AbsentError(ValueError):
    """The commit is there, and has no such file."""


def is_reference(name: str | Path) -> bool:
    """Return whether a file is named by a commit that has it: `git:origin/main:pyproject.toml`."""
    return str(name).startswith(_REFERENCE)


def content(reference: str | Path, repository: Path) -> bytes:
    """Return the bytes of `git:REV:PATH`.

    Args:
        reference: the path in it starts at the repository's root.
        repository: folder inside the working tree.

    Raises:
        AbsentError: the commit has no such file.
        ValueError: it cannot be read; one line that begins with the reference.
    """
    name = str(reference)
    revision, colon, path = name[len(_REFERENCE) :].partition(":")
    if not (revision and colon and path) or revision.startswith("-") or re.search(r"[\0\n]", name):
        raise ValueError(f"{name!r}: git:REV:PATH is needed, such as git:origin/main:baselines/report.json")
    begun = answer(repository, "rev-parse", "--git-dir", timeout_s=_FETCH_TIMEOUT_S)
    if begun.returncode:
        raise ValueError(f"{name}: git: {reason(begun)}")
    commit = answer(
        repository, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", timeout_s=_FETCH_TIMEOUT_S
    )
    if commit.returncode:
        raise ValueError(f"{name}: git knows no commit {revision!r} here; it may have to be fetched first")
    blob = b"%s:%s\n" % (commit.stdout.strip(), path.encode())
    found = answer(repository, "cat-file", "--batch", text=blob, timeout_s=_FETCH_TIMEOUT_S).stdout
    head, _, data = found.partition(b"\n")
    kind = re.fullmatch(rb"[0-9a-f]+ (\w+) (\d+)", head)
    if kind is None:
        raise AbsentError(f"{name}: {revision!r} has no file {path!r}; paths start at the repository's root")
    if kind[1] != b"blob":
        raise ValueError(f"{name}: is no file")
    return data[: int(kind[2])]


def answer(
    folder: Path,
    *arguments: str,
    text: bytes = b"",
    timeout_s: float | None = None,
    environ: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[bytes]:
    """Return what git did, whether it succeeded or not.

    Args:
        folder: inside the repository that is meant.
        arguments: after `git`.
        text: what it reads from its standard input.
        timeout_s: None: as long as it takes.
        environ: its environment variables.

    Raises:
        ValueError: git is missing or hangs; one line.
    """
    try:
        return subprocess.run(
            [*_COMMAND, "-C", str(folder), *arguments],
            input=text,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={**environ, "GIT_TERMINAL_PROMPT": "0"},  # nobody is there to type a password
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"git did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ValueError(f"git cannot be run: {error.strerror}") from None


def output(
    folder: Path, *arguments: str, timeout_s: float | None = None, environ: Mapping[str, str] = os.environ
) -> str:
    """Return what git printed; the arguments are those of `answer`.

    Raises:
        ValueError: git is missing, hangs or fails; one line.
    """
    done = answer(folder, *arguments, timeout_s=timeout_s, environ=environ)
    if done.returncode:
        raise ValueError(f"git: {reason(done)}")
    return done.stdout.decode(errors="replace")


def reason(failed: subprocess.CompletedProcess[bytes]) -> str:
    """Return the line of git's complaint that says why."""
    lines = failed.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {failed.returncode}"]
    return next((line for line in lines if line.startswith("fatal")), lines[0])
