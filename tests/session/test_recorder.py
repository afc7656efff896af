from __future__ import annotations

import math
import os
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.report_factory import known, make_ceilings, make_failed, make_result, make_traffic, make_work
from support.repository import git

from pytest_llmgpu.analysis.assess import assess
from pytest_llmgpu.profiling import machine
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.report import file
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Commit, Node
from pytest_llmgpu.report.result import CaseResult, Declared, Failure
from pytest_llmgpu.session import recorder
from pytest_llmgpu.session.recorder import Recorder
from pytest_llmgpu.store import store

_CPU: dict[str, Any] = {"device": "cpu", "devices": 1}
_FINGERPRINT = machine.fingerprint
_FACTS = Machine(device="cpu", devices=1, gpus=[], facts=TorchFacts(version="2"))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on an emulated machine, as a user named ada."""
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(recorder, "commit", lambda *_, **__: Commit(sha="0123456789abcdef"))
    monkeypatch.setattr(machine, "fingerprint", lambda _: Node(cpu="Xeon", python="3.11.7", platform="Linux"))


@pytest.fixture
def recorded(emulated: None, tmp_path: Path) -> Recorder:  # noqa: ARG001
    """A recorder of a run that is not kept in the store."""
    return _recorder(tmp_path, Options(dataset="/home/ada/d.jsonl"))


def _recorder(tmp_path: Path, options: Options) -> Recorder:
    return Recorder({"json": tmp_path / "report.json", "storage": tmp_path / "store"}, tmp_path, options)


def _add(recorded: Recorder, result: CaseResult) -> CaseResult:
    return recorded.add(result, Options(), "test_it.py::test_it", _FACTS)


@pytest.mark.usefixtures("emulated")
def test_private_names_and_secrets_reach_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options, variables, message and log of a failure, the finding that quotes them and reasons are published."""
    monkeypatch.setattr(machine, "fingerprint", _FINGERPRINT)
    monkeypatch.setenv("NCCL_PROXY", "http://user:hunter2@proxy")
    recorded = _recorder(tmp_path, Options(model="https://a:hunter2@hub/m", dataset="/home/ada/d.jsonl"))
    missing = "/home/ada/models/x/config.json is missing on node17, see /home/ada, http://a:hunter2@b"
    log = f'  File "{tmp_path}/tests/test_it.py", line 5, in fn\nOSError: {missing}\n'
    failed = make_failed("error", Failure(phase="load", message=f"rank 0: {missing}", log_tail=log))
    failed.why["traffic"] = failed.launches[0].why["work"] = "failed: hf_hunter2hunter2 in /scratch/ada"
    result = _add(recorded, failed)
    shown = ".../x/config.json is missing on <host>, see ~, http://***@b"
    failure = known(result.failure)
    assert failure.message == f"rank 0: {shown}"
    assert failure.log_tail == f'  File "tests/test_it.py", line 5, in fn\nOSError: {shown}\n'
    assert shown in result.findings[0].text
    path = known(recorded.path)
    written = path.read_text()
    assert not any(name in written for name in ("ada", "node17", str(tmp_path), "hunter2"))
    assert "http://***@proxy" in written
    assert file.load(path).options["--llmgpu-dataset"] == "d.jsonl"


def test_the_environment_has_the_ceilings_and_the_names_of_kernels(recorded: Recorder) -> None:
    """Before the GPUs are measured `why` has the reason, and afterwards the bound of a case follows from them."""
    _add(recorded, make_result(2.0, traffic=make_traffic(2)))
    report = known(recorded.report)
    environment = report.environment
    assert (environment.ceilings, environment.kernel_names) == (None, [])
    assert "ceilings" in environment.why
    assert "bound" in report.cases[0].why
    result = make_result(2.0, traffic=make_traffic(2))
    result.launches[0].work = make_work()
    names = ["nvjet_hsh", "add_kernel"]
    added = recorded.add(result, Options(), "test_it.py::test_it", _FACTS, kernel_names=names, ceilings=make_ceilings())
    assert (environment.ceilings, environment.kernel_names) == (make_ceilings(), names)
    assert "ceilings" not in environment.why
    assert (added.bound is not None, "bound" in added.why) == (True, False)


def test_every_case_is_written_at_once_under_a_name_of_its_own(recorded: Recorder) -> None:
    """An interrupted session keeps its measured cases; a second measurement does not replace the first."""
    for ids in (["mp-bs1"], ["mp-bs1", "mp-bs1#2"]):
        _add(recorded, make_result(**_CPU))
        assert [result.id for result in file.load(known(recorded.path)).cases] == ids


