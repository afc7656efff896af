from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from pytest_llmgpu.cli.bisection import begun
from pytest_llmgpu.store import git

_ENVIRON = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    **{f"GIT_{role}_{what}": f"An {role}" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    "GIT_AUTHOR_DATE": "1700000000 +0100",
    "GIT_CONFIG_GLOBAL": os.devnull,
}


def _git(folder: Path, *arguments: str) -> str:
    return git.output(folder, *arguments, environ=_ENVIRON).strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with an empty tree; temporary files are outside it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    root = tmp_path / "repository"
    root.mkdir()
    _git(root, "init", "--quiet")
    _git(root, "hash-object", "-w", "-t", "tree", os.devnull)
    return root


def _commit(folder: Path, message: str, *parents: str) -> str:
    tree = _git(folder, "hash-object", "-t", "tree", os.devnull)
    return _git(folder, "commit-tree", tree, *(f"-p{parent}" for parent in parents), "-m", message)


def _line(folder: Path, count: int) -> list[str]:
    shas: list[str] = []
    for number in range(count):
        shas.append(_commit(folder, f"c{number}", *shas[-1:]))
    return shas


@pytest.mark.parametrize("seed", range(3))
def test_a_commit_is_found_in_a_history_with_merges(repository: Path, seed: int) -> None:
    """A commit is bad if the culprit is among its ancestors."""
    chance = random.Random(seed)
    shas = [_commit(repository, "root")]
    ancestors = {shas[0]: {shas[0]}}
    for number in range(12):
        # The last commit merges everything, as does each fourth one a part.
        tips = [sha for sha in shas if not any(sha in seen for other, seen in ancestors.items() if other != sha)]
        parents = tips if number == 11 else tips[:2] if number % 4 == 3 else [chance.choice(shas[-3:])]
        new = _commit(repository, f"c{number}", *parents)
        ancestors[new] = {new}.union(*(ancestors[parent] for parent in parents))
        shas.append(new)
    culprit = chance.choice(shas[1:])
    with begun(shas[0], shas[-1], repository) as bisection:
        while (sha := bisection.candidate()) is not None:
            assert culprit in bisection.remaining()
            bisection.mark(sha, "bad" if culprit in ancestors[sha] else "good")
        assert bisection.first_bad() == culprit
        assert bisection.remaining() == [culprit]
        assert set(bisection.parents(culprit)) <= set(shas)


def test_the_text_of_a_commit_is_read(repository: Path) -> None:
    """Only the first line of the message is its subject."""
    shas = _line(repository, 2)
    named = _commit(repository, "Fuse the norm: 3 % faster\n\nNot really.", shas[-1])
    with begun(shas[0], named, repository) as bisection:
        text = bisection.text(named)
        assert text == (named, "Fuse the norm: 3 % faster", "An AUTHOR", "2023-11-14T23:13:20+01:00")


def test_skipped_commits_remain(repository: Path) -> None:
    """A bisection ends where only skipped commits are left."""
    shas = _line(repository, 4)
    with begun(shas[0], shas[-1], repository) as bisection:
        while (sha := bisection.candidate()) is not None:
            bisection.mark(sha, "skip")
        assert bisection.first_bad() is None
        assert set(bisection.remaining()) == set(shas[1:])


@pytest.mark.parametrize("trouble", [KeyboardInterrupt, ValueError])
def test_nothing_of_a_bisection_remains(repository: Path, trouble: type[BaseException]) -> None:
    """Neither a worktree nor a reference nor a temporary file, also after an error."""
    shas = _line(repository, 8)

    def interrupted() -> None:
        with begun(shas[0], shas[-1], repository) as bisection:
            sha = bisection.candidate()
            assert sha is not None
            bisection.mark(sha, "good")
            raise trouble

    with pytest.raises(trouble):
        interrupted()
    assert _git(repository, "for-each-ref") == ""
    assert len(_git(repository, "worktree", "list").splitlines()) == 1
    assert list((repository.parent / "tmp").iterdir()) == []
    assert not list((repository / ".git").glob("BISECT*"))
