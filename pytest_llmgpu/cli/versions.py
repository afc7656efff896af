"""A commit that `llmgpu ab` or `llmgpu bisect` measures: its worktree, its environment and its launches."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from pytest_llmgpu.cli import launches, subprocesses, worktrees
from pytest_llmgpu.cli.output import show
from pytest_llmgpu.cli.worktrees import Worktree
from pytest_llmgpu.gate import policy_file
from pytest_llmgpu.gate.policy import Policy, switched
from pytest_llmgpu.report.report import Report

LETTERS = 8
"""Digits of a commit in the output."""


def prepare(versions: Sequence[Version], setup: str | None) -> None:
    """Print the commits and create the environment of each worktree."""
    for one in versions:
        show(f"{one.name}  {one.tree.reference}  {one.tree.sha[:LETTERS]}")
    if worktrees.changed(Path()):
        show("note: your uncommitted changes are not measured")
    for one in versions:
        one.build(setup)
    if all(one.shares_environment for one in versions):
        show("note: the worktrees have no .venv: all commits run in the current environment")


class Version:
    """A commit in its worktree."""

    def __init__(self, name: str, tree: Worktree, kept: Path) -> None:
        """Set the name of the version in the output and in its files, which are written to the folder `kept`."""
        self.name, self.tree = name, tree
        self._kept = kept
        self._environ = worktrees.environment(tree)

    @property
    def shares_environment(self) -> bool:
        """True if the worktree has no .venv, so that its commands run in the current environment."""
        return not Path(self._environ.get("VIRTUAL_ENV", "/")).is_relative_to(self.tree.root)

    def build(self, setup: str | None) -> None:
        """Run the shell command that creates the environment of the worktree; ValueError in one line if it fails."""
        if setup is None:
            return
        began, log = time.monotonic(), self._kept / f"{self.name}-setup.log"
        status = subprocesses.run(("/bin/sh", "-c", setup), self.tree.folder, self._environ, log)
        show(f"{self.name}-setup  {time.monotonic() - began:.1f} s")
        if status:
            raise ValueError(f"{self.name}: --setup ended with {launches.describe_ending(status, log)}")
        self._environ = worktrees.environment(self.tree)

    def launch(self, command: Sequence[str], number: int, deselected: Sequence[str]) -> Report:
        """Run one launch and return its report; see `launches.launch`."""
        return launches.launch(
            command,
            f"{self.name}-{number}",
            self.tree.folder,
            environ=self._environ,
            into=self._kept,
            deselected=deselected,
        )


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
    path = policy_file.find(base.folder) if arguments.policy is None else arguments.policy
    return switched(policy_file.load(path), arguments), policy_file.in_words(path)
