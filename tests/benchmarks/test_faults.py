"""The script benchmarks/gate/faults.py: its expectations, and that it can fail."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest
from support.report_factory import make_report, make_result

from pytest_llmgpu.report.cause import CallsChange, Cause, TimeChange
from pytest_llmgpu.report.verdicts import Row


@pytest.fixture
def faults() -> Any:
    """Import faults.py."""
    return import_module("faults")


def _cause(name: str = "GEMM", module: str = "layers.*.mlp", **fields: Any) -> Cause:
    part = TimeChange(name=name, before_s=1.0, after_s=2.0, share=1.0)
    in_module = TimeChange(name=module, family="GEMM", before_s=1.0, after_s=2.0, share=1.0)
    return Cause(**{"place": "device", "parts": [part], "modules": [in_module], **fields})


_CALLED = CallsChange(name="cudaStreamSynchronize", before=4, after=132)


@pytest.mark.parametrize(
    ("fault", "cause", "right"),
    [
        ("one layer slower", _cause(), True),
        ("one layer slower", _cause(module="lm_head"), True),
        ("one layer slower", _cause(name="norm"), True),
        ("one layer slower", _cause(name="norm", module="lm_head"), False),
        ("one layer slower", None, False),
        ("a slower rank", _cause(rank=1), True),
        ("a slower rank", _cause(rank=0), False),
        ("a slower rank", _cause(), False),
        ("host sleep", Cause(place="host"), True),
        ("host sleep", _cause(), False),
        ("host synchronization", Cause(place="program", runtime_calls=[_CALLED]), True),
        ("host synchronization", Cause(place="program"), False),
    ],
)
def test_a_cause_is_right_if_it_names_the_fault(faults: Any, fault: str, cause: Cause | None, right: bool) -> None:
    """Family or module for kernels, the rank, the host, or the call."""
    row = Row.of(make_result(), "time", "REGRESSED", "slower", cause=cause)
    assert faults.is_right(row, faults.FAULTS[fault], "cuda") is right
    assert faults.is_right(None, faults.FAULTS[fault], "cuda") is False


def test_faults_without_effect_are_left_out(faults: Any) -> None:
    """One device has no collective and no other rank; on a CPU nothing waits for a GPU."""
    assert len(faults.faults_of(2, "cuda")) == len(faults.FAULTS) == 7
    assert len(faults.faults_of(1, "cuda")) == 5
    assert "host synchronization" not in faults.faults_of(2, "cpu")


def test_each_test_of_a_session_becomes_a_report(faults: Any) -> None:
    """All have the id of the case, so that they can be compared."""
    names = ["healthy", "host sleep"]
    cases = [make_result(), make_result()]
    for number, (name, case) in enumerate(zip(names, cases, strict=True)):
        case.id, case.nodeid = f"{case.id}#{number}", f"test_faults.py::test_fault[mp-bs8-{name}]"
    found = faults.split(make_report(cases), names)
    assert {name: [one.nodeid for one in report.cases] for name, report in found.items()} == {
        name: [case.nodeid] for name, case in zip(names, cases, strict=True)
    }
    assert {case.id for report in found.values() for case in report.cases} == {cases[0].case.id}


def test_one_fault_may_be_missed_and_nothing_healthy_regressed(faults: Any) -> None:
    """The exit status follows from the counts."""

    def trial(fault: str, right: bool) -> dict[str, Any]:
        return {"strategy": "mp", "round": 0, "fault": fault, "right": right}

    fine = [trial("host sleep", True)] * 3 + [trial("healthy", True)]
    assert faults.summary(fine)["ok"]
    assert faults.summary([*fine, trial("host sleep", False)])["ok"]
    assert not faults.summary([*fine, *[trial("host sleep", False)] * 2])["ok"]
    assert not faults.summary([*fine, trial("healthy", False)])["ok"]
    assert not faults.summary([])["ok"]


@pytest.mark.slow
def test_faults_are_found_on_a_cpu(faults: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Products that were added are found by FLOPs, and the cause names the op and its module."""
    faults.main(["--device=cpu", "--rounds=1", "--strategies=mp"])
    trials = {trial["fault"]: trial for trial in json.loads(capsys.readouterr().out)["trials"]}
    for name in ("one layer slower", "all layers slower", "a cast to float32"):
        assert trials[name]["right"]
        assert "more aten::mm in layers" in trials[name]["cause"]
