"""Launches of a measuring command by `llmgpu ab`, `bisect` and `calibrate`; the report and log of each are kept."""

from __future__ import annotations

import argparse
import datetime
import itertools
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_llmgpu.cli import subprocesses
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.store import store

_JSON = "--llmgpu-json"
_COMPLETE = (0, 1)
"""Exit statuses of pytest with a complete report: a failed test has its outcome in it."""

_MOST = 1000
"""Most launches, which is the limit of the gate's statistics."""


def check(command: Sequence[str]) -> None:
    """Raise ValueError if the command has an option that each launch sets."""
    if any(part == _JSON or part.startswith(f"{_JSON}=") for part in command):
        raise ValueError(f"{_JSON}: each launch sets its own; remove it from COMMAND")


def count(text: str) -> int:
    """Return a number of launches, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {_MOST}")
    return int(text)


def kept(parent: Path, name: str = "") -> Path:
    """Create a new folder for reports and logs, named after `name` and the time, in a folder of the store.

    Raises:
        ValueError: one line: the folder cannot be created.
    """
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    stem = f"{name}_{now}" if name else now
    for number in itertools.count(1):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            store.prepare(parent.parent)
            path.mkdir(parents=True)
            (path / "launches").mkdir()
        except FileExistsError:
            continue  # another run began in the same second
        except OSError as error:
            raise ValueError(f"folder {path}: cannot be created: {error.strerror}") from None
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
        command: the measuring command, such as `pytest benchmarks`.
        name: the name of the launch, for its report and its log.
        folder: the working directory.
        environ: all environment variables.
        into: the folder that `kept` returned.
        deselected: node ids of tests that are left out.

    Raises:
        ValueError: one line: the command cannot be run, or it ended without a complete report.
    """
    began = time.monotonic()
    path, log = into / "launches" / f"{name}.json.gz", into / "launches" / f"{name}.log"
    whole = [*command, f"{_JSON}={path}", *(f"--deselect={nodeid}" for nodeid in deselected)]
    status = subprocesses.run(whole, folder, environ, log)
    show(f"{name}  {time.monotonic() - began:.1f} s")
    if status not in _COMPLETE or not path.exists():
        without = "" if path.exists() else " without a report"
        raise ValueError(f"{name}: {shlex.join(command)} ended{without} with {describe_ending(status, log)}")
    return file.load(path)


def describe_ending(status: int, log: Path) -> str:
    """Return the exit status of a command, the last line of its output and the path of its log."""
    how = f"signal {-status}" if status < 0 else f"status {status}"
    last = subprocesses.last_line(log)
    return f"{how}{f': {last}' if last else ''}; see {log}"
