"""The gate in pytest: one item per test that measures, run after all tests. A plugin of its own.

A test is reported long before the whole report can be judged, and the rows of a metric are judged together. A
regression is therefore a failing item of its own, `llmgpu gate::<test>`, with the verdict that `llmgpu gate` gives for
the written report. The items exist from the collection on, whatever -k or --lf leave of the tests. A failure that
belongs to no test (a missing case, a run in which nothing was compared) fails the last item,
`llmgpu gate::the whole run`. The report is judged and written before the first item runs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from pytest_llmgpu.plugin import fixtures
from pytest_llmgpu.plugin.fixtures import DESELECTED, session_of
from pytest_llmgpu.render.exports.tools import junit_verdicts
from pytest_llmgpu.report.text import printable_lines

NAME = "llmgpu gate"
"""The ids of the items begin with this."""
WHOLE_RUN = "the whole run"
"""The name of the item for failures that belong to no test."""
_LAST_FAILED = "cache/lastfailed"
"""The entry of pytest's cache with the ids of failed tests, for --lf."""
_VERDICT = pytest.StashKey[str]()
"""In `item.stash`: the verdict of the item."""


class _Gate(pytest.File):
    """The parent of the items in pytest's tree; no such file exists."""

    def collect(self) -> Iterator[pytest.Item]:
        return iter(())


class GateItem(pytest.Item):
    """The verdict on one test, or on the whole run."""

    def __init__(self, *, judged: str | None, **pytests: Any) -> None:
        """Make the item of the test with the node id `judged`; None for failures that belong to no test."""
        super().__init__(**pytests)
        self._judged = judged

    def runtest(self) -> None:
        """Fail on a regression, and skip if there is no verdict; both with the reason."""
        __tracebackhide__ = True
        benchmark = session_of(self.config)
        assert benchmark.gate is not None, "the items exist with --llmgpu-compare only"
        if benchmark.gate.verdicts is None:
            benchmark.recorder.conclude(None, interrupted=False, deselected=[*self.config.stash[DESELECTED]])
        found = benchmark.gate.verdict_of(self._judged)
        self.stash[_VERDICT] = found.verdict
        self.user_properties += junit_verdicts(found.rows)
        if found.fails:
            pytest.fail(printable_lines(found.text), pytrace=False)
        if found.verdict not in {"OK", "CHANGED"}:
            pytest.skip(printable_lines(found.text))

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return the location and the heading of a failure."""
        return self.path / NAME, None, f"{NAME}: {self.name}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Add the items after the plugin has ordered the tests."""
    config = session.config
    if hasattr(config, "workerinput") or fixtures.runs_nothing(config):
        return
    tests = [item.nodeid for item in session.items if fixtures.measures(item)]
    # With the flag, a run without a test that measures fails too.
    if tests or config.getoption("llmgpu_compare") is not None:
        gate = session_of(config).gate
        assert gate is not None, "this plugin is registered with --llmgpu-compare only"
        gate.expect(tests)
        parent = _Gate.from_parent(session, path=config.rootpath / NAME)
        if config.pluginmanager.hasplugin("rerunfailures"):
            parent.add_marker(pytest.mark.flaky(reruns=0))  # --reruns: a verdict stays as it is
        judged = [*((test, test) for test in tests), (WHOLE_RUN, None)]
        # With the path of the rootdir, the hooks of its conftest.py apply to the items.
        session.items += [
            GateItem.from_parent(parent, path=config.rootpath, name=name, judged=nodeid) for name, nodeid in judged
        ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the verdict to pytest's report."""
    report = yield
    if report.when == "call" and _VERDICT in item.stash:
        report.llmgpu_verdict = item.stash[_VERDICT]  # type: ignore[attr-defined]  # it takes any attribute
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show the verdict, and count items without a verdict by their own name."""
    verdict: str | None = getattr(report, "llmgpu_verdict", None)
    verdict = verdict and verdict.replace("_", " ")
    if verdict is None:
        return None
    if report.skipped:
        return verdict.lower(), verdict[0], verdict  # one word in letter, line and footer
    return ("failed", "F", verdict) if report.failed else ("passed", ".", verdict)


@pytest.hookimpl(trylast=True)  # after pytest has written the failed ids
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Replace failed items by their tests in the cache of --lf, since the ids of items match no test.

    The item of the whole run is dropped, since no single test belongs to it.
    """
    if (cache := getattr(session.config, "cache", None)) is None or hasattr(session.config, "workerinput"):
        return
    failed: dict[str, bool] = cache.get(_LAST_FAILED, {})
    tests = {nodeid.removeprefix(f"{NAME}::"): True for nodeid in failed if nodeid != f"{NAME}::{WHOLE_RUN}"}
    if tests != failed:
        cache.set(_LAST_FAILED, tests)
