from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.stored_reports import H200, measured

from pytest_llmgpu.gate import promotion
from pytest_llmgpu.report.file import dump, load
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.store.references import BASELINE, resolve
from pytest_llmgpu.store.store import save, stored

_STORE = Path(".llmgpu")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _filled() -> None:
    """Save four reports: 0001 to 0003 of the GPUs, 0001 of a CPU."""
    save(measured("aaaa1111" * 5), _STORE, "base")
    save(measured("aaaa2222" * 5), _STORE)
    save(measured("1234567a" * 5), _STORE, "base")
    save(measured("bbbb1111" * 5, device="cpu", cpu="AMD EPYC"), _STORE, "laptop")


@pytest.mark.parametrize(
    ("reference", "meant"),
    [
        ("2", f"{H200}/0002"),
        ("0002", f"{H200}/0002"),
        (f"{H200}/1", f"{H200}/0001"),
        (f"{H200}/latest", f"{H200}/0003"),
        ("CPU-AMD-EPYC/latest", "CPU-AMD-EPYC/0001"),
        ("laptop", "CPU-AMD-EPYC/0001"),
        ("aaaa2", f"{H200}/0002"),
        ("AAAA2222", f"{H200}/0002"),
        ("aaaa2222" * 5, f"{H200}/0002"),
        ("1234567", f"{H200}/0003"),
        ("1234567a", f"{H200}/0003"),
    ],
)
def test_a_stored_report_is_found_by_what_people_know_of_it(reference: str, meant: str) -> None:
    """Number, name, commit, and the machine before any of them."""
    _filled()
    found = resolve(reference, _STORE)
    assert found.stored is not None
    assert found.stored.reference == meant
    assert found.report() == load(found.stored.path)
    assert Path(found.name) == found.stored.path


@pytest.mark.parametrize(
    ("reference", "candidates"),
    [
        ("1", ["CPU-AMD-EPYC/0001", f"{H200}/0001"]),
        ("latest", ["CPU-AMD-EPYC/0001", f"{H200}/0003"]),
        ("base", [f"{H200}/0001", f"{H200}/0003"]),
        ("aaaa", [f"{H200}/0001 (aaaa1111", f"{H200}/0002 (aaaa2222"]),
    ],
)
def test_what_can_mean_several_reports_is_refused_with_all_of_them(reference: str, candidates: list[str]) -> None:
    """No other report than the one in somebody's mind is ever judged; each candidate can be typed as it is shown."""
    _filled()
    with pytest.raises(ValueError, match=rf"^'{reference}' can mean ") as caught:
        resolve(reference, _STORE)
    for candidate in candidates:
        assert candidate in str(caught.value)
        assert resolve(candidate.partition(" ")[0], _STORE).stored is not None


def test_reports_of_the_machine_at_hand_are_meant_first() -> None:
    """In a run `latest` is the newest of this machine; what only another one has is found there."""
    _filled()
    assert resolve("latest", _STORE, machine=H200).name.endswith("0003_1234567a_20260102T030405Z_base.json")
    assert resolve("1", _STORE, machine=H200).name.endswith("0001_aaaa1111_20260102T030405Z_base.json")
    assert resolve("laptop", _STORE, machine=H200).name.startswith(str(_STORE / "CPU-AMD-EPYC"))


def _days() -> list[Report]:
    reports = [measured(f"{day}" * 40) for day in (1, 2, 3)]
    for day, report in enumerate(reports, 1):
        report.created = f"2026-01-0{day}T03:04:05Z"
    return reports


def test_promoting_an_old_report_does_not_make_it_the_latest() -> None:
    """Nor does its copy become the latest once it is no longer the baseline and has lost the name."""
    reports = _days()
    for report in reports:
        save(report, _STORE)
    assert promotion.NAME == BASELINE
    for report in (reports[0], reports[1], reports[2]):
        promotion.keep(report, None, path=None, store=_STORE)
        found = resolve("latest", _STORE).stored
        assert found is not None
        assert (found.number, found.name) == (3, None)
    assert [one.name for one in stored(_STORE)] == [None] * 5 + [BASELINE]


def test_a_baseline_that_was_measured_last_is_the_latest() -> None:
    """A run may have been saved under that name, or the store may hold nothing else."""
    first, second, _ = _days()
    save(second, _STORE, BASELINE)
    save(first, _STORE)
    assert resolve("latest", _STORE).report() == second


def test_many_candidates_are_counted() -> None:
    """The line stays one that people read."""
    for _ in range(8):
        save(measured(), _STORE, "base")
    with pytest.raises(ValueError, match=rf"{H200}/0005 [^/]*, and 3 more$"):
        resolve("base", _STORE)


