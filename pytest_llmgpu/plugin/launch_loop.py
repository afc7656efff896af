"""In which order tests run where every case is measured in several launches of its processes. A plugin of its own.

The whole run is repeated, launch by launch: all tests that measure, each strategy's batch sizes in ascending order;
then the processes are ended, and so on. So a model is loaded once a launch and not once a launch and case; in every
launch a case's processes have done the same before it, as the replicates of one measurement must; and a machine that
drifts does so for all cases alike, not from the first of them to the last. The tests themselves are repeated, since
only they know what they ask of the model besides measuring.

A test is reported once: after its last launch, or after the first in which it did not pass, which is its last then.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

# Private, and as pytest-rerunfailures has it: there is no public way to run a test and keep its reports.
from _pytest.runner import runtestprotocol

from pytest_llmgpu.plugin import options, selection
from pytest_llmgpu.plugin.fixtures import SESSION

__all__: list[str] = []

_ENDED = pytest.StashKey[set[str]]()
"""In `config.stash`: node ids that have been reported before the last launch; there until then."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests that measure once a launch, and in the last launch all that there is."""
    config = session.config
    repeated = [item for item in session.items if selection.measures(item)]
    uncollected = session.testsfailed and not config.getoption("continue_on_collection_errors")
    if not repeated or uncollected or selection.runs_nothing(config):
        return None
    benchmark, launches = config.stash[SESSION](), options.resolve(config).launches
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
    """Run a test before its last launch: nothing is reported if it passes."""
    ended = item.config.stash.get(_ENDED, None)
    if ended is None:
        return None
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    # One that is marked xfail goes on in spite of its failing.
    if not all(report.passed or hasattr(report, "wasxfail") for report in reports):
        ended.add(item.nodeid)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run(session: pytest.Session, items: Sequence[pytest.Item]) -> None:
    """Run tests as pytest does; what their fixtures hold is given back after the last."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
