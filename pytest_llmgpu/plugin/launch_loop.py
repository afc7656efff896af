"""The order of tests with several launches per case. A plugin of its own, for --llmgpu-launches above 1.

All tests that measure run, then the processes end, and the next launch begins. A model is therefore loaded once per
launch, the processes of a case have run the same cases before it in every launch, as replicates of one measurement
require, and a drift of the machine affects all cases alike. Whole tests are repeated, because a test may use the model
in other ways too. A test is reported once: after its last launch, or after the first one in which it did not pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

# Private, and imported by pytest-rerunfailures too: pytest has no public way to run a test and keep its reports.
from _pytest.runner import runtestprotocol

from pytest_llmgpu.plugin import fixtures, options
from pytest_llmgpu.plugin.fixtures import session_of

_ENDED = pytest.StashKey[set[str]]()
"""In `config.stash` until the last launch: the ids of the tests that were reported before it."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests that measure once per launch, and all other tests in the last launch."""
    config = session.config
    repeated = [item for item in session.items if fixtures.measures(item)]
    uncollected = session.testsfailed and not config.getoption("continue_on_collection_errors")
    if not repeated or uncollected or fixtures.runs_nothing(config):
        return None
    benchmark, launches = session_of(config), options.resolve(config).launches
    ended: set[str] = set()
    config.stash[_ENDED] = ended
    for launch in range(1, launches):
        benchmark.start_launch(launch, launches)
        _run(session, [item for item in repeated if item.nodeid not in ended])
    del config.stash[_ENDED]
    benchmark.start_launch(launches, launches)
    _run(session, [item for item in session.items if item.nodeid not in ended])
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test before its last launch, and report it only if it does not pass."""
    ended = item.config.stash.get(_ENDED, None)
    if ended is None:
        return None
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    # A test that is marked xfail continues after it failed.
    if not all(report.passed or hasattr(report, "wasxfail") for report in reports):
        ended.add(item.nodeid)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run(session: pytest.Session, items: Sequence[pytest.Item]) -> None:
    """Run tests as pytest's own loop does; the fixtures are torn down after the last one."""
    for item, following in zip(items, [*items[1:], None], strict=False):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