def test_a_path_is_read_as_it_is() -> None:
    """Of the store or from anywhere, compressed or not; its hash is the file's."""
    _filled()
    dump(measured(), Path("report.json.gz"))
    found = resolve("report.json.gz", _STORE)
    assert (found.name, found.report(), found.stored) == ("report.json.gz", measured(), None)
    assert found.data == Path("report.json.gz").read_bytes()
    assert len(found.sha256) == 64
    kept = str(stored(_STORE)[0].path)
    assert resolve(kept, _STORE).report() == load(Path(kept))


def test_a_file_named_like_a_number_is_not_guessed_at() -> None:
    """`2` is a report of the store and a file here; `./2` is the file."""
    _filled()
    dump(measured(), Path("report.json"))
    Path("report.json").rename("2")
    with pytest.raises(ValueError, match=rf"^'2' can mean \./2, {H200}/0002"):
        resolve("2", _STORE)
    assert resolve("./2", _STORE).report() == measured()


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("7", r"'7' is neither a file nor a report of the store \.llmgpu, which holds 4: see llmgpu list"),
        ("bas", "'bas' is neither"),
        ("aaa", "'aaa' is neither"),
        ("nowhere/latest", "'nowhere/latest' is neither"),
        ("", "'' is neither|report .: cannot be read"),
        ("x" * 5000, "'x+' is neither"),
        ("9" * 5000, "'9+' is neither"),
        ("a\0b", "'a.*b' is neither"),
        ("missing.json", r"report missing\.json: cannot be read: No such file or directory"),
        (".", "report .: cannot be read: Is a directory"),
    ],
)
def test_what_means_no_report_is_one_line(reference: str, reason: str) -> None:
    """It says where was looked."""
    _filled()
    with pytest.raises(ValueError, match=rf"^({reason})"):
        resolve(reference, _STORE)


def test_the_last_run_is_named_where_nothing_was_kept() -> None:
    """`latest` is of the store; whoever has just run finds the report beside it."""
    dump(measured(), _STORE / "last.json")
    with pytest.raises(ValueError, match=r"which is empty; the last run wrote \.llmgpu/last\.json, and --llmgpu-save"):
        resolve("latest", _STORE)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository of git with a baseline in a commit and another one staged in its place."""
    folder = tmp_path / "repository"
    (folder / "baselines").mkdir(parents=True)
    dump(measured("a" * 40), folder / "baselines" / "main.json")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        **{f"GIT_{role}_{field}": "x" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")},
    }
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "x", "--no-gpg-sign"]):
        subprocess.run(["git", "-C", folder, *command], check=True, env=environment)
    dump(measured("b" * 40), folder / "baselines" / "main.json")
    subprocess.run(["git", "-C", folder, "add", "."], check=True, env=environment)
    return folder


@pytest.mark.parametrize("reference", ["git:main:baselines/main.json", "git:HEAD:baselines/main.json"])
def test_a_baseline_is_read_from_its_commit(repository: Path, reference: str) -> None:
    """A change cannot edit its own bar: neither the working tree nor what is staged is looked at."""
    found = resolve(reference, _STORE, repository=repository / "baselines")
    assert found.name == reference
    assert found.report().commit.sha == "a" * 40


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("git:main:gone.json", "git:main:gone.json: 'main' has no file 'gone.json'; paths start at"),
        ("git:nope:baselines/main.json", "git:nope:baselines/main.json: git knows no commit 'nope' here; it may"),
        ("git:main:baselines", "git:main:baselines: is no file"),
        ("git:main", "'git:main': git:REV:PATH is needed, such as git:origin/main:"),
        ("git::x", "'git::x': git:REV:PATH is needed"),
        ("git:--all:x", "'git:--all:x': git:REV:PATH is needed"),
        ("git:main:a\nHEAD:b", "'git:main:a.*: git:REV:PATH is needed"),
    ],
)
def test_what_git_does_not_have_is_one_line(repository: Path, reference: str, reason: str) -> None:
    """A commit that was not fetched, a file that is not in it, and what is neither."""
    with pytest.raises(ValueError, match=rf"^{reason}") as caught:
        resolve(reference, _STORE, repository=repository)
    assert "\n" not in str(caught.value)


def test_outside_a_repository_git_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In git's own words, which also tell of a repository that belongs to somebody else."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match=r"^git:main:a\.json: git: fatal: not a git repository"):
        resolve("git:main:a.json", _STORE)


def test_without_git_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without git reads every other report."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^git cannot be run: No such file or directory$"):
        resolve("git:main:a.json", _STORE)
