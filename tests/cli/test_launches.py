from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.repository import first_commit, git
from support.worlds import ends

from pytest_llmgpu.cli.launches import Worktree, checked_out, describe_ending, handled, interruptible, run


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with two commits, the second with one more folder; no worktree and no temporary file remains."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    root = tmp_path / "repository"
    root.mkdir()
    (root / "speed").write_text("1")
    first_commit(root)
    (root / "sub").mkdir()
    (root / "sub" / "speed").write_text("2")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "second")
    monkeypatch.chdir(root)
    yield root
    assert list((tmp_path / "tmp").iterdir()) == []
    assert len(git(root, "worktree", "list").splitlines()) == 1


def _state(repository: Path) -> list[str]:
    commands = (("status", "--porcelain", "--branch"), ("for-each-ref",), ("stash", "list"))
    return [git(repository, *command) for command in commands]


def test_commits_are_checked_out_side_by_side(repository: Path) -> None:
    """The user's tree keeps its branch and its changes."""
    (repository / "speed").write_text("changed")
    before = _state(repository)
    with checked_out({"a": "main~1", "b": "main", "c": "main"}) as trees:
        assert [tree.reference for tree in trees] == ["main~1", "main", "main"]
        assert [tree.sha for tree in trees] == git(repository, "rev-parse", "main~1", "main", "main").split()
        assert [(tree.root / "speed").read_text() for tree in trees] == ["1"] * 3
        assert [(tree.root / "sub").exists() for tree in trees] == [False, True, True]
        assert not any(tree.root.is_relative_to(repository) for tree in trees)
    assert _state(repository) == before
    assert (repository / "speed").read_text() == "changed"


def test_commands_run_in_the_users_folder(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a folder of each worktree."""
    monkeypatch.chdir(repository / "sub")
    with checked_out({"a": "main", "b": "main"}) as trees:
        assert [(tree.folder / "speed").read_text() for tree in trees] == ["2", "2"]


@pytest.mark.parametrize(
    ("reference", "folder", "reason"),
    [
        ("nowhere", ".", "no commit 'nowhere'"),
        ("--all", ".", "'--all' is not a commit"),
        ("", ".", "'' is not a commit"),
        ("main~1", "sub", "main~1 has no folder 'sub/'"),
    ],
)
def test_an_unknown_commit_is_refused(
    repository: Path, monkeypatch: pytest.MonkeyPatch, reference: str, folder: str, reason: str
) -> None:
    """It is one line; a commit without the user's folder is refused, too."""
    monkeypatch.chdir(repository / folder)
    with pytest.raises(ValueError, match=reason), checked_out({"a": "main", "b": reference}):
        pass


@pytest.mark.usefixtures("repository")
def test_worktrees_are_removed_after_an_error() -> None:
    """Files that were created in them are removed too, and those that somebody removed leave no record in git."""

    def measure() -> None:
        with checked_out({"a": "main~1", "b": "main"}) as trees:
            (trees[0].root / ".venv").mkdir()
            (trees[0].root / ".venv" / "library").write_text("x")
            shutil.rmtree(trees[1].root)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()


@pytest.mark.usefixtures("repository")
def test_a_second_interrupt_does_not_stop_the_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the removal, Ctrl-C works as before."""
    remove = shutil.rmtree

    def interrupted(path: Path, *, ignore_errors: bool) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr("shutil.rmtree", interrupted)
    with checked_out({"a": "main~1", "b": "main"}):
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_hooks_of_the_repository_do_not_run(repository: Path) -> None:
    """GIT_DIR of a hook that runs `llmgpu` is ignored."""
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {repository}/ran\n")
    hook.chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GIT_DIR", str(repository / "nowhere"))
        with checked_out({"a": "main"}) as (tree,):
            assert "GIT_DIR" not in tree.environment()
    assert not (repository / "ran").exists()


def test_the_worktrees_environment_comes_first(tmp_path: Path) -> None:
    """Its .venv is first in PATH, PYTHONPATH names its files, and LLMGPU_BRANCH its commit."""
    tree = Worktree("head", "main", "a" * 40, tmp_path / "wt", tmp_path / "wt" / "sub", tmp_path / "own")
    given = {"PATH": "/bin", "PYTHONPATH": f"{tmp_path}/own/src:/other:", "PYTHONHOME": "/x", "HOME": "/h"}
    plain = tree.environment(given)
    assert plain == {**given, "PYTHONPATH": f"{tmp_path}/wt/src:/other:", "LLMGPU_BRANCH": "main"}
    scripts = tree.root / ".venv" / "bin"
    scripts.mkdir(parents=True)
    found = tree.environment(given)
    assert found["PATH"] == f"{scripts}:/bin"
    assert found["VIRTUAL_ENV"] == str(tree.root / ".venv")
    assert "PYTHONHOME" not in found
    nearer = tree.folder / ".venv" / "bin"
    nearer.mkdir(parents=True)
    assert tree.environment({})["PATH"] == str(nearer)


def _python(code: str) -> Sequence[str]:
    return [sys.executable, "-c", code]


def test_a_command_runs_with_its_folder_environment_and_log(tmp_path: Path) -> None:
    """Both output streams are appended to the log, and the exit status is returned."""
    log = tmp_path / "log"
    log.write_text("before\n")
    code = (
        "import os, sys; print(os.getcwd(), os.environ['X'], flush=True); print('last', file=sys.stderr); sys.exit(3)"
    )
    assert run(_python(code), tmp_path, {"X": "y"}, log) == 3
    assert log.read_text() == f"before\n{tmp_path} y\nlast\n"
    assert describe_ending(3, log) == f"status 3: last; see {log}"
    log.write_text("usage: pytest\npytest: error: no such option: --x\n  rootdir: /\n")
    assert describe_ending(4, log) == f"status 4: pytest: error: no such option: --x; see {log}"
    log.write_text("")
    assert describe_ending(-9, log) == f"signal 9; see {log}"
    assert run(_python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), tmp_path, {}, log) == -9


_STUBBORN = """
import os, signal

def ignore(number, frame):
    print("ignored", number, flush=True)
    open({noted!r}, "w").close()

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, ignore)
os.kill({parent}, signal.SIGINT)
while True:
    signal.pause()
