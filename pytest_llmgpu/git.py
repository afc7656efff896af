"""How git is run: it asks nobody for a password, leaves nothing behind, and its failures are one line."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["answer", "output", "reason"]

# No locks and no file system monitor: looking at a tree must not change it or leave a process behind.
_COMMAND = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


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
