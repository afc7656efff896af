"""Runs that are kept in the store."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.report_factory import make_result

from pytest_llmgpu.profiling import machine as environment
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.report import file
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Commit, Environment
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.session import recorder
from pytest_llmgpu.session.recorder import Recorder
from pytest_llmgpu.store import store

_NODEID = "test_it.py::test_it"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the probes of torch and NVML."""
    monkeypatch.setattr(recorder, "commit", lambda _: Commit(sha="0123456789abcdef"))
    found = Environment(cpu="Xeon", python="3.11.7", platform="Linux")
    monkeypatch.setattr(environment, "fingerprint", lambda _: found)


def _finished(
    tmp_path: Path,
    options: Options,
    *,
    exit_status: int = 0,
    interrupted: bool = False,
    result: CaseResult | None = None,
) -> Recorder:
    """Return the recorder of a run of one case."""
    kept = Recorder(tmp_path / "report.json", tmp_path / "store", tmp_path, options)
    kept.add(
        result or make_result(device="cpu", devices=1),
        options,
        _NODEID,
        Machine(device="cpu", devices=1, gpus=[], facts=TorchFacts(version="2")),
    )
    kept.conclude(exit_status, None, interrupted=interrupted, expected=[_NODEID], deselected=[])
    kept.finish(None)
    return kept


def test_a_run_is_saved_under_the_next_number_and_its_name(tmp_path: Path) -> None:
    """The store has the finished report, and the summary has its path."""
    kept = _finished(tmp_path, Options(save="before-the-upgrade"))
    (one,) = store.stored(tmp_path / "store")
    assert (one.number, one.name, one.machine) == (1, "before-the-upgrade", "CPU-Xeon")
    assert file.load(one.path) == kept.report
    assert kept.whereabouts()[:2] == ["report: report.json", f"saved: store/CPU-Xeon/{one.path.name}"]


@pytest.mark.parametrize(("interrupted", "names"), [(True, [None, "base"]), (False, ["base", "base"])])
def test_a_run_that_did_not_complete_loses_its_name(tmp_path: Path, interrupted: bool, names: list[str | None]) -> None:
    """The next run of that name gets it, or the name would be ambiguous after Ctrl-C; a complete run keeps it."""
    _finished(tmp_path, Options(save="base"), interrupted=interrupted)
    _finished(tmp_path, Options(save="base"))
    assert [(one.number, one.name) for one in store.stored(tmp_path / "store")] == list(enumerate(names, 1))


def test_a_second_run_of_a_name_is_noted(tmp_path: Path) -> None:
    """Both are kept, and the summary names them: the name alone finds neither."""
    assert len(_finished(tmp_path, Options(save="base")).whereabouts()) == 3
    *_, note, _next = _finished(tmp_path, Options(save="base")).whereabouts()
    assert note.startswith("note: 'base' is ambiguous: it can be CPU-Xeon/0001 (")
    assert "CPU-Xeon/0002" in note


@pytest.mark.parametrize(("exit_status", "interrupted"), [(1, False), (2, True)])
def test_who_asks_for_a_run_to_be_saved_gets_it_whatever_came_of_it(
    tmp_path: Path, exit_status: int, interrupted: bool
) -> None:
    """--llmgpu-save keeps a failed or interrupted run too."""
    _finished(tmp_path, Options(save=""), exit_status=exit_status, interrupted=interrupted)
    (one,) = store.stored(tmp_path / "store")
    assert one.name is None
    assert file.load(one.path).session.exit_status == exit_status


def test_a_store_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    """A store that cannot be written is refused before the run."""
    (tmp_path / "store").write_text("a file")
    with pytest.raises(ValueError, match="cannot be written"):
        Recorder(tmp_path / "report.json", tmp_path / "store", tmp_path, Options(save=""))
    Recorder(tmp_path / "report.json", tmp_path / "store", tmp_path, Options())


def test_a_run_that_could_not_be_saved_is_not_green(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that becomes full is reported, and the report itself is written."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save", full)
    kept = _finished(tmp_path, Options(save=""))
    said = "the report could not be saved in store: No space left on device"
    assert list(kept.problems.values()) == [said]
    assert kept.whereabouts()[:2] == ["report: report.json", said]
