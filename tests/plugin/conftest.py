from __future__ import annotations

import pytest
from support.faked_runs import BENCHMARK, FakedRuns


@pytest.fixture
def runs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> FakedRuns:
    """Return a function that runs a benchmark with measurements of no process: only pytest's part is tested."""
    faked = FakedRuns(pytester)
    faked.start(monkeypatch)
    pytester.makepyfile(test_it=BENCHMARK)
    return faked
