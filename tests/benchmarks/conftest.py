"""The scripts are imported by their names: `import_module("faults")`."""

from __future__ import annotations

from pathlib import Path

import pytest

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("faults", "gate", "overhead", "paper"):
        monkeypatch.syspath_prepend(_BENCHMARKS / folder)
