"""Launches of a measuring command by `llmgpu ab` and `bisect`, of a commit in its worktree.

The report and the log of each launch are kept.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from pytest_llmgpu.cli import subprocesses, worktrees
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.cli.worktrees import Worktree
from pytest_llmgpu.gate.policy import Policy, find_policy, load_policy, policy_in_words, switched
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.store import store

LETTERS = 8
"""Digits of a commit in the output."""
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


def kept(parent: Path, name: str) -> Path:
    """Create a new folder for reports and logs, named after `name` and the time, in a folder of the store."""
    stem = f"{name}_{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%SZ}"
    for number in itertools.count(1):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            store.prepare(parent.parent)
            (path / "launches").mkdir(parents=True)
            break
        except FileExistsError:
            continue  # another run began in the same second
        except OSError as error:
            raise ValueError(f"folder {path}: cannot be created: {error.strerror}") from None
    return path.resolve()


def describe_ending(status: int, log: Path) -> str:
    """Return the exit status of a command, the last line of its output and the path of its log."""
    how = f"signal {-status}" if status < 0 else f"status {status}"
    last = subprocesses.last_line(log)
    return f"{how}{f': {last}' if last else ''}; see {log}"


def prepare(versions: Sequence[Version], setup: str | None) -> None:
    """Print the commits and create the environment of each worktree."""
    for one in versions:
        show(f"{one.name}  {one.tree.reference}  {one.tree.sha[:LETTERS]}")
    if worktrees.changed(Path()):
        show("note: your uncommitted changes are not measured")
    for one in versions:
        one.build(setup)
    if not any(Path(one.environ.get("VIRTUAL_ENV", "/")).is_relative_to(one.tree.root) for one in versions):
        show("note: the worktrees have no .venv: all commits run in the current environment")


class Version:
    """A commit in its worktree."""

    def __init__(self, name: str, tree: Worktree, kept: Path) -> None:
        """Set the name of the version in the output and in its files, which are written to the folder `kept`."""
        self.name, self.tree, self._kept = name, tree, kept
        self.environ = worktrees.environment(tree)

    def build(self, setup: str | None) -> None:
        """Run the shell command that creates the environment of the worktree; ValueError in one line if it fails."""
        if setup is None:
            return
        began, log = time.monotonic(), self._kept / f"{self.name}-setup.log"
        status = subprocesses.run(("/bin/sh", "-c", setup), self.tree.folder, self.environ, log)
        show(f"{self.name}-setup  {time.monotonic() - began:.1f} s")
        if status:
            raise ValueError(f"{self.name}: --setup ended with {describe_ending(status, log)}")
        self.environ = worktrees.environment(self.tree)

    def launch(self, command: Sequence[str], number: int, deselected: Sequence[str]) -> Report:
        """Run one launch of the measuring command to its end and return its report, without the tests `deselected`.

        ValueError in one line: the command cannot be run, or it ended without a complete report.
        """
        name, began = f"{self.name}-{number}", time.monotonic()
        path, log = self._kept / "launches" / f"{name}.json.gz", self._kept / "launches" / f"{name}.log"
        whole = [*command, f"{_JSON}={path}", *(f"--deselect={nodeid}" for nodeid in deselected)]
        status = subprocesses.run(whole, self.tree.folder, self.environ, log)
        show(f"{name}  {time.monotonic() - began:.1f} s")
        if status not in _COMPLETE or not path.exists():
            without = "" if path.exists() else " without a report"
            raise ValueError(f"{name}: {shlex.join(command)} ended{without} with {describe_ending(status, log)}")
        return file.load(path)


def add_command(parser: argparse.ArgumentParser) -> None:
    """Declare COMMAND and `--setup`."""
    parser.add_argument(
        "command",
        metavar="COMMAND",
        nargs="+",
        help="after --: the measuring command, such as pytest benchmarks; --llmgpu-json and --deselect are added",
    )
    parser.add_argument(
        "--setup",
        metavar="CMD",
        help="shell command that creates the environment of each worktree, such as 'python -m venv .venv && "
        ".venv/bin/pip install .'; .venv/bin then comes first in PATH",
    )


def policy_at(base: Worktree, arguments: argparse.Namespace) -> tuple[Policy, str]:
    """Return the policy in force and the line that names it.

    It is the file of --policy or the base commit's: a change must not edit the thresholds that it is judged by.
    """
    path = find_policy(base.folder) if arguments.policy is None else arguments.policy
    return switched(load_policy(path), arguments), policy_in_words(path)
