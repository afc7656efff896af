"""Launches of a measuring command by `llmgpu ab` and `bisect`, of a commit in a temporary git worktree.

The user's own working tree is not touched. Reports and logs of launches are kept. Ctrl-C ends a command, then this.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pytest_llmgpu.cli import environments
from pytest_llmgpu.cli.output import complain, show
from pytest_llmgpu.gate import ab
from pytest_llmgpu.gate.policy import Policy, dump_policy, in_force
from pytest_llmgpu.processes import die_with_parent
from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.text import log_tail, plural
from pytest_llmgpu.store import git, store

_OWN_SETUP = (
    "give each commit an environment of its own, such as --setup 'python -m venv .venv && .venv/bin/pip install -e .'"
)
_LOCK = "llmgpu.lock"
"""A file beside the worktrees: folders of others have none."""
LETTERS = 8
"""Digits of a commit in the output."""
_JSON = "--llmgpu-json"
_COMPLETE = (0, 1)
"""Exit statuses of pytest with a complete report: a failed test has its outcome in it."""

_MOST = 1000
"""Most launches, which is the limit of the gate's statistics."""
_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
"""Variables that a git hook sets for its own repository; git would use that repository in every folder."""
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the end of a job of CI, and a terminal that is closed."""
_GRACES_S = ((signal.SIGINT, 60.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, None))
"""The signals that end a command, with the time to wait after each: pytest writes its report after SIGINT."""

_ERROR = re.compile(r"(E +)?([\w.]*Error:|ERROR:|\S+: error:)")
"""Begin of a line that says why a command failed, after which pytest writes others."""


def count(text: str) -> int:
    """Return a number of launches, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {_MOST}")
    return int(text)


def describe_ending(status: int, log: Path) -> str:
    """Return the exit status of a command, the last line of its output, of errors if it has one, and its log."""
    lines = [line.strip() for line in log_tail(log).splitlines() if line.strip()]
    last = "".join(f": {line}" for line in ([line for line in lines if _ERROR.match(line)] or lines)[-1:])
    return f"{f'signal {-status}' if status < 0 else f'status {status}'}{last}; see {log}"


