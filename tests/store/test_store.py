from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from support.report_factory import known
from support.repository import first_commit, git
from support.verdict_factory import H200, gpus, measured

from pytest_llmgpu.report.file import dump, load
from pytest_llmgpu.report.options import check_name, check_name_is_free
from pytest_llmgpu.report.report import Commit, Report, Session
from pytest_llmgpu.store import store
from pytest_llmgpu.store.git import AbsentError, MisspeltError
from pytest_llmgpu.store.store import BASELINE, LAST, hardware, resolve, save, stored, table

pytestmark = pytest.mark.usefixtures("empty_folder")

_STORE = Path(".llmgpu")


@pytest.mark.parametrize(
    ("sha", "created", "name", "written"),
    [
        ("3b1f09ac" * 5, "2026-01-02T03:04:05Z", None, "0001_3b1f09ac_20260102T030405Z.json"),
        (None, "2026-01-02T03:04:05Z", "before_graphs-2.1", "0001_nocommit_20260102T030405Z_before_graphs-2.1.json"),
        # The variable of a CI system can contain any text. Names sort by time for every time zone.
        ("", "2026-01-02T01:04:05.5+02:00", None, "0001_nocommit_20260101T230405Z.json"),
        ("v1.2/RC_7-final", "2026-01-02T03:04:05Z", None, "0001_v12rc7fi_20260102T030405Z.json"),
        ("../../etc", "2026-01-02T03:04:05Z", None, "0001_etc_20260102T030405Z.json"),
        ("ABC", "2026-01-02T03:04:05Z", None, "0001_abc_20260102T030405Z.json"),
    ],
)
def test_the_name_of_a_file_identifies_a_report(sha: str | None, created: str, name: str | None, written: str) -> None:
    """The name of the file identifies the report, which a user can compress."""
    report = msgspec.structs.replace(measured(sha), created=created)
    path = save(report, _STORE, name)
    assert path == _STORE / H200 / written
    assert load(path) == report
    dump(report, path.with_name(f"{written.replace('0001', '0002')}.gz"))
    save(measured(device="cpu", cpu="AMD EPYC"), _STORE)
    one, two, other = stored(_STORE)
    assert [one.reference, two.reference, other.reference] == [f"{H200}/0001", f"{H200}/0002", "CPU-AMD-EPYC/0001"]
    assert (one.name, one.commit or "nocommit") == (name, written.split("_")[1])
    assert load(two.path) == report


def test_a_time_that_is_none_is_refused() -> None:
    """The message has an example."""
    with pytest.raises(ValueError, match=r"^created 'yesterday': a time such as"):
        save(msgspec.structs.replace(measured(), created="yesterday"), _STORE)


def test_a_new_store_keeps_reports_out_of_git() -> None:
    """Reports do not show in `git status`; baselines can be committed."""
    git(Path(), "init", "-q")
    report = save(measured(), _STORE)
    names = [save(measured(), _STORE, "baseline")]
    Path("reports").mkdir()
    save(measured(), Path("reports"))
    assert not Path("reports/.gitignore").exists(), "in a folder of the user it could hide other files"
    shutil.rmtree("reports")
    for path in (_STORE / "last.json", report.parent / ".0001.unfinished"):
        path.write_text("")
    shown = git(Path(), "status", "--porcelain", "-uall").splitlines()
    assert {line[3:].strip('"') for line in shown} == set(map(str, names))


def test_the_next_number_follows_the_highest_one() -> None:
    """Numbers of deleted reports, and of a writer that was killed, are not used again; 10000 follows 9999."""
    folder = _STORE / H200
    folder.mkdir(parents=True)
    (folder / ".0001.unfinished").touch()
    first = save(measured(), _STORE)
    assert first.name.startswith("0002_")
    first.rename(first.with_name(first.name.replace("0002", "9999")))
    assert save(measured(), _STORE).name.startswith("10000_")
    assert [one.number for one in stored(_STORE)] == [9999, 10000]