class _Lazy(ModuleType):
    """A module that imports another one when it is asked for an attribute."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(name)


def test_a_conftest_that_git_does_not_track_makes_a_changed_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So do other modules of the repository that were imported; not those that git ignores, or of the environment."""
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "a repository")
    (tmp_path / ".git" / "info" / "exclude").write_text("_version.py\nreport.json\n")
    names = []
    monkeypatch.setitem(sys.modules, "of_repository.lazy", _Lazy("lazy"))
    for name, installed in (("_version", "/usr"), ("conftest", str(tmp_path)), ("conftest", "/usr")):
        (tmp_path / f"{name}.py").touch()
        module = ModuleType(name)
        module.__file__ = str(tmp_path / f"{name}.py")
        monkeypatch.setitem(sys.modules, f"of_repository.{name}", module)
        monkeypatch.setattr(sysconfig, "get_path", lambda _, installed=installed: installed)
        recorder_of_run = _recorder(tmp_path, Options())
        recorder_of_run.add(make_result(**_CPU), Options(), "test_it.py::test_it", _FACTS)
        names.append(known(recorder_of_run.report).commit.dirty)
    assert names == [False, False, True]


def test_a_case_is_compared_with_earlier_ones(recorded: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of the same items count that stand before it in the report, with all of their launches so far."""
    compared: list[list[tuple[str, int]]] = []

    def seen(launches: list[CaseResult], *, earlier: list[CaseResult], **others: Any) -> CaseResult:
        compared.append([(one.id, len(one.launches)) for one in earlier])
        return assess(launches, earlier=earlier, **others)

    monkeypatch.setattr(recorder, "assess", seen)
    for launch in (1, 2):
        recorded.start_launch(launch)
        for strategy, limit in (("mp", 1), ("mp", 2), ("tp", 1), ("iok", 1)):
            _add(recorded, make_result(strategy=strategy, limit=limit, **_CPU))
    once, twice = ([("mp-bs1", number), ("tp-bs1", number)] for number in (1, 2))
    assert compared == [[], [], once[:1], once, [], [], twice[:1], twice]


def test_a_figure_reaches_the_report_launch_by_launch(recorded: Recorder, tmp_path: Path) -> None:
    """The last attempt of a launch counts, and a name has one value in it; undeclared figures are kept as well."""
    recorded.declared = {"hit_rate": Declared(better="larger")}
    with pytest.raises(ValueError, match="'hit_rate': only a result that measure returned"):
        make_result().record("hit_rate", 1)
    for launch, values in ((1, (0.5, 0.9)), (2, (0.7,))):
        recorded.start_launch(launch)
        for value in values:
            recorded.begin_test("test_it.py::test_it")
            result = _add(recorded, make_result())
            result.record("hit_rate", value)
            with pytest.raises(ValueError, match=f"figure 'hit_rate': this launch of mp-bs1 has one, {value}: record"):
                result.record("hit_rate", 1)
    result.record("other", 3)
    (case,) = file.load(tmp_path / "report.json").cases
    assert [launch.figures for launch in case.launches] == [{"hit_rate": 0.9}, {"hit_rate": 0.7, "other": 3.0}]
    assert case.declared == recorded.declared


@pytest.mark.parametrize(
    ("interrupted", "others", "complete"), [(False, [], True), (False, ["another"], False), (True, [], False)]
)
def test_a_session_is_complete_once_all_expected_tests_measured(
    recorded: Recorder, interrupted: bool, others: list[str], complete: bool
) -> None:
    """A missing case or an interrupt makes it incomplete, a deselected test not; without a case there is no file."""
    path = known(recorded.path)
    recorded.expected += ["test_it.py::test_it", *others]
    recorded.conclude(1, interrupted=interrupted, deselected=["other"])
    assert not path.exists()
    _add(recorded, make_result(device="cpu", devices=1))
    recorded.conclude(1, interrupted=interrupted, deselected=["other"])
    report = file.load(path)
    session, (capacity,) = report.session, report.capacity
    assert (session.complete, session.exit_status, session.deselected) == (complete, 1, ["other"])
    assert (capacity.largest_fit, capacity.smallest_oom) == (1, None)


def test_a_nan_loses_no_report(recorded: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run fails, and a copy has every other figure."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    result = make_result()
    result.launches[0].wall_s = math.nan
    _add(recorded, result)
    recorded.conclude(0, interrupted=False, deselected=[])
    (copy,) = tmp_path.glob("tmp/*/report.json")
    (trouble,) = recorded.problems.values()
    assert "a figure is NaN or infinite" in trouble
    assert trouble.endswith(f"the report is {copy}")
    assert file.load(copy).cases[0].launches[0].wall_s is None


@pytest.fixture
def saved(emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorder]:  # noqa: ARG001
    """Return a function that finishes a run of one case with --llmgpu-save."""
    monkeypatch.chdir(tmp_path)

    def finish(name: str, exit_status: int = 0, *, interrupted: bool = False) -> Recorder:
        recorded = _recorder(tmp_path, Options(save=name))
        recorded.add(make_result(**_CPU), Options(), "tests/test_it.py::test_it", _FACTS)
        recorded.conclude(exit_status, interrupted=interrupted, deselected=[])
        recorded.finish(None)
        return recorded

    return finish


def test_a_run_is_saved_under_the_next_number_and_its_name(saved: Callable[..., Recorder], tmp_path: Path) -> None:
    """The store has the finished report, and the summary its path; the name is that of the newest one."""
    recorded = saved("base")
    (one,) = store.stored(tmp_path / "store")
    assert (one.number, one.name, one.machine) == (1, "base", "CPU-Xeon")
    assert file.load(one.path) == recorded.report
    *first, _next = recorded.whereabouts()
    assert first == ["report: report.json", f"saved: store/CPU-Xeon/{one.path.name}"]
    os.chdir("store")
    second = saved("base")
    assert second.whereabouts()[0] == f"report: {tmp_path / 'report.json'}", "a path that works in this folder"
    assert len(second.whereabouts()) == 3
    assert store.resolve("base", tmp_path / "store").report() == second.report


@pytest.mark.parametrize(
    ("name", "source", "step"),
    [
        ("base", Commit(sha="a" * 40), "next: llmgpu promote base --to tests/baseline.json.gz (makes it the baseline)"),
        ("", Commit(sha="a" * 40), "next: llmgpu promote latest --to tests/baseline.json.gz (makes it the baseline)"),
        ("base", Commit(sha="a" * 40, dirty=True), "next: no baseline: files were changed after the commit: commit"),
    ],
)
def test_the_step_after_saving_is_promote(
    saved: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch, name: str, source: Commit, step: str
) -> None:
    """Where promote would refuse the report, the reason comes at once."""
    monkeypatch.setattr(recorder, "commit", lambda *_, **__: source)
    assert saved(name).whereabouts()[-1].startswith(step)


@pytest.mark.parametrize("dirty", [False, True])
def test_the_step_after_an_interrupted_run_is_to_continue_it(
    saved: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch, dirty: bool
) -> None:
    """Only a committed state can be continued."""
    monkeypatch.setattr(recorder, "commit", lambda *_, **__: Commit(sha="a" * 40, dirty=dirty))
    step = saved("base", 2, interrupted=True).whereabouts()[-1]
    again = "next: the same command with --llmgpu-resume=report.json (measures what is missing); "
    assert step.startswith(again) != dirty


def test_the_summary_has_the_folder_of_traces(emulated: None, tmp_path: Path) -> None:  # noqa: ARG001
    """The report names the files without private folders; a folder that cannot be made is refused at the start."""
    for path, shown in ((tmp_path / "out", "out/a.gz"), (Path("/home/ada/out"), "a.gz")):
        recorded = Recorder({"storage": tmp_path / "store", "trace": tmp_path / "out"}, tmp_path, Options())
        result = make_result()
        _add(recorded, result)
        assert recorded.whereabouts()[1].startswith("no trace was written: ")
        result.launches[0].traces = [str(path / "a.gz")]
        assert _add(recorded, result).launches[0].traces == [shown]
        assert recorded.whereabouts()[1] == "trace: out"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"trace .*cannot be written"):
        Recorder({"storage": tmp_path / "store", "trace": tmp_path / "file"}, tmp_path, Options())


@pytest.mark.parametrize(("exit_status", "stopped", "name"), [(0, False, "base"), (1, False, "base"), (2, True, None)])
def test_a_run_that_did_not_complete_takes_no_name(
    saved: Callable[..., Recorder], tmp_path: Path, exit_status: int, stopped: bool, name: str | None
) -> None:
    """It is kept by its number, and the name is free for a whole report."""
    lines = saved("base", exit_status, interrupted=stopped).whereabouts()
    assert ("takes no name" in lines[1]) == stopped
    saved("base")
    kept = store.stored(tmp_path / "store")
    assert [(one.number, one.name) for one in kept] == [(1, name), (2, "base")]
    assert file.load(kept[0].path).session.exit_status == exit_status


def test_a_run_that_cannot_be_saved_is_refused_or_not_green(
    saved: Callable[..., Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that becomes full is reported, and the report is written; one without write access fails at the start."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save", full)
    recorded = saved("")
    problem = "the report could not be saved in store: No space left on device"
    assert list(recorded.problems.values()) == [problem]
    assert recorded.whereabouts()[:2] == ["report: report.json", problem]
    paths = {"json": tmp_path / "report.json", "storage": tmp_path / "taken"}
    paths["storage"].write_text("a file")
    with pytest.raises(ValueError, match="cannot be written"):
        Recorder(paths, tmp_path, Options(save=""))
    Recorder(paths, tmp_path, Options())
