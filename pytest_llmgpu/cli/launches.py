"""Commands that measure, run by a command of ours: one launch after another, each with a report and a log that stay."""

from __future__ import annotations

import argparse
import datetime
import itertools
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_llmgpu.cli.output import show

if TYPE_CHECKING:
    from pytest_llmgpu.report.report import Report

__all__ = ["check", "count", "ending", "kept", "launch"]

_JSON = "--llmgpu-json"
_RED_IS_FINE = (0, 1)
"""Statuses of pytest after which the report speaks: a test that failed has its outcome there."""

_MOST = 1000  # as many as statistics knows of


def check(command: Sequence[str]) -> None:
    """Refuse what each launch gets of its own; ValueError in one line."""
    if any(part == _JSON or part.startswith(f"{_JSON}=") for part in command):
        raise ValueError(f"{_JSON}: each launch gets one of its own; leave it out")


def count(text: str) -> int:
    """Return a number of launches, as argparse has it."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: a whole number from 1 to {_MOST} is needed")
    return int(text)


def kept(parent: Path, name: str = "") -> Path:
    """Make a folder of its own for the reports and logs, called like this and the time; ValueError in one line."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    called = f"{name}_{now}" if name else now
    for number in itertools.count(1):
        path = parent / (called if number == 1 else f"{called}-{number}")
        try:
            path.mkdir(parents=True)
            (path / "launches").mkdir()
        except FileExistsError:
            continue  # another one of this second
        except OSError as error:
            raise ValueError(f"{path}: cannot be made: {error.strerror}") from None
        break
    return path.resolve()


def launch(
    command: Sequence[str],
    name: str,
    folder: Path,
    *,
    environ: Mapping[str, str],
    into: Path,
    deselected: Sequence[str] = (),
) -> Report:
    """Run one launch to its end and return its report.

    Args:
        command: what measures, such as `pytest benchmarks`.
        name: of the launch.
        folder: where it runs.
        environ: its environment variables.
        into: what `kept` returned.
        deselected: node ids that are not to run.

    Raises:
        ValueError: it cannot be run, or ends without a report; one line that names its log.
    """
    from pytest_llmgpu.cli import subprocesses
    from pytest_llmgpu.report import file

    began = time.monotonic()
    path, log = into / "launches" / f"{name}.json.gz", into / "launches" / f"{name}.log"
    whole = [*command, f"{_JSON}={path}", *(f"--deselect={nodeid}" for nodeid in deselected)]
    status = subprocesses.run(whole, folder, environ, log)
    show(f"{name}  {time.monotonic() - began:.1f} s")
    if status not in _RED_IS_FINE or not path.exists():
        nothing = " without a report" * (not path.exists())
        raise ValueError(f"{name}: {shlex.join(command)} ended{nothing} with {ending(status, log)}")
    return file.load(path)


def ending(status: int, log: Path) -> str:
    """Return how a command ended: its status, and what it said last."""
    from pytest_llmgpu.cli import subprocesses

    how = f"signal {-status}" if status < 0 else f"status {status}"
    said = subprocesses.last_line(log)
    return f"{how}{f': {said}' if said else ''}; see {log}"