"""


def test_a_command_of_nohup_survives_its_terminal() -> None:
    """SIGHUP stays ignored."""
    with handled(signal.SIG_IGN, {signal.SIGHUP}), interruptible():
        signal.raise_signal(signal.SIGHUP)


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_ctrl_c_ends_the_command_first(tmp_path: Path, sent: str) -> None:
    """The command gets SIGINT once and may write its report before it ends."""
    code = (
        "import os, signal\n"
        f"os.kill({os.getpid()}, signal.{sent})\n"
        "try:\n    while True:\n        signal.pause()\n"
        "except KeyboardInterrupt:\n    print('written', flush=True)\n"
    )
    log = tmp_path / "log"
    with interruptible(), pytest.raises(KeyboardInterrupt):
        run(_python(code), tmp_path, {}, log)
    assert log.read_text() == "written\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ctrl_c_while_the_command_starts_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command may run before its start returns: it must not run on alone."""
    started = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(["sleep", "600"], tmp_path, dict(os.environ), tmp_path / "log")
    assert ends(started[0])


def test_a_command_that_ignores_ctrl_c_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets SIGINT, SIGTERM and SIGKILL in turn: each time limit is over once the command has ignored the signal."""
    noted, log = tmp_path / "noted", tmp_path / "log"
    os.mkfifo(noted)
    wait = subprocess.Popen.wait

    def run_out(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        noted.read_bytes()
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", run_out)
    with pytest.raises(KeyboardInterrupt):
        run(_python(_STUBBORN.format(noted=str(noted), parent=os.getpid())), tmp_path, {}, log)
    assert log.read_text().splitlines() == ["ignored 2", "ignored 15"]


_KILLED = """
import os, sys
from pathlib import Path
from pytest_llmgpu.cli.launches import checked_out, run
with checked_out({"a": "main", "b": "main"}):
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    run([sys.executable, "-c", code], Path(), os.environ, Path(sys.argv[1]))
"""


def test_what_a_killed_process_left_is_removed(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command ends with it; worktrees of a living process and of the user stay."""
    log = tmp_path / "log"
    os.mkfifo(log)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    killed = subprocess.Popen([*_python(_KILLED), str(log)])
    with log.open() as lines:
        command = int(lines.readline())
        killed.kill()
        killed.wait()
        assert ends(command)
    assert len(git(repository, "worktree", "list").splitlines()) == 3
    git(repository, "worktree", "add", "--quiet", str(tmp_path / "own"))
    (tmp_path / "llmgpu.lock").mkdir()  # no lock of ours can be taken there, as in a folder of another user
    with checked_out({"a": "main"}) as living, checked_out({"a": "main"}):
        assert len(git(repository, "worktree", "list").splitlines()) == 4
        assert living[0].root.is_dir()
    git(repository, "worktree", "remove", str(tmp_path / "own"))


def test_children_of_a_command_are_ended(tmp_path: Path) -> None:
    """They would disturb the next measurement."""
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {pid}"]
    assert run(command, tmp_path, dict(os.environ), tmp_path / "log") == 0
    assert ends(int(pid.read_text()))
