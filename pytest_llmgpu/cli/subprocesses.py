"""How a command is run in a worktree and ended: its output goes to a file; Ctrl-C ends it before us."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["interruptible", "last_line", "run"]

_GRACES_S = ((signal.SIGINT, 60.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, None))
"""How a command is asked to end, and how long it may take: pytest writes its report after the first."""


def run(command: Sequence[str], folder: Path, environ: Mapping[str, str], log: Path) -> int:
    """Run a command to its end and return its exit status, negative for the signal that ended it.

    It runs in a session of its own, without a terminal: what is typed there is for this process only, which ends the
    command before it ends itself.

    Args:
        command: program and arguments; the program is looked for in the PATH of `environ`.
        folder: working directory.
        environ: all environment variables.
        log: file that stdout and stderr go to; it is added to.

    Raises:
        ValueError: the program cannot be started; one line.
    """
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                list(command),
                cwd=folder,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ValueError(f"{command[0]!r} cannot be run: {error.strerror}") from None
        try:
            return process.wait()
        finally:
            _end(process)


@contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGTERM, with which a CI system cancels a job, end things as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def last_line(log: Path, most_bytes: int = 65536) -> str:
    """Return the last line of a log that is not empty; empty where there is none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - most_bytes))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next(filter(None, reversed(lines)), "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started, asking first; each further Ctrl-C asks more strongly."""
    if process.poll() is not None:
        # What it has left running would be measured with the next command.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return
    for number, grace_s in _GRACES_S:
        if process.poll() is not None:
            return
        try:
            os.killpg(process.pid, number)
            process.wait(grace_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt, ProcessLookupError):
            continue
