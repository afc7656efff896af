from __future__ import annotations

from collections.abc import Callable

import pytest
from support.faked_runs import FakedRuns


@pytest.fixture
def runs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> FakedRuns:
    """Return a function that runs a benchmark with measurements of no process: only pytest's part is tested."""
    return FakedRuns(pytester).start(monkeypatch)


@pytest.fixture
def refused(pytester: pytest.Pytester) -> Callable[..., str]:
    """Return a function that runs pytest with a usage error and without a report, and returns its only line."""

    def run(*flags: str) -> str:
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *flags)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "Traceback" not in result.stdout.str() + result.stderr.str()
        assert not (pytester.path / ".llmgpu").exists()
        (line,) = (line for line in result.errlines if line.startswith("ERROR: "))
        return line

    return run
