from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.repository import first_commit, git

from pytest_llmgpu.store import git as git_module
from pytest_llmgpu.store.git import commit


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working tree with one commit on the branch `work`."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "a.py").write_text("a", encoding="utf-8")
    first_commit(tmp_path, branch="work")
    return tmp_path


@pytest.fixture
def git_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes a script the program git."""

    def write(script: str) -> None:
        (tmp_path / "git").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / "git").chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return write


def test_git_names_commit_branch_and_changes(tree: Path) -> None:
    """CI variables do not count. A new report does not make the tree dirty, nor does a store that is kept in git."""
    found = commit(tree, {"GITHUB_SHA": "f" * 40, "GITHUB_REF_NAME": "other"})
    assert found.sha == git(tree, "rev-parse", "HEAD")
    assert (found.branch, found.dirty, found.source, found.why) == ("work", False, "git", {})
    (tree / "report.json").touch()
    assert commit(tree, {}, {"a.py", "../other.py"}).dirty is False
    (tree / "[a].py").touch()
    assert commit(tree, {}, {"[a].py"}).dirty is True, "a benchmark that git does not track is not in the commit"
    (tree / "[a].py").unlink()
    for folder in (tree, tree / "below"):
        last = folder / ".llmgpu" / "last.json"
        last.parent.mkdir(parents=True)
        last.write_text("1", encoding="utf-8")
        git(tree, "add", "-A")
        git(tree, "commit", "-q", "-m", "store")
        last.write_text("2", encoding="utf-8")
        assert commit(folder, {}).dirty is False
    (tree / "a.py").write_text("b", encoding="utf-8")
    assert [commit(folder, {}).dirty for folder in (tree, tree / "below")] == [True, True]


@pytest.mark.parametrize(
    ("environ", "branch"),
    [
        ({}, None),
        ({"GITHUB_REF_NAME": "main"}, "main"),
        ({"GITHUB_HEAD_REF": "fix", "GITHUB_REF_NAME": "12/merge"}, "fix"),
        ({"CI_COMMIT_REF_NAME": "dev"}, "dev"),
    ],
)
def test_a_detached_head_takes_the_branch_from_ci(tree: Path, environ: dict[str, str], branch: str | None) -> None:
    """CI checks out a commit; only its variables have the branch."""
    git(tree, "checkout", "-q", "--detach")
    assert commit(tree, environ).branch == branch


@pytest.mark.parametrize(
    ("environ", "sha", "branch", "source"),
    [
        ({"GITHUB_SHA": "a1", "GITHUB_REF_NAME": "main"}, "a1", "main", "GITHUB_SHA"),
        ({"CI_COMMIT_SHA": "b2", "CI_COMMIT_REF_NAME": "dev"}, "b2", "dev", "CI_COMMIT_SHA"),
        ({"LLMGPU_COMMIT": "c3", "GITHUB_SHA": "a1"}, "c3", None, "LLMGPU_COMMIT"),
        ({"LLMGPU_COMMIT": " ", "GITHUB_SHA": "a1"}, "a1", None, "GITHUB_SHA"),
    ],
)
def test_without_a_commit_of_git_ci_variables_name_it(
    tmp_path: Path, environ: dict[str, str], sha: str, branch: str | None, source: str
) -> None:
    """The variable that a user sets comes first; `dirty` is unknown, with the reason."""
    git(tmp_path, "init", "-q")
    found = commit(tmp_path, environ)
    assert (found.sha, found.branch, found.source, found.dirty) == (sha, branch, source, None)
    assert found.why["dirty"].startswith("git: fatal: ")


def test_a_commit_that_is_not_found_has_its_reason(
    tmp_path: Path, git_is: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run does not need git; a file system that hangs costs a minute, not the run. The reason has no home folder."""
    monkeypatch.setattr(git_module, "_STATUS_TIMEOUT_S", 0.1)
    monkeypatch.setenv("HOME", "/home/ada")
    git_is("exec tail -f /dev/null")
    found = commit(tmp_path, {})
    assert (found.sha, found.branch, found.dirty, found.source) == (None, None, None, None)
    reason = "git did not finish within 0.1 s; none of LLMGPU_COMMIT, GITHUB_SHA, CI_COMMIT_SHA"
    assert found.why["sha"].startswith(reason)
    git_is("echo \"fatal: detected dubious ownership in repository at '/home/ada/x'\" >&2; exit 128")
    assert "at '~/x'" in commit(tmp_path, {}).why["sha"]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert commit(tmp_path, {}).why["sha"].startswith("git cannot be run: No such file or directory")


def test_a_status_that_fails_still_leaves_the_commit(tmp_path: Path, git_is: Callable[[str], None]) -> None:
    """The commit of a huge tree is known although its state is not."""
    git_is('case "$*" in *porcelain*) echo fatal: too large >&2; exit 1;; esac; echo abc; echo work')
    found = commit(tmp_path, {})
    assert (found.sha, found.branch, found.dirty, found.source) == ("abc", "work", None, "git")
    assert found.why == {"dirty": "git: fatal: too large"}
