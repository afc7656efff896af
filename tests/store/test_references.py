from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
from support.repository import first_commit
from support.verdict_factory import H200, measured

from pytest_llmgpu.report.file import dump, load
from pytest_llmgpu.store.store import BASELINE, LAST, resolve, save, stored

pytestmark = pytest.mark.usefixtures("empty_folder")

_STORE = Path(".llmgpu")


def _fill_store() -> None:
    """Save four reports: 0001 to 0003 of GPUs and 0001 of a CPU."""
    save(measured("aaaa1111" * 5), _STORE, "base")
    save(measured("aaaa2222" * 5), _STORE)
    save(measured("1234567a" * 5), _STORE, "base")
    save(measured("bbbb1111" * 5, device="cpu", cpu="AMD EPYC"), _STORE, "laptop")


@pytest.mark.parametrize(
    ("reference", "found"),
    [
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
def test_a_stored_report_is_found_by_number_name_and_commit(reference: str, found: str) -> None:
    """The machine can be given in front of any of them."""
    _fill_store()
    source = resolve(reference, _STORE)
    assert source.stored is not None
    assert source.stored.reference == found
    assert source.report() == load(source.stored.path)
    assert Path(source.name) == source.stored.path


@pytest.mark.parametrize(
    ("reference", "candidates"),
    [
        ("1", ["CPU-AMD-EPYC/0001", f"{H200}/0001"]),
        ("latest", ["CPU-AMD-EPYC/0001", f"{H200}/0003"]),
        ("base", [f"{H200}/0001", f"{H200}/0003"]),
        ("aaaa", [f"{H200}/0001 (aaaa1111", f"{H200}/0002 (aaaa2222"]),
    ],
)
def test_an_ambiguous_reference_is_refused_with_all_candidates(reference: str, candidates: list[str]) -> None:
    """A report is never guessed; each candidate of the message is a reference that can be used."""
    _fill_store()
    with pytest.raises(ValueError, match=rf"^'{reference}' is ambiguous: ") as caught:
        resolve(reference, _STORE)
    for candidate in candidates:
        assert candidate in str(caught.value)
        assert resolve(candidate.partition(" ")[0], _STORE).stored is not None
    for _ in range(6):
        save(measured(), _STORE, "base")
    with pytest.raises(ValueError, match=r" and 3 more$"):
        resolve("base", _STORE)


def test_reports_of_the_current_machine_are_preferred() -> None:
    """In a run, `latest` is the newest report of this machine; a name that only another machine has is found there."""
    _fill_store()
    assert resolve("latest", _STORE, machine=H200).name.endswith("0003_1234567a_20260102T030405Z_base.json")
    assert resolve("1", _STORE, machine=H200).name.endswith("0001_aaaa1111_20260102T030405Z_base.json")
    assert resolve("laptop", _STORE, machine=H200).name.startswith(str(_STORE / "CPU-AMD-EPYC"))


def test_promoting_an_old_report_does_not_make_it_the_latest() -> None:
    """A copy that is promoted later does not become the latest; a baseline that was measured last is."""
    reports = [msgspec.structs.replace(measured(), created=f"2026-01-0{day}T03:04:05Z") for day in (1, 2, 3)]
    for report in reports:
        save(report, _STORE)
    for report in reports:
        save(report, _STORE, BASELINE)
        found = resolve("latest", _STORE).stored
        assert found is not None
        assert (found.number, found.name) == (3, None)
    save(msgspec.structs.replace(reports[0], created="2026-01-04T03:04:05Z"), _STORE, BASELINE)
    assert resolve("latest", _STORE).report().created == "2026-01-04T03:04:05Z"


def test_a_path_names_its_file() -> None:
    """The file can be in the store or not, compressed or not; the source has its bytes and their hash."""
    _fill_store()
    dump(measured(), Path("report.json.gz"))
    found = resolve("report.json.gz", _STORE)
    assert (found.name, found.report(), found.stored) == ("report.json.gz", measured(), None)
    assert found.data == Path("report.json.gz").read_bytes()
    assert len(found.sha256) == 64
    kept = str(stored(_STORE)[0].path)
    assert resolve(kept, _STORE).report() == load(Path(kept))
    Path("report.json.gz").rename("2")
    with pytest.raises(ValueError, match=rf"^'2' is ambiguous: it can be \./2, {H200}/0002"):
        resolve("2", _STORE)
    assert resolve("./2", _STORE).report() == measured()


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("7", r"'7' is neither a file nor a report of the store \.llmgpu, which has 4 reports: see llmgpu list"),
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
def test_a_reference_without_a_report_is_refused_in_one_line(reference: str, reason: str) -> None:
    """The message names the reference and the store, or the file."""
    _fill_store()
    with pytest.raises(ValueError, match=rf"^({reason})"):
        resolve(reference, _STORE)


def test_the_last_run_is_the_latest_whether_it_was_kept_or_not() -> None:
    """`latest` is what was measured last; a run that was kept is the report of the store."""
    last = _STORE / LAST
    dump(measured(), last)
    assert resolve("latest", _STORE).name == str(last)
    kept = save(measured(), _STORE)
    assert resolve("latest", _STORE).name == str(kept)
    later = msgspec.structs.replace(measured(), created="2027-01-01T00:00:00Z")
    dump(later, last)
    assert resolve("latest", _STORE).report() == later


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository of git with a baseline in a commit and another one staged in its place."""
    folder = tmp_path / "repository"
    dump(measured("a" * 40), folder / "baselines" / "main.json")
    first_commit(folder)
    dump(measured("b" * 40), folder / "baselines" / "main.json")
    subprocess.run(["git", "-C", folder, "add", "."], check=True)
    return folder


@pytest.mark.parametrize("reference", ["git:main:baselines/main.json", "git:HEAD:baselines/main.json"])
def test_a_baseline_is_read_from_its_commit(repository: Path, reference: str) -> None:
    """The file of the commit is read, not the one in the working tree or the index, which a change can edit."""
    found = resolve(reference, _STORE, repository=repository / "baselines")
    assert (found.name, found.report().commit.sha) == (reference, "a" * 40)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("git:main:gone.json", "git:main:gone.json: 'main' has no file 'gone.json'; give the path from"),
        ("git:nope:a", "git:nope:a: there is no commit 'nope' in this repository; fetch it"),
        ("git:main:baselines", "git:main:baselines: is not a file"),
        ("git:main", "'git:main': the form git:REV:PATH is needed, such as git:origin/main:"),
        ("git::x", "'git::x': the form git:REV:PATH is needed"),
        ("git:--all:x", "'git:--all:x': the form git:REV:PATH is needed"),
        ("git:main:a\nHEAD:b", "'git:main:a.*: the form git:REV:PATH is needed"),
    ],
)
def test_a_missing_file_of_a_commit_is_refused_in_one_line(repository: Path, reference: str, reason: str) -> None:
    """The commit was not fetched, it has no such file, or the reference has another form."""
    with pytest.raises(ValueError, match=rf"^{reason}") as caught:
        resolve(reference, _STORE, repository=repository)
    assert "\n" not in str(caught.value)


def test_without_a_repository_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message has the reason that git gives."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match=r"^git:main:a\.json: git: fatal: not a git repository"):
        resolve("git:main:a.json", _STORE)
