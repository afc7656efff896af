from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.report_factory import known, make_report, make_result
from support.repository import first_commit
from support.verdict_factory import any_unseen, noise

from pytest_llmgpu.profiling import machine as environment
from pytest_llmgpu.profiling.machine import Machine, TorchFacts
from pytest_llmgpu.report import file
from pytest_llmgpu.report.options import Options
from pytest_llmgpu.report.report import Environment, Gpu, Node, Report
from pytest_llmgpu.report.result import CaseResult
from pytest_llmgpu.report.text import named
from pytest_llmgpu.report.verdicts import Baseline
from pytest_llmgpu.session.gate import RunGate
from pytest_llmgpu.store import git, store

_MakeGate = Callable[..., RunGate]
_TEST, _SKIPPED = "test_it.py::test_it", "test_it.py::test_skipped"


def _result() -> CaseResult:
    result = make_result(device="cpu", devices=1)
    result.nodeid = _TEST
    return result


def _on(cpu: str, *results: CaseResult) -> Report:
    found = make_report(results, gpus=0)
    found.environment.cpu, found.session.complete = cpu, True
    return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This machine: a Xeon without GPUs."""
    found = Node(cpu="Xeon", python="3.11.7", platform="Linux")
    monkeypatch.setattr(environment, "fingerprint", lambda _: found)
    return Machine(device="cpu", devices=1, gpus=[], facts=TorchFacts(version="2"))


@pytest.fixture
def gate(tmp_path: Path, machine: Machine) -> _MakeGate:
    """Return a function that makes the gate of a run, which has looked for its baseline."""

    def make(where: str = "base.json", *, policy: Path | None = None, on: Machine = machine, **given: Any) -> RunGate:
        options = Options(compare=where, **given)
        found = RunGate(options, rootdir=tmp_path, policy_path=policy, storage_path=tmp_path / "store")
        found.find_baseline(on)
        return found

    return make


@pytest.mark.parametrize("on_gpus", [False, True])
def test_a_name_means_the_report_of_this_machine(
    tmp_path: Path, machine: Machine, gate: _MakeGate, monkeypatch: pytest.MonkeyPatch, on_gpus: bool
) -> None:
    """Two kinds of machines share a store, and GPUs name theirs; each is compared with its own, which verdicts name."""
    ours = _on("Xeon", _result())
    if on_gpus:
        gpus = [Gpu(index=0, uuid="GPU-0", name="NVIDIA H200", memory_bytes=140 * 2**30)]
        ours = make_report([make_result()])
        ours.session.complete = True
        ours.environment = Environment(cpu="Xeon", python="3.11.7", platform="Linux", gpus=gpus)
        here = Node(cpu="Xeon", python="3.11.7", platform="Linux", gpus=gpus)
        monkeypatch.setattr(environment, "fingerprint", lambda _: here)
        machine = msgspec.structs.replace(machine, device="cuda", gpus=gpus)
    kept, _ = (store.save(report, tmp_path / "store", "main") for report in (ours, _on("EPYC", _result())))
    sha256 = hashlib.sha256(kept.read_bytes()).hexdigest()
    assert known(gate("main", on=machine).judge(ours)).baseline == Baseline(name="main", sha256=sha256)


def test_a_path_counts_from_the_rootdir_where_it_is_not_here(tmp_path: Path, gate: _MakeGate) -> None:
    """An ini file names one path for whatever folder the run is started in; what is written names no folder."""
    file.dump(_on("Xeon", _result()), tmp_path / "kept" / "base.json")
    baseline = known(gate("kept/base.json").judge(_on("Xeon", _result()))).baseline
    assert known(baseline).name == "kept/base.json"


def test_names_of_the_policy_that_the_baseline_lacks_are_noted_before_the_run(tmp_path: Path, gate: _MakeGate) -> None:
    """A misspelt name would otherwise be seen after hours."""
    file.dump(_on("Xeon", _result()), tmp_path / "base.json")
    policy = tmp_path / "policy.toml"
    for name, notes in (("mp-*", 0), ("mp-b1", 1)):
        policy.write_text(f'[[allow]]\ncase = "{name}"\nmetric = "time"\nreason = "bug 7"\n')
        found = gate(policy=policy).notes()
        assert len(found) == notes
    assert "did you mean mp-bs1?" in found[0]


@pytest.mark.parametrize(
    ("cpu", "changes", "note"),
    [
        ("Xeon", [{}], ""),
        ("Xeon", [{"dtype": "bfloat16"}], "dtype float16 -> bfloat16"),
        ("Xeon", [{"dtype": "bfloat16"}, {"batch_size": 2}], ""),
        ("Xeon", [{"model": "other"}] * 2, "model huggyllama/llama-30b -> other"),
        ("Xeon", [{"dataset": "other", "limit": 3, "new_tokens": 8, "tokenizer_sha256": "0", "batch_size": 2}], ""),
        ("Xeon", [{"strategy": "tp", "dtype": "bfloat16"}], ""),
        ("EPYC", [{}], "CPU EPYC -> Xeon"),
    ],
)
def test_a_baseline_that_cannot_be_compared_is_noted_before_the_run(
    tmp_path: Path, gate: _MakeGate, cpu: str, changes: list[dict[str, Any]], note: str
) -> None:
    """Where one case is new or a test may choose other items, nothing is said."""
    file.dump(_on(cpu, _result()), tmp_path / "base.json")
    planned = [msgspec.structs.replace(_result().case, **change) for change in changes]
    found = gate().notes(planned)
    assert found == ([f"llmgpu: note: no case can be compared with the baseline: {note}"] if note else [])


@pytest.mark.parametrize(
    ("base", "cpu", "nodeid", "verdict", "text"),
    [
        ([], "Xeon", _TEST, "NEW", ""),
        ([], "Xeon", None, "NOT_COMPARABLE", "NOTHING COMPARED: "),
        ([_result()], "EPYC", _TEST, "NOT_COMPARABLE", "CPU EPYC -> Xeon"),
        # The missing case of the baseline has its own row.
        ([_result()], "Xeon", _SKIPPED, "MISSING", "the test measured no case"),
    ],
)
def test_a_test_whose_cases_cannot_be_compared_does_not_pass(
    tmp_path: Path, gate: _MakeGate, base: Any, cpu: str, nodeid: str | None, verdict: str, text: str
) -> None:
    """New and skipped ones are open, and the run fails if nothing was compared; another processor is no baseline."""
    file.dump(_on(cpu, *base), tmp_path / "base.json")
    judging = gate()
    judging.expect([_TEST, _SKIPPED])
    judging.judge(_on("Xeon", _result()))
    found, fails = judging.verdict_of(nodeid), verdict == "NOT_COMPARABLE"
    assert (found.verdict, found.fails) == (verdict, fails)
    assert text in found.text


def test_a_report_that_is_its_own_baseline_does_not_pass(tmp_path: Path, gate: _MakeGate) -> None:
    """A run that is continued without a missing case has the launches of the report."""
    file.dump(_on("Xeon", _result()), tmp_path / "base.json")
    judging = gate()
    judging.expect([_TEST])
    judging.judge(file.load(tmp_path / "base.json"))
    found = judging.verdict_of(_TEST)
    assert (found.verdict, found.fails) == ("UNDECIDED", True)
    assert "are of the same run" in found.text


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("main", "is neither a file nor a report of the store"),
        ("gone.json", "cannot be read: No such file"),
        (5000 * "a", "is neither a file nor a report of the store"),
    ],
)
def test_a_missing_baseline_names_the_remedy(gate: _MakeGate, reference: str, complaint: str) -> None:
    """With the flag a first run has no baseline; other errors are still refused."""
    with pytest.raises(ValueError, match=rf"{complaint}.*; --llmgpu-allow-no-baseline lets a first run pass"):
        gate(reference)
    judging = gate(reference, allow_no_baseline=True)
    assert known(judging.judge(_on("Xeon", _result()))).baseline is None
    assert judging.summary().startswith("no baseline: ")


def test_a_name_that_may_be_misspelt_is_no_first_run(tmp_path: Path, gate: _MakeGate) -> None:
    """Beside a similar name of the store the flag lets no run pass, which would compare nothing for ever."""
    store.save(_on("Xeon", _result()), tmp_path / "store", "main")
    with pytest.raises(ValueError, match=re.escape(f"(did you mean main?){git.FIRST}") + "$"):
        gate("mian", allow_no_baseline=True)
    assert gate("nightly", allow_no_baseline=True).summary().startswith("no baseline: ")


@pytest.mark.parametrize("reference", ["main", "folder", "git:nowhere:base.json"])
def test_a_broken_baseline_is_refused(tmp_path: Path, gate: _MakeGate, reference: str) -> None:
    """A baseline that is ambiguous, no file or unknown to git is refused although a missing one is allowed."""
    for cpu in ("EPYC", "Core"):
        store.save(_on(cpu, _result()), tmp_path / "store", "main")
    (tmp_path / "folder").mkdir()
    wanted = str(tmp_path / "folder") if reference == "folder" else reference
    with pytest.raises(ValueError, match="--llmgpu-compare: ") as caught:
        gate(wanted, allow_no_baseline=True)
    assert "\n" not in str(caught.value)


def test_the_summary_of_pytest_names_the_report_of_undecided_rows(tmp_path: Path, gate: _MakeGate) -> None:
    """The command that lists them reads the verdicts of the run; REPORT is the name that the session inserts."""
    file.dump(_on("Xeon", _result()), tmp_path / "base.json")
    judging = gate()
    with any_unseen():
        judging.judge(_on("Xeon", _result()))
        summary = judging.summary()
    assert "UNDECIDED (time): `llmgpu gate --verdicts REPORT --all` lists them." in summary
    assert "`llmgpu gate --verdicts latest --all`" in named(summary, "latest")


def test_the_policy_may_be_that_of_a_commit(tmp_path: Path, gate: _MakeGate) -> None:
    """A change under test cannot edit it; its name is under the table."""
    store.save(_on("Xeon", _result()), tmp_path / "store", "main")
    (tmp_path / "pyproject.toml").write_text("[tool.llmgpu.gate]\nstrict = true\n")
    first_commit(tmp_path)
    (tmp_path / "pyproject.toml").unlink()
    judging = gate("main", policy=Path("git:HEAD:pyproject.toml"), allow_no_baseline=True)
    policy = judging.policy
    assert (policy.strict, policy.allow_no_baseline) == (True, True), "an option changes its own rule alone"
    with noise():
        assert {row.verdict for row in known(judging.judge(_on("Xeon", _result()))).rows} == {"OK"}
    assert judging.summary().endswith("\npolicy: git:HEAD:pyproject.toml")
