"""Sessions that are broken off and continued from their report."""

from __future__ import annotations

import hashlib
import itertools
import os

import pytest
from support.faked_runs import FakedRuns
from support.repository import first_commit, git

from pytest_llmgpu.report import file
from pytest_llmgpu.report.report import Report
from pytest_llmgpu.report.result import Outcome
from pytest_llmgpu.store.store import stored

_LAST = ".llmgpu/last.json"
_RESUME = f"--llmgpu-resume={_LAST}"
_BREAKING = """
    import os, signal

    def break_off(loaded, name):
        def hook(*_):
            handle.remove()
            os.kill(os.getppid(), getattr(signal, name))
        handle = loaded.model.register_forward_pre_hook(hook)

    def test_hellaswag(llm, hellaswag, batch_size, measure):
        if batch_size == 4 and (name := os.environ.get("BREAK_OFF")):
            llm.run(break_off, name)
        assert measure(llm, hellaswag, batch_size).acc is not None
"""


@pytest.fixture
def runs(runs: FakedRuns, monkeypatch: pytest.MonkeyPatch) -> FakedRuns:
    """Return a function that runs a committed benchmark with stubbed measurements."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    first_commit(runs.pytester.path, "test_it.py")
    return runs


def _break_off(runs: FakedRuns, call: int, *arguments: str) -> Report:
    """Interrupt a run in its measurement of this number; return its report."""
    calls = itertools.count(1)
    runs.seconds = lambda size: float(size) if next(calls) != call else pytest.exit("broken off")
    assert runs(*arguments).ret == pytest.ExitCode.INTERRUPTED
    runs.seconds = float
    runs.did.clear()
    return runs.report()


def test_only_the_missing_cases_are_measured(runs: FakedRuns) -> None:
    """The report has the old cases as they were, then the new ones, and names the report that it continues."""
    broken = _break_off(runs, 2)
    digest = hashlib.sha256(runs.pytester.path.joinpath(_LAST).read_bytes()).hexdigest()
    result = runs("-v", _RESUME, "--llmgpu-json=whole.json", "--llmgpu-html=whole.html")
    assert result.ret == 0
    assert runs.measured == ["mp-bs4", "mp-bs8"]
    result.stdout.fnmatch_lines(["*mp-bs1? KEPT*", "*mp-bs4? PASSED*", "*mp-bs8? PASSED*", "*3 passed*"])
    whole = runs.report("whole.json")
    assert whole.cases[0] == broken.cases[0]
    assert [[launch.resumption for launch in case.launches] for case in whole.cases] == [[0], [1], [1]]
    assert (whole.created, whole.session.complete, whole.session.interrupted) == (broken.created, True, False)
    assert (whole.session.duration_s or 0) > (broken.session.duration_s or 0) > 0
    (resumption,) = whole.resumed
    assert (resumption.source, resumption.sha256, resumption.kept) == (_LAST, digest, 1)
    assert "Resumed" in runs.pytester.path.joinpath("whole.html").read_text()


def test_a_continued_session_takes_its_name_in_the_store(runs: FakedRuns) -> None:
    """The whole report replaces the one of the interrupted run; under another name it is a report more."""
    assert runs("--llmgpu-save=before").ret == 0
    _break_off(runs, 2, "--llmgpu-save=base")
    storage = runs.pytester.path / ".llmgpu"
    _break_off(runs, 2, _RESUME, "--llmgpu-save=other")
    assert [(one.number, one.name) for one in stored(storage)] == [(1, "before"), (2, None)]
    assert runs(_RESUME).ret == 0, "without the option the newer name is kept"
    _, whole = stored(storage)
    assert (whole.number, whole.name) == (2, "other")
    assert file.load(whole.path) == runs.report()
    assert runs.report().session.complete
    assert runs("--llmgpu-resume=other", "--llmgpu-save=base").ret == 0
    assert [(one.number, one.name) for one in stored(storage)] == [(1, "before"), (2, "other"), (3, "base")]
    # A whole session is judged again: nothing is measured, and the options of the gate may be others.
    runs.did.clear()
    result = runs(_RESUME, "--llmgpu-compare=before", "--llmgpu-json=judged.json")
    assert (result.ret, runs.measured) == (0, [])
    assert runs.report("judged.json").verdicts is not None


def test_launches_are_continued_where_they_broke_off(runs: FakedRuns) -> None:
    """Each case gets the launches that it lacks, and each launch the start of pytest that measured it."""
    flags = ("--llmgpu-launches=3", "-v")
    _break_off(runs, 5, *flags)
    assert runs(*flags, _RESUME).ret == 0
    assert runs.measured == ["mp-bs4", "mp-bs8", "mp-bs1", "mp-bs4", "mp-bs8"]
    written = runs.report()
    starts = {case.id: [launch.resumption for launch in case.launches] for case in written.cases}
    assert starts == {"mp-bs1": [0, 0, 1], "mp-bs4": [0, 1, 1], "mp-bs8": [0, 1, 1]}
    assert written.cases[0].inference_s == pytest.approx(10.0)


def test_a_case_that_failed_has_a_result(runs: FakedRuns) -> None:
    """It is not measured again: its test ends as it did."""
    ends: dict[int, Outcome] = {1: "crashed", 8: "oom"}
    runs.outcome = lambda size: ends.get(size, "completed")
    _break_off(runs, 1)
    result = runs("-rA", _RESUME)
    assert result.ret == 1
    assert runs.measured == ["mp-bs4", "mp-bs8"]
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*1 oom*"])


@pytest.mark.parametrize(
    ("appended", "flag", "reason"),
    [
        ("# changed", _RESUME, "*in another way: commit * -> *"),
        ("", "--llmgpu-limit=3", "*in another way: --llmgpu-limit none -> 3"),
        ("", "--llmgpu-resume=nowhere.json", "=nowhere.json: report nowhere.json: cannot be read: *"),
    ],
)
def test_another_source_or_option_is_refused(runs: FakedRuns, appended: str, flag: str, reason: str) -> None:
    """In one line and before anything is measured; the report stays as it is."""
    before = _break_off(runs, 2)
    if appended:
        git(runs.pytester.path, "commit", "--quiet", "--allow-empty", "-m", appended)
    result = runs(_RESUME, flag)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --llmgpu-resume*{reason}"])
    assert runs.measured == []
    assert runs.report() == before


@pytest.mark.slow
def test_a_session_that_was_killed_is_continued(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes and the bundled model: what was measured is kept, and the case in flight is measured again."""
    pytester.makepyfile(test_it=_BREAKING)
    first_commit(pytester.path, "test_it.py")
    flags = ("-v", "-p", "no:cacheprovider", "--llmgpu-limit=2", "--llmgpu-batch-sizes=2,4,8", "--llmgpu-device=cpu")
    with monkeypatch.context() as patched:
        patched.setenv("BREAK_OFF", "SIGKILL")
        pytester.runpytest_subprocess(*flags)
    broken = file.load(pytester.path / _LAST)
    assert (broken.session.complete, broken.session.interrupted) == (False, False)
    result = pytester.runpytest_subprocess(*flags, _RESUME)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*mp-bs2? KEPT*", "*mp-bs4? PASSED*", "*mp-bs8? PASSED*"])
    written = file.load(pytester.path / _LAST)
    assert written.cases[0] == broken.cases[0]
    assert [case.id for case in written.cases] == ["mp-bs2", "mp-bs4", "mp-bs8"]
    assert {case.outcome for case in written.cases} == {"completed"}
    assert (written.session.complete, written.session.exit_status) == (True, 0)
    assert all(launch.work is not None for case in written.cases for launch in case.launches)
