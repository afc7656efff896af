"""The script benchmarks/faults/rig.py: one fault that is good, and that it can be bad."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("status", "result"), [(2, "good"), (0, "bad")])
def test_a_fault_is_judged(
    status: int, result: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full stderr has exit status 2; a rig that expects another one prints it, with what is wrong."""
    rig = import_module("rig")
    fault = dataclasses.replace(rig.FAULTS["stderr-full"], status=status)
    monkeypatch.setattr(rig, "FAULTS", {"stderr-full": fault})
    assert rig.main(["stderr-full"]) == (result == "bad")
    found = json.loads(capsys.readouterr().out)
    assert (found[result], found["trials"][0]["wrong"]) == (1, ["status 2"] if result == "bad" else [])
