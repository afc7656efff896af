"""pytest's hooks. They translate and call; what they call decides.

Loading this module costs every test run of its users, so it imports nothing heavier than pytest itself; the rest is
imported once a collected test asks for the model.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_llmgpu.plugin import fixtures, hookspecs, options, selection
from pytest_llmgpu.plugin.fixtures import OUTCOME, SESSION, BatchSize, SessionMaker
from pytest_llmgpu.plugin.selection import DESELECTED

if TYPE_CHECKING:
    from pytest_llmgpu.session.session import BenchmarkSession

_EXPECTED = ("oom", "skipped_after_oom")
_XDIST = "llmgpu_usage_error"
_REFUSED = pytest.StashKey[list[str]]()
"""In `config.stash`: what is wrong with the markers of which test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    options.declare(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that other plugins may implement."""
    pluginmanager.add_hookspecs(hookspecs)


def pytest_llmgpu_strategies() -> Mapping[str, str]:
    """Register the strategies that come with the package."""
    from pytest_llmgpu import strategies

    return strategies.BUILT_IN


def pytest_llmgpu_tasks() -> Mapping[str, str]:
    """Register the tasks that come with the package."""
    from pytest_llmgpu.inference import tasks

    return tasks.BUILT_IN


def pytest_configure(config: pytest.Config) -> None:
    """Refuse bad options, whatever is collected, and bring the fixtures."""
    config.addinivalue_line(
        "markers",
        "llmgpu(model=..., batch_sizes=..., expect_oom=False, ...): options of pytest-llmgpu for one test, by their "
        "names without --llmgpu-; expect_oom: no batch size needs to complete",
    )
    chosen = options.resolve(config)
    options.refuse_idle(config, chosen)
    config.stash[DESELECTED] = selection.selection(config)
    refused: list[str] = []
    config.stash[_REFUSED] = refused
    config.stash[SESSION] = SessionMaker(lambda: _new_session(config))
    config.pluginmanager.register(fixtures.make(chosen), "llmgpu-fixtures")
    config.pluginmanager.register(fixtures.TaskFixtures(config), "llmgpu-task-fixtures")
    if chosen.compare is not None:
        from pytest_llmgpu.plugin import gate_items

        config.pluginmanager.register(gate_items, "llmgpu-gate")
    if chosen.launches > 1:
        from pytest_llmgpu.plugin import launch_loop

        config.pluginmanager.register(launch_loop, "llmgpu-launches")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that is marked its own strategies and batch sizes.

    By the marker of pytest's own, which takes the place of a fixture's parameters. A marker that is not allowed is kept
    for the end of the collection: here pytest would show it with a traceback.
    """
    markers = list(metafunc.definition.iter_markers("llmgpu"))
    if not markers:
        return
    try:
        chosen = options.resolve(metafunc.config, markers)
    except pytest.UsageError as error:
        metafunc.config.stash[_REFUSED].append(f"{metafunc.definition.nodeid}: {error}")
        return
    if any({"strategy", "batch_sizes"} & set(marker.kwargs) for marker in markers):
        for mark in fixtures.parameters(chosen, metafunc.fixturenames):
            metafunc.definition.add_marker(mark)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Remember what was taken out, so that a missing case differs from one nobody wanted."""
    for item in items:
        if selection.is_ours(item):
            item.config.stash[DESELECTED].append(item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Order our tests and refuse what cannot be measured, before anything expensive starts.

    Here and not in pytest_collection_modifyitems, because other plugins reorder after that hook's last implementation.
    """
    ours = [item for item in session.items if selection.is_ours(item)]
    refused = session.config.stash[_REFUSED]
    if not ours and not refused:
        return
    if hasattr(session.config, "workerinput"):
        workeroutput: dict[str, str] = session.config.workeroutput  # type: ignore[attr-defined]  # xdist's own
        no_workers = "-n: GPUs cannot be shared by xdist's workers; run these tests without -n"
        workeroutput[_XDIST] = refused[0] if refused else no_workers
        session.items[:] = [item for item in session.items if item not in ours]
        return
    if refused:
        raise pytest.UsageError(refused[0])
    from pytest_llmgpu.plugin.selection import ascending
    from pytest_llmgpu.report.case import REFERENCE_STRATEGY
    from pytest_llmgpu.strategies import BUILT_IN

    chosen = {name for item in ours for name in (selection.group_of(item)[0], *selection.group_of(item)[1].strategy)}
    options.refuse_unread(session.config, chosen, BUILT_IN)

    def is_yardstick(item: pytest.Item) -> bool:
        return selection.group_of(item)[0] == REFERENCE_STRATEGY

    turns = iter(ascending(ours, selection.group_of, selection.batch_size_of, is_yardstick))
    session.items[:] = [next(turns) if selection.is_ours(item) else item for item in session.items]
    if not selection.runs_nothing(session.config):
        _plan([item for item in session.items if selection.is_ours(item)])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Refuse the whole run where an xdist worker met our tests: only here can it still be a usage error."""
    refused = getattr(node, "workeroutput", {}).get(_XDIST)
    if refused is not None:
        raise pytest.UsageError(refused)


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Name devices, model and data first."""
    if selection.runs_nothing(config) or not any(selection.is_ours(item) for item in items):
        return []
    return config.stash[SESSION]().headlines()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the outcome ride on the report, where other plugins and xdist's controller find it."""
    report = yield
    if report.when != "teardown" and OUTCOME in item.stash:
        report.llmgpu_outcome = item.stash[OUTCOME]  # type: ignore[attr-defined]  # a report takes any attribute
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show out of memory as what it is."""
    if getattr(report, "llmgpu_outcome", None) not in _EXPECTED:
        return None
    if report.skipped:
        return "oom", "O", "OOM"
    return ("failed", "O", "OOM") if report.failed else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Complete the report and end every process."""
    benchmark = _made(session.config)
    if benchmark is not None:
        green = exitstatus == pytest.ExitCode.OK
        stopped = exitstatus == pytest.ExitCode.INTERRUPTED or bool(session.shouldstop or session.shouldfail)
        deselected = session.config.stash[DESELECTED]
        if benchmark.judge is not None:
            # Before the status is known: no item of the gate may have been left to ask for it.
            benchmark.conclude(int(exitstatus), interrupted=stopped, deselected=deselected)
        status = pytest.ExitCode.TESTS_FAILED if green and benchmark.troubles() else exitstatus
        benchmark.finish(int(status), interrupted=stopped, deselected=deselected)
        # Asked again, since the report may only now have failed to be written.
        session.exitstatus = pytest.ExitCode.TESTS_FAILED if green and benchmark.troubles() else status


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print tables and findings."""
    benchmark = _made(config)
    for line in benchmark.troubles() if benchmark is not None else ():
        terminalreporter.write_line(f"FAILED {line}", red=True)
    text = benchmark.summary() if benchmark is not None else ""
    if text:
        terminalreporter.section("LLM inference")
        terminalreporter.write_line(text)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what a run that was refused after the collection may have started."""
    benchmark = _made(config)
    if benchmark is not None:
        benchmark.close()


def _plan(items: Sequence[pytest.Item]) -> None:
    session = items[0].config.stash[SESSION]()
    try:
        session.find_baseline(fixtures.options_of(items[0]))
        for item in items:
            size, used = selection.parameter(item, "batch_size"), selection.fixture_names(item)
            session.expect(
                selection.group_of(item),
                item.nodeid if "measure" in used else None,
                int(size) if isinstance(size, BatchSize) else 1,
                scored=fixtures.tasks_of(item, session.planner.known_tasks),
                may_fit_nowhere=any(mark.kwargs.get(options.EXPECT_OOM) for mark in item.iter_markers("llmgpu")),
            )
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def _made(config: pytest.Config) -> BenchmarkSession | None:
    maker = config.stash.get(SESSION, None)
    return None if maker is None else maker.made


def _new_session(config: pytest.Config) -> BenchmarkSession:
    from pytest_llmgpu import strategies
    from pytest_llmgpu.inference import tasks
    from pytest_llmgpu.render.terminal.live import LiveLine
    from pytest_llmgpu.session.session import BenchmarkSession

    capture = config.pluginmanager.getplugin("capturemanager")
    writer = config.get_terminal_writer() if config.pluginmanager.hasplugin("terminalreporter") else None
    live = LiveLine(
        capture.global_and_fixture_disabled if capture is not None else nullcontext,
        # Not writer.fullwidth: it never says less than 40.
        lambda: shutil.get_terminal_size().columns - writer.width_of_current_line if writer is not None else 0,
    )
    chosen = options.resolve(config)
    try:
        known_tasks = tasks.merge(config.hook.pytest_llmgpu_tasks(config=config))
        fixtures.check_task_names(known_tasks)
        return BenchmarkSession(
            rootdir=config.rootpath,
            report_path=_folder_of(config, "llmgpu_json") / chosen.json if chosen.json else None,
            policy_path=_path_of(config, "llmgpu_policy", chosen.policy),
            calibration_path=_path_of(config, "llmgpu_calibration", chosen.calibration),
            page_path=_folder_of(config, "llmgpu_html") / chosen.html if chosen.html is not None else None,
            storage_path=_folder_of(config, "llmgpu_storage") / chosen.storage,
            options=chosen,
            known=strategies.merge(config.hook.pytest_llmgpu_strategies(config=config)),
            known_tasks=known_tasks,
            arguments=[str(argument) for argument in config.invocation_params.args],
            live=live,
        )
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def _path_of(config: pytest.Config, option: str, text: str | None) -> Path | None:
    """Return the file that an option names; one of a commit of git stays as it is."""
    from pytest_llmgpu.store.git import is_reference

    return None if text is None else Path(text) if is_reference(text) else _folder_of(config, option) / text


def _folder_of(config: pytest.Config, option: str) -> Path:
    """Return where a path counts from: of a flag where the command was given, of the ini file its folder."""
    return config.rootpath if config.getoption(option) is None else config.invocation_params.dir