def test_what_killed_writers_left_is_removed() -> None:
    """A file of the last hour may be of a process that lives."""
    folder = save(measured(), _STORE).parent
    left = [_STORE / ".llmgpu-ab.tmp", folder / ".llmgpu-cd.tmp", folder / ".0007.unfinished"]
    for path in left:
        path.touch()
    save(measured(), _STORE)
    assert all(path.exists() for path in left)
    for path in left:
        os.utime(path, (0, 0))
    save(measured(), _STORE)
    assert not any(path.exists() for path in left)


def test_threads_that_save_at_the_same_time_get_different_numbers() -> None:
    """Every report of 40 concurrent writers is in the store, and no temporary file is left."""
    reports = [measured(sha=f"{number:08x}") for number in range(40)]
    with ThreadPoolExecutor(16) as threads:
        paths = list(threads.map(lambda report: save(report, _STORE), reports))
    kept = stored(_STORE)
    assert len(set(paths)) == len({one.number for one in kept}) == 40
    assert {one.commit for one in kept} == {f"{number:08x}" for number in range(40)}
    assert not list((_STORE / H200).glob(".*"))


def test_a_writer_that_was_overtaken_takes_the_next_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run can save between the listing of the folder and the claim of the number; it keeps the number."""
    other = save(measured(), _STORE).with_name("0002_aaaaaaaa_20260102T030405Z.json")
    stored_in = store._stored_in
    # The listing is made before the other report is written.
    monkeypatch.setattr(store, "_stored_in", lambda folder: (list(stored_in(folder)), other.write_bytes(b"{}"))[0])
    assert save(measured(), _STORE).name.startswith("0003_3b1f09ac")


def test_a_full_disk_leaves_no_part_of_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that cannot be written completely is not in the store."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save(measured(), _STORE)
    assert list((_STORE / H200).iterdir()) == []
    assert save(measured(), _STORE).name.startswith("0001_")


@pytest.mark.parametrize(
    ("report", "name"),
    [
        (measured(), H200),
        (measured(seen=gpus("NVIDIA H200", memory_bytes=None)), "1x-NVIDIA-H200"),
        (measured(seen=[*gpus("A", "A"), *gpus("B")]), "2x-A-140GiB+1x-B-140GiB"),
        (measured(device="cpu", cpu="Intel(R) Xeon(R) Gold 6130 CPU @ 2.10GHz"), "CPU-Intel-Xeon-Gold-6130"),
        (measured(device="cpu", cpu="AMD EPYC 9654 96-Core Processor"), "CPU-AMD-EPYC-9654-96-Core-Processor"),
        (measured(device="cpu", cpu=None), "CPU-unknown"),
        (measured(seen=(), cpu="x/../../y"), "CPU-x-..-..-y"),
        (measured(seen=gpus("é" * 300)), "1x-140GiB"),
        (measured(seen=gpus("N" * 300)), "1x-" + "N" * 77),
    ],
)
def test_a_machine_has_a_readable_name_for_one_folder(report: Report, name: str) -> None:
    """The name has GPUs with count and memory, or the CPU, without slashes and spaces."""
    assert hardware(report) == name


@pytest.mark.parametrize("name", ["12", "a/b", "../x", "", ".hidden", "-x", "a b", "a:b", "x.json", "latest", "n" * 81])
def test_a_name_with_another_meaning_is_refused(name: str) -> None:
    """A number, a path, an option and `latest` cannot be names; this is checked before the run."""
    with pytest.raises(ValueError, match=rf"^name '{name}': (allowed are|means)"):
        check_name(name)
    with pytest.raises(ValueError, match=r"^name "):
        save(measured(), _STORE, name)
    assert not _STORE.exists()


def test_a_name_of_an_existing_folder_is_refused() -> None:
    """In `--llmgpu-save benchmarks` the folder was probably meant as tests to run."""
    Path("benchmarks").mkdir()
    with pytest.raises(ValueError, match="'benchmarks': is a file or folder here"):
        check_name_is_free("benchmarks")
    check_name_is_free("nightly")
    Path("nightly").touch()  # during the run
    assert save(measured(), _STORE, "nightly").name.endswith("_nightly.json")


def test_other_files_in_the_store_are_ignored() -> None:
    """The report of the last run, notes and folders of other tools are not listed."""
    path = save(measured(), _STORE)
    os.mkfifo(path.with_name(path.name.replace("0001", "0002")))  # `llmgpu trend` would wait for a writer
    path.with_name(path.name.replace("0001", "0003")).symlink_to("absent")
    dump(measured(), _STORE / "last.json")
    (_STORE / H200 / "notes.txt").touch()
    (_STORE / H200 / "0002_x.json").touch()
    (_STORE / "other").mkdir()
    assert [one.number for one in stored(_STORE)] == [1]
    assert stored(Path("nowhere")) == []


def test_a_store_that_cannot_be_read_is_refused_in_one_line() -> None:
    """For example, a file has the name of the store."""
    _STORE.touch()
    with pytest.raises(ValueError, match=r"^storage \.llmgpu: cannot be read: Not a directory$"):
        stored(_STORE)


def test_the_list_describes_each_report_and_names_broken_files() -> None:
    """A line has number, name, time, commit, machine, strategies and outcomes; a broken file hides no other."""
    save(measured(), _STORE, "base")
    changed = {"commit": Commit(sha="c" * 40, dirty=True), "session": Session(complete=False)}
    save(msgspec.structs.replace(measured(), **changed), _STORE)
    damaged, foreign = save(measured(), _STORE), save(measured(), _STORE)
    damaged.write_bytes(b"{")
    foreign.write_bytes(b'{"benchmarks": [], "version": "5.3.1"}')
    lines, (first, second) = table(stored(_STORE))
    assert [" ".join(line.split()) for line in lines.splitlines()[2:]] == [
        f"0001 base 2026-01-02T03:04:05Z 3b1f09ac main {H200} mp, tp 2 1 completed, 1 oom",
        f"0002 2026-01-02T03:04:05Z cccccccc (changed) {H200} mp, tp 2 1 completed, 1 oom, run not complete",
    ]
    assert first.startswith(f"report {damaged}: is not valid JSON: Input data was truncated")
    assert second.startswith(f"report {foreign}: is not a report of pytest-llmgpu")


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
        ("base", f"{H200}/0003"),
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
    kept = known(source.stored)
    assert kept.reference == found
    assert source.report() == load(kept.path)
    assert Path(source.name) == kept.path


@pytest.mark.parametrize(
    ("reference", "candidates"),
    [
        ("1", ["CPU-AMD-EPYC/0001", f"{H200}/0001"]),
        ("latest", ["CPU-AMD-EPYC/0001", f"{H200}/0003"]),
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
        save(measured("aaaa1111" * 5), _STORE)
    with pytest.raises(ValueError, match=r" and 3 more$"):
        resolve("aaaa", _STORE)


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
        found = known(resolve("latest", _STORE).stored)
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
    with pytest.raises(ValueError, match=rf"^'2' is ambiguous: give the number of \./2, {H200}/0002"):
        resolve("2", _STORE)
    assert resolve("./2", _STORE).report() == measured()


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


@pytest.mark.parametrize(
    ("reference", "misspelt"),
    [
        ("bsae", True),
        ("other", False),
        ("baseline", False),
        ("0123abc", False),
        ("base.json.gz", False),
        ("kpt.json.gz", True),
        ("reprots/kept.json", True),
        ("baselines/kept.json", False),
        ("git:main:baselines/kept.json.gz", False),
        ("git:main:baselines/mian.json", True),
        ("deep.json", True),
        ("git:main:main.json", True),
    ],
)
def test_a_name_may_be_misspelt_where_another_one_is_there(repository: Path, reference: str, misspelt: bool) -> None:
    """A name is beside a similar name of the store, a file beside a similar one; a commit may not be measured yet."""
    save(measured(), _STORE, "base")
    Path("reports").mkdir()
    for name in ("kept.json.gz", "head.json.gz", "reports/deep.json"):
        Path(name).touch()
    with pytest.raises(AbsentError) as caught:
        resolve(reference, _STORE, repository=repository)
    assert isinstance(caught.value, MisspeltError) == misspelt


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository of git with a baseline in a commit and another one staged in its place."""
    folder = tmp_path / "repository"
    dump(measured("a" * 40), folder / "baselines" / "main.json")
    first_commit(folder)
    dump(measured("b" * 40), folder / "baselines" / "main.json")
    git(folder, "add", ".")
    return folder


