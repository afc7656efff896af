"""pytest's hooks: they call the modules that decide, and pass results to pytest.

Every test run loads this module. It imports nothing heavier than pytest, the rest when a test uses the model.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import pytest

from pytest_llmgpu.plugin import fixtures, hookspecs, options
from pytest_llmgpu.plugin.fixtures import DESELECTED, KEPT, OUTCOME, PEERS, BatchSize, running, session_of
from pytest_llmgpu.plugin.options import NO_WORKERS
from pytest_llmgpu.report.text import guess, plural, printable, printable_lines

_OUT_OF_MEMORY = ("oom", "skipped_after_oom")
_MARKER_ERRORS = pytest.StashKey[dict[str, str]]()
"""In `config.stash`: node id of each test function whose markers are not allowed to the reason."""
_REFUSED = pytest.StashKey[str]()
"""In `item.stash`: the reason why a test cannot be measured. It fails with it, and the other tests run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    options.declare(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that other plugins may implement."""
    pluginmanager.add_hookspecs(hookspecs)


def pytest_llmgpu_strategies() -> Mapping[str, str]:
    """Register the strategies that come with the package."""
    from pytest_llmgpu.ranks import registered

    return registered.BUILT_IN


def pytest_llmgpu_tasks() -> Mapping[str, str]:
    """Register the tasks that come with the package."""
    from pytest_llmgpu.inference import tasks

    return tasks.BUILT_IN


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, None, None]:
    """Guess a misspelt option; rank 0's process alone prints what pytest does not know, and wrong values."""
    yield  # a conftest.py may add options
    options.declare_short(parser)
    is_silent = _serves_rank_zero(early_config)
    if is_silent or any(word.startswith("--llmgpu-") for word in args):
        unknown = parser.parse_known_and_unknown_args(args)[1]
        if is_silent and unknown:
            sys.exit(pytest.ExitCode.USAGE_ERROR)
        for name in (word.partition("=")[0] for word in unknown):
            if name.startswith("--llmgpu-") and (hint := guess(name, options.FLAGS)):
                raise pytest.UsageError(f"{name}: there is no such option{hint}")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """With --llmgpu-launcher=env, join the other processes: pytest runs in rank 0's, and in no other one."""
    if hasattr(config, "workerinput"):
        return None
    try:
        chosen = options.resolve(config)
    except pytest.UsageError:
        if _serves_rank_zero(config):
            return pytest.ExitCode.USAGE_ERROR
        raise
    if chosen.launcher != "env":
        return None
    from pytest_llmgpu.ranks import env_launcher, link

    try:
        here = link.of_environment(os.environ)
        if here.rank == 0:
            config.stash[PEERS] = peers = env_launcher.Peers(here)
            config.add_cleanup(peers.close)
            return None
        with tempfile.TemporaryDirectory(prefix="llmgpu-run-") as folder:
            return env_launcher.serve(here, Path(folder), min(chosen.load_timeout, link.JOIN_S))
    except ValueError as error:
        raise pytest.UsageError(printable(f"--llmgpu-launcher=env: {error}")) from None


def pytest_configure(config: pytest.Config) -> None:
    """Refuse bad options, whatever is collected, and register the fixtures and the plugins that options need."""
    config.addinivalue_line(
        "markers",
        "llmgpu(model=..., batch_sizes=..., expect_oom=False, ...): options of pytest-llmgpu for one test, by their "
        "names without --llmgpu-; expect_oom: the test does not fail if every batch size runs out of memory",
    )
    chosen = options.resolve(config)
    options.check_run(config, chosen)
    config.stash[DESELECTED] = fixtures.limits_of_selection(config)
    config.stash[_MARKER_ERRORS] = {}
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
    """Give a marked test the strategies and batch sizes of its marker.

    pytest's own marker `parametrize` replaces the parameters of the fixtures. A test whose marker is not allowed fails
    when it runs, because here pytest would show a traceback and stop the collection.
    """
    markers = list(metafunc.definition.iter_markers("llmgpu"))
    if not markers:
        return
    try:
        chosen = options.resolve(metafunc.config, markers)
    except pytest.UsageError as error:
        metafunc.config.stash[_MARKER_ERRORS][metafunc.definition.nodeid] = printable(str(error))
        return
    if any({"strategy", "quantization", "batch_sizes"} & set(marker.kwargs) for marker in markers):
        for name, values in fixtures.parameters(chosen).items():
            if name in metafunc.fixturenames:
                mark = pytest.mark.parametrize(name, values["params"], ids=values["ids"], indirect=True)
                metafunc.definition.add_marker(mark)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Keep the ids of deselected tests for the report, where a missing case then differs from a deselected one."""
    for item in items:
        if fixtures.is_ours(item):
            item.config.stash[DESELECTED].append(item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Order our tests, and refuse tests that cannot be measured before anything expensive starts.

    This is not done in pytest_collection_modifyitems, because other plugins reorder after its last implementation.
    """
    for item in session.items:
        if (error := session.config.stash[_MARKER_ERRORS].get(item.nodeid.partition("[")[0])) is not None:
            _refuse(item, error)
    ours = [item for item in session.items if _runs(item)]
    if not ours:
        return
    if hasattr(session.config, "workerinput"):
        for item in ours:
            if options.resolve(session.config).compare is not None:
                _refuse(item, NO_WORKERS)  # a run that is compared must not pass without a measurement
            else:
                item.add_marker(pytest.mark.skip(reason=NO_WORKERS))
        return
    from pytest_llmgpu.ranks.registered import BUILT_IN

    for item in ours:
        if (error := fixtures.idle_marker(item)) is not None:
            _refuse(item, error)
    ours = [item for item in ours if _runs(item)]
    groups = [fixtures.group_of(item) for item in ours]
    measured = {name for strategy, chosen in groups for name in (strategy, *chosen.strategy) if name}
    workloads = {name for item in ours for name in fixtures.workloads_of(item)}
    options.check_owners(session.config, measured, BUILT_IN, workloads)
    session.items[:] = fixtures.run_order(session.items, _runs)
    if not fixtures.runs_nothing(session.config):
        _plan([item for item in session.items if _runs(item)])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin a test, which a plugin may run again; fail one that cannot be measured, with the reason in one line."""
    if (benchmark := running(item.config)) is not None:
        benchmark.recorder.begin_test(item.nodeid)
    if (reason := item.stash.get(_REFUSED, None)) is not None:
        pytest.fail(reason, pytrace=False)


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Print devices, model and dataset before the tests run."""
    if fixtures.runs_nothing(config) or hasattr(config, "workerinput") or not any(map(_runs, items)):
        return []
    return list(map(printable, session_of(config).headlines()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the outcome to pytest's report, where other plugins can read it, and the output of the ranks."""
    if (benchmark := running(item.config)) is not None:
        for rank, text in benchmark.runner.take_output().items():
            item.add_report_section(call.when, f"rank {rank}", printable_lines(text))
    fixtures.add_junit_properties(item)
    report = yield
    if report.when != "teardown" and OUTCOME in item.stash:
        report.llmgpu_outcome = item.stash[OUTCOME]  # type: ignore[attr-defined]  # a report takes any attribute
        report.llmgpu_kept = item.stash.get(KEPT, False)  # type: ignore[attr-defined]
    if benchmark is not None and report.failed and fixtures.is_ours(item):
        benchmark.recorder.failed_tests.add(item.nodeid)
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show the outcome out of memory as OOM, and a test whose result is from the resumed report as KEPT."""
    if getattr(report, "llmgpu_outcome", None) not in _OUT_OF_MEMORY:
        kept = report.when == "call" and report.passed and getattr(report, "llmgpu_kept", False)
        return ("passed", ".", "KEPT") if kept else None
    if report.skipped:
        return "oom", "O", "OOM"
    return ("failed", "O", "OOM") if report.failed else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Complete the report and end every process."""
    if (benchmark := running(session.config)) is not None:
        # With verdicts every test has run, and only items of the gate are left, as after -x.
        judged = benchmark.gate is not None and benchmark.gate.verdicts is not None
        stopped = bool(session.shouldstop or session.shouldfail) and not judged
        stopped |= exitstatus == pytest.ExitCode.INTERRUPTED
        deselected = session.config.stash[DESELECTED]
        session.exitstatus = benchmark.end(int(exitstatus), interrupted=stopped, deselected=deselected)
    elif not exitstatus and _left_out(session.config)[1]:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print tables and findings."""
    if (benchmark := running(config)) is None:
        if count := _left_out(config)[0]:
            terminalreporter.write_line(f"llmgpu: {plural(count, 'measurement')} skipped: {NO_WORKERS}", yellow=True)
        return
    for line in benchmark.problems():
        terminalreporter.write_line(printable_lines(f"FAILED {line}"), red=True)
    if text := benchmark.summary(verbose=config.getoption("verbose") > 0):
        terminalreporter.section("LLM inference")
        terminalreporter.write_line(printable_lines(text))


def _serves_rank_zero(config: pytest.Config) -> bool:
    """Return whether this process was started with rank 0's, which has the same options and prints."""
    launcher = config.known_args_namespace.llmgpu_launcher or config.getini("llmgpu_launcher")
    return launcher == "env" and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0"


def _left_out(config: pytest.Config) -> tuple[int, bool]:
    """Return the number of measurements that workers of xdist skipped, and whether these were all tests."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    stats = {} if reporter is None else reporter.stats
    skipped = sum(NO_WORKERS in str(report.longrepr) for report in stats.get("skipped", []))
    others = {"", "warnings", "deselected"}
    return skipped, skipped > 0 and skipped == sum(len(stats[name]) for name in stats if name not in others)


def _runs(item: pytest.Item) -> bool:
    return fixtures.is_ours(item) and _REFUSED not in item.stash


def _refuse(item: pytest.Item, error: object) -> None:
    item.stash[_REFUSED] = f"{item.nodeid}: {error}"


def _plan(items: Sequence[pytest.Item]) -> None:
    """Check every test before anything expensive starts.

    What a marker chose concerns its test alone; everything else was chosen for the run, which is refused.
    """
    if not items:
        return
    session, chosen = session_of(items[0].config), options.resolve(items[0].config)
    try:
        if session.gate is not None:
            session.gate.find_baseline(session.planner.machine(fixtures.options_of(items[0])))
            session.gate.check_figures(session.recorder.declared)
        else:
            options.check_policy(items[0].config, chosen)
        for item in items:
            size = fixtures.parameter(item, "batch_size")
            markers = list(item.iter_markers("llmgpu"))
            try:
                session.expect(
                    fixtures.group_of(item),
                    item.nodeid if fixtures.measures(item) else None,
                    int(size) if isinstance(size, BatchSize) else None,
                    scored=fixtures.used(item, session.planner.known_tasks),
                    may_fit_nowhere=any(mark.kwargs.get(options.EXPECT_OOM) for mark in markers),
                )
            except ValueError as error:
                given = ", ".join(f"{name}={value!r}" for mark in markers for name, value in mark.kwargs.items())
                if not given:
                    raise
                _refuse(item, f"marker llmgpu({given}): {error}")
        if chosen.resume is not None:
            session.resume(chosen)
    except ValueError as error:
        raise pytest.UsageError(printable(options.as_typed(items[0].config, str(error)))) from None