class Worktree(NamedTuple):
    """A commit that is checked out in a folder of its own."""

    name: str
    """The name in the output and in the names of files."""
    reference: str
    """The commit as the user named it."""
    sha: str
    root: Path
    folder: Path
    """The user's working directory within the worktree; commands run there."""
    repository: Path
    """The root of the user's own working tree."""

    def build(self, setup: str | None, kept: Path) -> None:
        """Create the environment; ValueError in one line if that fails. Its log is written to the folder `kept`.

        A shell command `setup` creates it. Without one, the project is installed from the worktree if it is installed
        in the current environment from the user's own tree; else the current environment is used.
        """
        began, log = time.monotonic(), kept / f"{self.name}-setup.log"
        if setup is not None:
            command, what, remedy = ["/bin/sh", "-c", setup], "--setup", ""
        elif projects := environments.installed(self.root, self.repository):
            command = environments.create(self.root, self.repository, projects)
            what, remedy = "pip install of this commit", f"; {_OWN_SETUP}"
        else:
            return
        status = run(command, self.folder, self.environment(), log)
        show(f"{self.name}-setup  {time.monotonic() - began:.1f} s")
        if status:
            raise ValueError(f"{self.name}: {what} ended with {describe_ending(status, log)}{remedy}")

    def launch(self, command: Sequence[str], number: int, deselected: Sequence[str], kept: Path) -> Report:
        """Run one launch of the measuring command to its end and return its report, without the tests `deselected`.

        ValueError in one line: the command cannot be run, or it ended without a complete report.
        """
        name, began = f"{self.name}-{number}", time.monotonic()
        path, log = kept / "launches" / f"{name}.json.gz", kept / "launches" / f"{name}.log"
        whole = [*command, f"{_JSON}={path}", *(f"--deselect={nodeid}" for nodeid in deselected)]
        try:
            status = run(whole, self.folder, self.environment(), log)
        except KeyboardInterrupt:
            complain(f"interrupted: {plural(len(list(log.parent.glob('*.json.gz'))), 'report')} kept in {log.parent}")
            raise
        show(f"{name}  {time.monotonic() - began:.1f} s")
        if status not in _COMPLETE or not path.exists():
            without = "" if path.exists() else " without a report"
            raise ValueError(f"{name}: {shlex.join(command)} ended{without} with {describe_ending(status, log)}")
        report = file.load(path)
        if (found := report.commit.not_measured()) is not None:
            raise ValueError(f"{name}: the report names {found}: {_OWN_SETUP}")
        return report

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment variables of commands that run in the worktree.

        Its `.venv`, if there is one, comes first in PATH. Entries of PYTHONPATH in the user's own tree become those of
        the worktree. LLMGPU_BRANCH is the commit as the user named it: a CI system's variables name only one branch.
        """
        found = {name: value for name, value in environ.items() if name not in _GIT_VARIABLES}
        found["LLMGPU_BRANCH"] = self.reference
        if "PYTHONPATH" in found:
            entries = found["PYTHONPATH"].split(os.pathsep)
            for number, path in enumerate(map(Path, entries)):
                if path.is_relative_to(self.repository):
                    entries[number] = str(self.root / path.relative_to(self.repository))
            found["PYTHONPATH"] = os.pathsep.join(entries)
        for folder in (self.folder, self.root):
            scripts = folder / ".venv" / "bin"
            if scripts.is_dir():
                found["PATH"] = os.pathsep.join(filter(None, [str(scripts), found.get("PATH")]))
                found["VIRTUAL_ENV"] = str(scripts.parent)
                found.pop("PYTHONHOME", None)
                break
        return found


def add_command(parser: argparse.ArgumentParser) -> None:
    """Declare COMMAND and `--setup`."""
    text = "after --: the measuring command, such as pytest benchmarks; --llmgpu-json and --deselect are added"
    parser.add_argument("command", metavar="COMMAND", nargs="+", help=text)
    text = "shell command that creates the environment of each worktree, such as 'python -m venv .venv && "
    text += ".venv/bin/pip install .'; .venv/bin then comes first in PATH (default: the current environment, with the "
    text += "project of the worktree in place of one that is installed from your tree)"
    parser.add_argument("--setup", metavar="CMD", help=text)


def begin(
    arguments: argparse.Namespace, trees: Sequence[Worktree], looks: Sequence[int], parent: Path
) -> tuple[Path, Policy, str, ab.Measure]:
    """Print the two commits, create their environments, and write the policy to a new folder in a folder of the store.

    Return the folder, the policy in force, with its error rate divided by the comparisons, the line that names it, and
    the function that launches one side. The policy is the file of --policy or the first commit's: a change must not
    edit the thresholds that it is judged by. ValueError in one line if any of this fails.
    """
    if any(part == _JSON or part.startswith(f"{_JSON}=") for part in arguments.command):
        raise ValueError(f"{_JSON}: each launch sets its own; remove it from COMMAND")
    policy, in_words = in_force(arguments.policy, arguments, Path() if arguments.policy else trees[0].folder)
    policy = ab.split(policy, len(looks))
    commits = "_".join(tree.sha[:LETTERS] for tree in trees)
    path = parent / f"{commits}_{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%S.%fZ}"
    try:
        store.prepare(parent.parent)
        (path / "launches").mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"folder {path}: cannot be created: {error.strerror}") from None
    kept = path.resolve()
    (kept / "policy.toml").write_text(dump_policy(policy), encoding="utf-8")
    for tree in trees:
        show(f"{tree.name}  {tree.reference}  {tree.sha[:LETTERS]}")
    if git_output(Path(), "status", "--porcelain", "--untracked-files=no"):
        show("note: your uncommitted changes are not measured")
    for tree in trees:
        tree.build(arguments.setup, kept)
    if not any(Path(tree.environment().get("VIRTUAL_ENV", "/")).is_relative_to(tree.root) for tree in trees):
        show("note: the worktrees have no .venv: all commits run in the current environment")

    def measure(side: ab.Side, number: int, deselected: Sequence[str]) -> Report:
        return trees[ab.SIDES.index(side)].launch(arguments.command, number, deselected, kept)

    return kept, policy, in_words, measure


@contextmanager
def checked_out(references: Mapping[str, str]) -> Iterator[list[Worktree]]:
    """Check out commits by name, each in a worktree of its own, and remove these at the end, also after an error.

    They are in the folder for temporary files, which TMPDIR sets: each is as large as the working tree with its
    environment. Hooks of the repository do not run. ValueError in one line: there is no repository or no such commit,
    or the commit does not have the working directory.
    """
    inside, repository = place()
    commits = {name: sha_of(reference) for name, reference in references.items()}
    with temporary() as add:
        trees = []
        for name, reference in references.items():
            root = add(f"{name}-{commits[name][:LETTERS]}", commits[name])
            if not (root / inside).is_dir():
                raise ValueError(f"commit {reference} has no folder {inside!r}, in which the command would run")
            trees.append(Worktree(name, reference, commits[name], root, root / inside, repository))
        yield trees


def place() -> tuple[str, Path]:
    """Return the path of the working directory within its working tree, and the root of that."""
    answers = [git_output(Path(), "rev-parse", f"--show-{what}").removesuffix("\n") for what in ("prefix", "toplevel")]
    return answers[0], Path(answers[1])


@contextmanager
def temporary() -> Iterator[Callable[[str, str], Path]]:
    """Yield a function that adds a worktree, and remove the worktrees at the end, also after an error.

    The arguments of the function are the name of the worktree and the hash of its commit. It returns its root. Those
    of a process that was killed, whose lock nobody holds, are removed first.
    """
    left: dict[Path, list[Path]] = {}
    for line in git_output(Path(), "worktree", "list", "--porcelain").splitlines():
        if line.startswith("worktree "):
            root = Path(line.removeprefix("worktree "))
            left.setdefault(root.parent, []).append(root)
    for folder, roots in left.items():
        # Held by another process, of another kind, or of another user.
        with suppress(OSError), _locked(folder):
            _remove(folder, roots)
    parent = Path(tempfile.mkdtemp(prefix="llmgpu-")).resolve()
    (parent / _LOCK).touch()
    made: list[Path] = []

    def add(name: str, sha: str) -> Path:
        root = parent / name
        made.append(root)
        git_output(Path(), "worktree", "add", "--quiet", "--detach", str(root), sha)
        return root

    with _locked(parent):
        try:
            yield add
        finally:
            with handled(signal.SIG_IGN):  # git inherits that
                _remove(parent, made)


def _remove(parent: Path, roots: Sequence[Path]) -> None:
    """Remove worktrees, and the folder that `temporary` made for them."""
    for root in roots:
        # First, because git stops at a file that it cannot remove.
        shutil.rmtree(root, ignore_errors=True)
        with suppress(ValueError):  # git has no record of a worktree that it could not add
            git_output(Path(), "worktree", "remove", "--force", "--force", str(root))
    shutil.rmtree(parent, ignore_errors=True)


@contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """Hold the lock of a folder that `temporary` made; the kernel ends it with this process.

    FileNotFoundError for another folder, BlockingIOError if another process has the lock.
    """
    with (parent / _LOCK).open("r+") as lock:  # NFS locks no file that is open for reading alone
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def sha_of(reference: str) -> str:
    """Return the hash of a commit that the user named; ValueError in one line if there is none."""
    if reference.startswith("-") or not reference.strip():
        raise ValueError(f"{reference!r} is not a commit: give a branch, a tag or the first digits of a commit")
    try:
        return git_output(Path(), "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}").strip()
    except ValueError:
        raise ValueError(f"there is no commit {reference!r} in this repository; fetch it first") from None


def git_output(folder: Path, *arguments: str) -> str:
    """Return the output of git in a folder, without hooks of the repository; ValueError in one line."""
    environ = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    # A checkout must not run code of the repository.
    return git.output(folder, "-c", f"core.hooksPath={os.devnull}", *arguments, environ=environ)


def run(command: Sequence[str], folder: Path, environ: Mapping[str, str], log: Path) -> int:
    """Run a command to its end and return its exit status, negative for the signal that ended it.

    The command runs in a session of its own without a terminal, so that Ctrl-C reaches only this process, which ends
    the command first. The PATH of `environ` is searched for the program; stdout and stderr are appended to the log.
    ValueError in one line: the program cannot be started.
    """
    process = None
    received: list[int] = []
    with log.open("ab") as output:
        try:
            # An interrupted start would leave a process that nobody ends: the signal waits until it is started.
            try:
                with handled(lambda number, _: received.append(number)):
                    process = subprocess.Popen(
                        list(command),
                        cwd=folder,
                        env=dict(environ),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - this process has one thread
                    )
            finally:
                for late in received:
                    signal.raise_signal(late)
            return process.wait()
        except OSError as error:
            raise ValueError(f"{command[0]!r} cannot be run: {error.strerror}") from None
        finally:
            if process is not None:
                _end(process)


@contextmanager
def handled(handler: Any, numbers: Collection[int] = INTERRUPTS) -> Iterator[None]:
    """Give signals this handler within the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
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
