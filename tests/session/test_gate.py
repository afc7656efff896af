from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from support.report_factory import make_report, make_result
from support.repository import first_commit
from support.verdict_factory import noise

from pytest_llmgpu.profiling import machine as environment
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.report import file
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Environment, Gpu, Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.verdicts import Baseline
from pytest_llmgpu.session.gate import RunGate
from pytest_llmgpu.store import store

_TEST = "test_it.py::test_it"


def _result(**fields: object) -> CaseResult:
    result = make_result(device="cpu", devices=1, **fields)  # type: ignore[arg-type]
    result.nodeid = _TEST
    return result


def _on(cpu: str, *results: CaseResult) -> Report:
    found = make_report(results, gpus=0)
    found.environment.cpu = cpu
    return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This machine: a Xeon without GPUs."""
    found = Environment(cpu="Xeon", python="3.11.7", platform="Linux")
    monkeypatch.setattr(environment, "fingerprint", lambda _: found)
    return Machine(device="cpu", devices=1, gpus=[], facts=TorchFacts(version="2"))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _gate(folder: Path, reference: str, *, policy: Path | None = None, **given: object) -> RunGate:
    options = Options(compare=reference, **given)  # type: ignore[arg-type]
    return RunGate(options, rootdir=folder, policy_path=policy, storage_path=folder / "store")


def _judged(
    folder: Path, machine: Machine, *base: CaseResult, cpu: str = "Xeon", tests: Sequence[str] = (_TEST,)
) -> RunGate:
    """Return the gate of a run on a Xeon that measured one case, with a baseline of these cases."""
    file.dump(_on(cpu, *base), folder / "base.json")
    gate = _gate(folder, str(folder / "base.json"))
    gate.find_baseline(machine)
    gate.expect(tests)
    gate.judge(_on("Xeon", _result()))
    return gate


def test_a_name_means_the_report_of_this_machine(tmp_path: Path, machine: Machine) -> None:
    """Two kinds of machines share a store; each is compared with its own report, which the verdicts name."""
    ours, _ = (store.save(_on(cpu, _result()), tmp_path / "store", "main") for cpu in ("Xeon", "EPYC"))
    gate = _gate(tmp_path, "main")
    gate.find_baseline(machine)
    verdicts = gate.judge(_on("Xeon", _result()))
    assert verdicts.baseline == Baseline(name="main", sha256=_sha256(ours))


def test_a_machine_with_gpus_is_known_by_them(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store names its reports by the GPUs."""
    gpus = [Gpu(index=0, uuid="GPU-0", name="NVIDIA H200", memory_bytes=140 * 2**30)]
    found = Environment(cpu="Xeon", python="3.11.7", platform="Linux", gpus=gpus)
    monkeypatch.setattr(environment, "fingerprint", lambda _: found)
    on_gpu = make_report([make_result()])
    on_gpu.environment = found
    ours = store.save(on_gpu, tmp_path / "store", "main")
    store.save(_on("EPYC", _result()), tmp_path / "store", "main")
    gate = _gate(tmp_path, "main")
    gate.find_baseline(msgspec.structs.replace(machine, device="cuda", gpus=gpus))
    verdicts = gate.judge(on_gpu)
    assert verdicts.baseline == Baseline(name="main", sha256=_sha256(ours))