@pytest.mark.parametrize("reference", ["git:main:baselines/main.json", "git:HEAD:baselines/main.json"])
def test_a_baseline_is_read_from_its_commit(repository: Path, reference: str) -> None:
    """The file of the commit is read, not the one in the working tree or the index, which a change can edit."""
    found = resolve(reference, _STORE, repository=repository / "baselines")
    assert (found.name, found.report().commit.sha) == (reference, "a" * 40)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("7", r"'7' is neither a file nor a report of the store \.llmgpu, which has 4 reports: see llmgpu list"),
        ("bas", "'bas' is neither"),
        ("latset", r"'latset' is neither .* \(did you mean latest\?\)"),
        ("aaa", "'aaa' is neither"),
        ("nowhere/latest", "'nowhere/latest' is neither"),
        ("", "report '': an empty name: give a path, a number, a name or a commit"),
        ("x" * 5000, "'x+' is neither"),
        ("9" * 5000, "'9+' is neither"),
        ("a\0b", "'a.*b' is neither"),
        ("missing.json", r"report missing\.json: cannot be read: No such file or directory$"),
        ("run.json", r"report run\.json: cannot be read: .* \(did you mean run\.json\.gz\?\)$"),
        (".", "report .: cannot be read: Is a directory"),
        ("git:main:gone.json", "git:main:gone.json: 'main' has no file 'gone.json'; give the path from"),
        (
            "baselines/mian.jso",
            r"report baselines/mian\.jso: .*No such file .* \(did you mean main\.json\?\)$",
        ),
        ("last.jso", r"report last\.jso: cannot be read: No such file or directory$"),
        (
            "git:main:baselines/mian.json",
            r"git:.* no file .baselines/mian\.json. \(did you mean main\.json\?\); give",
        ),
        ("git:main:baseline/main.json", r"git:.* has no file 'baseline/main\.json' \(did you mean baselines\?\); give"),
        ("git:main:main.json", r"git:.* has no file 'main\.json' \(did you mean baselines/main\.json\?\); give"),
        ("git:nope:a", "git:nope:a: there is no commit 'nope' in this repository; fetch it"),
        ("git:main:baselines", "git:main:baselines: is not a file"),
        ("git:main", "'git:main': the form git:REV:PATH is needed, such as git:origin/main:"),
        ("git::x", "'git::x': the form git:REV:PATH is needed"),
        ("git:--all:x", "'git:--all:x': the form git:REV:PATH is needed"),
        ("git:main:a\nHEAD:b", "'git:main:a.*: the form git:REV:PATH is needed"),
    ],
)
def test_a_reference_without_a_report_is_refused_in_one_line(repository: Path, reference: str, reason: str) -> None:
    """The message names the reference and the store, the file or the commit."""
    _fill_store()
    Path("run.json.gz").touch()
    Path("baselines").mkdir()
    Path("baselines/main.json").touch()
    with pytest.raises(ValueError, match=rf"^({reason})") as caught:
        resolve(reference, _STORE, repository=repository)
    assert "\n" not in str(caught.value)


def test_without_a_repository_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message has the reason that git gives."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match=r"^git:main:a\.json: git: fatal: not a git repository"):
        resolve("git:main:a.json", _STORE)
