"""The gate inside pytest: an item for each test that measures, run after all of them. A plugin of its own.

A test has been reported long before the whole report can be judged, and a metric's rows are judged as one family: so
a regression is a failing item of its own, `llmgpu gate::<test>`, with the same verdict that `llmgpu gate` gives of the
written report. The items are there from the collection on, whatever -k or --lf leave of the tests; what belongs to no
test (a series, a case that is gone, nothing compared at all) fails the last of them, `llmgpu gate::the whole run`.
The report is judged and written before the first of them is run.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from pytest_llmgpu.plugin import selection
from pytest_llmgpu.plugin.fixtures import SESSION
from pytest_llmgpu.plugin.selection import DESELECTED
from pytest_llmgpu.render.exports.junit import verdict_properties

__all__ = ["NAME", "WHOLE_RUN", "GateItem"]

NAME = "llmgpu gate"
"""What the ids of the gate's items begin with."""

WHOLE_RUN = "the whole run"
"""Name of the item for what belongs to no test."""

_LAST_FAILED = "cache/lastfailed"
"""Where pytest keeps the ids of what failed, for --lf."""

_VERDICT = pytest.StashKey[str]()
"""In `item.stash`: what was said of it."""
_CONCLUDED = pytest.StashKey[bool]()
"""In `config.stash`: whether the report has been judged."""


class _Gate(pytest.File):
    """Where the gate's items hang in pytest's tree; there is no such file."""

    def collect(self) -> Iterator[pytest.Item]:
        return iter(())


class GateItem(pytest.Item):
    """What the gate says of one test, or of the whole run."""

    def __init__(self, *, judged: str | None, **pytests: Any) -> None:
        """Make one for the test with that node id; None for what belongs to no test."""
        super().__init__(**pytests)
        self._judged = judged

    def runtest(self) -> None:
        """Fail, or skip where nothing can be said, with the gate's reason."""
        __tracebackhide__ = True
        benchmark = self.config.stash[SESSION]()
        assert benchmark.judge is not None, "items of the gate are there for --llmgpu-compare only"
        if not self.config.stash.get(_CONCLUDED, False):
            deselected = self.config.stash[DESELECTED]
            benchmark.conclude(None, interrupted=False, deselected=deselected)
            self.config.stash[_CONCLUDED] = True
        ruling = benchmark.judge.ruling(self._judged)
        self.stash[_VERDICT] = ruling.verdict
        self.user_properties += verdict_properties(ruling.rows)
        if ruling.fails:
            pytest.fail(ruling.text, pytrace=False)
        if ruling.open:
            pytest.skip(ruling.text)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return what the heading of a failure shows."""
        return self.path / NAME, None, f"{NAME}: {self.name}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Add the items, after the plugin has ordered the tests."""
    config = session.config
    if hasattr(config, "workerinput") or selection.runs_nothing(config):
        return
    tests = [item.nodeid for item in session.items if selection.measures(item)]
    # Asked for on the command line, and no test is there that measures: that is not green either.
    if tests or config.getoption("llmgpu_compare") is not None:
        judge = config.stash[SESSION]().judge
        assert judge is not None, "this plugin is there for --llmgpu-compare only"
        judge.expect(tests)
        parent = _Gate.from_parent(session, path=config.rootpath / NAME)
        judged = [*((test, test) for test in tests), (WHOLE_RUN, None)]
        # The root's path, so that hooks of its conftest.py see them.
        session.items += [
            GateItem.from_parent(parent, path=config.rootpath, name=name, judged=nodeid) for name, nodeid in judged
        ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the verdict ride on the report."""
    report = yield
    if report.when == "call" and _VERDICT in item.stash:
        report.llmgpu_verdict = item.stash[_VERDICT]  # type: ignore[attr-defined]  # it takes any attribute
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show the verdict, and count what nothing can be said of by its own name."""
    verdict: str | None = getattr(report, "llmgpu_verdict", None)
    if verdict is None:
        return None
    if report.skipped:
        return verdict.lower().replace("_", " "), "?", verdict
    return ("failed", "F", verdict) if report.failed else ("passed", ".", verdict)


@pytest.hookimpl(trylast=True)  # pytest has written by then what failed
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Have --lf run the tests again whose items failed: the items' own ids match nothing, and would stay for good.

    Of the whole run nothing is kept: no test could be run again for it.
    """
    cache = getattr(session.config, "cache", None)
    if cache is None or hasattr(session.config, "workerinput"):
        return
    failed: dict[str, bool] = cache.get(_LAST_FAILED, {})
    tests = {nodeid.removeprefix(f"{NAME}::"): True for nodeid in failed if nodeid != f"{NAME}::{WHOLE_RUN}"}
    if tests != failed:
        cache.set(_LAST_FAILED, tests)