def test_a_path_counts_from_the_rootdir_where_it_is_not_here(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ini file names one path for whatever folder the run is started in; what is written names no folder."""
    file.dump(_on("Xeon", _result()), tmp_path / "kept" / "base.json")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    gate = _gate(tmp_path, "kept/base.json")
    gate.find_baseline(machine)
    verdicts = gate.judge(_on("Xeon", _result()))
    assert verdicts.baseline is not None
    assert verdicts.baseline.name == "kept/base.json"


def test_names_of_the_policy_that_the_baseline_lacks_are_noted_before_the_run(tmp_path: Path, machine: Machine) -> None:
    """A misspelt name would otherwise be seen after hours."""
    file.dump(_on("Xeon", _result()), tmp_path / "base.json")
    allowed = '[[allow]]\ncase = "{}"\nmetric = "time"\nreason = "bug 7"\n'
    for name, notes in (("mp-*", 0), ("mp-b1", 1)):
        policy = tmp_path / "policy.toml"
        policy.write_text(allowed.format(name))
        gate = _gate(tmp_path, str(tmp_path / "base.json"), policy=policy)
        gate.find_baseline(machine)
        found = gate.notes()
        assert len(found) == notes
    assert "did you mean mp-bs1?" in found[0]


def test_reports_without_a_common_case_fail(tmp_path: Path, machine: Machine) -> None:
    """New cases are skipped, and the run fails because nothing was compared."""
    gate = _judged(tmp_path, machine)
    of_test, of_run = gate.verdict_of(_TEST), gate.verdict_of(None)
    assert (of_test.verdict, of_test.fails, of_test.undecided) == ("NEW", False, True)
    assert of_run.fails
    assert of_run.text.startswith("NOTHING COMPARED: ")


def test_another_machine_s_report_fails_its_tests(tmp_path: Path, machine: Machine) -> None:
    """Times of another processor are no baseline."""
    found = _judged(tmp_path, machine, _result(), cpu="EPYC").verdict_of(_TEST)
    assert (found.verdict, found.fails) == ("NOT_COMPARABLE", True)
    assert "CPU EPYC -> Xeon" in found.text


def test_a_test_that_measured_nothing_is_open(tmp_path: Path, machine: Machine) -> None:
    """A skipped test neither passes nor fails; the missing case of the baseline has its own row."""
    gate = _judged(tmp_path, machine, _result(), tests=[_TEST, "test_it.py::test_skipped"])
    found = gate.verdict_of("test_it.py::test_skipped")
    assert (found.undecided, found.text) == (True, "the test measured no case")


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("main", "is neither a file nor a report of the store"),
        ("gone.json", "cannot be read: No such file"),
        (5000 * "a", "is neither a file nor a report of the store"),
    ],
)
def test_a_missing_baseline_names_the_remedy(tmp_path: Path, machine: Machine, reference: str, complaint: str) -> None:
    """With the flag a first run has no baseline; other errors are still refused."""
    with pytest.raises(ValueError, match=rf"{complaint}.*; --llmgpu-allow-no-baseline lets a first run pass"):
        _gate(tmp_path, reference).find_baseline(machine)
    gate = _gate(tmp_path, reference, allow_no_baseline=True)
    gate.find_baseline(machine)
    assert gate.judge(_on("Xeon", _result())).baseline is None
    assert gate.summary().startswith("no baseline: ")


@pytest.mark.parametrize("reference", ["main", "folder", "git:nowhere:base.json"])
def test_a_broken_baseline_is_refused(tmp_path: Path, machine: Machine, reference: str) -> None:
    """A baseline that is ambiguous, no file or unknown to git is refused although a missing one is allowed."""
    for cpu in ("EPYC", "Core"):
        store.save(_on(cpu, _result()), tmp_path / "store", "main")
    (tmp_path / "folder").mkdir()
    wanted = str(tmp_path / "folder") if reference == "folder" else reference
    with pytest.raises(ValueError, match="--llmgpu-compare: ") as caught:
        _gate(tmp_path, wanted, allow_no_baseline=True).find_baseline(machine)
    assert "\n" not in str(caught.value)


def test_the_policy_may_be_that_of_a_commit(tmp_path: Path, machine: Machine) -> None:
    """A change under test cannot edit it; its name is under the table."""
    store.save(_on("Xeon", _result()), tmp_path / "store", "main")
    (tmp_path / "pyproject.toml").write_text("[tool.llmgpu.gate]\nstrict = true\n")
    first_commit(tmp_path)
    (tmp_path / "pyproject.toml").unlink()
    gate = _gate(tmp_path, "main", policy=Path("git:HEAD:pyproject.toml"), allow_no_baseline=True)
    assert (gate.policy.strict, gate.policy.allow_no_baseline) == (True, True), "an option changes its own rule alone"
    gate.find_baseline(machine)
    with noise():
        assert {row.verdict for row in gate.judge(_on("Xeon", _result())).rows} == {"OK"}
    assert gate.summary().endswith("\npolicy: git:HEAD:pyproject.toml")
