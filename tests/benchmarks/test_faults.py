"""The script benchmarks/gate/faults.py: a session on a CPU, and that it can fail."""

from __future__ import annotations

import json
from importlib import import_module

import pytest


@pytest.mark.slow
def test_faults_are_injected_and_judged(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One fault is found and undone before the healthy program is measured again; one that is not injected is wrong."""
    faults = import_module("faults")
    monkeypatch.setattr(faults, "FAULTS", {"adapters": faults.FAULTS["adapters"]})
    assert faults.main(["--device=cpu", "--strategies=mp", "--workloads=score"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["faults"], found["right"], found["wrong"]) == (1, 1, [])
    injected = {trial["fault"]: trial["injected"] for trial in found["trials"]}
    assert injected == {"adapters": True, "healthy again": False}
    assert not faults.names(faults.FAULTS["adapters"], "layers.*.self_attn aten::mm")
