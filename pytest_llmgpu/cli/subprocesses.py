"""A measuring command as a child process: its output goes to a log, and Ctrl-C ends it before this process."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the end of a job of CI, and a terminal that is closed."""
_GRACES_S = ((signal.SIGINT, 60.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, None))
"""The signals that end a command, with the time to wait after each: pytest writes its report after SIGINT."""


def run(command: Sequence[str], folder: Path, environ: Mapping[str, str], log: Path) -> int:
    """Run a command to its end and return its exit status, negative for the signal that ended it.

    The command runs in a session of its own without a terminal, so that Ctrl-C reaches only this process, which ends
    the command first. The PATH of `environ` is searched for the program; stdout and stderr are appended to the log.
    ValueError in one line: the program cannot be started.
    """
    process = None
    with log.open("ab") as output:
        try:
            with _held():
                process = subprocess.Popen(
                    list(command),
                    cwd=folder,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            return process.wait()
        except OSError as error:
            raise ValueError(f"{command[0]!r} cannot be run: {error.strerror}") from None
        finally:
            if process is not None:
                _end(process)


@contextmanager
def handled(handler: Any, numbers: Collection[int] = INTERRUPTS) -> Iterator[None]:
    """Give signals this handler within the block; outside the main thread, where nobody can, they keep theirs."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers} if main else {}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def interruptible() -> Iterator[None]:
    """Treat the other signals of `INTERRUPTS` like Ctrl-C.

    A background job ignores SIGINT, and its children inherit that: commands get the default handler here. What nohup
    started ignores SIGHUP on purpose.
    """
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    with handled(signal.default_int_handler, {*INTERRUPTS} - ignored):
        yield


@contextmanager
def _held() -> Iterator[None]:
    """Handle `INTERRUPTS` after the block: an interrupted start would leave a process that nobody ends."""
    received: list[int] = []
    try:
        with handled(lambda number, _: received.append(number)):
            yield
    finally:
        for late in received:
            signal.raise_signal(late)


def last_line(log: Path, most_bytes: int = 65536) -> str:
    """Return the last line of a log that is not blank; an empty string if there is none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - most_bytes))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next(filter(None, reversed(lines)), "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and its children; each further Ctrl-C proceeds to the next signal."""
    if process.poll() is not None:
        # Children that still run would disturb the next measurement.
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
